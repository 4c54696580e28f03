"""Mirror: what the canary itself wrote, on the host; every record in it is also in the device's two copies."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import chain

import torch

from kvcanary.state import CanaryState
from kvcanary_kernels.record import COLUMNS, SEAL
from kvcanary_kernels.seal import identity_words, seal_values

#: The columns of one record as unsigned integers: content_b is 0, since fingerprints come later, and the seal is only
#: what the pool adds to it.
Written = tuple[int, int, int, int, int, int, int, int]
TOKEN_POSITION, CHAIN, OWNER, STEP_SITE = range(4)
LAYERS_LOW, LAYERS_HIGH = 5, 6


class Mirror:
    """Records by row (the slot, counted through all pools): on the host as integers, on the device as two copies.

    An engine's stray write can reach `state.records`, which is compared with `state.expected` whenever it is read.

    judged: rows of the entries that were found to be their requests' truth
    epoch:  counts up when one of them is written again, so that every row is judged anew
    """

    def __init__(self, state: CanaryState) -> None:
        self._state = state
        self.written: dict[int, Written] = {}
        self._fresh: dict[int, Written] = {}
        self.judged: set[int] = set()
        self.epoch = 0

    def chain(self, row: int) -> int:
        """Chain value of a record; 0 where nobody has written."""
        found = self.written.get(row)
        return 0 if found is None else found[CHAIN]

    def write(self, fresh: Mapping[int, Written]) -> None:
        """These records are new; the device has them from `flush` on."""
        if not self.judged.isdisjoint(fresh):
            self.epoch += 1
            self.judged.clear()
        self.written.update(fresh)
        self._fresh.update(fresh)

    def flush(self) -> None:
        """Write what is new to the device."""
        if not self._fresh:
            return
        state, words = self._state, array("Q", chain.from_iterable(self._fresh.values()))
        rows = torch.frombuffer(words, dtype=torch.int64).view(-1, COLUMNS).to(state.records.device)
        where = state.ints(self._fresh)
        rows[:, SEAL] += seal_values(identity_words(rows), where, 0, state.keys)
        state.records.index_copy_(0, where, rows)
        state.expected.index_copy_(0, where, rows)
        self._fresh.clear()
