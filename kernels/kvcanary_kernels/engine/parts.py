"""Parts: a long row of logits is read by many programs, each of which takes one part of it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary_kernels.record.device import tl, triton

BLOCK = 2048


@triton.jit
def load_part(logits, row_stride, size, BLOCK: tl.constexpr):
    """Of program (row, part): the numbers, the same with NaN as -inf, their places, and which of these are inside.

    Outside of the row every number is -inf.
    """
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < size
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    b_x = tl.load(row + o_d, mask=m_d, other=float("-inf")).to(tl.float32)
    return b_x, tl.where(b_x == b_x, b_x, float("-inf")), o_d, m_d


@triton.jit
def part_place():
    """Where program (row, part) puts what it has found."""
    return tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
