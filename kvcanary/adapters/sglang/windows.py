"""Layers with slots of their own: SGLang's rows name the slots of layers that see all tokens, a map says the others."""

from __future__ import annotations

import torch
from torch import Tensor


class MappedRows:
    """Rows of `req_to_token` and slots of a forward, as a map shows them; they stay where they are.

    table: [rows, length], like `req_to_token`;  slots: [most tokens] int64
    """

    def __init__(self, rows: Tensor, slot_map: Tensor, most_tokens: int) -> None:
        self.table, self.slots = torch.zeros_like(rows), rows.new_zeros(most_tokens, dtype=torch.int64)
        self._rows, self._map = rows, slot_map

    def fill(self, numbers: Tensor, longest: int, slots: Tensor) -> None:
        """numbers: [n] rows of a forward, of at most so many entries;  slots: [n] that it stores into"""
        self.table[numbers, :longest] = self.of(self._rows[numbers, :longest]).to(self.table.dtype)
        self.slots[: len(slots)] = self.of(slots)

    def of(self, slots: Tensor) -> Tensor:
        """Where the map shows them, int64; what it does not have is nowhere."""
        return self._map[slots.to(torch.int64).clamp(-1, len(self._map) - 1)]
