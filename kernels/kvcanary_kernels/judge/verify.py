"""Verify: judge the records of every entry that attention reads, along the index array that it reads."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_records
from kvcanary_kernels.record.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    LAYERS_HIGH,
    LAYERS_LOW,
    LOAD_FAILED,
    MULTIPLIER,
    NO_OWNER,
    QUARANTINED,
    R1,
    R2,
    R3,
    R4,
    R5,
    R7,
    R8,
    R11,
    R12,
    REQUEST_GENERATION,
    SEAL,
    SHARED,
    SHARED_OWNER,
    STEP_SITE,
    TOKEN_POSITION,
    high_word,
    live_count,
    low_word,
    programs_for,
    seal_of,
    tl,
    triton,
)
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import CODE_BITS, MASK_32, Keys, mix, signed
from kvcanary_kernels.record.seal import identity_words, seal_values
from kvcanary_kernels.record.table import segment_entries

ROOT = -1  # the segment's first entry continues its seed
NO_PREDECESSOR = -2  # the segment's first entry continues nothing known: R5 is not judged for it


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
    states: Tensor | None = None,
    owners: Tensor | None = None,
    readers: Tensor | None = None,
    step: Tensor | None = None,
    num_live: Tensor | None = None,
    group: int = 1,
    longest: int | None = None,
    launches: bool = True,
) -> None:
    """Write the check bits (record.CODE_BITS) of every entry of the given segments. May be captured.

    Entry j of segment s is indices[starts[s] + j]; it has position first_positions[s] + j and continues entry j - 1.
    Every check that fires sets its bit: R3, R4, R5 and R12 of what lies in the record,
    and those of device truth. R1 and R2 exclude every other one, and R7 excludes R12: that one speaks of pages whose
    grant is current. R5 is not judged where the predecessor itself is R1 or R2.

    records:         [num_slots, 8] int64
    indices:         [nnz] int64 slots, the very array that attention reads
    starts, lengths: [segments] int64, where in `indices` each segment lies (inside it; segments do not overlap)
    first_positions: [segments] int64
    predecessors:    [segments] int64, the slot that the first entry continues; ROOT (-1): it continues seeds[s];
                     NO_PREDECESSOR (-2): not judged
    seeds:           [segments] int64, chain value of the root; unused where a predecessor is given
    generations:     [num_pages] int64, current grant of each page (page = slot // page_size); the low 32 bits count
    layers:          [2] int64, bitmap of the layers that must be written
    codes:           [nnz] int64 out; entries outside the segments stay as they are
    num_live:        [1] int64, segments at and after it are padding; None: all live
    group:           so many segments, one behind the other, are likely to read alike: what one of them reads as the one
                     before it did is judged once. Codes are the same for every group that divides the segments
    longest:         entries that no segment exceeds, so that no more programs share one than it needs; None: not known

    Device truth, None where it is not fed; then its checks are not judged:
    states:          [num_pages] int64, record.FREE to record.SHARED (R7, R12)
    owners:          [num_pages] int64, uid, NO_OWNER or SHARED_OWNER; another request's private page is R8
    readers:         [segments] int64, uid of the request that reads; with `owners`
    step:            [1] int64, step of the reader; the low 32 bits count. A record of a later one is R11
    """
    n = starts.numel()
    if group < 1 or n % group:
        raise ValueError(f"group must divide {n} segments, got {group}")
    expect_records(records)
    expect_int64(indices.numel(), indices=indices, codes=codes)
    expect_int64(n, starts=starts, lengths=lengths, first_positions=first_positions)
    expect_int64(n, predecessors=predecessors, seeds=seeds, readers=readers)
    expect_int64(2, layers=layers)
    expect_int64(1, num_live=num_live, step=step)
    expect_int64(-(-records.shape[0] // page_size), generations=generations, states=states, owners=owners)
    if (owners is None) != (readers is None):
        raise ValueError("owners and readers must be fed together, got only one of them")
    if n == 0:
        return
    if launches:
        programs = programs_for(codes.numel() if longest is None else longest)
        _verify_kernel[(n // group, programs)](
            records,
            indices,
            starts,
            lengths,
            first_positions,
            predecessors,
            seeds,
            generations,
            layers,
            generations if states is None else states,
            generations if owners is None else owners,
            starts if readers is None else readers,
            layers if step is None else step,
            keys.constants,
            codes,
            starts if num_live is None else num_live,
            n,
            codes.numel(),
            records.shape[0],
            page_size,
            null_slots,
            pool_id,
            HAS_STATES=states is not None,
            HAS_OWNERS=owners is not None,
            HAS_STEP=step is not None,
            GROUP=group,
            BLOCK_N=BLOCK,
            HAS_LIVE=num_live is not None,
        )
        return
    live = n if num_live is None else max(int(num_live), 0)
    counts = lengths[:live].tolist()
    if not all(counts) or live < n:
        kept = lengths[:live].nonzero().squeeze(1)
        starts, lengths, first_positions, predecessors, seeds = (
            t.index_select(0, kept) for t in (starts, lengths, first_positions, predecessors, seeds)
        )
        readers = None if readers is None else readers.index_select(0, kept)
    if not sum(counts):
        return
    num_slots = records.shape[0]
    heads = lengths.cumsum(0).sub_(lengths)  # where each segment starts among the entries judged
    places, positions = segment_entries(lengths, sum(counts), starts, first_positions)
    readers = None if readers is None else readers.repeat_interleave(lengths)
    slots = indices.index_select(0, places)
    safe = slots.clamp(0, num_slots - 1)
    pages = safe // page_size
    held = records.index_select(0, safe)
    words = identity_words(held)
    found_tokens, found_positions, found_generations, found_steps = words[:, 0], words[:, 1], words[:, 5], words[:, 6]
    chains = held[:, record.CHAIN]
    continued = _continued_chains(records, chains, heads, predecessors, seeds)
    expected = mix(found_tokens, found_positions, keys).add_(continued, alpha=signed(keys.multiplier))
    current = (generations & MASK_32).index_select(0, pages)

    r1 = slots != safe
    r2 = safe < null_slots
    r3 = held[:, record.SEAL] != seal_values(words, safe, pool_id, keys)
    r4 = found_positions != positions
    r5 = chains != expected
    r7 = torch.zeros_like(r1)
    r12 = found_generations != current
    for column, bits in zip((record.LAYERS_LOW, record.LAYERS_HIGH), layers.tolist(), strict=True):
        if bits:
            r12 |= (held[:, column] & bits) != bits
    if states is not None:
        state = states.index_select(0, pages)
        r7 |= (state <= record.QUARANTINED) | (state > record.SHARED)
        r12 |= state <= record.LOAD_FAILED
    fired = {"R1": r1, "R2": r2, "R3": r3, "R4": r4, "R5": r5, "R12": r12}
    if states is not None:
        fired["R7"] = r7
        r12 &= ~r7
    if owners is not None:
        owner = owners.index_select(0, pages)
        is_private = (owner != record.NO_OWNER) & (owner != record.SHARED_OWNER)
        fired["R8"] = is_private & (owner != readers)
    if step is not None:
        fired["R11"] = (found_steps - step).to(torch.int32) > 0  # wraps
    found = torch.stack(tuple(fired.values()))
    if not found.count_nonzero():
        codes.index_fill_(0, places, 0)
        return
    found[1] &= ~r1
    found[2:] &= ~(r1 | r2)
    found[4] &= _judged(r1 | r2, heads, predecessors, num_slots, null_slots)
    weights = torch.tensor([CODE_BITS[code] for code in fired], device=codes.device)
    codes[places] = (found * weights[:, None]).sum(0)


verify_torch = partial(verify, launches=False)


@triton.jit(do_not_specialize=["num_segments", "num_codes"])
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
    states,
    owners,
    readers,
    step,
    constants,
    codes,
    num_live,
    num_segments,
    num_codes,
    num_slots,
    page_size,
    null_slots,
    pool_id,
    HAS_STATES: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    HAS_STEP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """A group's segments side by side, block by block: what one reads as the one before it did is judged so too."""
    i_group = tl.program_id(0).to(tl.int64) * GROUP
    end = tl.minimum(i_group + GROUP, live_count(num_live, num_segments, HAS_LIVE).to(tl.int64))
    longest = tl.zeros([], tl.int64)
    for i_segment in range(i_group, end):
        longest = tl.maximum(longest, tl.load(lengths + i_segment))
    i_first = tl.program_id(1).to(tl.int64) * BLOCK_N
    for i_block in range(i_first, longest, tl.num_programs(1) * BLOCK_N):
        o_j = i_block + tl.arange(0, BLOCK_N)
        last_slot, last_before, code = o_j, o_j, tl.zeros_like(o_j)
        last_position, last_seed, last_reader = longest, longest, longest
        m_last = o_j < 0  # of the one before: none
        for i_segment in range(i_group, end):
            o_n = tl.load(starts + i_segment) + o_j
            m_n = (o_j < tl.load(lengths + i_segment)) & (o_n >= 0) & (o_n < num_codes)
            slot = tl.load(indices + o_n, mask=m_n, other=-1)
            predecessor = tl.load(predecessors + i_segment)
            before = tl.load(indices + o_n - 1, mask=m_n & (o_j > 0), other=-1)
            before = tl.where(o_j > 0, before, predecessor)
            first_position = tl.load(first_positions + i_segment)
            seed = tl.load(seeds + i_segment)
            reader = tl.zeros([], tl.int64)
            if HAS_OWNERS:
                reader = tl.load(readers + i_segment)
            is_alike = (first_position == last_position) & (seed == last_seed) & (reader == last_reader)
            m_known = m_last & (slot == last_slot) & (before == last_before) & is_alike
            if tl.max((m_n & ~m_known).to(tl.int32)) > 0:
                code = _judge(
                    records,
                    slot,
                    before,
                    o_j,
                    m_n,
                    first_position,
                    (o_j == 0) & (predecessor == -1),
                    seed,
                    reader,
                    generations,
                    layers,
                    states,
                    owners,
                    step,
                    constants,
                    num_slots,
                    page_size,
                    null_slots,
                    pool_id,
                    HAS_STATES,
                    HAS_OWNERS,
                    HAS_STEP,
                )
            tl.store(codes + o_n, code, mask=m_n)
            last_slot, last_before, m_last = slot, before, m_n
            last_position, last_seed, last_reader = first_position, seed, reader


@triton.jit
def _judge(
    records,
    slot,
    before,
    o_j,
    m_n,
    first_position,
    is_root,
    seed,
    reader,
    generations,
    layers,
    states,
    owners,
    step,
    constants,
    num_slots,
    page_size,
    null_slots,
    pool_id,
    HAS_STATES: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    HAS_STEP: tl.constexpr,
):
    """Codes [BLOCK_N] int64 of a segment's entries `o_j`, which are these slots and continue those before."""
    row, m_read, _, owner, site, judged = judge_record(
        records, slot, before, m_n, first_position + o_j, is_root, seed, constants, num_slots, null_slots, pool_id
    )
    page = slot // page_size
    current = low_word(tl.load(generations + page, mask=m_read, other=0))
    low = tl.load(row + LAYERS_LOW, mask=m_read, other=0)
    high = tl.load(row + LAYERS_HIGH, mask=m_read, other=0)
    r7 = o_j < 0  # none
    r12 = high_word(owner) != current
    r12 |= ((tl.load(layers) & ~low) != 0) | ((tl.load(layers + 1) & ~high) != 0)
    if HAS_STATES:
        state = tl.load(states + page, mask=m_read, other=0)
        r7 |= (state <= QUARANTINED) | (state > SHARED)
        r12 |= state <= LOAD_FAILED
    r12 &= ~r7

    judged += tl.where(r7, R7, 0) + tl.where(r12, R12, 0)
    if HAS_OWNERS:
        page_owner = tl.load(owners + page, mask=m_read, other=0)
        is_private = (page_owner != NO_OWNER) & (page_owner != SHARED_OWNER)
        judged += tl.where(is_private & (page_owner != reader), R8, 0)
    if HAS_STEP:
        steps_later = (low_word(site) - tl.load(step)).to(tl.int32)  # wraps
        judged += tl.where(steps_later > 0, R11, 0)
    return refused_or(judged, slot, num_slots, null_slots)


@triton.jit
def judge_record(records, slot, before, m_n, position, is_root, seed, constants, num_slots, null_slots, pool_id):
    """What the records of entries say by themselves, whoever has the page: R3, R4, and R5 where `before` has a record.

    Gives where each record lies, which are read, their columns chain, request and step, and the bits; those of entries
    that are not read mean nothing (`refused_or`).
    """
    m_read = m_n & (slot >= null_slots) & (slot < num_slots)
    row = records + slot * COLUMNS
    token_position = tl.load(row + TOKEN_POSITION, mask=m_read, other=0)
    chain = tl.load(row + CHAIN, mask=m_read, other=0)
    owner = tl.load(row + REQUEST_GENERATION, mask=m_read, other=0)
    site = tl.load(row + STEP_SITE, mask=m_read, other=0)
    seal = tl.load(row + SEAL, mask=m_read, other=0)
    r3 = seal != seal_of(token_position, chain, owner, site, slot, pool_id, constants)
    r4 = high_word(token_position) != position

    m_before = (before >= null_slots) & (before < num_slots)
    continued = tl.load(records + before * COLUMNS + CHAIN, mask=m_read & m_before, other=0)
    continued = tl.where(is_root, seed, continued)
    expected = device_mix(low_word(token_position), high_word(token_position), constants)
    expected += tl.load(constants + MULTIPLIER) * continued
    r5 = (chain != expected) & (is_root | m_before)
    return row, m_read, chain, owner, site, tl.where(r3, R3, 0) + tl.where(r4, R4, 0) + tl.where(r5, R5, 0)


@triton.jit
def refused_or(bits, slot, num_slots, null_slots):
    """int64: R1 and R2, which exclude every other code, or these bits."""
    return tl.where((slot < 0) | (slot >= num_slots), R1, tl.where(slot < null_slots, R2, bits)).to(tl.int64)


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
