"""Streams: order exists where somebody waits, on a CPU too, and the canary says O1 where nobody did."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary import CanaryConfig, CanaryManager, PoolView
from spec_engine.step.streams import StagingRing, Streams

CPU = torch.device("cpu")


def armed_canary() -> CanaryManager:
    """A canary of eight pages, three of them request "one"'s."""
    view = PoolView("target", [torch.zeros(32, 2, 4)], [torch.zeros(32, 2, 4)], 4)
    canary = CanaryManager(CanaryConfig(mode="log", seed=1), [view])
    canary.arm()
    canary.admit("one", range(1, 13))
    canary.on_alloc("one", [3, 4, 5])
    return canary


def accesses(canary: CanaryManager) -> list[str]:
    canary.drain()
    assert {finding.code for finding in canary.findings} <= {"O1"}
    return [finding.found["access"] for finding in canary.findings]


def test_a_use_that_does_not_wait_reads_old_bytes():
    """A copy on a side stream has not run before somebody waits for it."""
    streams, source, copy = Streams(CPU), torch.ones(4), torch.zeros(4)
    event = streams.side("copies").submit("copy", lambda: copy.copy_(source))
    assert not copy.any()
    streams.main.wait(event)
    assert copy.all()


@pytest.mark.parametrize("waits", [False, True])
def test_the_canary_tells_a_use_that_does_not_wait(waits):
    """O1 names the access and the copy in flight; with the wait nothing is told."""
    canary = armed_canary()
    streams = Streams(CPU, canary.async_tracker)
    event = streams.side("copies").submit("load", lambda: None, writes=[3])
    if waits:
        streams.main.wait(event)
    streams.main.use("forward", [3])
    wrong = "'forward' on stream main touches page 3 without waiting for 'load' (stream copies, sequence 1)"
    assert accesses(canary) == ([] if waits else [wrong])


def test_what_the_host_has_waited_for_nobody_waits_for_again():
    """The tracker is told once that the copy is over; a side stream comes behind it without a word."""
    canary, reported = armed_canary(), []
    streams = Streams(CPU, canary.async_tracker)
    canary.async_tracker.log = SimpleNamespace(append=lambda event: reported.append(event[0]))
    event = streams.side("copies").submit("load", lambda: None, writes=[3])
    for stream in (streams.host, streams.host, streams.side("others"), streams.main):
        stream.wait(event)
    streams.main.use("forward", [3])
    assert [name for name in reported if name in ("ticket_complete", "ticket_waits")] == ["ticket_complete"]
    assert accesses(canary) == []


def test_the_canary_tells_a_side_stream_that_does_not_wait_for_the_forwards():
    """On a CPU the bytes are right, since forwards run at once; on a GPU they would not be."""
    canary = armed_canary()
    streams = Streams(CPU, canary.async_tracker)
    forward = streams.main.submit("forward", lambda: None, writes=[3, 4])
    streams.side("early").submit("offload", lambda: None, reads=[3])
    streams.side("late").wait(forward)
    streams.side("late").submit("offload", lambda: None, reads=[4])
    [wrong] = accesses(canary)
    assert wrong.startswith("'offload' on stream early touches page 3 without waiting for 'forward'")


def test_the_end_of_a_copy_is_judged_when_the_host_has_seen_it():
    """A page may be freed after the host has waited, and not before."""
    canary = armed_canary()
    streams = Streams(CPU, canary.async_tracker)
    first = streams.side("copies").submit("offload", lambda: None, reads=[3])
    streams.side("copies").submit("offload", lambda: None, reads=[4])
    streams.host.wait(first)
    canary.on_free("one", [3])
    assert accesses(canary) == []
    canary.on_free("one", [4])
    assert len(accesses(canary)) == 1


def test_advance_runs_so_many_operations_in_order():
    """What a device would do by and by: from the front of the queue, and no further than what was asked for."""
    streams, done = Streams(CPU), []
    side = streams.side("copies")
    for number in range(4):
        side.submit("work", lambda number=number: done.append(number))
    side.advance()
    assert done == [0]
    side.advance(2)
    assert done == [0, 1, 2]
    side.advance(9)
    assert done == [0, 1, 2, 3]


def test_one_side_stream_waits_for_another():
    """Reaching an event runs what it waits for, and nothing that comes later on the other stream."""
    streams, done = Streams(CPU), []
    a, b = streams.side("a"), streams.side("b")
    first = a.submit("first", lambda: done.append("first"))
    a.submit("later", lambda: done.append("later"))
    b.wait(first)
    streams.host.wait(b.submit("second", lambda: done.append("second")))
    assert done == ["first", "second"]
    streams.synchronize()
    assert done == ["first", "second", "later"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["work", "wait", "advance"]), st.integers(0, 9))))
def test_any_schedule_keeps_every_stream_in_order_and_every_wait(calls):
    """Each stream's work runs in the order of its submission, and what was waited for has run before what waited."""
    streams, done = Streams(CPU), []
    events, seen = [], {name: set() for name in "abc"}
    behind: list[set[int]] = []
    for name, kind, number in calls:
        stream = streams.side(name)
        if kind == "work":
            behind.append(set(seen[name]))
            seen[name].add(number := len(events))
            events.append((name, stream.submit("work", lambda number=number: done.append(number))))
        elif kind == "wait" and events:
            waited = number % len(events)
            stream.wait(events[waited][1])
            seen[name] |= behind[waited] | {waited}
        else:
            stream.advance(number)
    streams.synchronize()
    assert sorted(done) == list(range(len(events)))
    places = {number: place for place, number in enumerate(done)}
    assert all(places[before] < places[number] for number in places for before in behind[number])


def test_a_staging_buffer_is_not_filled_again_before_its_copy_is_done():
    """The upload of the first step holds the first step's values, though its buffer is taken again."""
    canary = armed_canary()
    streams = Streams(CPU, canary.async_tracker)
    ring = StagingRing(streams, "tokens", 2, [3], torch.int64)
    uploaded = [torch.zeros(3, dtype=torch.int64) for _ in range(5)]
    for step, target in enumerate(uploaded):
        buffer = ring.take()
        buffer.tensor.fill_(step)
        upload = lambda target=target, source=buffer.tensor: target.copy_(source)  # noqa: E731
        buffer.event = streams.side("uploads").submit("upload", upload, reads=[buffer.name])
    streams.synchronize()
    assert [int(target[0]) for target in uploaded] == [0, 1, 2, 3, 4]
    assert accesses(canary) == []


def test_a_staging_buffer_that_is_filled_too_early_is_told():
    """O1 names the buffer; without the event the ring cannot wait, and the copy takes the next step's values."""
    canary = armed_canary()
    streams = Streams(CPU, canary.async_tracker)
    ring = StagingRing(streams, "tokens", 1, [3], torch.int64)
    target = torch.zeros(3, dtype=torch.int64)
    for step in range(2):
        buffer = ring.take()
        buffer.tensor.fill_(step)
        upload = lambda source=buffer.tensor: target.copy_(source)  # noqa: E731
        streams.side("uploads").submit("upload", upload, reads=[buffer.name])
    streams.side("uploads").advance()
    assert target.tolist() == [1, 1, 1]
    [wrong] = accesses(canary)
    assert wrong.startswith("'fill' on stream host touches host buffer 'tokens 0' without waiting for 'upload'")


@pytest.mark.gpu
def test_a_cuda_side_stream_copies_beside_the_forwards():
    """The same calls on a GPU: what waits for the event sees the copy."""
    device = torch.device("cuda")
    streams = Streams(device)
    source, copy = torch.ones(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    forward = streams.main.submit("forward", lambda: source.mul_(3))
    side = streams.side("copies")
    side.wait(forward)
    event = side.submit("copy", lambda: copy.copy_(source))
    streams.main.wait(event)
    assert float(copy.sum()) == 3 * (1 << 20)
    streams.host.wait(event)
