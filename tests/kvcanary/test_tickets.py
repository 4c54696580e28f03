"""AsyncOps: accesses that did not wait for work in flight, or that belong to an earlier grant, and none else."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvcanary.transfers.async_ops import HOST, AsyncOp, AsyncOps
from kvcanary.transfers.async_tracker import AsyncTracker


def make_tickets() -> tuple[AsyncOps, np.ndarray]:
    """Ten pages, page p in generation 10 + p."""
    generations = np.arange(10, 20, dtype=np.int64)
    return AsyncOps(generations), generations


def words(violations) -> list[str]:
    assert all(violation.code == "O1" for violation in violations)
    return [violation.sentence for violation in violations]


# order


def test_a_copy_that_waits_for_the_write_is_right():
    """The copying stream waits for the writer's event, the host for the copy's, then the page may go."""
    tickets, _ = make_tickets()
    write = tickets.issue("forward", "main", writes={3: 13})
    tickets.waits("copy", write)
    copy = tickets.issue("offload", "copy", reads={3: 13}, writes={"staging 0": None})
    assert (write.violations, copy.violations) == ((), ())
    assert tickets.complete(copy) == []
    assert tickets.free({3: 13}) == []


def test_a_copy_that_does_not_wait_is_told():
    """The sentence names the access, the page, and the work in flight with its stream and number."""
    tickets, _ = make_tickets()
    tickets.issue("forward", "main", writes={2: 12})
    write = tickets.issue("forward", "main", writes={3: 13})
    copy = tickets.issue("offload", "copy", reads={3: 13})
    assert words(copy.violations) == [
        "'offload' on stream copy touches page 3 without waiting for 'forward' (stream main, sequence 2)"
    ]
    [violation] = copy.violations
    assert (violation.resource, violation.stream, violation.ticket) == (3, "copy", write)


def test_work_on_one_stream_is_in_order():
    """Nobody waits for an event of the own stream."""
    tickets, _ = make_tickets()
    tickets.issue("zeroing", "main", writes={3: 13})
    assert tickets.issue("forward", "main", reads={3: 13}, writes={3: 13}).violations == ()


def test_reads_need_no_order():
    """Two copies may read one page at once; a write must wait for both."""
    tickets, _ = make_tickets()
    first = tickets.issue("offload", "copy", reads={3: 13})
    tickets.issue("send", "net", reads={3: 13})
    assert tickets.use("forward", "main", {3: 13}) == []
    assert [v.ticket.what for v in tickets.use("forward", "main", {3: 13}, writes=True)] == ["offload", "send"]
    tickets.waits("main", first)
    assert [v.ticket.what for v in tickets.use("forward", "main", {3: 13}, writes=True)] == ["send"]


def test_waiting_is_passed_on():
    """Who waits for a stream that has waited has waited too; waiting for a later event covers the earlier ones."""
    tickets, _ = make_tickets()
    tickets.issue("load", "a", writes={3: 13})
    later = tickets.issue("load", "a", writes={4: 14})
    tickets.waits("b", later)
    relay = tickets.issue("relay", "b", writes={5: 15})
    assert tickets.use("forward", "c", {3: 13, 4: 14, 5: 15}) != []
    tickets.waits("c", relay)
    assert tickets.use("forward", "c", {3: 13, 4: 14, 5: 15}) == []


def test_an_earlier_event_covers_no_later_work():
    """To have waited for the first copy says nothing about the second."""
    tickets, _ = make_tickets()
    first = tickets.issue("load", "copy", writes={3: 13})
    tickets.issue("load", "copy", writes={4: 14})
    tickets.waits("main", first)
    assert [v.resource for v in tickets.use("forward", "main", {3: 13, 4: 14})] == [4]


def test_what_the_host_has_seen_nobody_waits_for():
    """All that is enqueued after the host saw the end comes behind it, on every stream."""
    tickets, _ = make_tickets()
    load = tickets.issue("load", "copy", writes={3: 13})
    assert len(tickets.use("forward", "main", {3: 13})) == 1
    assert tickets.complete(load) == []
    assert tickets.complete(load) == []
    assert tickets.use("forward", "main", {3: 13}, writes=True) == []


# staging buffers


def test_a_staging_buffer_is_reused_after_its_copy():
    """The host refills a pinned buffer only when the copy out of it has ended."""
    tickets, _ = make_tickets()
    copy = tickets.issue("upload", "main", reads={"indices": None}, writes={3: 13})
    assert words(tickets.use("refill", HOST, {"indices": None}, writes=True)) == [
        "'refill' on stream host touches host buffer 'indices' without waiting for 'upload' (stream main, sequence 1)"
    ]
    tickets.complete(copy)
    assert tickets.use("refill", HOST, {"indices": None}, writes=True) == []


def test_a_buffer_that_was_taken_again_is_told():
    """Who comes for what it held before, and a copy of then that lands now; the next use is right."""
    tickets, _ = make_tickets()
    tickets.renew("results", 1)
    copy = tickets.issue("results", "copy", writes={"results": 1})
    assert tickets.complete(copy) == []
    assert tickets.use("read", HOST, {"results": 1}) == []
    late = tickets.issue("results", "copy", writes={"results": 1})
    tickets.renew("results", 2)
    assert words(tickets.complete(late)) == [
        "the end of 'results' (stream copy, sequence 2) is meant for generation 1 of host buffer 'results', "
        "which is in 2 now"
    ]
    assert words(tickets.use("read", HOST, {"results": 1})) == [
        "'read' on stream host is meant for generation 1 of host buffer 'results', which is in 2 now"
    ]
    assert tickets.use("read", HOST, {"results": 2}) == []


# lifetimes


def test_a_page_is_not_freed_under_a_copy():
    """A free on the host waits for the end of the copy; a free for a stream that is behind it need not."""
    tickets, _ = make_tickets()
    tickets.issue("offload", "copy", reads={3: 13, 4: 14})
    assert words(tickets.free({3: 13})) == [
        "'free' on stream host touches page 3 without waiting for 'offload' (stream copy, sequence 1)"
    ]
    assert tickets.free({4: 14}, stream="copy") == []


def test_a_second_free_by_the_same_ticket_is_told():
    """The generation of the grant is spent with the first free, even if the page was granted again."""
    tickets, generations = make_tickets()
    assert tickets.free({3: 13}) == []
    generations[3] += 2
    assert words(tickets.free({3: 13})) == [
        "'free' on stream host is meant for generation 13 of page 3, which is in 15 now"
    ]


def test_an_access_to_an_earlier_grant_is_told():
    """A plan that was made before the page was freed and granted again reads or writes somebody else's bytes."""
    tickets, generations = make_tickets()
    generations[3] = 99
    expected = ["'save' on stream copy is meant for generation 13 of page 3, which is in 99 now"]
    assert words(tickets.use("save", "copy", {3: 13})) == expected
    assert words(tickets.issue("save", "copy", reads={3: 13, 4: 14}).violations) == expected


def test_a_copy_that_lands_in_a_new_grant_is_told():
    """The page was freed and granted again while the transfer was on its way, and nobody said so."""
    tickets, generations = make_tickets()
    load = tickets.issue("receive", "net", writes={3: 13, 4: 14})
    generations[3] += 2
    assert words(tickets.complete(load)) == [
        "the end of 'receive' (stream net, sequence 1) is meant for generation 13 of page 3, which is in 15 now"
    ]


def test_a_copy_that_ended_in_order_before_the_free_is_right():
    """The host learns late that it ended; what came behind it on its stream, written or not, is no late landing."""
    tickets, generations = make_tickets()
    copy = tickets.issue("offload", "main", reads={3: 13, 4: 14})
    assert tickets.free({3: 13, 4: 14}, stream="main") == []
    generations[[3, 4]] += 2
    assert tickets.issue("forward", "main", writes={3: 15}).violations == ()
    assert tickets.complete(copy) == []


def test_memory_is_bounded():
    """Work that is never completed is forgotten as later work takes its place."""
    tickets, _ = make_tickets()
    for _ in range(1000):
        tickets.issue("forward", "main", reads={3: 13, "a": None}, writes={4: 14})
    assert len(tickets._writes) + sum(map(len, tickets._reads.values())) == 3
    tickets.complete(tickets.issue("last", "main", reads={3: 13, "a": None}, writes={4: 14}))
    assert tickets._writes == tickets._reads == {}


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
    rng, (tickets, _) = random.Random(seed), make_tickets()
    events: list[tuple] = []
    issued: dict[int, object] = {}
    told = 0
    for number in range(150):
        stream = rng.choice(["a", "b", "c", HOST])
        if issued and rng.random() < 0.4:
            waited = rng.choice(sorted(issued)[-6:])
            events.append(("wait", stream, waited))
            if stream == HOST:
                tickets.complete(issued[waited])
            else:
                tickets.waits(stream, issued[waited])
            continue
        page, writes = rng.randrange(3), rng.random() < 0.5
        events.append(("issue", stream, page, writes))
        touched = {page: 10 + page}
        ticket = tickets.issue("work", stream, **{"writes" if writes else "reads": touched})
        issued[number] = ticket
        expected = sorted(other for other in conflicts(events, number) if not happens_before(events, other, number))
        numbers = {id(issued[other]): other for other in issued}
        assert sorted(numbers[id(violation.ticket)] for violation in ticket.violations) == expected
        told += len(expected)
    assert told > 10


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
    tickets, _ = make_tickets()
    tickets.issue("store", "main", writes={3: 13})
    fetched, _ = tickets.fetch("results", "copies", "main", "staging", 1)
    if is_new:
        tickets.issue("other", "new")
    assert tickets.receive(fetched)
    assert tickets.use("read", HOST, {3: 13}) == []


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
            found = [tickets.issue("work", stream, writes={page: None}) for tickets in (ours, theirs)]
            assert [str(one) for one in found[0].violations] == [str(one) for one in found[1].violations]
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
            ticket = ours.fetch(what, stream, "main", buffer, now)
            theirs.take("fill", HOST, buffer, now)
            theirs.follow(stream, "main")
            same = theirs.issue(what, stream, writes={buffer: now})
            assert (ticket.sequence, ticket.clock, ticket.writes) == (same.sequence, same.clock, same.writes)
            flying.append((ticket, same, buffer, now))
        elif way < 0.7 and flying:
            ticket, same, buffer, now = flying.pop(draws.choice([0, -1]))
            ours.receive(ticket, "results", ["only"])
            theirs.complete(same)
            theirs.use("results", HOST, {buffer: now}, requests=["only"])
        elif way < 0.75:
            generations[buffer] += 1
            for desk in (ours, theirs):
                desk.renew(buffer, generations[buffer])
        elif way < 0.87:
            for desk in (ours, theirs):
                desk.use(f"use {number}", "main", [buffer], writes=number % 2 == 0)
        else:
            for desk in (ours, theirs):
                desk.issue(f"work {number}", stream, reads=[buffer])
        assert list(map(str, found[0])) == list(map(str, found[1]))
    assert len(found[0]) > 5
