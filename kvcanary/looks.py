"""Looks: bytes that are read again behind a step, and judged when the host hears of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.beside import LAST, Beside
from kvcanary.groups import Ints
from kvcanary.hits import Hit
from kvcanary.intake import HitBatch
from kvcanary.lanes import numbers_are_right
from kvcanary.outbox import LINES
from kvcanary.state import PoolState
from kvcanary_kernels.content import check_content

ROOM = 1024  # numbers that a line begins with; it grows with what steps ask for
ALIGNMENT = 2  # numbers, so that kernels find all of them equally aligned
Judge = Callable[[], Sequence[Hit | HitBatch]]


class Numbers:
    """int64 numbers in memory that does not move, given away from the first on until `clear`.

    What does not fit begins a block that is twice as large; all blocks stay until then.
    """

    def __init__(self, device: torch.device, keep: Callable[[Tensor], None] | None = None) -> None:
        """`keep`: is told of every block on the device; None: they lie in memory of the host that it reaches."""
        self._keep, self._is_pinned = keep, keep is None and device.type != "cpu"
        self._device = torch.device("cpu") if keep is None else device
        self._full: list[tuple[Tensor, int]] = []
        self._block, self._used = self._new(ROOM), 0

    def take(self, count: int) -> Tensor:
        """[count], as they were left."""
        first = self._used
        self._used += count + -count % ALIGNMENT
        if self._used > len(self._block):
            self._full.append((self._block, first))
            self._block, first = self._new(max(2 * len(self._block), count + ALIGNMENT)), 0
            self._used = count + -count % ALIGNMENT
        return self._block[first : first + count]

    def are_zero(self) -> bool:
        """Whether all that were given away are, in memory of the host."""
        blocks = (*self._full, (self._block, self._used))
        return not any(np.count_nonzero(block.numpy()[:used]) for block, used in blocks)

    def clear(self) -> None:
        """Nobody uses what was given away any more."""
        self._full.clear()
        self._used = 0

    def _new(self, count: int) -> Tensor:
        with torch.inference_mode(False):
            block = torch.zeros(count, dtype=torch.int64, device=self._device, pin_memory=self._is_pinned)
        if self._keep is not None:
            self._keep(block)
        return block


class Line:
    """Memory of the looks behind one step.

    told:  what the host tells kernels, in its own memory;  there: such as many programs read, on the device
    found: what kernels tell the host, in its memory;  judges: of each look, with what was found
    is_sent: these looks are on their way; who wants the line next clears it
    """

    def __init__(self, device: torch.device, keep: Callable[[Tensor], None]) -> None:
        self.told, self.there, self.found = Numbers(device), Numbers(device, keep), Numbers(device)
        self.judges: list[tuple[Tensor, Judge]] = []
        self.is_sent = False

    def clear(self) -> None:
        for numbers in (self.told, self.there, self.found):
            numbers.clear()
        self.judges, self.is_sent = [], False


class Sent(NamedTuple):
    """Looks behind one step: what each has found, once the step is over, and who then says where."""

    line: Line

    def hits(self) -> list[Hit | HitBatch]:
        """What fired; the step is over."""
        if self.line.found.are_zero():
            return []
        with torch.inference_mode():
            return [hit for found, judge in self.line.judges if found.any() for hit in judge()]


class Looks:
    """Lane a of slots against what is kept; judged at once in host memory, on a device when the step is heard.

    Looks of a step lie in memory of their own until it is heard: some are made beside the next step, which asks for its
    own by then. In a step nothing is allocated, once the lines have grown, and no answer is copied.

    beside: where bytes are read, which leaves the device to the forwards of the next step
    """

    def __init__(self, device: torch.device, at_once: bool) -> None:
        """`at_once`: nobody waits for an answer, which lies in host memory."""
        self._at_once = at_once
        self.beside = Beside(device, LAST)
        if not at_once:
            self._lines = deque(Line(device, self.beside.keep) for _ in range(LINES))

    @property
    def waits(self) -> bool:
        """Whether something was launched that no `send` has taken along."""
        return not self._at_once and bool(self._lines[0].judges) and not self._lines[0].is_sent

    def look(self, pool: PoolState, slots: Ints, judge: Judge) -> Sequence[Hit | HitBatch]:
        """What fired, where that is known at once. `judge`: names it, where bytes differ. slots: [n] int64."""
        if self._at_once:
            return [] if numbers_are_right(pool, slots) else judge()
        where = self._line.there.take(len(slots))
        where.copy_(self.tell(slots), non_blocking=True)
        found = self.room(1)
        check_content(pool.rows, where, pool.keys, pool.content_a, differs=found)
        return self.ask(found, judge)

    def tell(self, numbers: Ints) -> Tensor:
        """The same where a kernel of this step's looks reads them."""
        if self._at_once:
            return torch.from_numpy(numbers)
        told = self._line.told.take(numbers.size)
        told.numpy()[:] = numbers.ravel()
        return told.view(numbers.shape)

    def room(self, count: int) -> Tensor:
        """[count] int64 zeros, in which a kernel of this step's looks says what it has found."""
        if self._at_once:
            return torch.zeros(count, dtype=torch.int64)
        return self._line.found.take(count + -count % ALIGNMENT).zero_()[:count]

    def ask(self, found: Tensor, judge: Judge) -> Sequence[Hit | HitBatch]:
        """As `look`, of what a kernel says in `room`: whether a number of it is not zero."""
        if self._at_once:
            return judge() if found.any() else []
        self._line.judges.append((found, judge))
        return []

    def send(self) -> Sent | None:
        """Those since the last time; None where there are none."""
        if not self.waits:
            return None
        line = self._lines[0]
        line.is_sent = True
        self._lines.rotate(-1)
        return Sent(line)

    @property
    def _line(self) -> Line:
        """Of the running step."""
        line = self._lines[0]
        if line.is_sent:
            line.clear()
        return line
