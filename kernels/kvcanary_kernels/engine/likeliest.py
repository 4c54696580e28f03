"""Likeliest: the largest number of each long row, by many programs a row."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.engine.parts import BLOCK, load_part, part_place
from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import follow, tl, triton
from kvcanary_kernels.record.overlap import overlap_options


def likeliest(logits: Tensor, out: Tensor, *, launches: bool = True) -> None:
    """The place of each row's largest number, the first of equals. NaN counts as -inf, inf as the largest finite one.

    A row without a number above -inf gives 0. May be captured.

    logits: [n, size] bf16, fp16 or fp32, dense rows;  out: [n] int64
    """
    n, size = logits.shape
    expect_int64(n, out=out)
    if size == 0 or 1 not in (logits.stride(1), size):
        raise ValueError(f"logits must be [n, size > 0] with dense rows, got {list(logits.shape)}")
    if n == 0:
        return
    largest = torch.finfo(logits.dtype).max
    if launches:
        parts = triton.cdiv(size, BLOCK)
        best = torch.empty(n, parts, dtype=torch.float32, device=logits.device)
        places = torch.empty(n, parts, dtype=torch.int64, device=logits.device)
        options = overlap_options(logits.device)
        _likeliest_kernel[(n, parts)](logits, best, places, logits.stride(0), size, largest, BLOCK=BLOCK, **options)
        _first_kernel[(n,)](best, places, out, parts, BLOCK=triton.next_power_of_2(parts), **options)
        return
    torch.argmax(torch.nan_to_num(logits, nan=-torch.inf, posinf=largest, neginf=-torch.inf), -1, out=out)


likeliest_torch = partial(likeliest, launches=False)


@triton.jit(do_not_specialize=["size"])
def _likeliest_kernel(logits, best, places, row_stride, size, largest, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """The largest of one part of a row, and where it stands."""
    follow(OVERLAPS)
    _, b_order, o_d, _ = load_part(logits, row_stride, size, BLOCK)
    b_order = tl.minimum(b_order, largest)
    b_best = tl.max(b_order)
    o_out = part_place()
    tl.store(best + o_out, b_best)
    tl.store(places + o_out, tl.min(tl.where(b_order == b_best, o_d, size)).to(tl.int64))


@triton.jit(do_not_specialize=["parts"])
def _first_kernel(best, places, out, parts, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Of the parts of a row the first with the largest."""
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < parts
    b_best = tl.load(best + i_n * parts + o_p, mask=m_p, other=float("-inf"))
    b_places = tl.load(places + i_n * parts + o_p, mask=m_p, other=0)
    is_best = m_p & (b_best == tl.max(b_best))
    tl.store(out + i_n, tl.min(tl.where(is_best, b_places, 0x7FFFFFFFFFFFFFFF)))
