"""Block tables by request state row, and the copies in batch order that attention gets."""

from __future__ import annotations

import torch

from vllm import RELEASE
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


class _Tables:
    def make(self, block_sizes, sizes, max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group, cp_size) -> None:
        """sizes: entries of a block of the tables"""
        self.block_sizes, self.max_num_reqs, self.cp_size = block_sizes, max_num_reqs, cp_size
        self.sizes = sizes
        self.ratios = [size // own for size, own in zip(block_sizes, sizes, strict=True)]
        widths = [count * ratio for count, ratio in zip(max_num_blocks_per_group, self.ratios, strict=True)]
        self.block_tables = [StagedWriteTensor((max_num_reqs, width), torch.int32) for width in widths]
        self.input_block_tables = [torch.zeros_like(table.gpu) for table in self.block_tables]
        self.num_blocks = [[0] * max_num_reqs for _ in block_sizes]
        self.slot_mappings = torch.zeros(len(block_sizes), max_num_batched_tokens, dtype=torch.int64)

    def append_block_ids(self, req_index, new_block_ids, overwrite):
        for group, blocks in enumerate(new_block_ids):
            ratio = self.ratios[group]
            blocks = [block * ratio + part for block in blocks for part in range(ratio)]
            start = 0 if overwrite else self.num_blocks[group][req_index]
            line = self.block_tables[group].gpu[req_index]
            line[start : start + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            self.num_blocks[group][req_index] = start + len(blocks)

    def gather_block_tables(self, idx_mapping, num_reqs_padded, out=None, out_ptrs=None):
        for table, held in zip(self.input_block_tables, self.block_tables, strict=True):
            table[: len(idx_mapping)] = held.gpu[idx_mapping.long()]
        return tuple(table[:num_reqs_padded] for table in self.input_block_tables)

    def compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out=None):
        self.slot_mappings.fill_(-1)
        for group, size in enumerate(self.sizes):
            for row, number in enumerate(idx_mapping.tolist()):
                where = slice(int(query_start_loc[row]), int(query_start_loc[row + 1]))
                line = self.block_tables[group].gpu[number].long()
                own = positions[where]
                self.slot_mappings[group, where] = line[own // size] * size + own % size
        return self.slot_mappings[:, :num_tokens_padded]


if RELEASE < (0, 32):

    class BlockTables(_Tables):
        def __init__(
            self, block_sizes, max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group, device,
            kernel_block_sizes, cp_size=1, cp_rank=0, cp_interleave=1,
        ):  # fmt: skip
            sizes = max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group
            self.make(block_sizes, kernel_block_sizes, *sizes, cp_size)
            self.blocks_per_kv_block = self.ratios
else:

    class BlockTables(_Tables):
        def __init__(
            self, block_sizes, max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group, device, cp_size=1,
            cp_rank=0, cp_interleave=1, slot_mapping_enabled=None,
        ):  # fmt: skip
            sizes = max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group
            self.make(block_sizes, block_sizes, *sizes, cp_size)
