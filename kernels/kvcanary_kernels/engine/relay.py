"""Relay: what a plain step takes from the one before it, and what it leaves for the next, by request-table row."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import follow, tl, triton
from kvcanary_kernels.record.overlap import overlap_options

BLOCK = 64


def take(
    rows: Tensor,
    relay_lens: Tensor,
    relay_bonus: Tensor,
    table: Tensor,
    *,
    lens: Tensor,
    bonus: Tensor,
    slots: Tensor,
    launches: bool = True,
) -> None:
    """Length, bonus token and next slot of each row. May be captured.

    rows:        [n] int64, rows of the relay and of the table; one outside either counts as row 0, padding's
    relay_lens:  [num_rows] int64, committed lengths;  relay_bonus: [num_rows] int64, the token at that length
    table:       [num_rows, width] int64 slots; a length outside the width is cut to it
    lens, bonus: [n] int64 out;  slots: [n] int64 out, of the entry at that length
    """
    _expect(rows, relay_lens, relay_bonus, lens=lens, bonus=bonus, slots=slots)
    if table.dim() != 2 or len(table) != relay_lens.numel() or not table.is_contiguous():
        raise ValueError(f"table must be contiguous [{relay_lens.numel()}, width], got {list(table.shape)}")
    n = rows.numel()
    if n == 0:
        return
    if launches:
        options = overlap_options(rows.device)
        _take_row_kernel[(triton.cdiv(n, BLOCK),)](
            rows, relay_lens, relay_bonus, table, lens, bonus, slots, n, *table.shape, BLOCK_N=BLOCK, **options
        )
        return
    own = rows.where((rows >= 0) & (rows < len(table)), 0)
    lens.copy_(relay_lens[own])
    bonus.copy_(relay_bonus[own])
    slots.copy_(table[own, lens.clamp(0, table.shape[1] - 1)])


take_torch = partial(take, launches=False)


def leave(
    rows: Tensor,
    relay_lens: Tensor,
    relay_bonus: Tensor,
    *,
    lens: Tensor,
    chosen: Tensor,
    num_live: Tensor,
    decides: Tensor,
    launches: bool = True,
) -> None:
    """The relay's rows have one entry more than ``lens``, and ``chosen`` behind it. May be captured.

    rows:     [n] int64, distinct up to the live ones; one outside the relay is left out
    lens:     [n] int64, before the step;  chosen: [n] int64
    num_live: [1] int64, entries at and after it are padding;  decides: [1] int64, 0: nothing changes
    """
    _expect(rows, relay_lens, relay_bonus, lens=lens, chosen=chosen)
    expect_int64(1, num_live=num_live, decides=decides)
    n = rows.numel()
    if n == 0:
        return
    if launches:
        options = overlap_options(rows.device)
        operands = rows, relay_lens, relay_bonus, lens, chosen, num_live, decides
        _leave_row_kernel[(triton.cdiv(n, BLOCK),)](*operands, n, relay_lens.numel(), BLOCK_N=BLOCK, **options)
        return
    live = slice(int(num_live) if int(decides) else 0)
    is_known = (rows[live] >= 0) & (rows[live] < len(relay_lens))
    own = rows[live][is_known]
    relay_lens[own] = lens[live][is_known] + 1
    relay_bonus[own] = chosen[live][is_known]


leave_torch = partial(leave, launches=False)


@triton.jit(do_not_specialize=["n", "num_rows"])
def _take_row_kernel(
    rows,
    relay_lens,
    relay_bonus,
    table,
    lens,
    bonus,
    slots,
    n,
    num_rows,
    table_width,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    b_row = tl.load(rows + o_n, mask=m_n, other=0)
    b_row = tl.where((b_row >= 0) & (b_row < num_rows), b_row, 0)
    b_len = tl.load(relay_lens + b_row, mask=m_n, other=0)
    tl.store(lens + o_n, b_len, mask=m_n)
    tl.store(bonus + o_n, tl.load(relay_bonus + b_row, mask=m_n, other=0), mask=m_n)
    b_place = tl.minimum(tl.maximum(b_len, 0), table_width - 1)
    tl.store(slots + o_n, tl.load(table + b_row * table_width + b_place, mask=m_n, other=0), mask=m_n)


@triton.jit(do_not_specialize=["n", "num_rows"])
def _leave_row_kernel(
    rows,
    relay_lens,
    relay_bonus,
    lens,
    chosen,
    num_live,
    decides,
    n,
    num_rows,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = tl.where(tl.load(decides) != 0, tl.minimum(tl.load(num_live), n), 0)
    b_row = tl.load(rows + o_n, mask=o_n < n, other=0)
    m_n = (o_n < live) & (b_row >= 0) & (b_row < num_rows)
    tl.store(relay_lens + b_row, tl.load(lens + o_n, mask=m_n, other=0) + 1, mask=m_n)
    tl.store(relay_bonus + b_row, tl.load(chosen + o_n, mask=m_n, other=0), mask=m_n)


def _expect(rows: Tensor, relay_lens: Tensor, relay_bonus: Tensor, **entries: Tensor) -> None:
    expect_int64(rows.numel(), may_broadcast=False, rows=rows, **entries)
    expect_int64(relay_lens.numel(), relay_lens=relay_lens, relay_bonus=relay_bonus)
