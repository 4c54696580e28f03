"""Count: add the codes of a verification to the header of findings, per check and per row, and keep the first ones."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_dense, expect_int64
from kvcanary_kernels.record.device import live_count, low_word, programs_for, tl, triton
from kvcanary_kernels.record.layout import MASK_32
from kvcanary_kernels.record.table import segment_entries

NUM_BITS = 64
ENTRY, SLOT, ROW, STEP = range(4)  # columns of `first`
UNSET = (2**63 - 1, -1, -1, -1)  # of a check that never fired: the entry is where a minimum starts
SCAN_N = 512  # entries that are asked at once whether anything fired
MOST_PROGRAMS = 1024  # of all segments: they run beside a forward, whose blocks wait for them
DEVICE_NUM_BITS = tl.constexpr(NUM_BITS)
DEVICE_ENTRY, DEVICE_SLOT, DEVICE_ROW, DEVICE_STEP = map(tl.constexpr, (ENTRY, SLOT, ROW, STEP))
NO_ENTRY = tl.constexpr(UNSET[ENTRY])


def count(
    codes: Tensor,
    indices: Tensor,
    *,
    starts: Tensor,
    lengths: Tensor,
    step: Tensor,
    counts: Tensor,
    first: Tensor,
    row_violations: Tensor,
    arrivals: Tensor,
    row_ids: Tensor | None = None,
    num_live: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Count what verify found in the given segments. May be captured; the order of programs changes nothing.

    codes:           [nnz] int64, as verify wrote them; entries outside the segments are not looked at
    indices, starts, lengths: as verify took them
    step:            [1] int64, stored with a first finding; the low 32 bits count
    counts:          [64] int64, bit b of the codes: += entries that have it (record.CODE_BITS)
    first:           [64, 4] int64, for each bit the entry (its place in `codes`), slot, row and step of its first
                     finding: the smallest entry of the first launch that had one, never overwritten. UNSET before
                     (unset_first). A slot outside the pool is the one that was asked for
    row_violations:  [rows] int64, += entries of the row with any bit
    arrivals:        [1] int64, zero before and afterwards; a launch's own
    row_ids:         [segments] int64, row of each segment, one that is not in [0, rows) is counted for none; None:
                     segment s is row s
    num_live:        [1] int64, segments at and after it are padding; None: all live
    """
    num_segments = starts.numel()
    expect_int64(indices.numel(), indices=indices, codes=codes)
    expect_int64(num_segments, starts=starts, lengths=lengths, row_ids=row_ids)
    expect_int64(1, step=step, arrivals=arrivals, num_live=num_live)
    expect_int64(NUM_BITS, counts=counts)
    expect_int64(row_violations.numel(), row_violations=row_violations)
    expect_dense((NUM_BITS, 4), first=first)
    if num_segments == 0:
        return
    if launches:
        programs = max(1, min(programs_for(codes.numel(), SCAN_N), MOST_PROGRAMS // num_segments))
        _count_kernel[(num_segments, programs)](
            codes,
            indices,
            starts,
            lengths,
            step,
            counts,
            first,
            row_violations,
            arrivals,
            starts if row_ids is None else row_ids,
            starts if num_live is None else num_live,
            num_segments,
            codes.numel(),
            row_violations.numel(),
            HAS_ROW_IDS=row_ids is not None,
            SCAN_N=SCAN_N,
            HAS_LIVE=num_live is not None,
        )
        return
    live = num_segments if num_live is None else max(int(num_live), 0)
    starts, lengths = starts[:live], lengths[:live]
    segments = torch.arange(starts.numel(), device=starts.device).repeat_interleave(lengths)
    (entries,) = segment_entries(lengths, segments.numel(), starts)
    violation = codes[entries].nonzero().squeeze(1)
    if not violation.numel():
        return
    entries, segments = entries[violation], segments[violation]
    rows = segments if row_ids is None else row_ids[segments]
    counted = rows[(rows >= 0) & (rows < row_violations.numel())]
    row_violations.index_add_(0, counted, torch.ones_like(counted))

    fired = (codes[entries, None] >> torch.arange(NUM_BITS, device=codes.device)) & 1
    counts += fired.sum(0)
    new = (fired.any(0) & (first[:, STEP] < 0)).nonzero().squeeze(1)
    smallest = torch.where(fired[:, new] == 1, entries[:, None], UNSET[ENTRY]).argmin(0)
    first[new, ENTRY] = entries[smallest]
    first[new, SLOT] = indices[entries[smallest]]
    first[new, ROW] = rows[smallest]
    first[new, STEP] = step & MASK_32


count_torch = partial(count, launches=False)


@triton.jit(do_not_specialize=["num_segments", "num_codes", "num_row_ids"])
def _count_kernel(
    codes,
    indices,
    starts,
    lengths,
    step,
    counts,
    first,
    row_violations,
    arrivals,
    row_ids,
    num_live,
    num_segments,
    num_codes,
    num_row_ids,
    HAS_ROW_IDS: tl.constexpr,
    SCAN_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """Every program counts, and lowers the entry of each new bit; the one that comes last completes what is new.

    Bit by bit, where anything fired: a tile of bits and entries would take so many registers, fired or not, that no
    block of a forward runs beside this one.
    """
    i_segment = tl.program_id(0).to(tl.int64)
    live = live_count(num_live, num_segments, HAS_LIVE).to(tl.int64)
    m_live = i_segment < live
    start = tl.load(starts + i_segment, mask=m_live, other=0)
    length = tl.load(lengths + i_segment, mask=m_live, other=0)
    for i_scan in range(tl.program_id(1).to(tl.int64) * SCAN_N, length, tl.num_programs(1) * SCAN_N):
        o_j = i_scan + tl.arange(0, SCAN_N)
        o_n = start + o_j
        m_n = (o_j < length) & (o_n >= 0) & (o_n < num_codes)
        code = tl.load(codes + o_n, mask=m_n, other=0)
        num_violations = tl.sum((code != 0).to(tl.int32), 0)
        if num_violations > 0:
            row_id = _row_of(row_ids, i_segment, HAS_ROW_IDS)
            m_row = (row_id >= 0) & (row_id < num_row_ids)
            tl.atomic_add(row_violations + row_id, num_violations.to(tl.int64), mask=m_row)
            for i_bit in range(DEVICE_NUM_BITS):
                fired = ((code >> i_bit) & 1) != 0
                bit_violations = tl.sum(fired.to(tl.int32), 0)
                if bit_violations > 0:
                    tl.atomic_add(counts + i_bit, bit_violations.to(tl.int64))
                    if tl.load(first + 4 * i_bit + DEVICE_STEP) < 0:
                        tl.atomic_min(first + 4 * i_bit + DEVICE_ENTRY, tl.min(tl.where(fired, o_n, NO_ENTRY), 0))

    if tl.atomic_add(arrivals, 1) < tl.num_programs(0) * tl.num_programs(1) - 1:
        return
    tl.store(arrivals, 0)
    row_first = first + 4 * tl.arange(0, DEVICE_NUM_BITS)
    is_new = (tl.load(row_first + DEVICE_ENTRY) < NO_ENTRY) & (tl.load(row_first + DEVICE_STEP) < 0)
    if tl.max(is_new.to(tl.int32), 0) == 0:
        return
    for i_bit in range(DEVICE_NUM_BITS):
        own = first + 4 * i_bit
        entry = tl.load(own + DEVICE_ENTRY)
        if (entry < NO_ENTRY) & (tl.load(own + DEVICE_STEP) < 0):
            segment = tl.zeros([], tl.int64)
            for i_block in range(0, live, SCAN_N):
                o_s = i_block + tl.arange(0, SCAN_N)
                place = entry - tl.load(starts + o_s, mask=o_s < live, other=0)
                is_in = (place >= 0) & (place < tl.load(lengths + o_s, mask=o_s < live, other=0))
                segment += tl.sum(tl.where(is_in, o_s, 0), 0)
            tl.store(own + DEVICE_SLOT, tl.load(indices + entry))
            tl.store(own + DEVICE_ROW, _row_of(row_ids, segment, HAS_ROW_IDS))
            tl.store(own + DEVICE_STEP, low_word(tl.load(step)))


@triton.jit
def _row_of(row_ids, segment, HAS_ROW_IDS: tl.constexpr):
    if HAS_ROW_IDS:
        segment = tl.load(row_ids + segment)
    return segment


def unset_first(device: torch.device | str = "cpu") -> Tensor:
    """[64, 4] int64: `first` before any finding."""
    return torch.tensor(UNSET, device=device).repeat(NUM_BITS, 1)
