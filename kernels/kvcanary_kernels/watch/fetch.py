"""Fetch, keep and send: what a step is, read from the host's memory, its block tables, and its count for the host."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.device import BLOCK, tl, triton
from kvcanary_kernels.watch.walk import (
    NO_VIOLATION,
    NONE,
    NOW_PLACE,
    NOW_ROWS,
    NOW_STAMP,
    NOW_WIDTH,
    SPLITS,
    Rows,
    lines_of,
    live_rows,
)


def fetch(lines: Tensor, ticks: Tensor, out: Tensor, *, width: int, cells: Tensor, launches: bool = True) -> None:
    """Count a step, copy its line, and clear its cells. No allocation, no wait, no call of the host but the launch.

    lines: [ring, >= width] int64, on the device or pinned on the host, where the device reads by itself
    ticks: [2] int64, steps so far, the line of the next is their number modulo the ring; and 0 between launches
    out:   [>= width] int64, its beginning is written
    cells: [ring, n] int64, those of this step become NO_VIOLATION
    """
    if launches:
        ring, n = len(lines), cells.shape[1]
        _fetch_kernel[(triton.cdiv(max(width, n), BLOCK),)](
            lines, ticks, out, cells, width, ring, lines.stride(0), cells.stride(0), n, BLOCK_N=BLOCK
        )
        return
    ticks[0] += 1
    place = int(ticks[0]) % lines.shape[0]
    out[:width], cells[place] = lines[place, :width], NO_VIOLATION


fetch_torch = partial(fetch, launches=False)


def send(total: Tensor, now: Tensor, out: Tensor, *, launches: bool = True) -> None:
    """Write a count, with the step's stamp on it, where the host looks for it. No allocation, no wait.

    total: [1] int64
    out:   [ring] int64, on the device or pinned on the host: it is there when anything is that was launched later
    """
    if launches:
        _send_kernel[(1,)](total, now, out)
        return
    *_, place, stamp = now[:NOW_WIDTH].tolist()
    out[place] = int(total) + stamp


send_torch = partial(send, launches=False)


def keep(rows: Rows, *, now: Tensor, kept: Tensor, block_size: int, launches: bool = True) -> None:
    """Copy of the block table of every live row what its entries are in. No allocation, no wait.

    rows:  lengths [>= rows], starts are not read
    kept:  [rows of Truth, width of the table] of its type, written at the number of each row
    """
    if launches:
        _keep_kernel[(rows.numbers.shape[0], SPLITS)](
            rows.numbers, rows.table, rows.lengths, now, kept, rows.table.shape[1], rows.table.stride(0),
            kept.stride(0), PAGE=block_size, IN_PLACE=rows.in_place, BLOCK_N=BLOCK,
        )  # fmt: skip
        return
    rows, _ = live_rows(rows, now)
    numbers, tables = rows.numbers.long(), rows.table[lines_of(rows)]
    blocks = (rows.lengths[: len(numbers)] + block_size - 1) // block_size
    is_used = torch.arange(tables.shape[1], device=tables.device) < blocks[:, None]
    kept[numbers] = torch.where(is_used, tables, kept[numbers])


keep_torch = partial(keep, launches=False)


@triton.jit(
    do_not_specialize=["width", "ring", "lines_stride", "cell_stride", "n"],
    do_not_specialize_on_alignment=["lines", "ticks", "out", "cells"],
)
def _fetch_kernel(
    lines,
    ticks,
    out,
    cells,
    width,
    ring,
    lines_stride,
    cell_stride,
    n,
    BLOCK_N: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < width
    tick = tl.load(ticks) + 1
    tl.store(out + o_n, tl.load(lines + tick % ring * lines_stride + o_n, mask=m_n, volatile=True), mask=m_n)
    tl.store(cells + tick % ring * cell_stride + o_n, tl.full([BLOCK_N], NONE, tl.int64), mask=o_n < n)
    tl.debug_barrier()  # every thread has read the tick
    if tl.atomic_add(ticks + 1, 1) == tl.num_programs(0) - 1:  # the last of them counts the step
        tl.store(ticks + 1, tl.zeros([], tl.int64))
        tl.store(ticks, tick)


@triton.jit(do_not_specialize_on_alignment=["total", "now", "out"])
def _send_kernel(total, now, out):
    tl.store(out + tl.load(now + NOW_PLACE), tl.load(total) + tl.load(now + NOW_STAMP))


@triton.jit(
    do_not_specialize=["width", "table_stride", "kept_stride"],
    do_not_specialize_on_alignment=["numbers", "table", "lengths", "now", "kept"],
)
def _keep_kernel(
    numbers,
    table,
    lengths,
    now,
    kept,
    width,
    table_stride,
    kept_stride,
    PAGE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if i_row >= tl.load(now + NOW_ROWS):
        return
    number = tl.load(numbers + i_row).to(tl.int64)
    row = table + (number if IN_PLACE else i_row) * table_stride
    blocks = tl.minimum(tl.cdiv(tl.load(lengths + i_row), PAGE), width)
    for i_block in range(tl.program_id(1) * BLOCK_N, blocks, tl.num_programs(1) * BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        m_n = o_n < blocks
        tl.store(kept + number * kept_stride + o_n, tl.load(row + o_n, mask=m_n), mask=m_n)
