"""Long prompts of the triton backend: cuDNN reads the pool as our kernel does."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.attention import paged_attention_torch
from spec_engine.attention.triton_backend import LEAST_WHOLE, TritonAttention
from spec_engine.core import ForwardBatch, indptr
from spec_engine.memory.fp8_pool import Fp8Pool
from spec_engine.memory.pool import KVPool

HEADS, KV_HEADS, DIM = 4, 2, 64


def prompts(lens: list[int], new_lens: list[int], device: str, num_slots: int) -> ForwardBatch:
    """Rows of so many entries in random slots, the last ``new_lens`` of each written by this forward."""
    indices = (torch.randperm(num_slots - 1)[: sum(lens)] + 1).to(device)
    rows = zip(indices.split(lens), new_lens, strict=True)
    slots = torch.cat([row[len(row) - new :] for row, new in rows])
    none = torch.zeros(len(lens), dtype=torch.int64, device=device)
    starts = indptr(lens, none.device)
    names = tuple(map(str, range(len(lens))))
    operands = (names, 1, none, starts, indices, tuple(lens), tuple(new_lens), slots, slots, slots)
    return ForwardBatch("prefill", 0, *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_type", [KVPool, Fp8Pool])
@pytest.mark.parametrize(
    ("lens", "new_lens", "is_whole"),
    [
        ([LEAST_WHOLE], [LEAST_WHOLE], True),
        ([LEAST_WHOLE + 77] * 3, [LEAST_WHOLE + 77] * 3, True),
        ([LEAST_WHOLE, LEAST_WHOLE + 1], [LEAST_WHOLE, LEAST_WHOLE + 1], False),
        ([LEAST_WHOLE + 5], [LEAST_WHOLE], False),
        ([LEAST_WHOLE - 1], [LEAST_WHOLE - 1], False),
    ],
)
def test_every_prompt_is_attended_alike(pool_type, lens, new_lens, is_whole: bool) -> None:
    """Whole prompts of equal lengths by cuDNN, all others by our kernel; both within bf16 of float64."""
    device, shape = torch.device("cuda"), {"num_layers": 1, "page_size": 1, "kv_heads": KV_HEADS, "head_dim": DIM}
    pool = pool_type("target", num_pages=4095, token_offset=0, dtype=torch.bfloat16, device=device, **shape)
    everywhere = torch.arange(1, pool.num_slots, device=device)
    k, v = torch.randn(2, len(everywhere), KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    pool.store(0, everywhere, k, v)
    batch = prompts(lens, new_lens, "cuda", pool.num_slots)
    attention = TritonAttention(pool, batch, HEADS, batch.kv_indices, batch.slots, None)
    assert bool(attention.num_whole) is is_whole
    q = torch.randn(sum(new_lens), HEADS, DIM, device=device, dtype=torch.bfloat16)
    wanted = torch.empty(q.shape, dtype=torch.float64, device=device)
    paged_attention_torch(
        q.double(),
        *pool.load(0, torch.arange(pool.num_slots, device=device)).double().unbind(1),
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        q_indptr=indptr(new_lens, device),
        max_kv_len=max(lens),
        max_q_len=max(new_lens),
        scale=DIM**-0.5,
        out=wanted,
    )
    torch.testing.assert_close(attention.read(0, q).double(), wanted, rtol=2e-2, atol=2e-2)
