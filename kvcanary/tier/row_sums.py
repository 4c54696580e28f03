"""RowSums: both fingerprints of rows of bytes, by a compiled loop in host memory, by torch elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.records.fingerprints import fingerprints_of_words
from kvcanary.tier.tensors import Flat
from kvcanary.transfers.object_seals import Longs
from kvcanary_kernels.content.fingerprint import TEMPORARY_BYTES
from kvcanary_kernels.record.layout import Keys, make_keys
from kvcanary_kernels.record.rows import WORD_BYTES


class RowSums:
    """One key a place in a row, the same for all rows: a fingerprint names bytes, wherever they lie."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._keys: dict[tuple[int, torch.device], tuple[Keys, Tensor]] = {}

    def keys(self, words: int, device: torch.device | str = "cpu") -> Keys:
        """Of rows of so many words."""
        return self._known(words, torch.device(device))[0]

    @property
    def start(self) -> int:
        """Fingerprint a of no bytes, and of zeros; fingerprint b of them is 0."""
        return int(self.keys(1).start_a[0])

    def of(self, flat: Flat, row_bytes: int) -> Longs:
        """[2, rows] int64, the last row filled up with zeros."""
        words, whole = row_bytes // WORD_BYTES, flat.num_bytes // row_bytes
        found = np.empty((2, -(-flat.num_bytes // row_bytes)), np.int64)
        if whole:
            found[:, :whole] = self._sums(flat.data[: whole * row_bytes], words, whole)
        if whole < found.shape[1]:
            found[:, whole:] = self._sums(padded(flat.data[whole * row_bytes :], row_bytes), words, 1)
        return found

    def _sums(self, data: NDArray[np.uint8] | Tensor, words: int, n: int) -> Longs:
        if isinstance(data, Tensor):
            return self._on_device(data, words, n)
        from kvcanary.native import loops

        keys, stacked = self._known(words, torch.device("cpu"))
        found = np.empty((2, n), np.int64)
        rows, start = (data.ctypes.data, words * WORD_BYTES, words), int(keys.start_a[0])
        loops.sum_values(*rows, *(rows[0], 0, 0), n, stacked.data_ptr(), start, found.ctypes.data, 0)
        return found

    def _on_device(self, data: Tensor, words: int, n: int) -> Longs:
        keys, _ = self._known(words, data.device)
        rows = data.view(torch.int32).view(n, words)
        chunk = max(1, TEMPORARY_BYTES // (8 * words))
        parts = [torch.stack(fingerprints_of_words(keys, 0, part)) for part in rows.split(chunk)]
        return torch.cat(parts, 1).cpu().numpy()

    def _known(self, words: int, device: torch.device) -> tuple[Keys, Tensor]:
        known = self._keys.get((words, device))
        if known is None:
            keys = make_keys(self._seed, 1, words, device)
            stacked = torch.stack([keys.fingerprint_a[0], keys.fingerprint_b[0]])
            known = self._keys[words, device] = keys, stacked
        return known


def padded(data: NDArray[np.uint8] | Tensor, count: int) -> NDArray[np.uint8] | Tensor:
    """With zeros behind it."""
    if isinstance(data, Tensor):
        return torch.cat([data, data.new_zeros(count - len(data))])
    return np.concatenate([data, np.zeros(count - len(data), np.uint8)])
