"""AsyncOps: accesses that did not wait for work in flight, or that belong to an earlier grant, and none else."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvcanary.transfers.async_ops import HOST, AsyncOp, AsyncOps
from kvcanary.transfers.async_tracker import AsyncTracker


def make_async_ops() -> tuple[AsyncOps, np.ndarray]:
    """Ten pages, page p in generation 10 + p."""
    generations = np.arange(10, 20, dtype=np.int64)
    return AsyncOps(generations), generations


def words(unordered_accesses) -> list[str]:
    return [unordered.sentence for unordered in unordered_accesses]


# order


def test_a_copy_that_waits_for_the_write_is_right():
    """The copying stream waits for the writer's event, the host for the copy's, then the page may go."""
    async_tracker, _ = make_async_ops()
    write = async_tracker.issue("forward", "main", writes={3: 13})
    async_tracker.waits("copy", write)
    copy = async_tracker.issue("offload", "copy", reads={3: 13}, writes={"staging 0": None})
    assert (write.unordered_accesses, copy.unordered_accesses) == ((), ())
    assert async_tracker.complete(copy) == []
    assert async_tracker.free({3: 13}) == []


def test_a_copy_that_does_not_wait_is_told():
    """The sentence names the access, the page, and the work in flight with its stream and number."""
    async_tracker, _ = make_async_ops()
    async_tracker.issue("forward", "main", writes={2: 12})
    write = async_tracker.issue("forward", "main", writes={3: 13})
    copy = async_tracker.issue("offload", "copy", reads={3: 13})
    assert words(copy.unordered_accesses) == [
        "'offload' on stream copy touches page 3 without waiting for 'forward' (stream main, sequence 2)"
    ]
    [unordered] = copy.unordered_accesses
    assert (unordered.resource, unordered.stream, unordered.op) == (3, "copy", write)


def test_work_on_one_stream_is_in_order():
    """Nobody waits for an event of the own stream."""
    async_tracker, _ = make_async_ops()
    async_tracker.issue("zeroing", "main", writes={3: 13})
    assert async_tracker.issue("forward", "main", reads={3: 13}, writes={3: 13}).unordered_accesses == ()


def test_reads_need_no_order():
    """Two copies may read one page at once; a write must wait for both."""
    async_tracker, _ = make_async_ops()
    first = async_tracker.issue("offload", "copy", reads={3: 13})
    async_tracker.issue("send", "net", reads={3: 13})
    assert async_tracker.use("forward", "main", {3: 13}) == []
    assert [v.op.what for v in async_tracker.use("forward", "main", {3: 13}, writes=True)] == ["offload", "send"]
    async_tracker.waits("main", first)
    assert [v.op.what for v in async_tracker.use("forward", "main", {3: 13}, writes=True)] == ["send"]


def test_waiting_is_passed_on():
    """Who waits for a stream that has waited has waited too; waiting for a later event covers the earlier ones."""
    async_tracker, _ = make_async_ops()
    async_tracker.issue("load", "a", writes={3: 13})
    later = async_tracker.issue("load", "a", writes={4: 14})
    async_tracker.waits("b", later)
    relay = async_tracker.issue("relay", "b", writes={5: 15})
    assert async_tracker.use("forward", "c", {3: 13, 4: 14, 5: 15}) != []
    async_tracker.waits("c", relay)
    assert async_tracker.use("forward", "c", {3: 13, 4: 14, 5: 15}) == []


def test_an_earlier_event_covers_no_later_work():
    """To have waited for the first copy says nothing about the second."""
    async_tracker, _ = make_async_ops()
    first = async_tracker.issue("load", "copy", writes={3: 13})
    async_tracker.issue("load", "copy", writes={4: 14})
    async_tracker.waits("main", first)
    assert [v.resource for v in async_tracker.use("forward", "main", {3: 13, 4: 14})] == [4]


def test_what_the_host_has_seen_nobody_waits_for():
    """All that is enqueued after the host saw the end comes behind it, on every stream."""
    async_tracker, _ = make_async_ops()
    load = async_tracker.issue("load", "copy", writes={3: 13})
    assert len(async_tracker.use("forward", "main", {3: 13})) == 1
    assert async_tracker.complete(load) == []
    assert async_tracker.complete(load) == []
    assert async_tracker.use("forward", "main", {3: 13}, writes=True) == []


# staging buffers


def test_a_staging_buffer_is_reused_after_its_copy():
    """The host refills a pinned buffer only when the copy out of it has ended."""
    async_tracker, _ = make_async_ops()
    copy = async_tracker.issue("upload", "main", reads={"indices": None}, writes={3: 13})
    assert words(async_tracker.use("refill", HOST, {"indices": None}, writes=True)) == [
        "'refill' on stream host touches host buffer 'indices' without waiting for 'upload' (stream main, sequence 1)"
    ]
    async_tracker.complete(copy)
    assert async_tracker.use("refill", HOST, {"indices": None}, writes=True) == []


def test_a_buffer_that_was_taken_again_is_told():
    """Who comes for what it held before, and a copy of then that lands now; the next use is right."""
    async_tracker, _ = make_async_ops()
    async_tracker.renew("results", 1)
    copy = async_tracker.issue("results", "copy", writes={"results": 1})
    assert async_tracker.complete(copy) == []
    assert async_tracker.use("read", HOST, {"results": 1}) == []
    late = async_tracker.issue("results", "copy", writes={"results": 1})
    async_tracker.renew("results", 2)
    assert words(async_tracker.complete(late)) == [
        "the end of 'results' (stream copy, sequence 2) is meant for generation 1 of host buffer 'results', "
        "which is in 2 now"
    ]
    assert words(async_tracker.use("read", HOST, {"results": 1})) == [
        "'read' on stream host is meant for generation 1 of host buffer 'results', which is in 2 now"
    ]
    assert async_tracker.use("read", HOST, {"results": 2}) == []


# lifetimes


def test_a_page_is_not_freed_under_a_copy():
    """A free on the host waits for the end of the copy; a free for a stream that is behind it need not."""
    async_tracker, _ = make_async_ops()
    async_tracker.issue("offload", "copy", reads={3: 13, 4: 14})
    assert words(async_tracker.free({3: 13})) == [
        "'free' on stream host touches page 3 without waiting for 'offload' (stream copy, sequence 1)"
    ]
    assert async_tracker.free({4: 14}, stream="copy") == []


def test_a_second_free_by_the_same_ticket_is_told():
    """The generation of the grant is spent with the first free, even if the page was granted again."""
    async_tracker, generations = make_async_ops()
    assert async_tracker.free({3: 13}) == []
    generations[3] += 2
    assert words(async_tracker.free({3: 13})) == [
        "'free' on stream host is meant for generation 13 of page 3, which is in 15 now"
    ]


def test_an_access_to_an_earlier_grant_is_told():
    """A plan that was made before the page was freed and granted again reads or writes somebody else's bytes."""
    async_tracker, generations = make_async_ops()
    generations[3] = 99
    expected = ["'save' on stream copy is meant for generation 13 of page 3, which is in 99 now"]
    assert words(async_tracker.use("save", "copy", {3: 13})) == expected
    assert words(async_tracker.issue("save", "copy", reads={3: 13, 4: 14}).unordered_accesses) == expected


def test_a_copy_that_lands_in_a_new_grant_is_told():
    """The page was freed and granted again while the transfer was on its way, and nobody said so."""
    async_tracker, generations = make_async_ops()
    load = async_tracker.issue("receive", "net", writes={3: 13, 4: 14})
    generations[3] += 2
    assert words(async_tracker.complete(load)) == [
        "the end of 'receive' (stream net, sequence 1) is meant for generation 13 of page 3, which is in 15 now"
    ]


def test_a_copy_that_ended_in_order_before_the_free_is_right():
    """The host learns late that it ended; what came behind it on its stream, written or not, is no late landing."""
    async_tracker, generations = make_async_ops()
    copy = async_tracker.issue("offload", "main", reads={3: 13, 4: 14})
    assert async_tracker.free({3: 13, 4: 14}, stream="main") == []
    generations[[3, 4]] += 2
    assert async_tracker.issue("forward", "main", writes={3: 15}).unordered_accesses == ()
    assert async_tracker.complete(copy) == []


def test_memory_is_bounded():
    """Work that is never completed is forgotten as later work takes its place."""
    async_tracker, _ = make_async_ops()
    for _ in range(1000):
        async_tracker.issue("forward", "main", reads={3: 13, "a": None}, writes={4: 14})
    assert len(async_tracker._writes) + sum(map(len, async_tracker._reads.values())) == 3
    async_tracker.complete(async_tracker.issue("last", "main", reads={3: 13, "a": None}, writes={4: 14}))
    assert async_tracker._writes == async_tracker._reads == {}


# at random


def happens_before(events: list[tuple], first: int, last: int) -> bool:
    """By search: is there a path from one event to a later one along streams, waits and the host?"""
    reached = {first}
    for number in range(first + 1, last + 1):
        kind, stream, *rest = events[number]
        for earlier in reached.copy():
            earlier_kind, earlier_stream, *_ = events[earlier]
            same_stream = earlier_stream in (stream, HOST)
            if same_stream or (kind == "wait" and rest[0] == earlier and earlier_kind == "issue"):
                reached.add(number)
                break
    return last in reached


@pytest.mark.parametrize("seed", range(20))
def test_random_streams_agree_with_a_search_for_paths(seed):
    """An access is told exactly if no path leads to it from the last write, or for a write from a read since."""
    rng, (async_tracker, _) = random.Random(seed), make_async_ops()
    events: list[tuple] = []
    issued: dict[int, object] = {}
    reported = 0
    for number in range(150):
        stream = rng.choice(["a", "b", "c", HOST])
        if issued and rng.random() < 0.4:
            waited = rng.choice(sorted(issued)[-6:])
            events.append(("wait", stream, waited))
            if stream == HOST:
                async_tracker.complete(issued[waited])
            else:
                async_tracker.waits(stream, issued[waited])
            continue
        page, writes = rng.randrange(3), rng.random() < 0.5
        events.append(("issue", stream, page, writes))
        touched = {page: 10 + page}
        op = async_tracker.issue("work", stream, **{"writes" if writes else "reads": touched})
        issued[number] = op
        expected = sorted(other for other in conflicts(events, number) if not happens_before(events, other, number))
        numbers = {id(issued[other]): other for other in issued}
        assert sorted(numbers[id(unordered.op)] for unordered in op.unordered_accesses) == expected
        reported += len(expected)
    assert reported > 10


def conflicts(events: list[tuple], last: int) -> list[int]:
    """The last write of the same page before an event and, if it writes, the last read of each stream since."""
    _, _, page, writes = events[last]
    found: dict[str, int] = {}
    for number, event in enumerate(events[:last]):
        if event[0] == "issue" and event[2] == page:
            found = {"write": number} if event[3] else {**found, str(event[1]): number}
    return [number for key, number in found.items() if writes or key == "write"]


@pytest.mark.parametrize("is_new", [False, True])
def test_who_receives_has_waited_for_all_that_came_before_the_fetch(is_new):
    """The host then reads what the other stream had written, be a stream named meanwhile or not."""
    async_tracker, _ = make_async_ops()
    async_tracker.issue("store", "main", writes={3: 13})
    fetched, _ = async_tracker.fetch("results", "copies", "main", "staging", 1)
    if is_new:
        async_tracker.issue("other", "new")
    assert async_tracker.receive(fetched)
    assert async_tracker.use("read", HOST, {3: 13}) == []


def test_to_follow_a_stream_is_to_wait_for_a_mark_on_it():
    """Whatever each has waited for before: the same is ordered, and what is issued next has the same number."""
    draws = random.Random(4)
    streams = ["main", "copies", 7, HOST]
    ours, theirs = AsyncOps([0] * 4), AsyncOps([0] * 4)
    for number in range(300):
        stream, other = draws.sample(streams, 2)
        if draws.random() < 0.4:
            mark = theirs.issue("mark", other)
            theirs.waits(stream, mark)
            assert ours.follow(stream, other) == mark.sequence
        else:
            page = number % 4
            found = [async_tracker.issue("work", stream, writes={page: None}) for async_tracker in (ours, theirs)]
            assert [str(one) for one in found[0].unordered_accesses] == [
                str(one) for one in found[1].unordered_accesses
            ]
            assert (found[0].sequence, found[0].clock) == (found[1].sequence, found[1].clock)


@pytest.mark.parametrize("seed", range(8))
def test_a_fetch_and_its_end_find_what_the_calls_find_that_they_stand_for(seed):
    """One engine fetches into buffers and receives, the other makes every call; others use the buffers meanwhile."""
    draws, found = random.Random(seed), ([], [])
    ours, theirs = (AsyncTracker(SimpleNamespace(generations=[]), None, own.extend) for own in found)
    flying: list[tuple[AsyncOp, AsyncOp, str, int]] = []
    generations = dict.fromkeys(("one", "two"), 0)
    for number in range(120):
        buffer, stream = draws.choice([*generations]), draws.choice(["copies", "more"])
        way = draws.random()
        if way < 0.35:
            generations[buffer] += 1
            now, what = generations[buffer], f"copy {number}"
            op = ours.fetch(what, stream, "main", buffer, now)
            theirs.take("fill", HOST, buffer, now)
            theirs.follow(stream, "main")
            same = theirs.issue(what, stream, writes={buffer: now})
            assert (op.sequence, op.clock, op.writes) == (same.sequence, same.clock, same.writes)
            flying.append((op, same, buffer, now))
        elif way < 0.7 and flying:
            op, same, buffer, now = flying.pop(draws.choice([0, -1]))
            ours.receive(op, "results", ["only"])
            theirs.complete(same)
            theirs.use("results", HOST, {buffer: now}, requests=["only"])
        elif way < 0.75:
            generations[buffer] += 1
            for tracker in (ours, theirs):
                tracker.renew(buffer, generations[buffer])
        elif way < 0.87:
            for tracker in (ours, theirs):
                tracker.use(f"use {number}", "main", [buffer], writes=number % 2 == 0)
        else:
            for tracker in (ours, theirs):
                tracker.issue(f"work {number}", stream, reads=[buffer])
        assert list(map(str, found[0])) == list(map(str, found[1]))
    assert len(found[0]) > 5
