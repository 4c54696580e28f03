"""SideStream: a stream on which operations run while a forward goes on, in a captured step a branch of its graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from kvcanary_kernels.record.streams import current, on

_HERE = nullcontext()
FIRST, LAST = -2, 0  # priorities of streams; an engine may capture its forwards between them


class SideStream:
    """On a GPU a second stream, in whose order all runs that is launched `behind`; on a CPU all runs at once.

    It goes FIRST where both want to start: its kernels are short, and would wait for the whole of a long one. What
    reads much goes LAST, and leaves the device to forwards of a higher priority.
    """

    def __init__(self, device: torch.device, priority: int = FIRST) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._here = torch.cuda.Event() if device.type == "cuda" else None  # where a caller was, recorded every time
        self._is_ahead = False
        self._postponed: list[tuple[str, Callable[[], None]]] = []

    def behind(self) -> AbstractContextManager[None]:
        """What is launched within follows all that was launched before the call, there and here, and nobody waits."""
        if self._stream is None or self._here is None:
            return _HERE
        self._here.record(current(self._stream.device))
        self._here.wait(self._stream)
        self._is_ahead = True
        return on(self._stream)

    def keep(self, memory: torch.Tensor) -> None:
        """What is launched there may write here: nobody is given this memory, once it is free, before that is over."""
        if self._stream is not None:
            memory.record_stream(self._stream)

    @property
    def is_captured(self) -> bool:
        """Whether what is launched now goes into a graph: then a body has run before, as it will run from now on."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def defer(self, pool: str, *launches: Callable[[], None]) -> None:
        """What each of these launches, of this pool, is launched at a `catch_up` to come, in their order."""
        self._postponed += [(pool, launch) for launch in launches]

    def owes(self, pool: str) -> bool:
        """Whether something of this pool was postponed."""
        return any(pool == own for own, _ in self._postponed)

    def catch_up(self, among: int = 1) -> int:
        """Launch what was postponed where the caller is: `behind`. How many of them were launched.

        among: so many calls share them, as evenly as they can
        """
        most = -(-len(self._postponed) // max(among, 1))
        due = self._postponed[:most]
        del self._postponed[:most]
        for _, launch in due:
            launch()
        return len(due)

    def join(self) -> bool:
        """What is launched from now on follows all that runs beside; whether something does that it did not follow."""
        is_ahead, self._is_ahead = self._is_ahead, False
        if is_ahead and self._stream is not None:
            current(self._stream.device).wait_stream(self._stream)
        return is_ahead

    def finish(self) -> None:
        """`join`, behind all that was postponed."""
        if self._postponed:
            with self.behind():
                self.catch_up()
        self.join()
