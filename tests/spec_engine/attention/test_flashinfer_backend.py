"""FlashInfer: every group of query heads, and CUDA graphs: what `captured` gives is planned before each replay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.attention import paged_attention_torch
from spec_engine.core import ForwardBatch, indptr
from spec_engine.memory.pools.pool import KVPool

KV_HEADS, FOLD = 2, 2

pytestmark = [pytest.mark.gpu, pytest.mark.package("flashinfer")]


def random_pool(head_dim: int) -> KVPool:
    shape = {"num_layers": 1, "num_pages": 511, "page_size": 1, "kv_heads": KV_HEADS, "head_dim": head_dim}
    pool = KVPool("target", token_offset=0, dtype=torch.bfloat16, device=torch.device("cuda"), **shape)
    pool.kv.normal_()
    return pool


def random_queries(n: int, fold: int, head_dim: int) -> Tensor:
    return torch.randn(n, KV_HEADS * fold, head_dim, dtype=torch.bfloat16, device="cuda")


def reference(pool: KVPool, q: Tensor, lens: list[int], new: int, indices: Tensor, mask: Tensor | None) -> Tensor:
    device = indices.device
    out = torch.empty_like(q, dtype=torch.float64)
    paged_attention_torch(
        q.double(),
        *pool.kv[0].unbind(1),
        kv_indptr=indptr(lens, device),
        kv_indices=indices,
        q_indptr=indptr([new] * len(lens), device),
        max_kv_len=max(lens),
        max_q_len=new,
        scale=q.shape[-1] ** -0.5,
        out=out,
        tree_mask=mask,
    )
    return out


@pytest.mark.parametrize(("fold", "head_dim"), [*((fold, 64) for fold in range(1, 9)), (4, 128)])
def test_every_group_of_query_heads_is_decoded(fold, head_dim) -> None:
    """By the decode kernel where it has the group, by the prefill kernel else: within bf16 of float64."""
    from spec_engine.attention.flashinfer_backend import DECODE_GROUPS, FlashInferAttention

    pool, lens, device = random_pool(head_dim), [120, 9, 300], torch.device("cuda")
    indices = torch.randperm(511, device=device)[: sum(lens)] + 1
    ends = indptr(lens, device)
    slots = indices[ends[1:] - 1]
    operands = (("a", "b", "c"), 1, slots, ends, indices, tuple(lens), (1, 1, 1), slots, slots, slots)
    batch = ForwardBatch("decode", 0, *operands)
    attention = FlashInferAttention(pool, batch, KV_HEADS * fold, indices, slots, None)
    assert attention.planned.decodes == (fold in DECODE_GROUPS)
    q = random_queries(3, fold, head_dim)
    expected = reference(pool, q, lens, 1, indices, None)
    torch.testing.assert_close(attention.read(0, q).double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("new", "is_tree"), [(1, False), (5, False), (5, True)], ids=["decode", "chain", "tree"])
def test_a_captured_read_follows_its_plan(new, is_tree, head_dim) -> None:
    """Other lengths, slots and masks at each replay of one graph."""
    from spec_engine.attention.flashinfer_backend import captured

    device, pool = torch.device("cuda"), random_pool(head_dim)
    planned = captured(pool, 3, 400, decodes=new == 1, max_nodes=new if is_tree else 0)
    q = random_queries(3 * new, FOLD, head_dim)
    out, graph = torch.empty_like(q), None
    for lens in ([120, 130, 140], [9, 5, 300], [40, 5, 6]):
        indices = torch.randperm(511, device=device)[: sum(lens)] + 1
        mask = None
        if is_tree:
            mask = torch.rand(3, new, new, device=device).round().bool() | torch.eye(new, device=device).bool()
        planned.plan(pool, FOLD, lens, [new] * 3, indices, mask)
        if graph is None:
            planned.run(pool, 0, q, out)  # compiles the kernel before the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                planned.run(pool, 0, q, out)
        out.fill_(torch.nan)
        graph.replay()
        expected = reference(pool, q, lens, new, indices, mask)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
