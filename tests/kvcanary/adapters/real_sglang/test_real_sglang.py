"""The canary inside a real SGLang on this CPU: `make real-sglang` installs it, pinned by hash."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary.adapters.hosted.probing import IN_A_GRAPH
from kvcanary_tools.bench.sglang.cpu import OFF, POOLS, TREES, served

from .playing import INSTALLED, expect_sound, first, is_installed

GIVEN_BACK = "the slot was given back while the row still reads it"
ASTRAY = "the forward stores an entry where its row has another one"
pytestmark = is_installed


def mode_of(act: dict[str, Any]) -> str:
    return str(act.get("mode", "log"))


def test_a_sound_scheduler_is_silent(scene) -> None:
    """Chunks, prefix hits, eviction, retraction, an abort, a flush, attached by the entry point: equal tokens."""
    act, bare = scene("dense")
    expect_sound(act, bare, 5_000)
    assert act["plugged_in"]
    assert act["flushed"]
    assert min(act["counts"][name] for name in ("chunks", "hits", "evicted", "retractions")) >= 1
    assert 0 < len(act["outputs"]["x1"]) < 40  # its client went away


def test_a_flipped_bit_names_request_slot_layer_and_bit(scene) -> None:
    """One bit of K of the last layer: R9 with the request that reads it, and the one bit as its cause."""
    found, touched = first(scene("dense faults"), "bit")
    assert (found["code"], found["reader"], found["slot"]) == ("R9", touched["request"], touched["slot"])
    assert (found["layer"], found["part"], found["bit"]) == (touched["layer"], "K", touched["bit"])
    assert found["causes"][0]["text"].startswith("one flipped bit")


@pytest.mark.parametrize("fault", ["swapped", "foreign"])
def test_a_wrong_table_entry_names_request_and_slot(scene, fault: str) -> None:
    """Two entries exchanged, or one of another request: R4 at the first, with whose bytes lie there."""
    found, touched = first(scene("dense faults"), fault)
    assert (found["code"], found["reader"]) == ("R4", touched["request"])
    assert (found["position"], found["slot"]) == (touched["position"], touched["slot"])
    assert found["writer"] == touched.get("other", touched["request"])


def test_a_token_that_was_sampled_of_another_row_is_named(scene) -> None:
    """SGLang launches a step before it knows the tokens of the last, and keeps these by row: two are exchanged there.

    W6 with the token that was sampled of the row, and no token of that step leaves.
    """
    [act] = scene("ahead")
    touched = act["touched"]
    assert (act["raised"], act["left"]) == ("KVCorruptionError", 0)
    expect_exchanged(act["finding"], touched, "decode")
    assert f"that token was sampled of {touched['other']!r}" in act["finding"]["evidence"]


@pytest.mark.slow
def test_a_tree_that_begins_with_the_token_of_another_row_is_named(scene) -> None:
    """The target and the draft are fed the same, so that only what was sampled says that it is wrong."""
    for _, found, touched in struck(scene, "tokens_exchanged"):
        expect_exchanged(found, touched, "verify")


def expect_exchanged(found: dict[str, Any], touched: dict[str, Any], kind: str) -> None:
    """W6 of the row that was touched, with both tokens."""
    assert (found["code"], found["writer"], found["site"]) == ("W6", touched["request"], [kind, 0])
    assert (found["expected"], found["found"]) == ({"token": touched["token"]}, {"token": touched["fed"]})
    assert found["causes"][0]["family"] == "order"


def test_a_slot_off_by_one_names_the_request_that_stores(scene) -> None:
    """One entry is stored one slot further, which nobody was granted: where it went, and where it belongs."""
    found, touched = first(scene("dense faults"), "off_by_one")
    assert found["code"] in ("W2", "W5", "W7")
    assert (found["position"], found["site"], found["slot"]) == (touched["position"], ["decode", 0], touched["slot"])
    assert found["expected"] == {"slot": touched["slot"] - 1}
    assert found["causes"][0]["text"] == ASTRAY


def test_a_layer_that_stores_nothing_is_named_in_its_step(scene) -> None:
    """The last layer stores nothing in one forward, and its attention reads what lay there before: R12 alone."""
    [act] = [act for act in scene("dense faults") if act["fault"] == "unstored"]
    [found], touched = act["findings"], act["touched"]
    assert (found["code"], found["reader"], found["layer"]) == ("R12", touched["request"], touched["layer"])
    assert (found["position"], found["slot"]) == (touched["position"], touched["slot"])
    assert found["causes"][0]["text"] == "a layer did not store its K and V for this entry"


def test_a_hit_of_a_whole_prompt_names_the_request(scene) -> None:
    """None of its tokens is computed, and its first one is sampled from another row: R10, before that leaves."""
    found, touched = first(scene("dense faults"), "whole_hit")
    assert (found["code"], found["reader"], found["position"]) == ("R10", touched["request"], touched["position"])
    assert found["causes"][0]["text"].startswith("the hit of a prefix cache was counted to the prompt's end")


def test_a_token_that_was_sampled_within_a_prompt_is_named(scene) -> None:
    """A chunk that is not the last one counts as it: W6 where the token is fed behind the prompt."""
    found, touched = first(scene("dense faults"), "chunk_ends_prompt")
    assert (found["code"], found["writer"]) == ("W6", touched["requests"][0])
    assert found["expected"] == {"token": None}
    assert found["causes"][0]["text"] == "what was sampled in the middle of a prompt counts as its answer"


def test_a_token_that_its_request_did_not_get_is_named(scene) -> None:
    """It was sampled, and the next forward goes on from it, but the answer lacks it: R10 at its place."""
    found, touched = first(scene("dense faults"), "token_lost")
    assert (found["code"], found["reader"], found["position"]) == ("R10", touched["request"], touched["tokens"])
    assert found["causes"][0]["text"] == "a token that was sampled did not come into its request's answer"


def test_a_value_that_is_not_finite_names_request_layer_and_position(scene) -> None:
    """NaN in what the last layer stores of one entry: N1, in the step that stores it."""
    found, touched = first(scene("dense faults"), "not_finite")
    assert (found["code"], found["writer"]) == ("N1", touched["request"])
    assert {name: found[name] for name in ("position", "slot", "layer")}.items() <= touched.items()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("rows_shifted", "attention ignores the row's table"),
        ("one_less", "attention left out entries of the row"),
        ("scaled_twice", "entries weigh otherwise than K and the query say"),
    ],
)
def test_attention_is_asked_what_it_reads(scene, harm: str, said: str) -> None:
    """While the canary attaches: R8 of the first forward that reads otherwise, and what it read."""
    [act] = [act for act in scene("dense faults") if act["misreading"] == harm]
    [found] = act["findings"]
    assert (found["code"], found["pool"]) == ("R8", "target")
    assert found["causes"][0]["text"].startswith(said)


@pytest.mark.slow
def test_attention_of_a_draft_is_asked_what_it_reads(scene) -> None:
    """By its own runner's backend: R8 in its pool, and the target's is silent."""
    [act] = [act for act in scene("topk 1, page 1") if act["misreading"]]
    [found] = act["findings"]
    assert (found["code"], found["pool"]) == ("R8", "draft")
    assert found["causes"][0]["text"].startswith("entries weigh otherwise than K and the query say")


def test_no_token_of_a_wrong_step_leaves(scene) -> None:
    """In mode raise the step of the blow ends in KVCorruptionError, and its tokens stay inside."""
    act = scene("dense faults")[-1]
    assert (act["raised"], act["left"]) == ("KVCorruptionError", 0)
    assert (act["finding"]["code"], act["finding"]["reader"]) == ("R9", act["touched"]["request"])
    assert sum(map(len, act["outputs"].values())) > 0


def test_a_hook_that_fails_ends_no_request(scene) -> None:
    """In mode log SGLang goes on with the tokens that it has without a canary; the certificate says since when not."""
    acts = scene("dense faults")
    [failed], [bare] = (
        [act for act in acts if act[key] == value] for key, value in (("fault", "hook_error"), ("mode", "off"))
    )
    assert "raised" not in failed
    assert failed["outputs"] == bare["outputs"]
    assert failed["findings"] == []
    report = failed["reports"]["target"]
    assert not report["armed"]
    assert report["forwards"] > 0
    assert report["unchecked"] == {"stopped watching: RuntimeError in forward: a defect of ours": 1}


def test_layers_with_windows_are_watched_by_their_own_slots(scene) -> None:
    """Two pools, one of which is found by a map: silent, and a bit of either is found in its pool and layer."""
    act, bare = scene("windows")[:2]
    expect_sound(act, bare, 700)
    for fault, pool in ("bit", "group 0 target"), ("window_bit", "group 1 target, windows"):
        found, touched = first(scene("windows"), fault)
        assert (found["code"], found["reader"], found["pool"]) == ("R9", touched["request"], pool)
        assert {name: found[name] for name in ("position", "slot", "layer", "bit")}.items() <= touched.items()


def test_layers_with_windows_that_are_read_in_other_slots_are_named(scene) -> None:
    """SGLang's own: torch's attention stores where the map shows, and reads what rows name. The others are right."""
    as_it_is, _ = [act for act in scene("windows") if act["misreading"]]
    [found] = as_it_is["findings"]
    assert (found["code"], found["pool"], found["site"]) == ("R8", "group 1 target, windows", ["prefill", 0])
    assert as_it_is["reports"]["target"]["reader_probes"] == 2


def test_a_window_that_attention_forgets_is_named(scene) -> None:
    """Rows of a probe go beyond it: the first entry that it does not reach any more is read."""
    *_, forgotten = scene("windows")
    [found] = forgotten["findings"]
    assert (found["code"], found["pool"], found["position"]) == ("R8", "group 1 target, windows", 16)


@pytest.mark.slow
def test_a_window_that_decodes_see_less_of_is_named(scene) -> None:
    """sglang#32087, as it is in 0.5.23: Triton's decodes leave out the oldest entry of a window, which prefills see."""
    [act] = scene("windows, triton")
    [found] = act["findings"]
    assert (found["code"], found["pool"], found["site"]) == ("R8", "group 1 target, windows", ["decode", 0])
    [cause] = found["causes"]
    assert cause["family"] == "lengths"
    assert cause["text"].startswith("attention left out entries of the row: slots ")
    assert "," not in cause["text"]
    assert act["reports"]["target"]["reader_probes"] == 2


@pytest.mark.slow
def test_what_replays_of_a_graph_keep_of_its_capture_is_named(scene) -> None:
    """By Triton's attention, which is asked as it is, and as in graphs: silent but for the faults."""
    sound, *harmed = scene("graphs")
    assert (sound["findings"], sound["reports"]["target"]["reader_probes"]) == ([], 2)
    for act in harmed:
        [found] = act["findings"]
        assert (found["code"], found["site"]) == ("R8", ["decode", 0])
        assert found["causes"][0]["evidence"][-1] == IN_A_GRAPH


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_pools_of_other_kinds_are_watched(scene, name: str) -> None:
    """Latent rows, attention beside states, 8-bit floats, other pages and types: silent, and one bit is found."""
    acts = scene(name)
    expect_sound(*acts[:2], least=500)
    for act in acts[2:]:
        found, touched = first(acts, act["fault"])
        assert (found["code"], found["reader"], found["slot"]) == ("R9", touched["request"], touched["slot"])
        assert (found["layer"], found["bit"]) == (touched["layer"], touched["bit"])


@pytest.mark.slow
def test_prompts_whose_embeddings_differ_are_told_apart(scene) -> None:
    """Equal tokens, of which one has an embedding of its own in each request: what another wrote is another's."""
    found, _ = first(scene("embeddings"), "embeddings_shared")
    assert (found["code"], found["position"]) == ("R5", 0)
    assert found["reader"] != found["writer"]
    expect_sound(*scene("embeddings")[:2], least=300)


@pytest.mark.slow
def test_a_bit_of_the_host_tier_is_found_when_it_comes_back(scene) -> None:
    """T1 that says what loaded it and which word of which layer; what comes back whole is compared and silent."""
    sound, bare, struck, _ = scene("host tier")
    assert (sound["outputs"], sound["findings"]) == (bare["outputs"], [])
    assert sound["counts"]["evicted"] > 0
    assert sound["reports"]["target"]["loads_checked"] > 100
    [found] = struck["findings"]
    assert (found["code"], found["site"], found["found"]["came_back_by"]) == ("T1", ["load", 0], "the host tier")
    assert (found["layer"], found["bit"]) == (struck["touched"]["layer"], struck["touched"]["bit"])
    assert found["causes"][0]["text"].startswith("one word: one bit, bit 7, of K")
    assert "P1" in sound["reports"]["target"]["inactive_classes"]


@pytest.mark.slow
def test_a_forward_that_does_not_wait_for_a_load_is_named(scene) -> None:
    """O1 of the step that reads, though here the load has landed meanwhile; bytes are right."""
    struck = scene("host tier")[3]
    assert struck["touched"]["forwards"] > 0
    assert set(struck["reports"]["target"]["fired"]) == {"O1"}
    found = struck["findings"][0]
    assert (found["layers"], found["site"]) == ([0, 1], ["load", 0])
    assert found["reader"] in struck["outputs"]
    assert found["causes"][0]["text"] == "a copy, zeroing or staging buffer was used without waiting for its event"


@pytest.mark.slow
def test_entries_of_older_weights_are_counted(scene) -> None:
    """Only those that a request began with, after weights were loaded without a flush; with one nothing is left. The
    certificate names the version that SGLang was told.
    """
    assert scene("page 16, bfloat16")[0]["reports"]["target"]["older_weights"] >= 4 * 64
    assert scene("lifetimes")[0]["reports"]["target"]["older_weights"] > 0
    assert scene("latent")[0]["reports"]["target"]["older_weights"] == 0
    assert [scene(name)[0]["reports"]["target"]["weights"] for name in ("latent", "lifetimes")] == ["", "16"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, own in TREES.items() if OFF["mode"] in map(mode_of, own.acts)])
def test_more_sound_schedulers_are_silent(scene, name: str) -> None:
    """Pages of one slot; drafts of one branch and of several, with pages of one slot and of four: both pools."""
    act, bare = scene(name)[:2]
    expect_sound(act, bare, 300)


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 4])
def test_draft_steps_that_change_are_followed(scene, page: int) -> None:
    """From 3 to 1, 2 and none, and back: between rounds, in both pools."""
    act, *_ = scene(f"adaptive, page {page}")
    assert act["counts"]["adapted"] >= 5
    assert act["reports"].keys() == {"target", "draft"}


def struck(scene, fault: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Of every scene with this fault: its name, the first finding, and what was touched."""
    return [(name, *first(scene(name), fault)) for name in with_fault(fault)]


def with_fault(fault: str) -> list[str]:
    """Scenes that have it."""
    names = [name for name, own in TREES.items() if any(act.get("fault") == fault for act in own.acts)]
    assert names
    return names


@pytest.mark.slow
def test_an_accepted_length_that_is_too_long_is_named(scene) -> None:
    """W6 of the verify, at the first entry behind those that were right, before any read of them; told once."""
    for _, found, touched in struck(scene, "one_too_long"):
        assert touched["rows"] > 0
        assert (found["code"], found["pool"], found["site"]) == ("W6", "target", ["verify", 0])
        assert found["causes"][0]["text"] == "the accepted length, or the path that was accepted, is wrong"
        assert found["expected"] != found["found"]


@pytest.mark.slow
def test_a_move_of_one_layer_less_is_named(scene) -> None:
    """Accepted nodes that are moved in all layers but the last: T1 with that layer; silent where none was moved."""
    moved = 0
    for name in with_fault("short_move"):
        [act] = [act for act in scene(name) if act["fault"] == "short_move"]
        moved += act["touched"]["moves"]
        assert bool(act["findings"]) == bool(act["touched"]["moves"]), name
        for found in act["findings"]:
            assert (found["code"], found["pool"], found["layer"]) == ("T1", "target", 1)
    assert moved > 0


@pytest.mark.slow
def test_a_branch_without_its_copy_of_the_prefix_end_is_named(scene) -> None:
    """With pages of several slots each further branch begins with a copy of the prefix's last page: T1 of the draft."""
    for _, found, touched in struck(scene, "no_tail_copy"):
        assert touched["calls"] > 0
        assert (found["code"], found["pool"], found["site"]) == ("T1", "draft", ["move", 0])


@pytest.mark.slow
def test_a_bit_of_the_draft_model_is_named(scene) -> None:
    """The draft's pool has records of its own."""
    for _, found, touched in struck(scene, "draft_bit"):
        assert (found["code"], found["pool"], found["reader"]) == ("R9", "draft", touched["request"])
        assert (found["slot"], found["layer"], found["bit"]) == (touched["slot"], touched["layer"], touched["bit"])


@pytest.mark.slow
def test_a_draft_that_stores_nothing_is_named_in_its_step(scene) -> None:
    """The only layer of an EAGLE draft, which goes on from what the target computed, so that it is asked."""
    for _, found, touched in struck(scene, "draft_unstored"):
        assert (found["code"], found["pool"], found["layer"]) == ("R12", "draft", touched["layer"])
        assert (found["reader"], found["position"]) == (touched["request"], touched["position"] + 1)
        assert (found["slot"], found["site"]) == (touched["slot"] + 1, ["prefill", 0])


@pytest.mark.slow
def test_drafts_store_in_slots_that_others_had(scene) -> None:
    """What is freed is filled before a draft or a verify stores there again, though that is shown behind it: no P1, and
    the tokens of a server without a canary.
    """
    act, bare = scene("topk 2, page 4, life")
    assert act["counts"]["evicted"] > 60
    assert (act["findings"], act["outputs"]) == ([], bare["outputs"])
    assert all("P1" in report["classes"] for report in act["reports"].values())


@pytest.mark.slow
def test_drafts_without_a_model_have_no_pool(scene) -> None:
    """What they draft is verified in the target's; the verify's entries are judged as those of any draft."""
    sound = scene("n-gram, page 1")[0]
    assert set(sound["reports"]) == {"target"}
    assert sound["reports"]["target"]["forwards"] < sum(map(len, sound["outputs"].values())) / 2  # it accepts


@pytest.mark.slow
def test_a_hook_of_the_draft_that_fails_stops_its_pool_alone(scene) -> None:
    """The target's pool is judged to the end, and tokens are those without a canary."""
    acts = scene("topk 1, page 1")
    [failed] = [act for act in acts if act["fault"] == "draft_hook_error"]
    assert failed["outputs"] == acts[1]["outputs"]
    target, draft = failed["reports"]["target"], failed["reports"]["draft"]
    assert (target["armed"], draft["armed"]) == (True, False)
    assert target["forwards"] == acts[0]["reports"]["target"]["forwards"] > draft["forwards"]
    assert (target["unchecked"], failed["findings"]) == ({}, [])


@pytest.mark.slow
def test_a_node_that_is_stored_one_slot_further_is_named(scene) -> None:
    """The first node of a verify, of which the accepted chain begins, lands on the second: one slot of both is told."""
    for _, found, touched in struck(scene, "off_by_one"):
        assert (found["code"] in ("W2", "W5", "W7"), found["pool"]) == (True, "target")
        assert (found["writer"], found["position"], found["slot"]) == (
            touched["request"], touched["position"], touched["slot"],
        )  # fmt: skip
        assert found["expected"] == {"slot": touched["slot"] - 1}
        assert (found["causes"][0]["family"], found["causes"][0]["text"]) == ("addressing", ASTRAY)


@pytest.mark.slow
def test_a_scatter_one_column_too_far_is_named(scene) -> None:
    """The last slot of one row lands on the first of the next: of a draft step, and of the nodes of a verify."""
    for _, found, touched in struck(scene, "draft_scatter"):
        assert (found["code"], found["pool"], found["site"]) == ("W5", "draft", ["draft", 1])
        assert (found["writer"], found["position"], found["slot"]) == (
            touched["request"], touched["position"], touched["slot"],
        )  # fmt: skip
        assert found["causes"][0]["text"] == "a draft step stores where another entry belongs"
        assert "branch 0 of its row" in found["evidence"]
    for _, found, touched in struck(scene, "verify_scatter"):
        assert (found["code"], found["pool"], found["site"]) == ("W2", "target", ["verify", 0])
        assert (found["writer"], found["position"], found["slot"]) == (
            touched["request"], touched["position"], touched["slot"],
        )  # fmt: skip
        assert found["causes"][0]["text"] == ASTRAY
        assert f"the slot was granted to {touched['other']!r}" in found["evidence"]


@pytest.mark.slow
def test_a_chunk_that_is_rotated_within_itself_is_named(scene) -> None:
    """Behind the last token of a chunk a draft is fed its first, not what was sampled or the prompt goes on with."""
    for _, found, touched in struck(scene, "chunk_rotated"):
        assert touched["rows"] > 3
        assert (found["code"], found["pool"], found["site"]) == ("W6", "draft", ["prefill", 0])
        assert found["causes"][0]["text"] == "the token behind the chunk is not the prompt's next one"


@pytest.mark.slow
def test_a_page_that_is_freed_under_its_branches_is_named(scene) -> None:
    """A running request reads on, at the first entry, and its own next entries were granted the page: nobody has
    stored there since, as in both pools (R12). The cause says what lay there before.
    """
    for name, found, touched in struck(scene, "freed"):
        assert (found["code"], found["pool"], found["site"]) == ("R12", "target", ["verify", 0])
        assert (found["reader"], found["position"], found["slot"]) == (touched["request"], 0, touched["slot"])
        assert (found["causes"][0]["family"], found["causes"][0]["text"]) == ("lifetime", GIVEN_BACK)
        assert f"position 0 of {touched['request']!r} lay there" in found["causes"][0]["evidence"][0]
        assert len(found["causes"]) == 1
        [act] = [act for act in scene(name) if act["fault"] == "freed"]
        firsts = {own["pool"]: own["code"] for own in reversed(act["findings"])}
        assert firsts == {"target": "R12", "draft": "R12"}  # R9 of its last re-read follows from it


@pytest.mark.slow
def test_writes_into_slots_that_are_free_are_named(scene) -> None:
    """By a forward at once (W7); by somebody of whom nobody tells when the slot is granted again (P1)."""
    acts = scene("dense, page 1")
    found, touched = first(acts, "written_when_free")
    assert (found["code"], found["writer"]) == ("W7", touched["request"])
    assert (found["position"], found["slot"]) == (touched["position"], touched["slot"])
    found, touched = first(acts, "late_write")
    assert (found["code"], found["slot"], found["layer"]) == ("P1", touched["slot"], touched["layer"])
    assert (found["site"], found["causes"][0]["family"]) == (["grant", 0], "lifetime")


@pytest.mark.slow
def test_a_million_entries_are_judged_without_a_finding(scene) -> None:
    """Fifty requests of some hundred tokens each, sixteen at a time."""
    act, bare = scene("dense, long")
    expect_sound(act, bare, 1_000_000)


@pytest.mark.slow
def test_a_row_without_room_for_what_is_reserved_is_named_before_a_token_leaves(scene) -> None:
    """PR 26972 taken back: one branch, pages of several slots, a request at the context's end. Nothing of SGLang's
    stops it there; it writes into the next request's row.
    """
    [act], control = scene("without 26972"), scene("at the context's end")[0]
    found = act["findings"][0]
    assert (act["raised"], act["left"]) == ("KVCorruptionError", 0)
    assert (found["code"], found["reader"], found["site"]) == ("R10", "c", ["grant", 0])
    assert found["found"]["length"] > found["expected"]["row_width"] == found["position"]
    assert (found["causes"][0]["family"], control["findings"]) == ("bounds", [])
    assert all(control["outputs"][name][: len(tokens)] == tokens for name, tokens in act["outputs"].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "site", "cause"),
    [
        ("without 25015", "W5", "draft", "the draft's positions are 1 too far"),
        ("without 26329", "W6", "prefill", "the token behind the chunk is not the prompt's next one"),
    ],
)
def test_its_own_bugs_are_found_by_its_own_switches(scene, name: str, code: str, site: str, cause: str) -> None:
    """A mend that is taken back is found in the draft's pool at the place that it is about, and once; it is silent
    with the mend, and tokens are right in both, so that nobody else would see it.
    """
    [act], control = scene(name), scene("topk 1, page 4")[0]
    assert (control["findings"], act["outputs"]) == ([], control["outputs"])
    assert act["reports"]["target"]["fired"] == {}
    found = act["findings"][0]
    assert (found["code"], found["pool"], found["site"][0]) == (code, "draft", site)
    assert found["causes"][0]["text"] == cause
    assert len(act["findings"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_engine_says_in_its_log_and_its_metrics_that_it_is_watched(scene, tmp_path, ranks: int) -> None:
    """Its schedulers are processes of their own, which the plug-in reaches; SGLang's page of metrics shows it."""
    told = served(INSTALLED, tmp_path, ranks=ranks)
    bare = scene("dense")[1]
    assert told["outputs"] == {name: bare["outputs"][name][:8] for name in told["outputs"]}
    watched = [f'kvcanary_watching{{engine="sglang",pool="target",rank="{rank}"}} 1.0' for rank in range(ranks)]
    assert sorted(line for line in told["metrics"] if line.startswith("kvcanary_watching")) == watched
    attached = [line for line in told["lines"] if "kvcanary.attached" in line]
    assert len(attached) == ranks
    assert all({"host=sglang", "mode=log"} <= set(line.split()) for line in attached)
