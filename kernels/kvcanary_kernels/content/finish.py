"""Finish: add what was stored to sealed slots, their content lanes and the layers written."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_layered, expect_records, live_indices
from kvcanary_kernels.record.device import BLOCK, COLUMNS, CONTENT_B, LAYERS_HIGH, LAYERS_LOW, live_count, tl, triton


def finish(
    records: Tensor,
    content_a: Tensor,
    slots: Tensor,
    *,
    lane_a: Tensor,
    lane_b: Tensor,
    layers: Tensor,
    num_live: Tensor | None = None,
) -> None:
    """Write what was stored into sealed slots: both content lanes and the bitmap of layers. May be captured.

    records:   [num_slots, 8] int64, columns CONTENT_B and LAYERS are written
    content_a: [layers, num_slots] int64, written
    slots:     [n] int64, distinct; a slot outside the pool is refused
    lane_a:    [layers, n] int64;  lane_b: [n] int64 (fingerprint)
    layers:    [2] int64, bitmap of the layers stored, the same for every slot (record.layers_bitmap)
    num_live:  [1] int64, entries at and after it write nothing; None: all live
    """
    _check(records, content_a, slots, lane_a, lane_b, layers, num_live)
    n = slots.numel()
    if n == 0:
        return
    _finish_kernel[(triton.cdiv(n, BLOCK),)](
        records,
        content_a,
        slots,
        lane_a,
        lane_b,
        layers,
        slots if num_live is None else num_live,
        n,
        records.shape[0],
        content_a.shape[0],
        content_a.stride(0),
        lane_a.stride(0),
        BLOCK_N=BLOCK,
        HAS_LIVE=num_live is not None,
    )


def finish_torch(
    records: Tensor,
    content_a: Tensor,
    slots: Tensor,
    *,
    lane_a: Tensor,
    lane_b: Tensor,
    layers: Tensor,
    num_live: Tensor | None = None,
) -> None:
    """The torch reference of `finish`."""
    _check(records, content_a, slots, lane_a, lane_b, layers, num_live)
    entries = live_indices(slots, records.shape[0], num_live)
    if entries is not None:
        slots, lane_a, lane_b = slots[entries], lane_a[:, entries], lane_b[entries]
    content_a.index_copy_(1, slots, lane_a)
    stored = torch.cat((lane_b[:, None], layers.expand(slots.numel(), 2)), dim=1)
    records[:, record.CONTENT_B : record.LAYERS_HIGH + 1].index_copy_(0, slots, stored)


@triton.jit(do_not_specialize=["n", "lane_stride"])
def _finish_kernel(
    records,
    content_a,
    slots,
    lane_a,
    lane_b,
    layers,
    num_live,
    n,
    num_slots,
    num_layers,
    content_stride,
    lane_stride,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < live_count(num_live, n, HAS_LIVE)
    slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n &= (slot >= 0) & (slot < num_slots)
    row = records + slot * COLUMNS
    b_lane = tl.load(lane_b + o_n, mask=m_n, other=0)
    tl.store(row + CONTENT_B, b_lane, mask=m_n)
    tl.store(row + LAYERS_LOW, tl.zeros_like(b_lane) + tl.load(layers), mask=m_n)
    tl.store(row + LAYERS_HIGH, tl.zeros_like(b_lane) + tl.load(layers + 1), mask=m_n)
    lane = lane_a + o_n
    content = content_a + slot
    for _ in range(num_layers):
        tl.store(content, tl.load(lane, mask=m_n, other=0), mask=m_n)
        lane += lane_stride
        content += content_stride


def _check(
    records: Tensor,
    content_a: Tensor,
    slots: Tensor,
    lane_a: Tensor,
    lane_b: Tensor,
    layers: Tensor,
    num_live: Tensor | None,
) -> None:
    n = slots.numel()
    expect_records(records)
    expect_int64(n, slots=slots, lane_b=lane_b)
    expect_int64(2, layers=layers)
    expect_int64(1, num_live=num_live)
    expect_layered(content_a.shape[0], n, lane_a=lane_a)
    expect_layered(content_a.shape[0], records.shape[0], content_a=content_a)
