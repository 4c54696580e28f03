"""Index: the slots that each row of a forward reads, from lengths that only the device knows."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import BLOCK, programs_for, tl, triton


def index_rows(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    tails: Tensor,
    *,
    tail_lens: Tensor | None = None,
    num_slots: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    launches: bool = True,
) -> None:
    """Row r of a forward reads the prefix of its request, then its tail; rows are request-major. May be captured.

    The slots of row r are table[rows[b], :prefix_lens[b]] of its request b, then tails[r, :tail_lens[r]]. A length
    outside its table or tails is cut to it, a slot outside the pool is null slot 0, and rows outside the table have an
    empty prefix, so that what the device got wrong is read by a check and by no stray address.

    table:       [table_rows, table_width] int64, the request table
    rows:        [requests] int64, row of the table; padding has row 0, whose slots are all null
    prefix_lens: [requests] int64
    tails:       [num_rows, max_tail] int64 slots; num_rows is a multiple of requests
    tail_lens:   [num_rows] int64; None: whole tails
    num_slots:   of the pool
    kv_indptr:   [num_rows + 1] int64 out
    kv_indices:  [>= num_rows * (table_width + max_tail)] int64 out; entries behind the last row stay as they are
    """
    for name, grid in (("table", table), ("tails", tails)):
        if grid.dim() != 2 or grid.dtype is not torch.int64 or not grid.is_contiguous():
            raise ValueError(f"{name} must be contiguous [rows, width] int64, got {list(grid.shape)} {grid.dtype}")
    (num_rows, max_tail), requests, table_width = tails.shape, rows.numel(), table.shape[1]
    if num_rows % max(requests, 1):
        raise ValueError(f"tails must have as many rows for each of {requests} requests, got {num_rows}")
    expect_int64(requests, rows=rows, prefix_lens=prefix_lens)
    expect_int64(num_rows, tail_lens=tail_lens)
    expect_int64(num_rows + 1, kv_indptr=kv_indptr)
    expect_int64(kv_indices.numel(), kv_indices=kv_indices)
    needed = num_rows * (table_width + max_tail)
    if kv_indices.numel() < needed:
        raise ValueError(f"kv_indices must hold {needed} entries, every row whole, got {kv_indices.numel()}")
    if num_rows == 0:
        return
    if launches:
        _index_rows_kernel[(num_rows, programs_for(table_width + max_tail))](
            table,
            rows,
            prefix_lens,
            tails,
            prefix_lens if tail_lens is None else tail_lens,
            kv_indptr,
            kv_indices,
            num_rows,
            num_rows // requests,
            *table.shape,
            max_tail,
            num_slots,
            HAS_TAIL_LENS=tail_lens is not None,
            BLOCK_N=BLOCK,
        )
        return
    width = num_rows // requests
    inside = (rows >= 0) & (rows < table.shape[0])
    prefixes = torch.where(inside, prefix_lens.clamp(0, table_width), 0).repeat_interleave(width)
    own = tails.new_full((num_rows,), max_tail) if tail_lens is None else tail_lens.clamp(0, max_tail)
    ends = (prefixes + own).cumsum(0)
    kv_indptr[0] = 0
    kv_indptr[1:] = ends
    both = torch.cat((table[torch.where(inside, rows, 0)].repeat_interleave(width, 0), tails), 1)
    column = torch.arange(both.shape[1], device=tails.device)
    tail_column = column - table_width
    is_read = (column < prefixes[:, None]) | ((tail_column >= 0) & (tail_column < own[:, None]))
    slots = both[is_read]
    kv_indices[: slots.numel()] = torch.where((slots >= 0) & (slots < num_slots), slots, 0)


index_rows_torch = partial(index_rows, launches=False)


@triton.jit(do_not_specialize=["num_rows", "num_table_rows", "table_width", "max_tail", "num_slots"])
def _index_rows_kernel(
    table,
    rows,
    prefix_lens,
    tails,
    tail_lens,
    kv_indptr,
    kv_indices,
    num_rows,
    width,
    num_table_rows,
    table_width,
    max_tail,
    num_slots,
    HAS_TAIL_LENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1).to(tl.int64)
    first = tl.zeros([], tl.int64)
    for i_block in range(0, i_row, BLOCK_N):
        o_r = i_block + tl.arange(0, BLOCK_N)
        m_r = o_r < i_row
        prefix = _prefix_lens(rows, prefix_lens, o_r // width, m_r, num_table_rows, table_width)
        tail = _tail_lens(tail_lens, o_r, m_r, max_tail, HAS_TAIL_LENS)
        first += tl.sum(tl.where(m_r, prefix + tail, 0))
    prefix = _prefix_lens(rows, prefix_lens, i_row // width, i_row < num_rows, num_table_rows, table_width)
    tail = _tail_lens(tail_lens, i_row, i_row < num_rows, max_tail, HAS_TAIL_LENS)
    if i_part == 0:
        tl.store(kv_indptr + i_row + 1, first + prefix + tail)
        if i_row == 0:
            tl.store(kv_indptr, first)
    table_row = table + tl.load(rows + i_row // width) * table_width
    tail_row = tails + i_row * max_tail
    for i_block in range(i_part * BLOCK_N, prefix + tail, tl.num_programs(1) * BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        slot = tl.load(table_row + o_n, mask=o_n < prefix, other=0)
        m_tail = (o_n >= prefix) & (o_n < prefix + tail)
        slot = tl.where(m_tail, tl.load(tail_row + (o_n - prefix), mask=m_tail, other=0), slot)
        slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0)
        tl.store(kv_indices + first + o_n, slot, mask=o_n < prefix + tail)


@triton.jit
def _prefix_lens(rows, prefix_lens, o_request, m_r, num_table_rows, table_width):
    """Prefix lengths of these requests, cut to the table."""
    row = tl.load(rows + o_request, mask=m_r, other=-1)
    length = tl.load(prefix_lens + o_request, mask=m_r, other=0)
    length = tl.minimum(tl.maximum(length, 0), table_width)
    return tl.where((row >= 0) & (row < num_table_rows), length, 0)


@triton.jit
def _tail_lens(tail_lens, o_r, m_r, max_tail, HAS_TAIL_LENS: tl.constexpr):
    """Tail lengths of these rows, cut to the tails."""
    length = tl.zeros_like(o_r) + max_tail
    if HAS_TAIL_LENS:
        length = tl.minimum(tl.maximum(tl.load(tail_lens + o_r, mask=m_r, other=0), 0), max_tail)
    return length
