"""What a batch is for attention: here its metadata are what all backends are given."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    positions: torch.Tensor | None = None


class AttentionMetadataBuilder:
    def __init__(self, block_size: int) -> None:
        self.kv_cache_spec = SimpleNamespace(block_size=block_size)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)
