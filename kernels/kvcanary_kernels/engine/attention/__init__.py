"""Attention over a paged pool: one operation for decode, tree verify and prefill, beside its torch reference."""

from kvcanary_kernels.engine.attention.merging import merge_passes, merge_passes_torch
from kvcanary_kernels.engine.attention.paged import attention_workspace, paged_attention, paged_attention_torch

__all__ = [
    "attention_workspace",
    "merge_passes",
    "merge_passes_torch",
    "paged_attention",
    "paged_attention_torch",
]
