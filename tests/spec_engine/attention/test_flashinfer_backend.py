"""FlashInfer in CUDA graphs: what `captured` gives is planned anew before each replay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.attention import paged_attention_torch
from spec_engine.core import indptr
from spec_engine.memory.pool import KVPool

HEADS, KV_HEADS, DIM = 4, 2, 64

pytestmark = [pytest.mark.gpu, pytest.mark.package("flashinfer")]


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
        scale=DIM**-0.5,
        out=out,
        tree_mask=mask,
    )
    return out


@pytest.mark.parametrize(("new", "is_tree"), [(1, False), (5, False), (5, True)], ids=["decode", "chain", "tree"])
def test_a_captured_read_follows_its_plan(new, is_tree) -> None:
    """Other lengths, slots and masks at each replay of one graph."""
    from spec_engine.attention.flashinfer_backend import captured

    device = torch.device("cuda")
    shape = {"num_layers": 1, "num_pages": 511, "page_size": 1, "kv_heads": KV_HEADS, "head_dim": DIM}
    pool = KVPool("target", token_offset=0, dtype=torch.bfloat16, device=device, **shape)
    pool.kv.normal_()
    planned = captured(pool, 3, 400, decodes=new == 1, max_nodes=new if is_tree else 0)
    q = torch.randn(3 * new, HEADS, DIM, dtype=torch.bfloat16, device=device)
    out, graph = torch.empty_like(q), None
    for lens in ([120, 130, 140], [9, 5, 300], [40, 5, 6]):
        indices = torch.randperm(511, device=device)[: sum(lens)] + 1
        mask = None
        if is_tree:
            mask = torch.rand(3, new, new, device=device).round().bool() | torch.eye(new, device=device).bool()
        planned.plan(pool, HEADS // KV_HEADS, lens, [new] * 3, indices, mask)
        if graph is None:
            planned.run(pool, 0, q, out)  # compiles the kernel before the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                planned.run(pool, 0, q, out)
        out.fill_(torch.nan)
        graph.replay()
        expected = reference(pool, q, lens, new, indices, mask)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
