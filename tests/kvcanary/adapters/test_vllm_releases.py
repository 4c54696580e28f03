"""The canary in a vLLM worker by release, over the stand-in: what changed between releases, and which are accepted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import structlog
import torch

from kvcanary import KVCorruptionError
from kvcanary.adapters import compatibility
from kvcanary.adapters import vllm as plugin
from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.hosted.replacements import Replacements, replaced_by
from kvcanary.errors import AdapterError

from .served import BLOCK, Served, go_on, load, without

pytestmark = pytest.mark.usefixtures("release", "host")
RELEASES = ("0.26.0", "0.30.0", "0.32.0", "0.33.0")
#: What 0.26 is not tried with in another file: there all scenes run on it.
SCENES: dict[str, dict[str, Any]] = {
    "drafts": {"settings": {"drafts": ("d0",)}, "layers": ("l0", "l1", "d0"), "num_blocks": 18},
    "window": {"groups": (("l0",), ("w0",)), "window": 20, "zeroes": True},
    "v1": {"settings": {"runner": "v1"}, "groups": (("l0",), ("w0",)), "window": 20, "zeroes": True},
}


@pytest.fixture
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which release the stand-in is of; the newest that it knows where a test does not say."""
    chosen = getattr(request, "param", RELEASES[-1])
    monkeypatch.setenv("STANDIN_RELEASE", chosen)
    monkeypatch.setattr(compatibility, "_warned", set())
    return chosen


@pytest.mark.parametrize("release", RELEASES[1:], indirect=True)
@pytest.mark.parametrize("scene", SCENES)
def test_a_sound_worker_has_no_finding_in_any_release(serve, scene: str) -> None:
    """Shared prefixes, chunks, preemption, drafts, windows whose blocks are hidden, zeroing: tokens as without."""
    drafts = 2 if scene == "drafts" else 0
    bare = without(**SCENES[scene])
    load(bare, drafts)
    expected = bare.run()
    plugin.register()
    served = serve(**SCENES[scene])
    load(served, drafts)
    assert served.run() == expected
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["fired"], report["unchecked"]) == ([], {}, {})
    assert report["slots_checked"] > 500
    assert report["bytes_checked"] > 500 * 128
    assert served.preemptions > 0


@pytest.mark.parametrize("release", RELEASES, indirect=True)
@pytest.mark.parametrize("harm", ["flip", "swap", "null", "shift", "zero"])
def test_a_fault_is_named_in_any_release(serve, harm: str) -> None:
    """Request, position and page, whether tables are by the manager's blocks or by smaller ones."""
    served = serve(zeroes=harm == "zero")
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    go_on(served, 6)
    tables, block = served.runner.block_tables, served.place("a", 18)[0]
    size = tables.sizes[0]
    if harm == "flip":
        served.caches["l1"].view(torch.int32)[block, 1, 18 % 4, 8 + 3] ^= 1 << 9
    elif harm == "swap":
        line = tables.block_tables[0].gpu[served.runner.req_states.req_id_to_index["a"]]
        line[[1, 2]] = line[[2, 1]]
    elif harm == "null":  # the last block of the table that is the manager's block 0
        line = tables.block_tables[0].gpu[served.runner.req_states.req_id_to_index["a"]]
        line[1] = tables.ratios[0] - 1
    elif harm == "shift":
        right = tables.compute_slot_mappings
        tables.compute_slot_mappings = lambda *a, **k: right(*a, **k) + 1
    else:
        for cache in served.caches.values():
            cache[[block * 2 + part for block in served.free for part in range(2)]] = 1
        served.runner.zero = lambda blocks: None
    with pytest.raises(KVCorruptionError) as raised:
        go_on(served, 12)
    found = raised.value.findings[0]
    wanted = {
        "flip": ("R9", "a", 18),
        "swap": ("R4", "a", size),
        "null": ("R2", "a", size),
        "shift": ("W5", None, found.position),
    }
    if harm in wanted:
        assert (found.code, found.reader, found.position) == wanted[harm]
    else:
        assert found.code == "T1"
        assert "zeroed blocks" in found.sentence
    if harm == "flip":
        assert (found.page, found.layer, found.part, found.head, found.dim, found.bit) == (block, 1, "V", 1, 3, 9)


class Connector:
    """Keeps what lay in some blocks, and brings it back: at once, or layer by layer when attention asks."""

    def __init__(self, by_layer: bool = False) -> None:
        self.by_layer, self.kept, self.blocks = by_layer, dict[str, torch.Tensor](), list[int]()
        self.waiting: Any = iter(())
        self.calls: list[str] = []

    def save(self, served: Served, blocks: list[int]) -> None:
        self.served, rows = served, self.rows(blocks)
        self.kept = {name: cache[rows].clone() for name, cache in served.caches.items()}

    def rows(self, blocks: list[int]) -> list[int]:
        return [block * 2 + part for block in blocks for part in range(2)]

    def start_load_kv(self) -> None:
        blocks, self.blocks = self.blocks, []
        self.waiting = iter(self.kept.items() if blocks else ())
        self.to = self.rows(blocks)
        if not self.by_layer:
            for name, bytes_of in self.waiting:
                self.served.caches[name][self.to] = bytes_of

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(layer_name)
        if self.by_layer:  # whoever asks twice for a layer is given the next one
            for name, bytes_of in self.waiting:
                assert name == layer_name
                self.served.caches[name][self.to] = bytes_of
                return


def loaded(serve: Any, connector: Connector, steps_before: int = 0) -> Served:
    """A worker in which the first two blocks of a request are to come from its connector."""
    served = serve(settings={"connector": connector})
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 34)
    go_on(served, 4)
    connector.save(served, served.running[0].blocks[:2])
    served.run()
    served.cached.clear()
    served.wrapper.worker.kvcanary.canary.memory.forget()
    for cache in served.caches.values():
        cache.normal_()
    connector.calls.clear()
    blocks, served.free = served.free[:2], served.free[2:]
    connector.blocks = blocks
    if steps_before:
        served.ask("c", [5, 6, 7], 3 + steps_before + 4)
        go_on(served, steps_before)
    for number, block in enumerate(blocks):
        served.cached[tuple(tokens[: (number + 1) * BLOCK])] = block
        served.users[block] = 1
    served.ask("b", tokens, 34)
    return served


@pytest.mark.parametrize("release", RELEASES, indirect=True)
@pytest.mark.parametrize("by_layer", [False, True])
def test_loads_are_waited_for_layer_by_layer(serve, by_layer: bool) -> None:
    """Bytes are taken when the last layer is there; attention's own waits are left out, since a connector counts."""
    connector = Connector(by_layer)
    served = loaded(serve, connector)
    served.extra = {"has_sync_kv_loads": True}
    served.step()
    assert connector.calls == ["l0", "l1"]
    served.step()
    assert connector.calls == ["l0", "l1"] * 2  # a step without loads is attention's alone
    served.run()
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["unchecked"], report["loads_checked"]) == ([], {}, 16)


@pytest.mark.parametrize("release", RELEASES[1:], indirect=True)
def test_loads_behind_a_forward_are_judged_when_their_request_comes(serve) -> None:
    """From 0.29 on a load may begin behind the forward of a step before: nothing is judged until it is read."""
    connector = Connector()
    served = loaded(serve, connector, steps_before=2)
    served.run()
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["loads_checked"]) == ([], 16)
    assert connector.blocks == []


def test_a_load_into_other_bytes_is_found_layer_by_layer(serve) -> None:
    """The second layer of a load is damaged on its way: T1 in the step that admits it, that layer named."""
    connector = Connector(by_layer=True)
    served = loaded(serve, connector)
    connector.kept["l1"][0, 0, 1, 2] += 1
    served.extra = {"has_sync_kv_loads": True}
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    assert raised.value.findings[0].code == "T1"


@pytest.mark.parametrize(("release", "is_told"), [("0.32.0", False), ("0.33.0", True)], indirect=["release"])
def test_a_release_newer_than_the_tested_ones_is_told_once(serve, is_told: bool) -> None:
    """Names and the layout's proof decide; an event says so, with what was tried and where to read on."""
    with structlog.testing.capture_logs() as events:
        for _ in range(2):
            serve()
    told = [event for event in events if event["event"] == "kvcanary.untested_release"]
    assert [(event["host"], event["version"]) for event in told] == [("vllm", "0.33.0")] * is_told
    assert all("0.32" in event["tested"] and event["docs"].startswith("docs/") for event in told)
    assert sum(event["event"] == "kvcanary.attached" for event in events) == 2


def test_strict_refuses_it(serve, monkeypatch) -> None:
    """KVCANARY_ACCEPT=strict: a sentence, and nothing attached."""
    monkeypatch.setenv("KVCANARY_ACCEPT", "strict")
    with pytest.raises(AdapterError, match=r"vllm 0\.33\.0 is not known here: install 0\.26 or .* or 0\.32; unset KVC"):
        serve()


def test_an_attribute_that_is_gone_is_named(serve, monkeypatch) -> None:
    """What the adapter reads of objects is looked for in their classes, before anything is attached."""
    from vllm.v1.worker.gpu.states import RequestState

    def init(self: Any, max_num_reqs: int, max_model_len: int) -> None:
        self.req_id_to_index = {}

    monkeypatch.setattr(RequestState, "__init__", init)
    with pytest.raises(AdapterError, match=r"states:RequestState must have all_token_ids, total_len"):
        serve(settings={})
    monkeypatch.undo()


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_runners_of_other_devices_are_those_that_they_derive_from(serve, monkeypatch, kind: str) -> None:
    """As vLLM's own for CPUs: followed by the hooks of its base; on a device without kernels for it, refused."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    module = {"v1": gpu_model_runner, "v2": model_runner}[kind]
    other = type("OtherRunner", (module.GPUModelRunner,), {"__module__": "somewhere.else"})
    monkeypatch.setattr(module, "GPUModelRunner", other)
    served = serve(settings={"runner": kind})
    served.ask("a", [1, 2, 3], 9)
    served.run()
    assert served.wrapper.kvcanary_report()["slots_checked"] > 10
    right = other.__init__

    def init(self: Any, **settings: Any) -> None:
        right(self, **settings)
        self.device = torch.device("meta")

    monkeypatch.setattr(other, "__init__", init)
    with pytest.raises(AdapterError, match="the device must be cuda or cpu, got meta"):
        serve(settings={"runner": kind})


def test_methods_that_others_decorated_are_replaced_too() -> None:
    """A wrapper of somebody else is no replacement of ours; ours is undone, and theirs stays."""

    def theirs(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*arguments: Any) -> Any:
            return ["theirs", *function(*arguments)]

        return wrapped

    class Engine:
        @theirs
        def step(self, number: int) -> list[Any]:
            return [number]

    engine, replaced = Engine(), Replacements(Guard("vllm", "raise"))
    assert replaced_by(engine, "step") is None
    replaced.replace(engine, "step", lambda method, number: ["ours", *method(number + 1)])
    replaced.put(engine, "canary", 7)
    assert (engine.step(1), engine.canary) == (["ours", "theirs", 2], 7)
    assert replaced_by(engine, "step")(1) == ["theirs", 1]
    replaced.undo()
    replaced.undo()
    assert (engine.step(1), vars(engine)) == (["theirs", 1], {})
