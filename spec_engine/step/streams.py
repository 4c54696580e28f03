"""Streams: work beside the forwards. Each stream runs in order, and in none with another unless one waits for it.

On CUDA a side stream is a ``torch.cuda.Stream``. On a CPU it is a queue of operations that have not run yet: whoever
does not wait reads old bytes there too. Every piece of work is issued at the canary's tracker, which says O1 for a use
that is ordered behind nothing, also where the bytes happened to be right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvcanary.invariants import check_staging
from kvcanary.transfers import HOST
from kvcanary_kernels.record.streams import current, on

if TYPE_CHECKING:
    from kvcanary.transfers import AsyncOp, AsyncTracker, Resources

MAIN = "main"
Operation = Callable[[], object]


class Streams:
    """The streams of one engine: ``host``, ``main`` (its forwards), and side streams by name."""

    def __init__(self, device: torch.device, tracker: AsyncTracker | None = None) -> None:
        """``tracker``: ``canary.async_tracker``, where there is a canary."""
        self._device, self._tracker = device, tracker
        self._sides: dict[str, Stream] = {}
        self._outsides: dict[str, Stream] = {}
        self.is_cuda = device.type == "cuda"
        self.host = Stream(HOST, _AtOnce(), tracker)
        self.main = Stream(MAIN, _Cuda(device, None) if self.is_cuda else _AtOnce(), tracker)

    def side(self, name: str) -> Stream:
        """The side stream of this name, made at its first use."""
        if name not in self._sides:
            queue = _Cuda(self._device, torch.cuda.Stream(self._device)) if self.is_cuda else _Deferred()
            self._sides[name] = Stream(name, queue, self._tracker)
        return self._sides[name]

    def outside(self, name: str) -> Stream:
        """Work that others do, such as transfers: it runs already, and its operation waits for its end."""
        return self._outsides.setdefault(name, Stream(name, _Outside(), self._tracker))

    def behind_main(self, name: str) -> Stream:
        """A side stream on which what comes now runs behind all that the forwards were given so far."""
        side = self.side(name)
        side.follow(self.main)
        return side

    def launched(self) -> Event | None:
        """The end of a step's work on ``main``, for ``collected``; None where it has no side stream to be ordered
        with.
        """
        return self.main.mark() if self._sides else None

    def collected(self, event: Event | None) -> None:
        """The host has the results of a step: it is behind all that the step waited for."""
        if event is not None:
            self.host.wait(event)

    def synchronize(self) -> None:
        """The host waits for all work of all side streams."""
        for stream in self._sides.values():
            if stream.last is not None:
                self.host.wait(stream.last)


class Stream:
    """One stream; ``last`` is the event of its newest work. See :class:`Streams` for the three kinds."""

    def __init__(self, name: Hashable, queue: _Queue, tracker: AsyncTracker | None) -> None:
        self.name = name
        self.last: Event | None = None
        self._queue, self._tracker = queue, tracker

    def submit(self, what: str, operation: Operation, reads: Resources = (), writes: Resources = ()) -> Event:
        """Enqueue an operation that touches these pages (by number) and host buffers (by name).

        The operation is kept until it has run, and with it every tensor that it names.
        """
        op = None if self._tracker is None else self._tracker.issue(what, self.name, reads, writes)
        self.last = Event(what, self._queue, self._queue.put(operation), op)
        return self.last

    def mark(self) -> Event:
        """The end of everything that was submitted so far; on ``main`` on CUDA also of what it was given otherwise."""
        return self.submit("mark", _nothing)

    def follow(self, other: Stream) -> None:
        """What comes on this stream from now on runs behind all that the other was given so far: its `mark`."""
        self._queue.wait(other._queue, other._queue.put(_nothing))
        if self._tracker is not None:
            self._tracker.follow(self.name, other.name)

    def fetch(self, what: str, copy: Callable[[Tensor], object], buffer: Staging, behind: Stream) -> Event:
        """`submit` of a copy into a buffer that was taken for it, behind all that another stream was given so far."""
        self._queue.wait(behind._queue, behind._queue.put(_nothing))
        op = None
        if self._tracker is not None:
            op = self._tracker.fetch(what, self.name, behind.name, buffer.name, buffer.generation)
        self.last = Event(what, self._queue, self._queue.put(partial(copy, buffer.tensor)), op)
        return self.last

    def receive(self, event: Event, what: str, requests: Sequence[str]) -> None:
        """`wait`, of the host, and `use` of what was fetched; requests: as of `use`."""
        if not event.is_over:
            self._queue.wait(event.queue, event.mark)
            event.is_over = True
            if self._tracker is not None and event.op is not None:
                self._tracker.receive(event.op, what, requests)
        elif event.op is not None:
            self.use(what, event.op.writes, requests=requests)

    def wait(self, event: Event) -> None:
        """What comes on this stream from now on runs behind the event's work; the host stands still, once."""
        if event.is_over:
            return
        self._queue.wait(event.queue, event.mark)
        event.is_over = self.name == HOST
        if self._tracker is None or event.op is None:
            return
        if event.is_over:
            self._tracker.complete(event.op)
        else:
            self._tracker.waits(self.name, event.op)

    def use(self, what: str, resources: Resources, writes: bool = False, requests: Sequence[str] = ()) -> None:
        """An access that is no work of its own: a forward over pages, the host over a buffer.

        requests: whose tokens it touches, where no page says that.
        """
        if self._tracker is not None:
            self._tracker.use(what, self.name, resources, writes, requests)

    def take(self, what: str, buffer: str, generation: int) -> None:
        """A host buffer is taken for something else, and filled with it."""
        if self._tracker is not None:
            self._tracker.take(what, self.name, buffer, generation)

    def advance(self, count: int = 1) -> None:
        """On a CPU: ``count`` waiting operations run, as a device would run them by and by. Elsewhere nothing."""
        self._queue.advance(count)


@dataclass(eq=False)
class Event:
    """The end of one piece of work; ``mark`` is its place in its queue, ``is_over``: the host has waited for it."""

    what: str
    queue: _Queue
    mark: Any
    op: AsyncOp | None
    is_over: bool = False


class StagingRing:
    """Host buffers that copies in flight still read or write: each is taken again only when its last copy is done."""

    def __init__(self, streams: Streams, name: str, count: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """``count``: at least lag + 2, so that the host does not wait for the step that runs."""
        self._host = streams.host
        self._buffers = deque(
            Staging(f"{name} {number}", torch.zeros(tuple(shape), dtype=dtype, pin_memory=streams.is_cuda))
            for number in range(count)
        )

    def take(self) -> Staging:
        """The buffer that was taken longest ago, to be filled; set its ``event`` to that of its copy."""
        buffer = self._next()
        self._host.take("fill", buffer.name, buffer.generation)
        return buffer

    def fetch(self, what: str, side: Stream, behind: Stream, copy: Callable[[Tensor], object]) -> Staging:
        """The same, filled by a copy on a side stream, behind all that another was given so far."""
        buffer = self._next()
        buffer.event = side.fetch(what, copy, buffer, behind)
        return buffer

    def _next(self) -> Staging:
        """The host has waited for the last copy that needs its bytes."""
        last = self._buffers.popleft()
        if last.event is not None:
            self._host.wait(last.event)
        buffer = Staging(last.name, last.tensor, last.generation + 1)
        self._buffers.append(buffer)
        return buffer

    def check(self, buffer: Staging) -> None:
        """StagingError unless nobody has taken the buffer since."""
        now = next(own for own in self._buffers if own.name == buffer.name)
        check_staging(buffer.name, buffer.generation, now.generation, len(self._buffers))


@dataclass(eq=False)
class Staging:
    """One host buffer from one ``take`` to the next; ``event`` is the end of the copy that needs its bytes."""

    name: str
    tensor: Tensor
    generation: int = 0
    event: Event | None = None

    @property
    def planned(self) -> dict[str, int]:
        """What an access names, so that one that comes after the next ``take`` is told."""
        return {self.name: self.generation}


def _nothing() -> None:
    """What a mark does."""


class _Queue(Protocol):
    def put(self, operation: Operation) -> Any:
        """Enqueue; the mark of its end."""

    def wait(self, other: _Queue, mark: Any) -> None:
        """What is put from now on runs behind the other queue's mark."""

    def reach(self, mark: Any) -> None:
        """The host stands still until the mark."""

    def advance(self, count: int) -> None:
        """Let ``count`` operations run."""


class _AtOnce:
    """The host; on a CPU the forwards too."""

    def put(self, operation: Operation) -> None:
        operation()

    def wait(self, other: _Queue, mark: Any) -> None:
        other.reach(mark)

    def reach(self, mark: Any) -> None: ...

    def advance(self, count: int) -> None: ...


class _Outside:
    """Work that runs elsewhere; the host alone waits for it."""

    def put(self, operation: Operation) -> Operation:
        return operation

    def wait(self, other: _Queue, mark: Any) -> None: ...

    def reach(self, mark: Operation) -> None:
        mark()

    def advance(self, count: int) -> None: ...


class _Deferred:
    """A side stream on a CPU: nothing runs before somebody waits for it."""

    def __init__(self) -> None:
        self._put, self._run = 0, 0
        self._waiting: deque[tuple[Operation, int]] = deque()  # (operation, 1, or 0 where it only waits)

    def put(self, operation: Operation) -> int:
        self._put += 1
        self._waiting.append((operation, 1))
        return self._put

    def wait(self, other: _Queue, mark: Any) -> None:
        self._waiting.append((lambda: other.reach(mark), 0))

    def reach(self, mark: Any) -> None:
        while self._run < mark:
            operation, counts = self._waiting.popleft()
            self._run += counts
            operation()

    def advance(self, count: int) -> None:
        self.reach(min(self._run + count, self._put))


class _Cuda:
    """A CUDA stream; None is whichever the forwards run on."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device, self._own = device, stream
        self._running: deque[tuple[torch.cuda.Event, Operation]] = deque()

    @property
    def _stream(self) -> torch.cuda.Stream:
        return current(self._device) if self._own is None else self._own

    def put(self, operation: Operation) -> torch.cuda.Event:
        """The operation enqueues its kernels and copies; its tensors live until they are done."""
        while self._running and self._running[0][0].query():
            self._running.popleft()
        stream, event = self._stream, torch.cuda.Event()
        if operation is _nothing:
            event.record(stream)
            return event
        with on(stream):
            operation()
        event.record(stream)
        self._running.append((event, operation))
        return event

    def wait(self, other: _Queue, mark: Any) -> None:
        if mark is not None:
            self._stream.wait_event(mark)

    def reach(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def advance(self, count: int) -> None: ...
