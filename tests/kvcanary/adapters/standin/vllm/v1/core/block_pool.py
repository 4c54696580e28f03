"""Blocks by reference count: free ones in the order in which they are given out, full ones found by their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockPool:
    def __init__(self, num_gpu_blocks: int, enable_caching: bool = True) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free = list(range(1, num_gpu_blocks))
        self.cached: dict[tuple[int, ...], int] = {}

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        taken = [self.blocks[self.free.pop(0)] for _ in range(num_blocks)]
        for block in taken:
            self._forget(block)
            block.ref_cnt += 1
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and block.block_id in self.free:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                self.free.append(block.block_id)

    def cache_full_blocks(
        self, request: Any, blocks: list[KVCacheBlock], num_cached_blocks: int, num_full_blocks: int, block_size: int,
        kv_cache_group_id: int = 0,
    ) -> None:  # fmt: skip
        for number in range(num_cached_blocks, num_full_blocks):
            own, block = request.key((number + 1) * block_size), blocks[number]
            if not block.is_null and block.block_hash is None:
                block._block_hash = own
                self.cached.setdefault(own, block.block_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self._forget(self.blocks[block])

    def _forget(self, block: KVCacheBlock) -> None:
        block._block_hash = None
        self.cached = {own: held for own, held in self.cached.items() if held != block.block_id}
