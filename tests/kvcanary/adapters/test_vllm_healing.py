"""Mode heal in vLLM: blocks that a connector brought wrongly are told as failed, and vLLM computes them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvcanary import KVCorruptionError
from kvcanary.errors import AdapterError

from .served import BLOCK, Served, go_on
from .test_load_arrival import TOKENS, TWO_GROUPS, blocks_exchanged, layers_exchanged, load, noise, stored

HARMS = (noise, blocks_exchanged, layers_exchanged)


@pytest.fixture
def make(serve, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    """Make(policy, mode, settings) a server whose connector loads, and which computes failed loads again."""

    def make(policy: str = "recompute", mode: str = "heal", disable: str = "", content: str = "full", **settings: Any):
        from vllm.config.kv_transfer import KVTransferConfig

        for name, value in (("MODE", mode), ("DISABLE", disable), ("CONTENT", content)):
            monkeypatch.setenv(f"KVCANARY_{name}", value)
        own = {"transfer": KVTransferConfig("StoreConnector", policy), **settings.pop("settings", {})}
        return stored(serve, goes_back=policy == "recompute", settings=own, **settings)

    return make


def right(serve: Any, runner: str = "v2") -> list[int]:
    """The tokens that are due."""
    served = serve(settings={"runner": runner})
    served.ask("b", TOKENS, 6)
    return served.run()["b"]


@pytest.mark.parametrize("runner", ["v2", "v1"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_load_is_computed_again(serve, make, harm, runner) -> None:
    """Its tokens are those of a prompt that was never loaded, and the finding says how it was healed."""
    due = right(serve, runner)
    connector, served = make(settings={"runner": runner})
    load(connector, served, harm)
    served.ask("b", TOKENS, 6)
    assert served.run()["b"] == due
    report = served.wrapper.kvcanary_report()
    assert (report["fired"], report["healed"]) == ({"T1": 1}, 1)
    [found] = report["findings"]
    assert found["action"] == "heals: vLLM computes b again"
    assert found["healed"] == "vLLM computes b again from position 0"


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_a_load_that_is_right_is_not_computed_again(make, runner) -> None:
    """The clean twin."""
    connector, served = make(settings={"runner": runner})
    load(connector, served, lambda kept, other: None)
    served.ask("b", TOKENS, 4)
    served.step()
    assert served.running[0].computed > 2 * BLOCK
    served.run()
    report = served.wrapper.kvcanary_report()
    assert (report["fired"], report["loads_checked"]) == ({}, 2 * BLOCK)


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_a_damaged_load_is_found_with_either_runner(make, runner) -> None:
    """T1 in mode raise, before a token leaves."""
    connector, served = make(mode="raise", settings={"runner": runner})
    load(connector, served, blocks_exchanged)
    served.ask("b", TOKENS, 4)
    with pytest.raises(KVCorruptionError) as raised:
        served.run()
    [finding] = raised.value.findings
    assert (finding.code, finding.found["verdict"], finding.reader) == ("T1", "misrouted", "b")
    assert served.outputs["b"] == []


@pytest.mark.parametrize(("runner", "mode"), [("v2", "heal"), ("v1", "heal"), ("v1", "raise")])
def test_what_the_connector_says_itself_fails_too(serve, make, mode, runner) -> None:
    """Its own blocks are computed again, beside those that the canary has found in mode heal; a right recovery."""
    due = right(serve, runner)
    connector, served = make(mode=mode, settings={"runner": runner})
    connector.failed = {load(connector, served, lambda kept, other: None)[1]}
    served.ask("b", TOKENS, 6)
    assert served.run()["b"] == due
    assert served.wrapper.kvcanary_report()["fired"] == {}


def test_damage_in_the_same_block_is_another_fault_once_it_was_healed(make) -> None:
    """Two loads into the same blocks, both wrong: two findings, both made good."""
    connector, served = make()
    blocks: list[int] = []
    for name in ("b", "c"):
        kept = {layer: values.clone() for layer, values in connector.kept.items()}
        served.free = [*blocks, *(block for block in served.free if block not in blocks)]
        blocks, again = load(connector, served, noise), blocks
        served.ask(name, TOKENS, 4)
        served.run()
        connector.kept = kept
    assert again == blocks
    report = served.wrapper.kvcanary_report()
    assert (len(report["incidents"]), report["healed"]) == (2, 2)


def test_blocks_are_told_as_failed_once(make) -> None:
    """In the step that loads them, and in none behind it."""
    connector, served = make()
    blocks = load(connector, served, noise)
    served.ask("b", TOKENS, 4)
    served.step()
    assert served.runner.kv_connector.failed.intersection(blocks)
    assert connector.get_block_ids_with_load_errors() == set()


def test_other_findings_stop_the_server(make) -> None:
    """A byte of a resident block changes: no load that could come again."""
    connector, served = make()
    load(connector, served, lambda kept, other: None)
    served.ask("b", TOKENS, 9)
    go_on(served, 2)
    block, offset = served.place("b", 3)
    served.caches["l0"][block, 0, offset, 1] += 1
    with pytest.raises(KVCorruptionError) as raised:
        go_on(served, 2)
    [finding] = raised.value.findings
    assert finding.code == "R9"
    assert finding.action.endswith("R9 is no load that vLLM could compute again")


@pytest.mark.parametrize(
    ("site", "fired", "stops"), [(("load", 0), "T1", False), (("move", 0), "T1", True), (("load", 0), "R9", True)]
)
def test_only_loads_are_healed(make, site, fired, stops) -> None:
    """No copy that went wrong in a row whose load failed, and nothing where a fault beside it was not described."""
    connector, served = make()
    load(connector, served, noise)
    served.ask("b", TOKENS, 4)
    served.run()
    handle = served.wrapper.worker.kvcanary
    [finding] = handle.canary.log.findings
    handle._healing.failed("b", 99)
    group = SimpleNamespace(last=SimpleNamespace(code=fired))
    treatment = handle._healing.treat([group], [replace(finding, site=site)], frozenset(), set(), 99)
    assert treatment.stops is stops


def test_the_third_damaged_load_stops_the_server(make) -> None:
    """Two are healed; a tier that goes on so is no answer."""
    connector, served = make()
    for number in range(3):
        kept = {name: values.clone() for name, values in connector.kept.items()}
        load(connector, served, noise)
        served.ask(f"b{number}", TOKENS, 4)
        if number < 2:
            served.run()
            assert served.wrapper.kvcanary_report()["healed"] == number + 1
            connector.kept = kept
    with pytest.raises(KVCorruptionError) as raised:
        served.run()
    assert raised.value.findings[0].action.endswith("finding 3 of cause 'transfer', healing does not last")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"disable": "T1"}, "so leave T1 on"),
        ({"content": "write"}, "KVCANARY_CONTENT at rolling or full"),
        ({"settings": {"transfer": None}}, "what vLLM computes again are loads, so serve with a connector"),
        ({"policy": "fail"}, "give --kv-transfer-config a kv_load_failure_policy of recompute"),
        ({"groups": TWO_GROUPS}, "where a model has one group of layers"),
        ({"settings": {"is_ahead": True}}, "behind a failed load: give --no-async-scheduling"),
        ({"layers": ("l0", "d0"), "settings": {"drafts": ("d0",)}}, "are not computed again where the server drafts"),
    ],
    ids=["without T1", "nothing compared", "no connector", "fails", "groups", "ahead", "drafts"],
)
def test_where_nothing_could_be_healed_the_mode_is_refused(make, settings, words) -> None:
    """With the reason, and what to do."""
    with pytest.raises(AdapterError, match="mode must be 'log' or 'raise' here, got 'heal'") as raised:
        make(**settings)
    assert words in str(raised.value)


def test_names_that_are_gone_close_the_mode(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What heals leans on names of vLLM."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    monkeypatch.delattr(StagedWriteTensor, "apply_write")
    with pytest.raises(AdapterError, match="apply_write"):
        make()


def test_names_that_are_gone_close_loads_with_runner_v1(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a connector it is refused; what runs without one does not need them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_model_forward")
    with pytest.raises(AdapterError, match=r"external loads cannot be followed .*_model_forward.* without a connector"):
        make(mode="raise", settings={"runner": "v1"})


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_scheduler_that_is_ahead_goes_on_from_a_load_that_failed(make, policy, is_ahead) -> None:
    """Its token of the next step leaves: R12, before it does. Where requests of failed loads end, none is read."""
    connector, served = make(policy, "raise", settings={"is_ahead": is_ahead})
    served.goes_back = False
    block = load(connector, served, lambda kept, other: None)[1]
    served.ask("b", TOKENS, 6)
    connector.failed = {block}
    served.step()
    if (policy, is_ahead) != ("recompute", True):
        served.run()
        assert served.wrapper.kvcanary_report()["fired"] == {}
        return
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    [finding] = raised.value.findings
    assert (finding.code, finding.reader, finding.position) == ("R12", "b", BLOCK)
    assert finding.causes[0].text == "the row goes on from a load that failed, and was not computed again"
    assert finding.causes[0].evidence[0].startswith("the load of this block failed, StoreConnector said in step ")
