"""Settle: when the body has run, judge what every entry stored and read as its own, and count what was covered."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.judge.forward import ForwardPlan, Planned
from kvcanary_kernels.judge.plan import NO_CLAIM
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_records
from kvcanary_kernels.record.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    LAYERS_HIGH,
    LAYERS_LOW,
    N1,
    R5,
    R6,
    R12,
    STORED_NOT_FINITE,
    STORED_TWICE,
    W4,
    live_count,
    programs_for,
    tl,
    triton,
)
from kvcanary_kernels.record.layout import CODE_BITS
from kvcanary_kernels.record.table import device_entry_at, entry_at

RUN_ROWS, RUN_WRITTEN, RUN_READ = range(3)  # of `runs`
NUM_RUNS = 3
DEVICE_NO_CLAIM = tl.constexpr(NO_CLAIM)
DEVICE_RUN_ROWS, DEVICE_RUN_WRITTEN, DEVICE_RUN_READ = map(tl.constexpr, (RUN_ROWS, RUN_WRITTEN, RUN_READ))


def settle(
    forward: ForwardPlan,
    planned: Planned,
    *,
    records: Tensor,
    expected: Tensor,
    layers: Tensor,
    claims: Tensor,
    twice: Tensor,
    codes: Tensor,
    runs: Tensor,
    null_slots: int,
    launches: bool = True,
) -> None:
    """Judge layers (R12, W4, N1), own entries and lineages (R5), and row truths (R6) of live rows. May be captured;
    after verify.

    forward, planned: as `plan` left them; planned.codes: R12 where a layer stored nothing, W4 where one stored twice,
                N1 where what one stored is not finite
    records:    [num_slots, 8] int64, sealed and stored
    expected:   [num_slots, 8] int64, the entries' records are copied there
    layers:     [2] int64, bitmap of all layers
    claims:     [num_slots] int64, claims of this forward are withdrawn
    twice:      [entries] int64, as attest left it; zero again afterwards
    codes:      [nnz] int64, read codes as verify left them. R5 is added where a row reads, as its own entry, a slot
                with another chain, and where what it reads before its own entries is not what its lineage goes on from
                (planned.seeds); R6 at the last entry of a prefix that is not the row's truth
    runs:       [NUM_RUNS] int64, += rows, entries written, entries read of live rows
    """
    rows, entries = forward.num_rows, forward.num_entries
    expect_records(records)
    expect_records(expected)
    expect_int64(2, layers=layers)
    expect_int64(records.shape[0], claims=claims)
    expect_int64(entries, twice=twice, safe_slots=planned.safe_slots)
    expect_int64(forward.capacity, codes=codes)
    expect_int64(NUM_RUNS, runs=runs)
    if rows == 0:
        return
    if launches:
        starts = forward.row_starts
        _settle_kernel[(rows, programs_for(entries))](
            forward.indices,
            starts,
            forward.bounds,
            forward.prefix_lens,
            starts if forward.truths is None else forward.truths,
            forward.num_live,
            planned.read_lengths,
            planned.row_lengths,
            planned.seeds,
            planned.safe_slots,
            planned.asked,
            planned.places,
            planned.codes,
            records,
            expected,
            layers,
            claims,
            twice,
            codes,
            runs,
            rows,
            entries,
            codes.numel(),
            records.shape[0],
            null_slots,
            HAS_TRUTHS=forward.truths is not None,
            HAS_LINEAGE=forward.lineage is not None,
            BLOCK_N=BLOCK,
        )
        return
    live = min(max(int(forward.num_live), 0), rows)
    n, num_slots = int(planned.live_entries), records.shape[0]
    runs += torch.stack((forward.num_live.new_tensor(live), planned.live_entries[0], planned.row_lengths[:live].sum()))
    if forward.truths is not None:
        last = forward.prefix_lens[:live] - 1
        _judge_chains(forward, planned, last, forward.truths[:live], "R6", records, codes, null_slots)
    if forward.lineage is not None:
        last = planned.read_lengths[:live] - 1
        _judge_chains(forward, planned, last, planned.seeds[:live], "R5", records, codes, null_slots)
    asked, safe = planned.asked[:n], planned.safe_slots[:n]
    claims[asked[(asked >= 0) & (asked < num_slots)]] = NO_CLAIM
    planned.codes[:n] |= torch.where((twice[:n] & record.STORED_TWICE) != 0, CODE_BITS["W4"], 0)
    planned.codes[:n] |= torch.where((twice[:n] & record.STORED_NOT_FINITE) != 0, CODE_BITS["N1"], 0)
    twice[:n] = 0
    sealed = (safe >= 0).nonzero().flatten()
    slots = safe[sealed]
    bitmaps = slice(record.LAYERS_LOW, record.LAYERS_HIGH + 1)
    missing = ((records[slots, bitmaps] & layers) != layers).any(1)
    planned.codes[sealed[missing]] |= CODE_BITS["R12"]
    expected[slots] = records[slots]

    places = planned.places[:n][sealed]
    read = entry_at(forward.indices, places)
    judged = (read >= null_slots) & (read < num_slots)
    chains = records[:, record.CHAIN]
    astray = judged & (chains[read.clamp(0, num_slots - 1)] != chains[slots])
    codes[places[astray]] |= CODE_BITS["R5"]


settle_torch = partial(settle, launches=False)


@triton.jit(do_not_specialize=["num_rows", "num_entries", "num_codes"])
def _settle_kernel(
    indices,
    row_starts,
    bounds,
    prefix_lens,
    truths,
    num_live,
    read_lengths,
    row_lengths,
    seeds,
    safe_slots,
    asked,
    places,
    plan_codes,
    records,
    expected,
    layers,
    claims,
    twice,
    codes,
    runs,
    num_rows,
    num_entries,
    num_codes,
    num_slots,
    null_slots,
    HAS_TRUTHS: tl.constexpr,
    HAS_LINEAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1).to(tl.int64)
    if i_row >= live_count(num_live, num_rows, True):
        return
    first = tl.load(bounds + i_row)
    written = tl.maximum(tl.load(bounds + i_row + 1) - first, 0)
    if i_part == 0:
        tl.atomic_add(runs + DEVICE_RUN_ROWS, tl.full([], 1, tl.int64), sem="relaxed")
        tl.atomic_add(runs + DEVICE_RUN_WRITTEN, written, sem="relaxed")
        tl.atomic_add(runs + DEVICE_RUN_READ, tl.load(row_lengths + i_row), sem="relaxed")
        start = tl.load(row_starts + i_row)
        read = tl.load(read_lengths + i_row)
        if HAS_TRUTHS:
            last = tl.load(prefix_lens + i_row) - 1
            m_row = (last >= 0) & (last < read)
            wanted = tl.load(truths + i_row)
            _judge_chain(records, codes, indices, start + last, m_row, wanted, R6, num_slots, num_codes, null_slots)
        if HAS_LINEAGE:
            last = read - 1
            wanted = tl.load(seeds + i_row)
            _judge_chain(records, codes, indices, start + last, last >= 0, wanted, R5, num_slots, num_codes, null_slots)

    low = tl.load(layers)
    high = tl.load(layers + 1)
    for i_block in range(i_part * BLOCK_N, written, tl.num_programs(1) * BLOCK_N):
        o_e = first + i_block + tl.arange(0, BLOCK_N)
        m_e = (o_e < first + written) & (o_e >= 0) & (o_e < num_entries)
        slot = tl.load(safe_slots + o_e, mask=m_e, other=-1)
        m_sealed = m_e & (slot >= 0)
        claimed = tl.load(asked + o_e, mask=m_e, other=-1)
        m_claimed = m_e & (claimed >= 0) & (claimed < num_slots)
        tl.store(claims + claimed, tl.zeros_like(slot) + DEVICE_NO_CLAIM, mask=m_claimed)
        row = slot * COLUMNS
        low_bits = tl.load(records + row + LAYERS_LOW, mask=m_sealed, other=0)
        high_bits = tl.load(records + row + LAYERS_HIGH, mask=m_sealed, other=0)
        missing = m_sealed & (((low & ~low_bits) != 0) | ((high & ~high_bits) != 0))
        stored = tl.load(twice + o_e, mask=m_e, other=0)
        is_wrong = stored != 0
        tl.store(twice + o_e, tl.zeros_like(slot), mask=m_e & is_wrong)
        code = tl.load(plan_codes + o_e, mask=m_e, other=0)
        code |= tl.where(missing, R12, 0) | tl.where((stored & STORED_TWICE) != 0, W4, 0)
        code |= tl.where((stored & STORED_NOT_FINITE) != 0, N1, 0)
        tl.store(plan_codes + o_e, code, mask=m_e & (missing | is_wrong))

        place = tl.load(places + o_e, mask=m_e, other=-1)
        read = device_entry_at(indices, place, m_sealed, num_codes)
        m_read = m_sealed & (read >= null_slots) & (read < num_slots)
        chain = tl.load(records + row + CHAIN, mask=m_sealed, other=0)
        astray = m_read & (tl.load(records + read * COLUMNS + CHAIN, mask=m_read, other=0) != chain)
        tl.store(codes + place, tl.load(codes + place, mask=astray, other=0) | R5, mask=astray)
        for i_column in tl.static_range(COLUMNS):
            value = tl.load(records + row + i_column, mask=m_sealed, other=0)
            tl.store(expected + row + i_column, value, mask=m_sealed)


@triton.jit
def _judge_chain(records, codes, indices, place, m_row, wanted, code: tl.constexpr, num_slots, num_codes, null_slots):
    """The code where the entry that a row reads at this place has not the chain that is wanted there."""
    slot = device_entry_at(indices, place, m_row, num_codes)
    m_row &= (slot >= null_slots) & (slot < num_slots)
    chain = tl.load(records + slot * COLUMNS + CHAIN, mask=m_row, other=0)
    m_row &= chain != wanted
    tl.store(codes + place, tl.load(codes + place, mask=m_row, other=0) | code, mask=m_row)


def _judge_chains(
    forward: ForwardPlan,
    planned: Planned,
    last: Tensor,
    wanted: Tensor,
    code: str,
    records: Tensor,
    codes: Tensor,
    null_slots: int,
) -> None:
    """A code where the entry that a live row reads at this place [live] has not the chain that is wanted there."""
    live = len(last)
    inside = (last >= 0) & (last < planned.read_lengths[:live])
    places = torch.where(inside, forward.row_starts[:live] + last, -1)
    slots = entry_at(forward.indices, places)
    judged = (slots >= null_slots) & (slots < records.shape[0])
    wrong = judged & (records[:, record.CHAIN][slots.clamp(0, records.shape[0] - 1)] != wanted)
    codes[places[wrong]] |= CODE_BITS[code]
