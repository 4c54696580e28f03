"""Recurrent states of a real SGLang on this CPU: `make real-sglang` installs it, pinned by hash."""

from __future__ import annotations

import pytest

from .playing import expect_sound, first, is_installed

pytestmark = is_installed


@pytest.mark.slow
def test_states_beside_attention_are_watched(scene) -> None:
    """One a row and forward, those that requests begin with from the prefix cache among them; others have none."""
    reports = {name: scene(name)[0]["reports"]["target"] for name in ("states", "latent")}
    assert [report["not_watched"] for report in reports.values()] == [[], []]
    assert scene("states")[0]["counts"]["hits"] > 20
    assert reports["states"]["states_checked"] > 50
    assert reports["latent"]["states_checked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("state_bit", "R9", "a write that nobody told: padding whose index was clamped, or a kernel's wrong index"),
        ("state_swapped", "R8", "the index of another row is used: the entry is another request's"),
        ("no_state_copy", "R12", "the entry is taken before anybody has left a state in it"),
        ("state_freed", "R7", "the entry was given back while its row still goes on from it"),
    ],
)
def test_what_is_wrong_with_a_state_names_request_and_entry(scene, fault: str, code: str, cause: str) -> None:
    """Before the forward that takes it, in the pool of states alone: a bit, another's, none, one that was freed."""
    acts = scene("states, faults")
    [act] = [act for act in acts if act["fault"] == fault]
    assert set(act["reports"]["target"]["fired"]) == {code}
    found, touched = act["findings"][0], act["touched"]
    assert (found["code"], found["pool"], found["causes"][0]["text"]) == (code, "states", cause)
    if fault == "no_state_copy":
        assert touched["copies"] == len(act["findings"]) == 2
        assert {own["reader"] for own in act["findings"]} == {"c again 0", "d again 0"}
    else:
        assert (found["reader"], found["entry"], found["site"]) == (touched["request"], touched["slot"], ["decode", 0])
    assert found["layers"] == [touched["layer"]] if fault == "state_bit" else not found["layers"]


@pytest.mark.slow
def test_states_of_a_server_that_drafts_are_watched(scene) -> None:
    """Gated delta nets and n-gram drafts: silent, with tokens as without a canary. sglang#26351, committed once more:
    R4 of every row in the round behind it, no token of which leaves.
    """
    act, bare, broken = scene("deltas, n-gram")
    expect_sound(act, bare, 400)
    assert act["reports"]["target"]["states_checked"] >= 30
    assert act["counts"]["hits"] > 0
    assert (broken["raised"], broken["left"]) == ("KVCorruptionError", 0)
    assert {own["code"] for own in broken["findings"]} == {"R4"}
    assert {own["reader"] for own in broken["findings"]} == {"a", "b", "c", "d"}
    for own in broken["findings"]:
        assert (own["pool"], own["site"]) == ("states", ["verify", 0])
        assert own["found"]["absorbed"] < own["expected"]["absorbed"]
        assert own["causes"][0]["text"] == "the last verify's state was not copied to where its row goes on"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["deltas", "deltas, topk 2", "deltas, kept", "deltas, kept, NEXTN", "deltas, kept, n-gram", "mamba2, kept, n-gram"],
)
def test_layers_with_states_are_watched(scene, name: str) -> None:
    """Without drafts, with trees, and with states that are kept for the prefix cache at the ends of chunks."""
    act, bare = scene(name)[:2]
    expect_sound(act, bare, 400)
    assert act["reports"]["target"]["states_checked"] >= 30
    assert act["counts"]["hits"] >= (64 if "kept" in name else 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "pool"),
    [
        ("state_bit", "R9", "windows"),
        ("state_swapped", "R8", "states"),
        ("state_commit", "R4", "states"),
        ("state_scatter", "T1", "states"),
    ],
)
def test_what_is_wrong_with_a_state_of_drafts_is_found(scene, fault: str, code: str, pool: str) -> None:
    """A bit, another's, that behind another node, and one that arrived as another node's."""
    found, touched = first(scene("deltas, topk 2"), fault)
    assert (found["code"], found["pool"], found["site"]) == (code, pool, ["verify", 0])
    if fault == "state_bit":
        assert (found["reader"], found["entry"]) == (touched["request"], touched["slot"])
    elif fault == "state_swapped":
        assert found["reader"] in (touched["request"], touched["other"])
    else:
        assert touched["rows"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deltas, kept", "deltas, kept, n-gram"])
def test_a_state_that_a_prompt_did_not_leave_is_found_at_the_hit(scene, name: str) -> None:
    """As sglang#39342 had it: R12 of the request that begins with it, behind the 64 tokens of a chunk."""
    found, touched = first(scene(name), "state_untracked")
    assert touched["rows"] > 0
    assert (found["code"], found["pool"], found["position"]) == ("R12", "states", 64)
    assert found["reader"] == "that prompt again"
