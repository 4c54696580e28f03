"""What the scheduler knows of one block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class KVCacheBlock:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    _block_hash: tuple[int, ...] | None = None

    @property
    def block_hash(self) -> tuple[int, ...] | None:
        return self._block_hash
