"""RowTruth: what the host knows of the rows of a forward that it launches before it has collected the one before."""

from __future__ import annotations

from array import array

import numpy as np

from kvcanary.native.layout import ROWS
from kvcanary.pools.slot_maps import Ints


def _listed(row: int) -> property:
    """One row of `RowTruth.numbers`, as a list."""
    return property(lambda truth: truth.numbers[row].tolist())


class RowTruth:
    """What the host knows of the rows that a captured forward is launched with, by request.

    step:        the step's number and turn, as `SubstepRegistry.step` has them, for forwards with a step of their own
    numbers:     [5, requests] int64, all that follows in this order
    uids:        of the requests
    prefix_lens: final entries of their rows; UNKNOWN (-1) where a token of these is not known to the host yet
    truths:      chain value at that length, as int64
    roots:       chain value that position 0 continues, as int64
    uncollected: 1 where the row goes on by what the last step has accepted, which the device alone knows
                 (`AcceptedTokens`): length and chain value are those of all entries whose tokens the host knows. Else 0
    """

    __slots__ = ("_rows", "step")

    def __init__(self, rows: array[int], step: int) -> None:
        """`rows`: these numbers, and what is the canary's alone (native/layout.py, ROWS.size)."""
        self._rows, self.step = rows, step

    def copy(self) -> RowTruth:
        return RowTruth(self._rows[:], self.step)

    @property
    def numbers(self) -> Ints:
        n = len(self._rows) // ROWS.size
        return np.frombuffer(self._rows, np.int64, ROWS.committed * n).reshape(ROWS.committed, n)

    uids, prefix_lens, truths = _listed(ROWS.uids), _listed(ROWS.lengths), _listed(ROWS.chains)
    roots, uncollected = _listed(ROWS.roots), _listed(ROWS.uncollected)
