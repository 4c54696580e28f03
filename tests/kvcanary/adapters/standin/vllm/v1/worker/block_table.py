"""Block tables of runner V1: by row of the batch, which the host fills anew."""

from __future__ import annotations

import torch

from vllm import RELEASE
from vllm.v1.utils import CpuGpuBuffer


class _Table:
    def make(self, block_size, ratio, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens) -> None:
        self.block_size, self.ratio, self.pcp_world_size = block_size, ratio, 1
        self.block_table = CpuGpuBuffer(max_num_reqs, max_num_blocks_per_req * ratio, dtype=torch.int32)
        self.slot_mapping = CpuGpuBuffer(max_num_batched_tokens, dtype=torch.int64)

    def fill_row(self, row, blocks) -> None:
        ratio = self.ratio
        blocks = [block * ratio + part for block in blocks for part in range(ratio)]
        self.block_table.gpu[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)


if RELEASE < (0, 32):

    class BlockTable(_Table):
        def __init__(
            self, block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens, pin_memory, device,
            kernel_block_size, cp_kv_cache_interleave_size=1,
        ):  # fmt: skip
            self.blocks_per_kv_block = block_size // kernel_block_size
            sizes = max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens
            self.make(kernel_block_size, self.blocks_per_kv_block, *sizes)
else:

    class BlockTable(_Table):
        def __init__(
            self, block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens, pin_memory, device,
            cp_kv_cache_interleave_size=1,
        ):  # fmt: skip
            self.make(block_size, 1, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens)


class MultiGroupBlockTable:
    def __init__(self, tables) -> None:
        self.tables = tables

    def __getitem__(self, idx):
        return self.tables[idx]
