"""Verify: judge the records of every entry that attention reads, along the index array that it reads."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels import record
from kvcanary_kernels.checks import expect_int64, expect_records
from kvcanary_kernels.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    LAYERS_HIGH,
    LAYERS_LOW,
    MULTIPLIER,
    R1,
    R2,
    R3,
    R4,
    R5,
    R12,
    REQUEST_GENERATION,
    SEAL,
    STEP_SITE,
    TOKEN_POSITION,
    high_word,
    live_count,
    low_word,
    seal_of,
    tl,
    triton,
)
from kvcanary_kernels.device import mix as device_mix
from kvcanary_kernels.record import MASK_32, Keys, mix, signed
from kvcanary_kernels.seal import identity_words, seal_values

ROOT = -1  # the segment's first entry continues its seed
NO_PREDECESSOR = -2  # the segment's first entry continues nothing known: R5 is not judged for it
PROGRAMS_PER_SEGMENT = 8  # a fixed grid, whatever the lengths on the device


def verify(
    records: Tensor,
    indices: Tensor,
    *,
    starts: Tensor,
    lengths: Tensor,
    first_positions: Tensor,
    predecessors: Tensor,
    seeds: Tensor,
    generations: Tensor,
    layers: Tensor,
    page_size: int,
    null_slots: int,
    pool_id: int,
    keys: Keys,
    codes: Tensor,
    num_live: Tensor | None = None,
) -> None:
    """Write the check bits (record.CODE_BITS) of every entry of the given segments. May be captured.

    Entry j of segment s is indices[starts[s] + j], has position first_positions[s] + j and continues entry j - 1.
    R1 and R2 exclude every other bit. R5 is not judged where the predecessor itself is R1 or R2.

    records:         [num_slots, 8] int64
    indices:         [nnz] int64 slots, the very array that attention reads
    starts, lengths: [segments] int64, where in `indices` each segment lies (inside it; segments do not overlap)
    first_positions: [segments] int64
    predecessors:    [segments] int64, the slot that the first entry continues; ROOT (-1): it continues seeds[s];
                     NO_PREDECESSOR (-2): not judged
    seeds:           [segments] int64, chain value of the root; unused where a predecessor is given
    generations:     [num_pages] int64, current grant of each page (page = slot // page_size)
    layers:          [2] int64, bitmap of the layers that must be written
    codes:           [nnz] int64 out; entries outside the segments stay as they are
    num_live:        [1] int64, segments at and after it are padding; None: all live
    """
    _check(
        records,
        indices,
        starts,
        lengths,
        first_positions,
        predecessors,
        seeds,
        generations,
        layers,
        page_size,
        codes,
        num_live,
    )
    if starts.numel() == 0:
        return
    _verify_kernel[(starts.numel(), PROGRAMS_PER_SEGMENT)](
        records,
        indices,
        starts,
        lengths,
        first_positions,
        predecessors,
        seeds,
        generations,
        layers,
        keys.constants,
        codes,
        starts if num_live is None else num_live,
        starts.numel(),
        indices.numel(),
        records.shape[0],
        page_size,
        null_slots,
        pool_id,
        BLOCK_N=BLOCK,
        HAS_LIVE=num_live is not None,
    )


def verify_torch(
    records: Tensor,
    indices: Tensor,
    *,
    starts: Tensor,
    lengths: Tensor,
    first_positions: Tensor,
    predecessors: Tensor,
    seeds: Tensor,
    generations: Tensor,
    layers: Tensor,
    page_size: int,
    null_slots: int,
    pool_id: int,
    keys: Keys,
    codes: Tensor,
    num_live: Tensor | None = None,
) -> None:
    """The torch reference of `verify`."""
    _check(
        records,
        indices,
        starts,
        lengths,
        first_positions,
        predecessors,
        seeds,
        generations,
        layers,
        page_size,
        codes,
        num_live,
    )
    live = starts.numel() if num_live is None else max(int(num_live), 0)
    counts = lengths[:live].tolist()
    if not all(counts) or live < starts.numel():
        kept = lengths[:live].nonzero().squeeze(1)
        starts, lengths, first_positions, predecessors, seeds = (
            t.index_select(0, kept) for t in (starts, lengths, first_positions, predecessors, seeds)
        )
    if not sum(counts):
        return
    num_slots = records.shape[0]
    heads = lengths.cumsum(0).sub_(lengths)  # where each segment starts among the entries judged
    where, positions = _entries(heads, starts, lengths, first_positions, sum(counts))
    slots = indices.index_select(0, where)
    safe = slots.clamp(0, num_slots - 1)
    rows = records.index_select(0, safe)
    words = identity_words(rows)
    found_tokens, found_positions, found_generations = words[:, 0], words[:, 1], words[:, 5]
    chains = rows[:, record.CHAIN]
    continued = _continued_chains(records, chains, heads, predecessors, seeds)
    expected = mix(found_tokens, found_positions, keys).add_(continued, alpha=signed(keys.multiplier))

    r1 = slots != safe
    r2 = safe < null_slots
    r3 = rows[:, record.SEAL] != seal_values(words, safe, pool_id, keys)
    r4 = found_positions != positions
    r5 = chains != expected
    r12 = found_generations != (generations & MASK_32).index_select(0, safe // page_size)
    for column, bits in zip((record.LAYERS_LOW, record.LAYERS_HIGH), layers.tolist(), strict=True):
        if bits:
            r12 |= (rows[:, column] & bits) != bits
    found = torch.stack((r1, r2, r3, r4, r5, r12))
    if not found.count_nonzero():
        codes.index_fill_(0, where, 0)
        return
    found[1] &= ~r1
    found[2:] &= ~(r1 | r2)
    found[4] &= _judged(r1 | r2, heads, predecessors, num_slots, null_slots)
    weights = torch.tensor(list(record.CODE_BITS.values()), device=codes.device)
    codes[where] = (found * weights[:, None]).sum(0)


@triton.jit(do_not_specialize=["num_segments", "num_indices"])
def _verify_kernel(
    records,
    indices,
    starts,
    lengths,
    first_positions,
    predecessors,
    seeds,
    generations,
    layers,
    constants,
    codes,
    num_live,
    num_segments,
    num_indices,
    num_slots,
    page_size,
    null_slots,
    pool_id,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    i_segment = tl.program_id(0).to(tl.int64)
    if i_segment >= live_count(num_live, num_segments, HAS_LIVE):
        return
    start = tl.load(starts + i_segment)
    length = tl.load(lengths + i_segment)
    first_position = tl.load(first_positions + i_segment)
    predecessor = tl.load(predecessors + i_segment)
    seed = tl.load(seeds + i_segment)
    i_first = tl.program_id(1).to(tl.int64) * BLOCK_N
    for i_block in range(i_first, length, tl.num_programs(1) * BLOCK_N):
        o_j = i_block + tl.arange(0, BLOCK_N)
        o_n = start + o_j
        m_n = (o_j < length) & (o_n >= 0) & (o_n < num_indices)
        slot = tl.load(indices + o_n, mask=m_n, other=-1)
        before = tl.load(indices + o_n - 1, mask=m_n & (o_j > 0), other=predecessor)
        r1 = (slot < 0) | (slot >= num_slots)
        r2 = (slot >= 0) & (slot < null_slots)
        m_read = m_n & ~r1 & ~r2
        row = records + slot * COLUMNS
        token_position = tl.load(row + TOKEN_POSITION, mask=m_read, other=0)
        chain = tl.load(row + CHAIN, mask=m_read, other=0)
        owner = tl.load(row + REQUEST_GENERATION, mask=m_read, other=0)
        site = tl.load(row + STEP_SITE, mask=m_read, other=0)
        seal = tl.load(row + SEAL, mask=m_read, other=0)
        r3 = seal != seal_of(token_position, chain, owner, site, slot, pool_id, constants)
        r4 = high_word(token_position) != first_position + o_j

        is_root = (o_j == 0) & (predecessor == -1)
        m_before = (before >= null_slots) & (before < num_slots)
        continued = tl.load(records + before * COLUMNS + CHAIN, mask=m_read & m_before, other=0)
        continued = tl.where(is_root, seed, continued)
        expected = device_mix(low_word(token_position), high_word(token_position), constants)
        expected += tl.load(constants + MULTIPLIER) * continued
        r5 = (chain != expected) & (is_root | m_before)

        granted = tl.load(generations + slot // page_size, mask=m_read, other=0)
        low = tl.load(row + LAYERS_LOW, mask=m_read, other=0)
        high = tl.load(row + LAYERS_HIGH, mask=m_read, other=0)
        r12 = high_word(owner) != low_word(granted)
        r12 |= ((tl.load(layers) & ~low) != 0) | ((tl.load(layers + 1) & ~high) != 0)

        judged = tl.where(r3, R3, 0) + tl.where(r4, R4, 0) + tl.where(r5, R5, 0) + tl.where(r12, R12, 0)
        code = tl.where(r1, R1, tl.where(r2, R2, judged))
        tl.store(codes + o_n, code.to(tl.int64), mask=m_n)


def _entries(heads: Tensor, starts: Tensor, lengths: Tensor, first_positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """For every entry of every segment: its place in `indices`, and its position."""
    shifts = torch.stack((starts, first_positions)).sub_(heads)
    shifts = torch.repeat_interleave(shifts, lengths, dim=1, output_size=n)
    where, positions = shifts.add_(torch.arange(n, device=shifts.device))
    return where, positions


def _continued_chains(records: Tensor, chains: Tensor, heads: Tensor, predecessors: Tensor, seeds: Tensor) -> Tensor:
    """The chain value that each entry continues: the entry before it, at a head the predecessor's or the seed."""
    first = records[:, record.CHAIN].index_select(0, predecessors.clamp(0, records.shape[0] - 1))
    continued = chains.roll(1)
    continued[heads] = torch.where(predecessors == ROOT, seeds, first)
    return continued


def _judged(refused: Tensor, heads: Tensor, predecessors: Tensor, num_slots: int, null_slots: int) -> Tensor:
    """Where R5 can be judged: the predecessor is a root or a slot of the pool that is not a null slot."""
    judged = ~refused.roll(1)
    judged[heads] = (predecessors == ROOT) | ((predecessors >= null_slots) & (predecessors < num_slots))
    return judged


def _check(
    records: Tensor,
    indices: Tensor,
    starts: Tensor,
    lengths: Tensor,
    first_positions: Tensor,
    predecessors: Tensor,
    seeds: Tensor,
    generations: Tensor,
    layers: Tensor,
    page_size: int,
    codes: Tensor,
    num_live: Tensor | None,
) -> None:
    expect_records(records)
    expect_int64(indices.numel(), indices=indices, codes=codes)
    expect_int64(
        starts.numel(),
        starts=starts,
        lengths=lengths,
        first_positions=first_positions,
        predecessors=predecessors,
        seeds=seeds,
    )
    expect_int64(2, layers=layers)
    expect_int64(1, num_live=num_live)
    expect_int64(-(-records.shape[0] // page_size), generations=generations)
