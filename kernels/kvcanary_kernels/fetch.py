"""Fetch and keep: what a step is, read from the host's memory, and the block tables that its rows have."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from kvcanary_kernels.device import BLOCK, tl, triton
from kvcanary_kernels.walk import NOW_ROWS, ROWS_NOW, Rows


def fetch(lines: Tensor, ticks: Tensor, out: Tensor, *, width: int) -> None:
    """Copy the line of this step. No allocation, no wait, no call of the host but the launch.

    lines: [ring, >= width] int64, on the device or pinned on the host, where the device reads by itself
    ticks: [1] int64, which step it is: its line is that number modulo the ring
    out:   [>= width] int64, its beginning is written
    """
    _fetch_kernel[(triton.cdiv(width, BLOCK),)](
        lines, ticks, out, width, lines.shape[0], lines.stride(0), BLOCK_N=BLOCK
    )


def fetch_torch(lines: Tensor, ticks: Tensor, out: Tensor, *, width: int) -> None:
    """The torch reference of `fetch`."""
    out[:width] = lines[int(ticks) % lines.shape[0], :width]


def keep(rows: Rows, *, now: Tensor, kept: Tensor, width: int) -> None:
    """Copy the beginning of the block table of every live row. No allocation, no wait.

    kept:  [rows of Truth, >= width] of the table's type, written at the number of each row
    width: blocks of a row, at most as many as its table has
    """
    _keep_kernel[(rows.numbers.shape[0], triton.cdiv(width, BLOCK))](
        rows.numbers, rows.table, now, kept, width, rows.table.stride(0), kept.stride(0), BLOCK_N=BLOCK
    )


def keep_torch(rows: Rows, *, now: Tensor, kept: Tensor, width: int) -> None:
    """The torch reference of `keep`."""
    n = int(now[NOW_ROWS])
    kept[rows.numbers[:n].long(), :width] = rows.table[:n, :width]


@triton.jit(do_not_specialize=["width", "ring", "lines_stride"], do_not_specialize_on_alignment=["lines", "out"])
def _fetch_kernel(lines, ticks, out, width, ring, lines_stride, BLOCK_N: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < width
    line = lines + tl.load(ticks) % ring * lines_stride
    tl.store(out + o_n, tl.load(line + o_n, mask=m_n, volatile=True), mask=m_n)


@triton.jit(
    do_not_specialize=["width", "table_stride", "kept_stride"],
    do_not_specialize_on_alignment=["numbers", "table", "now", "kept"],
)
def _keep_kernel(numbers, table, now, kept, width, table_stride, kept_stride, BLOCK_N: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    if i_row >= tl.load(now + ROWS_NOW):
        return
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < width
    line = kept + tl.load(numbers + i_row).to(tl.int64) * kept_stride
    tl.store(line + o_n, tl.load(table + i_row * table_stride + o_n, mask=m_n), mask=m_n)
