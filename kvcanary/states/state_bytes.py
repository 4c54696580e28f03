"""State bytes: fingerprints of what was left in entries, compared where a state is taken, copied, loaded or cached.

A state changes with every token, so nothing compares it while a forward works on it. From where it was left to where it
is taken again `full` compares all of its bytes, `rolling` one of up to 64 slices, another one each time. Where a state
rests (published, copied, put away, loaded) all of its bytes are compared, but under `write`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.config import CanaryConfig
from kvcanary.pools.state_views import StateView
from kvcanary.provenance.changed_word import ChangedWord, locate_word
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.state import PoolState
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.layout import make_keys

NOTHING, SLICE, WHOLE = range(3)  # what is kept of an entry's bytes


class StateBytes:
    """The fingerprints of one view's entries.

    kept:   [num_entries] NOTHING, SLICE or WHOLE;  numbers: of the slice
    """

    def __init__(self, view: StateView, pool: PoolState, config: CanaryConfig, coverage: Coverage, seed: int) -> None:
        self.view, self.pool, self._coverage = view, pool, coverage
        self.content = config.content if {"R9", "T1"} - config.disable else "write"
        self.kept = np.zeros(view.num_entries, np.int8)
        self.numbers = np.zeros(view.num_entries, np.int64)
        words = view.slices.words_per_row
        self._slice_keys = make_keys(seed, view.num_layers, words, device=view.device)
        self._slice_sums = torch.zeros(view.num_layers, view.num_entries, dtype=torch.int64, device=view.device)
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return self._slice_sums.nbytes + self.pool.content_a.nbytes

    @torch.inference_mode()
    def left(self, entries: Sequence[int]) -> None:
        """States were left there: what is kept of them is compared where they are taken."""
        if self.content == "full":
            self.keep(entries)
        elif self.content == "rolling" and len(entries):
            self._next = (self._next + 1) % self.view.num_slices
            where = np.asarray(entries)
            self.kept[where], self.numbers[where] = SLICE, self._next
            slots = torch.from_numpy(where).to(self.view.device)
            self._slice_sums[:, slots] = self._slices(where)

    @torch.inference_mode()
    def keep(self, entries: Sequence[int]) -> None:
        """States rest there."""
        if self.content == "write" or not len(entries):
            return
        where = torch.as_tensor(np.asarray(entries), device=self.view.device)
        self.pool.write_fingerprints(where, *fingerprints_of_slots(self.pool, where))
        self.kept[np.asarray(entries)] = WHOLE

    def forget(self, entries: Sequence[int]) -> None:
        self.kept[np.asarray(entries, np.int64)] = NOTHING

    @torch.inference_mode()
    def changed(self, entries: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Entries whose bytes are not those that are kept, each with the layers that differ."""
        own, found = np.asarray(entries, np.int64), list[tuple[int, tuple[int, ...]]]()
        for kind, sums, kept in ((WHOLE, self._whole, self.pool.content_a), (SLICE, self._slices, self._slice_sums)):
            where = own[self.kept[own] == kind]
            if not len(where):
                continue
            differs = sums(where) != kept[:, torch.from_numpy(where).to(kept.device)]
            self._count(len(where), kind)
            if differs.any():
                layers = differs.cpu().numpy()
                found += [
                    (int(entry), tuple(np.flatnonzero(layers[:, place]).tolist()))
                    for place, entry in enumerate(where)
                    if layers[:, place].any()
                ]
        return found

    @torch.inference_mode()
    def fingerprints(self, entries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Fingerprint a [layers, n] and b [n] of what lies there now, whole entries."""
        self._count(len(entries), WHOLE)
        return fingerprints_of_slots(self.pool, torch.as_tensor(np.asarray(entries), device=self.view.device))

    def are_zero(self, entry: int) -> bool:
        """Whether every byte of every layer is."""
        self._count(1, WHOLE)
        return not any(bool(tensor[entry].any()) for part in self.view.whole.parts for tensor in part.tensors)

    @torch.inference_mode()
    def whose(self, entry: int, layers: Sequence[int]) -> tuple[str, str]:
        """Whose bytes lie there now, in words, and what `StateFacts.bytes_source` is with it."""
        if self.are_zero(entry):
            return "zeros", "zero"
        equal = self._equal_to(entry)
        if equal is not None:
            is_null = equal < self.view.null_entries
            return f"the bytes of {'null ' if is_null else ''}entry {equal}", "null" if is_null else "entry"
        return "", ""

    @torch.inference_mode()
    def changed_word(self, entry: int, layers: Sequence[int]) -> ChangedWord | None:
        """The one word that changed, where that is all and the whole entry was kept."""
        is_one = self.kept[entry] == WHOLE and len(layers) == 1
        return locate_word(self.pool, entry, layers[0]) if is_one else None

    # helpers

    def _equal_to(self, entry: int) -> int | None:
        """Another entry that has the same bytes in the first layer, null entries first."""
        equal: Tensor | None = None
        for part in self.view.whole.parts:
            rows = part.tensors[0].view(torch.uint8).flatten(1)
            same = (rows == rows[entry]).all(1)
            equal = same if equal is None else equal & same
        others = [] if equal is None else [number for number in equal.nonzero().flatten().tolist() if number != entry]
        return others[0] if others else None

    def _whole(self, entries: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return fingerprints_of_slots(self.pool, torch.from_numpy(entries).to(self.view.device))[0]

    def _slices(self, entries: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        """Fingerprint a [layers, n] of the slice of each entry whose number is kept."""
        slots = torch.from_numpy(entries * self.view.num_slices + self.numbers[entries]).to(self.view.device)
        out = slots.new_empty(self.view.num_layers, len(slots))
        fingerprint(self.view.slices, slots, self._slice_keys, fingerprint_a=out, launches=slots.is_cuda)
        return out

    def _count(self, num_entries: int, kind: int) -> None:
        share = self.view.num_slices if kind == SLICE else 1
        self._coverage.bytes_checked += num_entries * self.view.entry_bytes // share
