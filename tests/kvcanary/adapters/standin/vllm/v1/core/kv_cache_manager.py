"""It has the pool of blocks."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool


class KVCacheManager:
    def __init__(self, num_blocks: int) -> None:
        self.block_pool = BlockPool(num_blocks)
