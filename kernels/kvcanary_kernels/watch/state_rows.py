"""State rows: what an engine that is told of knows of the states of one captured forward, in the words of `states`.

`describe` says which entries rows go on from and what these should have absorbed, for `take_states`; `note_left` which
entries the forward fills, for `leave_states`, and of what, by the records of the K and V that it has stored; `follow`
takes along what is known of states that are copied.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record.device import CHAIN, COLUMNS, MASK_32, tl, triton
from kvcanary_kernels.record.layout import signed
from kvcanary_kernels.watch.states import States, Taken
from kvcanary_kernels.watch.walk import (
    NOW_PLACE,
    NOW_ROWS,
    NOW_STEP,
    TAILS,
    UID,
    Rows,
    Truth,
)

BLOCK = 64


class StateRows(NamedTuple):
    """The arguments of `take_states`, of n rows at fixed addresses.

    now:   [NOW_WIDTH] int64;  seeds: [n, 2] int64
    """

    rows: Rows
    truth: Truth
    now: Tensor
    seeds: Tensor


def rows_of(n: int, site: int, device: torch.device) -> StateRows:
    """Room for n rows; site: of their forward."""
    numbers, starts = torch.arange(n, device=device), torch.arange(n + 1, device=device)
    rows = Rows(numbers, torch.zeros(n, 1, dtype=torch.int64, device=device), torch.zeros_like(numbers), starts)
    now = torch.tensor([0, 0, 0, site, 0, 0], device=device)
    lines = torch.zeros(n, TAILS + 1, dtype=torch.int64, device=device)
    return StateRows(rows, Truth(lines), now, torch.zeros(n, 2, dtype=torch.int64, device=device))


def describe(
    into: StateRows,
    *,
    step: Tensor,
    live: Tensor,
    entries: Tensor,
    lens: Tensor,
    known: Tensor,
    chains: Tensor,
    uids: Tensor,
    judged: Tensor,
    ring: int,
    launches: bool = True,
) -> None:
    """Each of the live rows goes on from an entry, behind so many tokens. No allocation, no wait.

    step:    [1] int64, its number in the low 32 bits;  live: [1] int64, rows
    entries: [n] int64;  lens: [n] int64, as the engine has them;  uids: [n] int64
    known:   [n] int64, as the canary has the lengths, chains: [n] int64, of these tokens; -1: it does not know them
    judged:  [1] int64, grows by the live rows
    """
    n = len(entries)
    if launches:
        _describe_kernel[(triton.cdiv(n, BLOCK),)](
            into.now, into.rows.table, into.rows.lengths, into.truth.lines, into.seeds, step, live, entries, lens,
            known, chains, uids, judged, n, ring, WIDTH=TAILS + 1, BLOCK_N=BLOCK,
        )  # fmt: skip
        return
    number = int(step) & MASK_32.value
    into.now[NOW_ROWS.value], into.now[NOW_STEP.value], into.now[NOW_PLACE.value] = live[0], number, number % ring
    into.rows.table[:n, 0] = entries
    is_known = known >= 0
    past = torch.where(is_known, known, lens)
    into.rows.lengths[:n] = past + 1
    into.truth.uids[:n] = uids
    into.seeds[:n] = torch.stack((chains, (is_known & (past > 0)).long()), 1)
    judged += live


describe_torch = partial(describe, launches=False)


def note_left(
    taken: Taken,
    *,
    live: Tensor,
    entries: Tensor,
    slots: Tensor,
    positions: Tensor,
    uids: Tensor,
    records: Tensor,
    launches: bool = True,
) -> None:
    """The forward leaves the states after these tokens, new of each row. No allocation, no wait.

    live:    [1] int64, rows of uids [rows] that are no padding
    entries: [rows * new] int64, -1: the state after this token goes nowhere
    slots, positions: [rows * new] int64, of the tokens' K and V;  records: [num_slots, 8] int64, of these
    """
    n, new = len(entries), len(entries) // len(uids)
    if launches:
        _note_kernel[(triton.cdiv(n, BLOCK),)](
            taken.left, live, entries, slots, positions, uids, records, n, new, taken.cells.shape[2], len(records),
            COLUMN=CHAIN, BLOCK_N=BLOCK,
        )  # fmt: skip
        return
    row = torch.arange(n, device=entries.device) // new
    left = taken.left.unflatten(1, (2, -1))[:, 0, :n]
    held = slots.clamp(0, len(records) - 1)
    left[:] = torch.stack((entries, positions + 1, uids[row], records[held, CHAIN.value]))
    left[0, row >= live] = -1


note_left_torch = partial(note_left, launches=False)


def follow(states: States, sources: Tensor, entries: Tensor, now: Tensor, *, site: int, launches: bool = True) -> None:
    """The bytes of sources [n] were copied to entries [n], -1: none; none is both. No allocation, no wait.

    now: of the step;  site: of the copy
    """
    n, layers = len(sources), len(states.sums)
    if launches:
        _follow_kernel[(n, max(states.compared, 1))](
            states.known, states.chains, states.phases, states.sums, sources, entries, now, states.known.shape[1],
            states.sums.stride(0), layers, site, SLICES=states.slices, COMPARED=states.compared,
            BLOCK_L=triton.next_power_of_2(layers),
        )  # fmt: skip
        return
    copied = entries >= 0
    src, dst, step = sources[copied], entries[copied], int(now[NOW_STEP.value])
    states.known[:2, dst], states.chains[dst] = states.known[:2, src], states.chains[src]
    states.known[2, dst] = signed(step & MASK_32.value | site << 32)
    states.phases[dst] = states.phases[src]
    if states.compared:
        every = torch.arange(states.slices, device=src.device)
        which = every if states.compared == states.slices else states.phases[src, None]
        states.sums[:, dst[:, None] * states.slices + which] = states.sums[:, src[:, None] * states.slices + which]


follow_torch = partial(follow, launches=False)


@triton.jit(do_not_specialize=["n", "ring"])
def _describe_kernel(
    now,
    table,
    lengths,
    lines,
    seeds,
    step,
    live,
    entries,
    lens,
    known,
    chains,
    uids,
    judged,
    n,
    ring,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    number, rows = tl.load(step) & MASK_32, tl.load(live)
    if tl.program_id(0) == 0:
        tl.store(now + NOW_ROWS, rows)
        tl.store(now + NOW_STEP, number)
        tl.store(now + NOW_PLACE, number % ring)
        tl.store(judged, tl.load(judged) + rows)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    b_known = tl.load(known + o_n, mask=m_n, other=0)
    b_past = tl.where(b_known >= 0, b_known, tl.load(lens + o_n, mask=m_n, other=0))
    tl.store(table + o_n, tl.load(entries + o_n, mask=m_n, other=0), mask=m_n)
    tl.store(lengths + o_n, b_past + 1, mask=m_n)
    tl.store(lines + o_n * WIDTH + UID, tl.load(uids + o_n, mask=m_n, other=0), mask=m_n)
    tl.store(seeds + 2 * o_n, tl.load(chains + o_n, mask=m_n, other=0), mask=m_n)
    tl.store(seeds + 2 * o_n + 1, ((b_known >= 0) & (b_past > 0)).to(tl.int64), mask=m_n)


@triton.jit(do_not_specialize=["n", "parts", "most", "num_slots"])
def _note_kernel(
    left,
    live,
    entries,
    slots,
    positions,
    uids,
    records,
    n,
    parts,
    most,
    num_slots,
    COLUMN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    b_row = o_n // parts
    b_entry = tl.load(entries + o_n, mask=m_n, other=-1)
    tl.store(left + o_n, tl.where(b_row < tl.load(live), b_entry, -1), mask=m_n)
    tl.store(left + 2 * most + o_n, tl.load(positions + o_n, mask=m_n, other=0) + 1, mask=m_n)
    tl.store(left + 4 * most + o_n, tl.load(uids + b_row, mask=m_n, other=0), mask=m_n)
    b_slot = tl.minimum(tl.maximum(tl.load(slots + o_n, mask=m_n, other=0), 0), num_slots - 1)
    tl.store(left + 6 * most + o_n, tl.load(records + b_slot * COLUMNS + COLUMN, mask=m_n, other=0), mask=m_n)


@triton.jit(do_not_specialize=["num_entries", "sums_stride", "num_layers", "site"])
def _follow_kernel(
    known,
    chains,
    phases,
    sums,
    sources,
    entries,
    now,
    num_entries,
    sums_stride,
    num_layers,
    site,
    SLICES: tl.constexpr,
    COMPARED: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One slice of one state that was copied, and what is known of it."""
    i_n, i_slice = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source, entry = tl.load(sources + i_n), tl.load(entries + i_n)
    if entry < 0:
        return
    phase = tl.load(phases + source)
    if i_slice == 0:
        tl.store(known + entry, tl.load(known + source))
        tl.store(known + num_entries + entry, tl.load(known + num_entries + source))
        at_step = (tl.load(now + NOW_STEP) & MASK_32) | (tl.zeros([], tl.int64) + site) << 32
        tl.store(known + 2 * num_entries + entry, at_step)
        tl.store(chains + entry, tl.load(chains + source))
        tl.store(phases + entry, phase)
    if COMPARED > 0:
        o_l = tl.arange(0, BLOCK_L).to(tl.int64)
        m_l = o_l < num_layers
        which = i_slice if COMPARED == SLICES else phase
        b_sum = tl.load(sums + o_l * sums_stride + source * SLICES + which, mask=m_l, other=0)
        tl.store(sums + o_l * sums_stride + entry * SLICES + which, b_sum, mask=m_l)
