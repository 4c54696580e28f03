"""Attention over a paged pool: one operation for decode, tree verify and prefill, beside its torch reference."""

from kvcanary_kernels.attention.paged import attention_workspace, paged_attention, paged_attention_torch

__all__ = ["attention_workspace", "paged_attention", "paged_attention_torch"]
