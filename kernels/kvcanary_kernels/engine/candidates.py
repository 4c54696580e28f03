"""Candidates: the likeliest places of each long row of logits with their probabilities, by many programs a row."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.engine.parts import BLOCK, load_part, part_place
from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import follow, tl, triton
from kvcanary_kernels.record.overlap import overlap_options

NOWHERE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


def candidates(logits: Tensor, *, probs: Tensor, ids: Tensor, launches: bool = True) -> None:
    """The k places of each row with the largest numbers, the first of equals before others, and their softmax.

    For the order NaN counts as -inf; the probabilities of a row with NaN or inf, or without a finite number, are NaN.
    May be captured.

    logits: [n, size >= k] bf16, fp16 or fp32, dense rows
    probs:  [n, k] fp32 out;  ids: [n, k] int64 out
    """
    n, size = logits.shape
    k = ids.shape[-1]
    expect_int64(n * k, ids=ids.view(-1))
    if probs.shape != (n, k) or ids.shape != (n, k) or probs.dtype is not torch.float32 or not probs.is_contiguous():
        raise ValueError(f"probs must be contiguous [{n}, {k}] fp32, got {list(probs.shape)} {probs.dtype}")
    if size < max(k, 1) or 1 not in (logits.stride(1), size):
        raise ValueError(f"logits must be [n, size >= {k}] with dense rows, got {list(logits.shape)}")
    if n == 0 or k == 0:
        return
    if launches:
        parts = triton.cdiv(size, BLOCK)
        best = torch.empty(n, parts, k, dtype=torch.float32, device=logits.device)
        highest, sums = (torch.empty(n, parts, dtype=torch.float32, device=logits.device) for _ in range(2))
        places = torch.empty(n, parts, k, dtype=torch.int64, device=logits.device)
        options = {"K": k, **overlap_options(logits.device)}
        _parts_kernel[(n, parts)](logits, best, places, highest, sums, logits.stride(0), size, BLOCK=BLOCK, **options)
        blocks = {"BLOCK_P": triton.next_power_of_2(parts), "BLOCK": triton.next_power_of_2(parts * k)}
        _rows_kernel[(n,)](best, places, highest, sums, probs, ids, parts, **blocks, **options)
        return
    order = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids.copy_(order.sort(dim=-1, descending=True, stable=True).indices[:, :k])
    probs.copy_(torch.softmax(logits.float(), -1).gather(1, ids))


candidates_torch = partial(candidates, launches=False)


@triton.jit(do_not_specialize=["size"])
def _parts_kernel(
    logits,
    best,
    places,
    highest,
    sums,
    row_stride,
    size,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of one part of a row the k largest, where they stand, and the sum of its powers over the largest's."""
    follow(OVERLAPS)
    b_x, b_order, o_d, m_d = load_part(logits, row_stride, size, BLOCK)
    o_out = part_place()
    m_none = (b_x != b_x) | (b_x == float("inf"))  # what has no power, and no sum
    part_highest = tl.max(b_order)
    power_sum = tl.sum(tl.exp(tl.where(m_none, 0.0, b_order - _finite(part_highest))))
    tl.store(highest + o_out, part_highest)
    tl.store(sums + o_out, tl.where(tl.max(m_none.to(tl.int32)) > 0, float("nan"), power_sum))
    for i_k in tl.static_range(K):
        b_best = tl.max(tl.where(m_d, b_order, float("-inf")))
        place = tl.min(tl.where(m_d & (b_order == b_best), o_d, size))
        tl.store(best + o_out * K + i_k, b_best)
        tl.store(places + o_out * K + i_k, tl.where(place < size, place.to(tl.int64), NOWHERE))
        m_d &= o_d != place


@triton.jit(do_not_specialize=["parts"])
def _rows_kernel(
    best,
    places,
    highest,
    sums,
    probs,
    ids,
    parts,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of the parts of a row the k largest, and what they are of the sum of all."""
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < parts
    b_highest = tl.load(highest + i_n * parts + o_p, mask=m_p, other=float("-inf"))
    row_highest = tl.max(b_highest)
    b_sums = tl.load(sums + i_n * parts + o_p, mask=m_p, other=0.0)
    total = tl.sum(b_sums * tl.exp(b_highest - _finite(row_highest)))
    total = tl.where(row_highest == float("-inf"), float("nan"), total)
    o_c = tl.arange(0, BLOCK)
    b_best = tl.load(best + i_n * parts * K + o_c, mask=o_c < parts * K, other=float("-inf"))
    b_places = tl.load(places + i_n * parts * K + o_c, mask=o_c < parts * K, other=NOWHERE)
    m_c = b_places < NOWHERE
    for i_k in tl.static_range(K):
        largest = tl.max(tl.where(m_c, b_best, float("-inf")))
        place = tl.min(tl.where(m_c & (b_best == largest), b_places, NOWHERE))
        tl.store(ids + i_n * K + i_k, place)
        tl.store(probs + i_n * K + i_k, tl.exp(largest - _finite(row_highest)) / total)
        m_c &= b_places != place


@triton.jit
def _finite(highest):
    """What is subtracted from numbers none of which is larger, before their powers are summed."""
    return tl.where((highest == float("-inf")) | (highest == float("inf")), 0.0, highest)
