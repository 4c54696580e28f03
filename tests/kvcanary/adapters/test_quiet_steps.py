"""Steps that repeat the last one, each row by one entry: launched again as they are, and judged like all others."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import KVCorruptionError
from kvcanary.adapters.observed.canary import GROWN, PagedCanary
from kvcanary.dumps.watched_events import GRANTED
from kvcanary.records import graph_cache

from .served import BLOCK, Served, go_on, load

pytestmark = pytest.mark.usefixtures("host")
RUNNERS = ("v1", "v2")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every step that repeats the last one, whether it was launched as such."""
    right, seen = PagedCanary.read_again, list[bool]()

    def read_again(self: PagedCanary) -> bool:
        seen.append(right(self))
        return seen[-1]

    monkeypatch.setattr(PagedCanary, "read_again", read_again)
    return seen


@pytest.fixture(autouse=True)
def _leaves_free_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that grants what was filled is no quiet one: these tests are of steps that nothing happens in."""
    monkeypatch.setenv("KVCANARY_POISON", "off")


def decoding(serve: Any, runner: str = "v2", steps: int = 12, **settings: Any) -> Served:
    """Requests that decode, whose last steps were quiet; one with runner V1, whose rows change places here."""
    served = serve(settings={"runner": runner}, **settings)
    served.ask("a", [(3 * n) % 97 for n in range(30)], 130)
    if runner == "v2":
        served.ask("b", [5, 6, 7, 8, 9], 130)
    go_on(served, steps)
    return served


def number(served: Served) -> int:
    return int(served.wrapper.worker.kvcanary.canary.step)


@pytest.mark.parametrize("runner", RUNNERS)
def test_most_steps_of_a_decode_are_quiet(serve, quiet, runner: str) -> None:
    """Blocks are granted in them too; one in GROWN reads lengths, and rows that come or go end them."""
    served = decoding(serve, runner)
    quiet.clear()
    go_on(served, 40)
    assert len(quiet) == 40
    assert 1 <= quiet.count(False) <= 2 + 40 // GROWN
    served.ask("c", [7, 7, 7], 20)
    quiet.clear()
    go_on(served, 2)
    assert quiet.count(True) == 0
    served.run()
    assert served.wrapper.kvcanary_report()["findings"] == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_told_of_quiet_steps_is_what_is_told_of_all(serve, monkeypatch, runner: str) -> None:
    """Certificate, steps with their rows, lengths and events, and tokens: as if every step had been read in full."""

    def ran() -> tuple[Any, ...]:
        served = serve(settings={"runner": runner})
        load(served)
        tokens = dict(served.run())
        handle = served.wrapper.worker.kvcanary
        report = served.wrapper.kvcanary_report()
        told = handle.canary.recent.told()
        steps = [(step.number, list(step.requests), step.count, step.site) for step in handle.canary.steps]
        return tokens, {name: own for name, own in report.items() if name != "seed_id"}, told, steps

    found = ran()
    monkeypatch.setattr(PagedCanary, "read_again", lambda self: False)
    assert found == ran()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("harm", ["flip", "swap", "free"])
def test_a_fault_in_a_quiet_step_is_named_with_its_step(serve, quiet, runner: str, harm: str) -> None:
    """A bit, a table and a free, between two quiet steps: code, request, position, and the first bad step."""
    served = decoding(serve, runner)
    [victim] = [request for request in served.running if request.name == "a"]
    block, step = victim.blocks[1], number(served) + 1
    if harm == "flip":
        served.caches["l1"].view(torch.int32)[block * 2, 1, 1, 3] ^= 1 << 9
    elif harm == "free":
        served.pool.free_blocks([served.pool.blocks[block]])
    elif runner == "v1":
        held = served.runner.requests["a"].block_ids[0]
        held[1], held[2] = held[2], held[1]
    else:
        line = served.runner.block_tables.block_tables[0].gpu[served.runner.req_states.req_id_to_index["a"]]
        size = line[2:4].clone()
        line[2:4], line[4:6] = line[4:6].clone(), size
    quiet.clear()
    with pytest.raises(KVCorruptionError) as error:
        served.step()
    assert quiet == [True]
    found = error.value.findings[0]
    wanted = {"flip": ("R9", BLOCK + 1), "swap": ("R4", BLOCK), "free": ("R7", BLOCK)}[harm]
    assert (found.code, found.position, found.reader, found.first_bad_step) == (*wanted, "a", step)


@pytest.mark.parametrize("ring", ["0", "3"])
def test_a_recorder_of_few_steps_ends_nothing(serve, quiet, monkeypatch, ring: str) -> None:
    """Quiet steps go on and are judged where fewer are recorded than there were, or none."""
    monkeypatch.setenv("KVCANARY_RING", ring)
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = decoding(serve)
    served.caches["l1"].view(torch.int32)[served.running[0].blocks[1] * 2, 1, 1, 3] ^= 1 << 9
    served.ask("c", [7, 7, 7], 20)
    served.run()
    report = served.wrapper.kvcanary_report()
    assert quiet.count(True) > 20
    assert [own["code"] for own in report["incidents"]] == ["R9"]
    assert not any("stopped watching" in why for why in report["unchecked"])


def test_a_fault_of_some_steps_ago_is_told_with_that_step(serve, quiet, monkeypatch) -> None:
    """In mode log, where its count is looked at late: behind further quiet steps, and behind one that is not."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    for is_ended in (False, True):
        served = decoding(serve)
        handle = served.wrapper.worker.kvcanary
        monkeypatch.setattr(handle, "_look_at", lambda total, step: None)
        line = served.runner.block_tables.block_tables[0].gpu[served.runner.req_states.req_id_to_index["a"]]
        step, kept = number(served) + 1, line.clone()
        line[2:4] = line[4:6]
        served.step()
        line[2:4] = kept[2:4]
        if is_ended:
            served.ask("c", [7, 7, 7], 20)
        quiet.clear()
        go_on(served, 3)
        assert quiet.count(True) == (0 if is_ended else 3)
        monkeypatch.undo()
        monkeypatch.setenv("KVCANARY_MODE", "log")
        report = served.wrapper.kvcanary_report()
        assert [(own["code"], own["reader"], own["first_bad_step"]) for own in report["incidents"]] == [
            ("R4", "a", step)
        ]


def test_grants_of_quiet_steps_are_told_with_their_steps(serve, quiet) -> None:
    """A dump says in which step a block was granted, as of any other step."""
    served = decoding(serve, steps=4)
    quiet.clear()
    before = number(served)
    go_on(served, 20)
    told = served.wrapper.worker.kvcanary.canary.recent.told()
    granted = {step["step"]: event for step in told for event in step["events"] if event[0] == GRANTED}
    late = [step for step in granted if step > before]
    assert len(late) >= 4
    assert all(quiet[step - before - 1] for step in late if step - before - 1 < len(quiet))
    for step in told:  # every row is one entry further than in the step before
        assert len(step["rows"]) <= 2


def test_a_tensor_that_lies_elsewhere_is_read_anew(serve, quiet) -> None:
    """The same rows over other memory are no repetition."""
    served = decoding(serve)
    quiet.clear()
    served.runner.input_buffers.positions = served.runner.input_buffers.positions.clone()
    go_on(served, 2)
    assert quiet == [True]
    served.run()
    assert served.wrapper.kvcanary_report()["findings"] == []


def test_other_rows_of_one_length_are_read_anew(serve, quiet) -> None:
    """A batch of as many rows in another order is no repetition."""
    served = decoding(serve)
    quiet.clear()
    right = served.runner.make_batch
    names = served.runner.req_states.req_id_to_index
    assert set(names) == {"a", "b"}

    def turned(output: Any) -> Any:
        output.num_scheduled_tokens = dict(reversed(output.num_scheduled_tokens.items()))
        return right(output)

    served.runner.make_batch = turned
    served.step()
    assert quiet == []
    served.step()
    assert quiet == [True]


class Graph:
    """As torch's, with a handle; replays are counted."""

    replays = 0

    def raw_cuda_graph_exec(self) -> int:
        return 1 << 40

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver that notes what it launches and gives `result`."""
    held = SimpleNamespace(calls=[], result=0)

    def launch(graph: int, stream: int) -> int:
        held.calls.append((graph, stream))
        return int(held.result)

    monkeypatch.setattr(graph_cache, "_launch_graph", lambda: launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    return held


def test_a_graph_is_launched_by_the_driver_on_the_current_stream(driver) -> None:
    """Not by torch; a result other than 0 is an error that names it."""
    graph = Graph()
    replay = graph_cache.replay_of(graph, torch.device("cuda", 3))  # type: ignore[arg-type]
    replay()
    assert (driver.calls, graph.replays) == ([(1 << 40, 73)], 0)
    driver.result = 700
    with pytest.raises(RuntimeError, match="cuGraphLaunch must give 0, got 700"):
        replay()


def test_where_there_is_no_driver_or_no_handle_torch_replays(driver, monkeypatch) -> None:
    """Older releases of torch do not give the handle; nothing else changes."""
    old = SimpleNamespace(replay=Graph().replay)
    assert graph_cache.replay_of(old, torch.device("cuda", 0)) == old.replay  # type: ignore[arg-type]
    graph = Graph()
    monkeypatch.setattr(graph_cache, "_launch_graph", lambda: None)
    graph_cache.replay_of(graph, torch.device("cuda", 0))()  # type: ignore[arg-type]
    assert (graph.replays, driver.calls) == (1, [])
    monkeypatch.undo()
    graph_cache._launch_graph.cache_clear()

    def gone(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "PyDLL", gone)
    assert graph_cache._launch_graph() is None
    graph_cache._launch_graph.cache_clear()
