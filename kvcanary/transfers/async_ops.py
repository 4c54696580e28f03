"""AsyncOps: every copy, zeroing, offload and host buffer in flight, and who has waited for it.

Streams are opaque; the host is one of them. Each stream has a clock: how far it has seen every other stream. An access
is ordered after an operation if its stream has run the operation's work itself, or has waited for its event, or for
another event behind it. Two accesses that both read need no order. O1 is an access that is not ordered, or that belongs
to an earlier grant of its page, or to what a host buffer held before it was taken again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvcanary.ledger.page_states import Array

Stream = Hashable
#: A page by its number, or a host staging buffer by its name.
Resource = int | str
#: What an access touches, each with the generation that it was planned for; None where it was planned for any.
Touched = Mapping[Resource, int | None]

#: An operation, and the sequence of the mark that its stream has waited for.
Fetch = tuple["AsyncOp", int]

HOST: Stream = "host"
NOTHING: Touched = {}
#: Hazards of a violation.
UNORDERED, OUTDATED, FREED = "not waited for", "old grant", "freed in flight"


@dataclass(frozen=True)
class UnorderedAccess:
    """O1: one access that came too early, or to a page that is granted anew.

    resource:  the page or the buffer
    stream:    on which the access runs
    op:    the work in flight that it did not wait for, or None
    sentence:  what happened, in plain words with all numbers
    hazard:    UNORDERED, OUTDATED or FREED
    what:      the access, in its own words;  writes: whether it writes
    planned:   generation of the resource that the access is meant for, and `now` the one in which it is; of OUTDATED
    """

    resource: Resource
    stream: Stream
    op: AsyncOp | None
    sentence: str
    hazard: str = UNORDERED
    what: str = ""
    writes: bool = False
    planned: int | None = None
    now: int | None = None

    @property
    def expected(self) -> dict[str, Any]:
        """What it should have come behind, what that does there, and who should have waited; or its generation."""
        op = self.op
        if op is None or self.planned is not None:
            return {"behind": "nothing" if op is None else str(op), "generation": self.planned}
        does = "fills" if self.resource in op.writes else "reads"
        return {"behind": str(op), "which": f"{does} {_name(self.resource)}", "waiting": self._where}

    @property
    def found(self) -> dict[str, Any]:
        """Which resource was used, by whom, and how."""
        used = {"resource": _name(self.resource), "reader": f"{self.what!r} on {self._where}"}
        used |= {"used_to": "write" if self.writes else "read"}
        generation = {} if self.planned is None else {"generation": self.now}
        return used | generation | {"access": self.sentence, "hazard": self.hazard}

    @property
    def _where(self) -> str:
        return "the host" if self.stream == HOST else f"stream {self.stream}"


class AsyncOp(NamedTuple):
    """One piece of asynchronous work; nobody changes it.

    number:     of its stream
    sequence:   its number on its stream, from 1
    clock:      by number of a stream, up to where its own had waited for that when it was issued, itself included
    unordered_accesses: what was wrong with it from the start
    """

    what: str
    stream: Stream
    number: int
    sequence: int
    reads: Touched
    writes: Touched
    clock: Sequence[int]
    unordered_accesses: tuple[UnorderedAccess, ...] = ()

    def __str__(self) -> str:
        return f"{self.what!r} (stream {self.stream}, sequence {self.sequence})"


class _Streams(dict[Stream, int]):
    """Streams by name, numbered when they are named for the first time; the host is 0.

    clocks: by number, up to where it has waited for each; all that the host has seen is behind every stream besides
    """

    def __init__(self) -> None:
        self.clocks: list[Sequence[int]] = [[0]]
        self[HOST] = 0

    def __missing__(self, stream: Stream) -> int:
        number = self[stream] = len(self)
        self.clocks[:] = [[*clock, 0] for clock in (*self.clocks, [0] * number)]
        return number


class AsyncOps:
    """All work in flight. Memory is bounded: a resource keeps its last write, and one read a stream since."""

    def __init__(self, generations: Sequence[int] | Array) -> None:
        """`generations`: of every page, as the ledger keeps them current."""
        self._generations = generations
        self.buffers: dict[str, int] = {}  # generations of host buffers that have one
        self._streams = _Streams()
        self._clocks = self._streams.clocks
        self._writes: dict[Resource, AsyncOp] = {}  # in flight: the last one of each
        self._reads: dict[Resource, dict[Stream, AsyncOp]] = {}  # the last one of each stream since

    def issue(self, what: str, stream: Stream, reads: Touched = NOTHING, writes: Touched = NOTHING) -> AsyncOp:
        """Work is enqueued on a stream, its event behind it; the operation's `unordered_accesses` say what it did not
        wait for.

        Nobody changes `reads` and `writes` any more.
        """
        found = self.use(what, stream, reads) if reads else []
        if writes:
            found += self.use(what, stream, writes, writes=True)
        number, clocks = self._streams[stream], self._clocks
        clock = [*clocks[number]]
        sequence = clock[number] = clock[number] + 1
        clocks[number] = clock
        op = AsyncOp(what, stream, number, sequence, reads, writes, clock, tuple(found))
        for resource in reads:
            self._reads.setdefault(resource, {})[stream] = op
        for resource in writes:
            self._writes[resource] = op
            self._reads.pop(resource, None)
        return op

    def waits(self, stream: Stream, op: AsyncOp) -> None:
        """The stream waits for the event of an operation: all that comes on it from now on is ordered behind."""
        number, clocks, seen = self._streams[stream], self._clocks, op.clock
        own = clocks[number]
        clocks[number] = [*map(max, own, seen), *own[len(seen) :]]

    def follow(self, stream: Stream, other: Stream) -> int:
        """`waits`, for an operation that is issued on the other stream now and touches nothing; its sequence."""
        number, behind, clocks = self._streams[stream], self._streams[other], self._clocks
        seen = [*clocks[behind]]
        seen[behind] += 1
        clocks[behind], clocks[number] = seen, [*map(max, clocks[number], seen)]
        return seen[behind]

    def renew(self, buffer: str, generation: int) -> None:
        """A host buffer is taken for something else: who comes for what it held before is too late."""
        self.buffers[buffer] = generation

    def fetch(self, what: str, stream: Stream, behind: Stream, buffer: str, generation: int) -> Fetch | None:
        """A buffer with which nothing is in flight is renewed, and work that is issued behind another stream writes it.

        As `renew`, `follow` and `issue`, which find nothing then. None where something is in flight: nothing was done.
        """
        if buffer in self._writes or buffer in self._reads:
            return None
        self.buffers[buffer] = generation
        number, other, clocks = self._streams[stream], self._streams[behind], self._clocks
        seen = clocks[other] = [*clocks[other]]
        seen[other] = mark = seen[other] + 1
        clock = clocks[number] = [*map(max, clocks[number], seen)]
        clock[number] = sequence = clock[number] + 1
        own = what, stream, number, sequence, NOTHING, {buffer: generation}, clock, ()
        op = self._writes[buffer] = tuple.__new__(AsyncOp, own)  # as `AsyncOp(*own)`, without a call
        return op, mark

    def receive(self, op: AsyncOp) -> bool:
        """`complete` it, if neither that nor a use by the host of what it has written finds anything; else nothing."""
        if op.reads or not op.writes.items() <= self.buffers.items():
            return False
        for buffer in op.writes:
            if self._writes.get(buffer) is not op:
                return False
        for buffer in op.writes:
            del self._writes[buffer]
        own, seen = self._clocks[0], op.clock
        self._clocks[0] = [*map(max, own, seen), *own[len(seen) :]]  # as `waits` does, without a call
        return True

    def complete(self, op: AsyncOp) -> list[UnorderedAccess]:
        """The host has seen the event: nothing needs to wait any more. What arrived in a page granted anew is O1."""
        self.waits(HOST, op)
        if not op.reads and not op.writes:
            return []
        touched = {**op.reads, **op.writes} if op.reads else op.writes
        outdated_here = {resource: planned for resource, planned in touched.items() if self._leaves(resource, op)}
        outdated = self._outdated(outdated_here) if outdated_here else ()
        return [_too_late(f"the end of {op}", op.what, op.stream, *one, op) for one in outdated]

    def use(self, what: str, stream: Stream, touched: Touched, writes: bool = False) -> list[UnorderedAccess]:
        """An access that leaves nothing in flight, such as the host's own."""
        outdated = self._outdated(touched)
        found = [_too_late(f"{what!r} on stream {stream}", what, stream, *one) for one in outdated] if outdated else []
        if self._writes.keys().isdisjoint(touched) and self._reads.keys().isdisjoint(touched):
            return found
        clock, host = self._clocks[self._streams[stream]], self._clocks[0]
        for resource in touched:
            for op in self._conflicts(resource, writes):
                if clock[op.number] < op.sequence > host[op.number]:
                    sentence = f"{what!r} on stream {stream} touches {_name(resource)} without waiting for {op}"
                    found.append(UnorderedAccess(resource, stream, op, sentence, what=what, writes=writes))
        return found

    def free(self, pages: Touched, stream: Stream = HOST) -> list[UnorderedAccess]:
        """Pages are given back in the generation in which they were granted; `stream`: who may write them next."""
        found = [
            unordered if unordered.hazard == OUTDATED else replace(unordered, hazard=FREED)
            for unordered in self.use("free", stream, pages, writes=True)
        ]
        for page in pages:
            self._writes.pop(page, None)
            self._reads.pop(page, None)
        return found

    def _conflicts(self, resource: Resource, writes: bool) -> list[AsyncOp]:
        """Work in flight there that an access must have waited for."""
        found = [] if (write := self._writes.get(resource)) is None else [write]
        return [*found, *self._reads.get(resource, {}).values()] if writes else found

    def _outdated(self, touched: Touched) -> Sequence[tuple[Resource, int, int | None]]:
        """What is in another generation than the access was planned for: the resource, that one, and now's."""
        if touched.items() <= self.buffers.items():
            return ()
        return [
            (resource, planned, now)
            for resource, planned in touched.items()
            if planned is not None and planned != (now := self._generation(resource))
        ]

    def _generation(self, resource: Resource) -> int | None:
        return self.buffers.get(resource) if isinstance(resource, str) else int(self._generations[resource])

    def _leaves(self, resource: Resource, op: AsyncOp) -> bool:
        """The operation is no longer in flight there; False where a later access or a free has taken its place."""
        reads = self._reads.get(resource, {})
        was_read, was_write = reads.get(op.stream) is op, self._writes.get(resource) is op
        if was_read:
            del reads[op.stream]
            if not reads:
                del self._reads[resource]
        if was_write:
            del self._writes[resource]
        return was_read or was_write


def _too_late(
    access: str, what: str, stream: Stream, resource: Resource, planned: int, now: int | None, op: AsyncOp | None = None
) -> UnorderedAccess:
    sentence = f"{access} is meant for generation {planned} of {_name(resource)}, which is in {now} now"
    return UnorderedAccess(resource, stream, op, sentence, OUTDATED, what=what, planned=planned, now=now)


def _name(resource: Resource) -> str:
    return f"host buffer {resource!r}" if isinstance(resource, str) else f"page {resource}"
