"""The torch backend against attention written out by hand, for every shape of forward."""

from dataclasses import replace

import pytest
import torch

from spec_engine.attention.torch_backend import TorchAttention
from spec_engine.core import ForwardBatch, indptr
from spec_engine.memory.pools.pool import KVPool

HEADS, KV_HEADS, DIM = 4, 2, 8


def make_pool() -> KVPool:
    pool = KVPool(
        "target",
        num_layers=2,
        num_pages=20,
        page_size=4,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        token_offset=0,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    pool.kv.normal_()
    return pool


def make_batch(kv_lens, new_lens, mask=None) -> ForwardBatch:
    """Rows of random slots, all different."""
    slots = (torch.randperm(76)[: sum(kv_lens)] + 4).split(kv_lens)
    written = torch.cat([row[len(row) - new :] for row, new in zip(slots, new_lens, strict=True)])
    return ForwardBatch(
        kind="verify",
        index=0,
        requests=tuple(f"req-{row}" for row in range(len(kv_lens))),
        rows_per_request=1,
        prefix_lens=torch.tensor(kv_lens) - torch.tensor(new_lens),
        kv_indptr=indptr(kv_lens, torch.device("cpu")),
        kv_indices=torch.cat(slots),
        kv_lens=tuple(kv_lens),
        new_lens=tuple(new_lens),
        slots=written,
        tokens=torch.zeros(sum(new_lens), dtype=torch.int64),
        positions=torch.zeros(sum(new_lens), dtype=torch.int64),
        tree_mask=mask,
    )


def by_hand(pool: KVPool, batch: ForwardBatch, layer: int, q: torch.Tensor) -> torch.Tensor:
    """Token by token and head by head, over the pool as it is."""
    outputs = []
    token = 0
    for row, (length, new) in enumerate(zip(batch.kv_lens, batch.new_lens, strict=True)):
        slots = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]].tolist()
        for own in range(new):
            seen = slots[: length - new]
            for other in range(new):
                visible = other <= own if batch.tree_mask is None else bool(batch.tree_mask[row, own, other])
                seen = [*seen, slots[length - new + other]] if visible else seen
            heads = []
            for head in range(HEADS):
                k, v = pool.kv[layer, seen, :, head // (HEADS // KV_HEADS)].unbind(1)
                heads.append(torch.softmax(k @ q[token, head] / DIM**0.5, 0) @ v)
            outputs.append(torch.stack(heads))
            token += 1
    return torch.stack(outputs)


TREE = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("kv_lens", "new_lens", "mask"),
    [
        ((5,), (1,), None),
        ((5, 9, 1), (1, 1, 1), None),
        ((7, 7), (1, 1), None),
        ((6,), (6,), None),
        ((9, 4), (3, 4), None),
        ((8, 5), (3, 3), TREE),
        ((3,), (3,), TREE[:1]),
    ],
)
def test_attend_equals_attention_by_hand(kv_lens, new_lens, mask):
    """Decode, padded decode, prefill, ragged chunks and trees: prefix plus ancestors, nothing else."""
    pool, batch = make_pool(), make_batch(kv_lens, new_lens, mask)
    n = sum(new_lens)
    q, k, v = (torch.randn(n, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attention = TorchAttention(pool, batch, HEADS, batch.kv_indices, batch.slots, None)
    output = attention.attend(1, q, k, v)
    assert torch.equal(pool.kv[1, batch.slots], torch.stack((k, v), 1))
    torch.testing.assert_close(output, by_hand(pool, batch, 1, q), rtol=1e-12, atol=1e-12)


def test_attend_takes_its_rows_from_the_array_that_the_canary_sees():
    """kv_indptr says where rows begin, in attention as in the canary's plan; a host copy beside it decides nothing."""
    pool, batch = make_pool(), make_batch((5, 9), (1, 1))
    q, k, v = (torch.randn(2, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    outputs = [
        TorchAttention(pool, each, HEADS, each.kv_indices, each.slots, None).attend(1, q, k, v)
        for each in (batch, replace(batch, kv_lens=(9, 5)))
    ]
    assert torch.equal(*outputs)
