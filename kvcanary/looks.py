"""Looks: bytes that are read again behind a step, and judged when the host hears of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.beside import LAST, Beside
from kvcanary.hits import Hit
from kvcanary.intake import HitBatch
from kvcanary.lanes import slots_are_right
from kvcanary.outbox import LINES, Outbox
from kvcanary.state import PoolState
from kvcanary_kernels.content import check_content

#: Behind one step, a byte of one copy each: more than requests may be granted pages in a step. What comes on top is
#: judged at once, and waited for.
MOST_LOOKS = 1024
Judge = Callable[[], Sequence[Hit | HitBatch]]


class Sent(NamedTuple):
    """Looks behind one step: whether each has found a difference, once the copy is over, and who then says which."""

    answers: NDArray[np.bool_]
    judges: list[Judge]

    def hits(self) -> list[Hit | HitBatch]:
        """What fired; the copy is over."""
        asked = self.answers[: len(self.judges)].tolist()
        return [hit for differs, judge in zip(asked, self.judges, strict=True) if differs for hit in judge()]


class Looks:
    """Lane a of slots against what is kept; judged at once in host memory, on a device when the step is heard.

    Answers of a step lie in memory of their own until it is heard: some are found beside the next step, whose own are
    asked for by then.

    beside: where bytes are read, which leaves the device to the forwards of the next step
    """

    def __init__(self, device: torch.device, at_once: bool) -> None:
        """`at_once`: nobody waits for an answer, which lies in host memory."""
        self._judges: list[Judge] = []
        self._at_once = at_once
        self.beside = Beside(device, LAST)
        if not at_once:
            lines = torch.zeros(LINES, MOST_LOOKS, dtype=torch.bool, device=device)
            self.beside.keep(lines)
            self._lines = deque((Outbox(line, turns=1), line.unbind()) for line in lines)

    @property
    def waits(self) -> bool:
        """Whether something was launched that no `send` has taken along."""
        return bool(self._judges)

    def look(self, pool: PoolState, slots: Tensor, judge: Judge) -> Sequence[Hit | HitBatch]:
        """What fired, where that is known at once. `judge`: names it, where bytes differ.

        slots: [n] int64; those outside the pool are nobody's
        """
        if self._at_once or len(self._judges) == MOST_LOOKS:
            own = slots[(slots >= 0) & (slots < pool.view.num_slots)] if not self._at_once else slots
            return [] if slots_are_right(pool, own) else judge()
        mismatch = torch.zeros(len(slots), 2, dtype=torch.int64, device=slots.device)
        check_content(pool.rows, slots, pool.keys, pool.content_a, mismatch=mismatch)
        return self.ask(mismatch, judge)

    def ask(self, mismatch: Tensor, judge: Judge) -> Sequence[Hit | HitBatch]:
        """The same for what a kernel has compared already: whether a number of `mismatch` is not zero."""
        if self._at_once or len(self._judges) == MOST_LOOKS:
            return judge() if mismatch.any() else []
        _, answers = self._lines[0]
        torch.any(mismatch, out=answers[len(self._judges)])
        self._judges.append(judge)
        return []

    def send(self) -> Sent | None:
        """Those since the last time; None where there are none."""
        if not self._judges:
            return None
        judges, self._judges = self._judges, []
        outbox, _ = self._lines[0]
        self._lines.rotate(-1)
        return Sent(outbox.send(), judges)
