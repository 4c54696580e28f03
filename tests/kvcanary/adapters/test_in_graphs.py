"""Launches in graphs that an engine captures of its forwards: the same findings, and the host launches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvcanary.adapters import vllm as plugin
from kvcanary.adapters.observed import report
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.vllm import runner_v2
from kvcanary.records.graph_cache import Replays

from .row_engine import BLOCK, WIDTH, RowEngine
from .served import Served, go_on, load, without

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = 24  # tokens that the graph is for


class CapturedRows(RowEngine):
    """Rows of an engine that captured its forward, with its canary's launches around it."""

    graph: Any = None

    def prepare(self) -> None:
        empty = RowEngine.forward_of(self, [], 0, [WIDTH * BLOCK])
        self.canary.prepare(empty, in_graph=True)

        def captured() -> None:
            self.canary.launch_before(empty, SIZE)
            super(CapturedRows, self).run(SIZE)
            self.canary.launch_after(SIZE)

        captured()
        if self.device == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                captured()
        else:
            self.graph = SimpleNamespace(replay=captured)
        self.canary.restart()

    def forward_of(self, numbers: Sequence[int], num_tokens: int, lengths: Sequence[int]) -> Forward:
        self.slots[0, num_tokens:] = 0
        return replace(super().forward_of(numbers, num_tokens, lengths), in_graph=True)

    def run(self, num_tokens: int) -> None:
        self.graph.replay()

    def idle(self) -> None:
        """A replay for no rows, which a canary is told of like any other."""
        self.canary.read(self.forward_of([], 0, [1]))
        self.graph.replay()


def story(engine: RowEngine) -> list[int]:
    """Rows that begin, share a prefix, draw several tokens, wait and end; the counter of findings behind each step."""
    shared, counts = [(7 * n) % 51 for n in range(13)], []
    engine.begin(0, [])
    counts.append(engine.step({0: shared}))
    for number in range(1, 3):
        engine.begin(number, [])
    counts += [engine.step({0: [5], 1: [3], 2: [4, 5, 6]}), engine.step({1: [9] * 10, 0: [1], 2: [1]})]
    counts += [engine.step({0: [n], 1: [n], 2: [n]}) for n in range(9)]
    engine.table[4, :3], engine.table[4, 3:6] = engine.table[0, :3], torch.tensor(engine.free[:3], dtype=torch.int32)
    engine.begin(4, shared, 12)  # three blocks of another row's
    counts.append(engine.step({4: [shared[12]], 0: [1]}))
    engine.end(1)
    counts += [engine.step({0: [n], 4: [n]}) for n in range(3)]
    return counts


def told(engine: RowEngine) -> dict[str, Any]:
    certificate = engine.canary.certificate(list(engine.tokens))
    return {name: certificate[name] for name in ("forwards", "slots_checked", "slots_sealed", "bytes_checked")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_what_a_graph_judges_is_what_launches_judge(device: str, content: str) -> None:
    """Every step, with events and without: no finding, and as much was checked as without a graph."""
    plain, captured = RowEngine(device, content), CapturedRows(device, content)
    assert story(plain) == story(captured) == [0] * 16
    assert told(plain) == told(captured)
    assert torch.equal(plain.canary.groups[0].records, captured.canary.groups[0].records)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fault_is_told_with_its_step(device: str) -> None:
    """Bytes of a row that another step wrote, behind steps of events, quiet ones and replays for nobody."""
    engine = CapturedRows(device)
    story(engine)
    engine.idle()
    engine.idle()
    assert engine.step({0: [3], 4: [3]}) == 0
    block = int(engine.table[0, 4])
    engine.kv[1].view(torch.int32)[block, 0, 2, 3] ^= 1
    engine.idle()
    assert engine.step({4: [5]}) == 0  # which does not read it
    engine.step({0: [5], 4: [6]})
    step = engine.canary.steps[-1]
    assert step.number == 22
    report.report_step(engine.canary, step)
    [found] = engine.canary.log.findings
    assert (found.code, found.reader, found.position, found.step) == ("R9", "r0", 18, 22)


@pytest.mark.parametrize("device", DEVICES)
def test_lines_that_were_cleared_have_a_graph_do_nothing(device: str) -> None:
    """Whoever detaches leaves its launches in the engine's graphs: no record changes, and nothing is found."""
    engine = CapturedRows(device)
    story(engine)
    records, total = engine.canary.groups[0].records.clone(), int(engine.canary.memory.total)
    engine.canary.launches.clear_lines()
    engine.positions += 3
    for _ in range(20):
        engine.graph.replay()
    assert torch.equal(engine.canary.groups[0].records, records)
    assert int(engine.canary.memory.total) == total


def served(serve: Callable[..., Served], mode: str = "raise", **settings: Any) -> Served:
    return serve(settings={"graphs": True, **settings})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host launched."""
    keys: list[str] = []
    run = Replays.run

    def noted(self: Replays, key: Any, launch: Callable[[], None]) -> Any:
        keys.append("owners" if isinstance(key, int) else key[0])
        return run(self, key, launch)

    monkeypatch.setattr(Replays, "run", noted)
    return keys


def test_a_step_of_a_graph_is_one_line(serve, launched: list[str]) -> None:
    """Quiet or not: where rows begin or end their events are launched, and nothing else ever."""
    own = served(serve)
    own.ask("a", [1, 2, 3], 40)
    own.ask("b", [4, 5, 6], 12)
    go_on(own, 2)
    launched.clear()
    go_on(own, 5)
    assert launched == []
    while "b" not in own.finished:
        own.step()
    launched.clear()
    go_on(own, 2)
    assert launched == ["begin"]
    own.ask("c", [n % 7 for n in range(30)], 3)  # more tokens than a graph is for
    own.step()
    assert launched == ["begin", "before", "after"]


@pytest.mark.parametrize("drafts", [0, 2])
def test_everything_is_judged_as_without_graphs(serve, drafts: int) -> None:
    """The same tokens, forwards and entries; drafts are taken behind the graph."""
    reports = []
    for graphs in False, True:
        settings: dict[str, Any] = {"graphs": graphs} | ({"drafts": ["d0"]} if drafts else {})
        layers = ("l0", "l1", "d0") if drafts else ("l0", "l1")
        bare = without(settings=settings, layers=layers)
        load(bare, drafts)
        plugin.register()
        own = serve(settings=settings, layers=layers)
        load(own, drafts)
        assert own.run() == bare.run()
        reports.append(own.wrapper.kvcanary_report())
    names = ("findings", "forwards", "slots_checked", "slots_sealed", "bytes_checked", "unchecked")
    assert [{name: own[name] for name in names} for own in reports[1:]] == [{name: reports[0][name] for name in names}]
    assert reports[0]["findings"] == []


def test_a_dummy_run_takes_a_line_of_its_own(serve) -> None:
    """An engine that replays a graph for nobody, between steps: nothing is judged twice."""
    own = served(serve)
    own.ask("a", [1, 2, 3], 30)
    go_on(own, 4)
    manager = own.runner.cudagraph_manager
    for _ in range(3):
        own.runner.block_tables.slot_mappings.fill_(-1)
        manager.run_fullgraph(manager.candidates[0])
        own.step()
    assert int(own.wrapper.worker.kvcanary.canary.launches._ticks[0]) == own.wrapper.worker.kvcanary.canary.step
    own.run()
    assert own.wrapper.kvcanary_report()["findings"] == []


def test_a_step_without_its_graph_is_launched(serve, launched: list[str]) -> None:
    """The same rows, from a graph and without one in turns: each forward is judged once."""
    own = served(serve)
    own.ask("a", [1, 2, 3], 40)
    go_on(own, 4)
    manager, canary = own.runner.cudagraph_manager, own.wrapper.worker.kvcanary.canary
    for _ in range(3):
        kept = dict(manager.graphs)
        manager.graphs.clear()
        launched.clear()
        go_on(own, 2)
        assert launched == ["before", "after"] * 2
        manager.graphs.update(kept)
        launched.clear()
        go_on(own, 2)
        assert launched == []
        assert int(canary.launches._ticks[0]) == canary.step
    own.run()
    assert own.wrapper.kvcanary_report()["findings"] == []


def test_a_graph_that_is_not_replayed_stops_the_canary(serve, monkeypatch) -> None:
    """It would be a step behind from then on: the server goes on, and says that nobody watches."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    own = served(serve)
    own.ask("a", [1, 2, 3], 30)
    go_on(own, 4)
    monkeypatch.setattr(own.runner.cudagraph_manager, "run_fullgraph", lambda desc: None)
    with capture_logs() as events:
        go_on(own, 2)
    [stopped] = [event for event in events if event["event"] == "kvcanary.stopped"]
    assert "the graph that vLLM chose for a forward was not replayed" in stopped["reason"]


def test_tensors_that_were_not_captured_stop_the_canary(serve, monkeypatch) -> None:
    """What lies in the graph would read others than the forward has."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    own = served(serve)
    own.ask("a", [1, 2, 3], 30)
    go_on(own, 4)
    own.runner.input_buffers.positions = own.runner.input_buffers.positions.clone()
    own.ask("b", [4, 5], 30)
    with capture_logs() as events:
        go_on(own, 2)
    [stopped] = [event for event in events if event["event"] == "kvcanary.stopped"]
    assert "has other tensors than were captured" in stopped["reason"]


def test_who_detaches_or_sleeps_leaves_idle_launches(serve, launched: list[str]) -> None:
    """A worker that wakes up has another canary: it launches by itself."""
    own = served(serve)
    own.ask("a", [1, 2, 3], 50)
    go_on(own, 4)
    first = own.wrapper.worker.kvcanary.canary
    own.runner.block_tables.slot_mappings.fill_(-1)
    for name in ("sleep", "wake_up"):
        getattr(own.wrapper.worker, name)()
    assert own.wrapper.worker.kvcanary.canary is not first
    assert not first.launches._lines[:, 0].any()
    own = served(serve)
    own.ask("a", [1, 2, 3], 50)
    go_on(own, 4)
    records = own.wrapper.worker.kvcanary.canary.groups[0].records.clone()
    own.wrapper.worker.kvcanary.detach()
    own.run()
    assert torch.equal(own.runner.cudagraph_manager.graphs[own.runner.cudagraph_manager.candidates[0]].kvcanary
                       .groups[0].records, records)  # fmt: skip


@pytest.mark.parametrize("why", ["names", "parts", "ranks", "microbatches"])
def test_graphs_that_cannot_have_them_are_left_alone(serve, monkeypatch, launched: list[str], why: str) -> None:
    """A release without the names, graphs of parts of a forward, ranks that agree on a graph: launched as ever."""
    if why == "names":
        monkeypatch.setattr(runner_v2, "missing", lambda needs: ["it is gone"])
    initialize = plugin_worker().initialize_from_config

    def initialized(self: Any, kv_cache_config: Any) -> Any:
        worker, manager = self, self.model_runner.cudagraph_manager
        if why == "parts":
            manager.use_breakable_cg = True
        elif why == "microbatches":
            manager.ubatch_runner = object()
        elif why == "ranks":
            worker.vllm_config.parallel_config.data_parallel_size = 2
        return initialize(self, kv_cache_config)

    monkeypatch.setattr(plugin_worker(), "initialize_from_config", initialized)
    own = served(serve)
    own.ask("a", [1, 2, 3], 12)
    go_on(own, 2)
    launched.clear()
    go_on(own, 3)
    assert {"before", "after"} >= set(launched) >= {"after"}
    own.run()
    assert own.wrapper.kvcanary_report()["findings"] == []


def plugin_worker() -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    return Worker
