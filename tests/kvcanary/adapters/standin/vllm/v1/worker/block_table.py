"""Block tables of runner V1: by row of the batch, which the host fills anew."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class BlockTable:
    def __init__(
        self, block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens, pin_memory, device,
        kernel_block_size, cp_kv_cache_interleave_size=1,
    ):  # fmt: skip
        self.block_size, self.blocks_per_kv_block = kernel_block_size, block_size // kernel_block_size
        width = max_num_blocks_per_req * self.blocks_per_kv_block
        self.block_table = SimpleNamespace(gpu=torch.zeros(max_num_reqs, width, dtype=torch.int32))
        self.slot_mapping = SimpleNamespace(gpu=torch.zeros(max_num_batched_tokens, dtype=torch.int64))
        self.pcp_world_size = 1

    def fill_row(self, row, blocks) -> None:
        ratio = self.blocks_per_kv_block
        blocks = [block * ratio + part for block in blocks for part in range(ratio)]
        self.block_table.gpu[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)


class MultiGroupBlockTable:
    def __init__(self, tables) -> None:
        self.tables = tables

    def __getitem__(self, idx):
        return self.tables[idx]
