"""What connectors of a real vLLM for CPUs bring back: found where it is wrong, and computed again in mode heal."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm.loads import lmcache
from vllm_for_cpus import NEEDS_VLLM, ROOT, run


@NEEDS_VLLM
@pytest.mark.parametrize("runner", ["0", pytest.param("1", marks=pytest.mark.slow)])  # V2 is interpreted
def test_a_restart_between_store_and_load(tmp_path, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    """vLLM's connector brings back from files what another process stored: right ones are silent, damaged ones T1."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    told = run("loads", tmp_path / "record.json")
    expect_named(told)
    assert told["equal_tokens"]


@NEEDS_VLLM
@pytest.mark.slow
def test_a_recovery_that_goes_on_behind_the_row_is_found(tmp_path) -> None:
    """vllm#49250, in vLLM as it is: a load fails, and runner V2 does not take the row back with the scheduler."""
    expect_recovery_found(run("loads.recovery", tmp_path / "record.json"))


def test_the_record_of_a_recovery() -> None:
    """The same, as it is committed."""
    record = RESULTS / "cpu_vllm_recovery.json"
    expect_recovery_found(json.loads(record.read_text()))


def expect_recovery_found(told: dict[str, Any]) -> None:
    """All tokens are wrong without a canary, none leaves with one; the first cause says what happened to which row."""
    assert told["equal_when_loaded"]
    assert told["wrong_tokens"] == {"off": 32, "log": 32, "raise": 0, "mended": 0}
    assert (told["mended"]["stopped_by"], told["mended"]["fired"]) == (None, {})
    assert told["raise"]["stopped_by"] == "W6"
    first = told["raise"]["findings"][0]["causes"][0]
    assert first["text"] == "the row was taken back, and the model runner went on behind it"
    assert re.match(r"the scheduler took the row back from entry 128 to 32 before step \d+", first["evidence"][0])


@NEEDS_VLLM
@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"])
def test_damaged_loads_are_computed_again(tmp_path, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    """Mode heal: files of an external store are damaged in five ways, and vLLM's tokens stay what they were."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    expect_healed(run("loads.healing", tmp_path / "record.json"))


@pytest.mark.parametrize("record", ["cpu_vllm_heal", "cpu_vllm_heal_v1", "gpu_vllm_heal"])
def test_the_record_of_healed_loads(record: str) -> None:
    """The same with either runner and on a GPU, as it is committed, and what its page says of it."""
    told = json.loads((RESULTS / f"{record}.json").read_text())
    expect_healed(told)
    page = " ".join((ROOT / "docs/vllm.md").read_text().split())
    healed = sum(own["healed"] for runs in told["healed"].values() for own in runs)
    healed += sum(own["healed"] for own in told["together"])
    wrong = sum(own["wrong_tokens"] for runs in told["logged"].values() for own in runs)
    assert f"All {healed} loads were healed" in page
    assert f"those one by one gave {wrong} wrong tokens" in page
    assert f"`{record}.json`" in page


def expect_healed(told: dict[str, Any]) -> None:
    """Each damaged load is T1, with its kind, and made good; the third one of a server stops it."""
    kinds = dict(zip(told["healed"], ("one word", "short", "misrouted", "misrouted", "other layout"), strict=True))
    for harm, runs in told["healed"].items():
        assert [(own["wrong_tokens"], own["fired"], own["healed"]) for own in runs] == [(0, {"T1": 1}, 1)] * 4
        assert [own["found"][0][:2] for own in runs] == [["T1", kinds[harm]]] * 4
    assert [(own["wrong_tokens"], own["healed"]) for own in told["together"]] == [(0, 1)] * 4
    assert (told["equal_tokens"], told["clean"]["fired"], told["async_scheduling"]) == (True, {}, False)
    assert sum(own["wrong_tokens"] for runs in told["logged"].values() for own in runs) > 0
    assert told["one_after_the_other"]["stopped_by"].endswith("finding 3 of cause 'transfer', healing does not last")


@pytest.mark.parametrize("record", ["vllm_loads", "cpu_vllm_loads", "cpu_vllm_loads_v1"])
def test_the_record_of_a_restart(record: str) -> None:
    """The same on a GPU and on a CPU, with either runner, as it is committed."""
    expect_named(json.loads((RESULTS / f"{record}.json").read_text()))


@pytest.mark.parametrize(("record", "release"), [("cpu_vllm_lmcache", "0.5.6"), ("cpu_vllm_lmcache_older", "0.5.2")])
def test_the_record_of_lmcache_in_a_real_vllm(record: str, release: str) -> None:
    """A restart behind LMCache's server: right loads are silent and all compared, each wrong copy is T1 by its kind."""
    told = json.loads((RESULTS / f"{record}.json").read_text())
    assert told["machine"]["lmcache"] == release
    assert told["equal_tokens"]
    assert (told["report"]["loads_checked"], told["report"]["fired"]) == (416, {})
    first = {harm.__name__: told[harm.__name__]["found"][0] for harm in lmcache.HARMS}
    assert {name: (own["code"], own["found"]["verdict"]) for name, own in first.items()} == {
        "k_and_v_exchanged": ("T1", "other layout"),
        "last_chunk_missing": ("T1", "short"),
        "blocks_exchanged": ("T1", "misrouted"),
        "one_bit": ("T1", "one word"),
    }
    assert {own["found"]["came_back_by"] for own in first.values()} == {"LMCacheMPConnector"}


def expect_named(told: dict[str, Any]) -> None:
    """Every entry that came back was compared; each damage by its kind, with the connector, the store and who wrote."""
    assert (told["report"]["loads_checked"], told["report"]["fired"]) == (416, {})
    named = {name: own["found"][0] for name, own in told.items() if isinstance(own, dict) and own.get("found")}
    assert {name: (first["code"], first["found"]["verdict"]) for name, first in named.items()} == {
        "one_bit": ("T1", "one word"),
        "zeros_at_the_end": ("T1", "short"),
        "blocks_exchanged": ("T1", "misrouted"),
        "other_prompt": ("T1", "misrouted"),
        "layers_exchanged": ("T1", "other layout"),
    }
    for first in named.values():
        assert first["found"]["came_back_by"] == "ExampleConnector"
        assert re.search(r"was written by vllm \S+:\d+ rank 0, as file names.sqlite says", " ".join(first["evidence"]))
