"""Advance: what a forward is about to write into watched pools, recorded before it does, and how its rows go on."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.chain import chain_scan_torch
from kvcanary_kernels.record.device import BLOCK, CHAIN, COLUMNS, INVERSES, TOKEN_POSITION, low_word, pair, tl, triton
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.seal import seal_torch, store_record
from kvcanary_kernels.record.table import PageTable, device_slot_at, slot_at
from kvcanary_kernels.watch.walk import (
    END,
    EVERYBODYS,
    FIRST_TAIL,
    GIVEN_BACK,
    KNOWN,
    NONE,
    NOT_FOLLOWED,
    NOW_PLACE,
    NOW_ROWS,
    NOW_SITE,
    NOW_STEP,
    SHARED_WRITER,
    TAILS,
    TURN,
    UID,
    UNJUDGED,
    Rows,
    Truth,
    Watched,
    context_lengths,
    lines_of,
    live_rows,
    note,
    tell,
    tell_torch,
    violation_bit,
)

FILLED_STAMP = 1  # of a slot whose bytes are of no entry, but known: a pattern fills it
FILLED = tl.constexpr(FILLED_STAMP)
W1 = tl.constexpr(violation_bit("W1"))
W2 = tl.constexpr(violation_bit("W2"))
W3 = tl.constexpr(violation_bit("W3"))
W5 = tl.constexpr(violation_bit("W5"))
W6 = tl.constexpr(violation_bit("W6"))
W7 = tl.constexpr(violation_bit("W7"))


class Fed(NamedTuple):
    """What a forward writes: [n] tokens, positions and slots, int32 or int64.

    all_tokens, num_tokens: [rows of Truth, width] and [rows of Truth], tokens that the engine knows; None: nobody does
    ahead:   of drafts, at most so many are fed behind these
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    all_tokens: Tensor | None = None
    num_tokens: Tensor | None = None
    ahead: int = 0


class Overwritten(NamedTuple):
    """What lay in the slots that a forward is about to write, in pools of layers that share these slots.

    stamps: by pool, [num_slots] int64, as `take` writes them, or FILLED_STAMP;  ptrs: [pools] int64, their addresses
    is_another: [ring, >= n] int64 out: bit p: of this slot bytes were taken in pool p, and they are not of the token
                that is to be stored now: bytes that are the same afterwards were not stored
    """

    stamps: tuple[Tensor, ...]
    ptrs: Tensor
    is_another: Tensor

    @classmethod
    def of(cls, stamps: Sequence[Tensor], ring: int, n: int) -> Overwritten:
        """Of these pools, for the last `ring` forwards of at most `n` entries."""
        ptrs = torch.tensor([own.data_ptr() for own in stamps], device=stamps[0].device)
        return cls(tuple(stamps), ptrs, stamps[0].new_zeros(ring, n))


def advance(
    watched: Watched,
    rows: Rows,
    fed: Fed,
    truth: Truth,
    *,
    seeds: Tensor,
    slots: Tensor,
    chains: Tensor,
    violations: Tensor,
    overwritten: Overwritten | None = None,
    is_first: bool = True,
    launches: bool = True,
) -> None:
    """Record what a forward is about to write, and follow its rows. No allocation, no wait.

    seeds:  [>= rows, 2] int64 out, chain of what each row has so far, as the canary knows it, and whether it does
    slots:  [ring, >= n] int64 out, in the line of this step where it writes; -1 where a record would lie outside the
            pool or in a null slot
    chains: [ring, >= n] int64 out, chain of each entry
    violations:   [ring, >= rows] int64, NO_VIOLATION or lower before; in the cell of this step the first violation of
            each row: W1, W2, W3, W5, W6, W7 (W4 is for who takes the fingerprints)
    overwritten: of layers that are stored in these slots; None: nobody asks
    is_first: False: the rows were followed already, in another pool: `seeds` are true, and the truth is of after this
              forward
    """
    if launches:
        has_tokens = fed.all_tokens is not None
        known, counts = (fed.all_tokens, fed.num_tokens) if has_tokens else (fed.tokens, fed.tokens)
        _advance_kernel[(rows.numbers.shape[0],)](
            watched.records,
            *rows[:4],
            *fed[:3],
            known,
            counts,
            watched.now,
            truth.lines,
            watched.keys.constants,
            watched.keys.powers,
            seeds,
            slots,
            chains,
            violations,
            watched.total,
            watched.records.shape[0],
            rows.table.shape[1],
            rows.table.stride(0),
            known.stride(0) if has_tokens else 0,  # type: ignore[union-attr]
            truth.lines.shape[1],
            slots.stride(0),
            violations.stride(0),
            watched.null_slots,
            fed.ahead,
            watched.records if watched.owners is None else watched.owners,
            *((slots, slots) if overwritten is None else overwritten[1:]),
            NUM_POOLS=0 if overwritten is None else len(overwritten.stamps),
            PAGE=watched.block_size,
            IN_PLACE=rows.in_place,
            HAS_OWNERS=watched.owners is not None,
            HAS_TOKENS=has_tokens,
            IS_FIRST=is_first,
            BLOCK_N=BLOCK,
        )
        return
    records, keys, block_size, _, now, total, null_slots, owners = watched
    rows, ring_place = live_rows(rows, now)
    slots, chains, cells = slots[ring_place], chains[ring_place], violations[ring_place]
    past, numbers, tails = context_lengths(rows), rows.numbers.long(), truth.tails
    if is_first:
        back = truth.ends[numbers] - past
        is_known = (back >= 0) & (back < truth.known[numbers])
        behind = tails[numbers].gather(1, back.clamp(0, tails.shape[1] - 1)[:, None])[:, 0]
        seeds[: len(numbers)] = torch.stack((torch.where(is_known, behind, 0), is_known), 1)
        truth.turns[numbers] += 1
    starts, lines = rows.starts.tolist(), lines_of(rows)
    for i, number in enumerate(numbers.tolist()):
        where, count = slice(starts[i], starts[i + 1]), starts[i + 1] - starts[i]
        slots[where] = -1
        if overwritten is not None:
            overwritten.is_another[ring_place, where] = 0
        if int(truth.ends[number]) == NOT_FOLLOWED or not count:
            continue
        tokens, positions, own = (values[where].long() for values in (fed.tokens, fed.positions, fed.slots))
        row = lines[i].expand_as(tokens)
        wanted = torch.arange(count, device=tokens.device) + past[i]
        place = slot_at(PageTable(rows.table, block_size), row, wanted)
        bits = torch.where((own != place) | (positions != wanted), violation_bit("W5"), 0)
        if fed.all_tokens is not None and fed.num_tokens is not None:
            limit = min(int(fed.num_tokens[number]), fed.all_tokens.shape[1])
            real = fed.all_tokens[number, wanted.clamp(max=max(limit - 1, 0))].long()
            is_wrong = torch.where(wanted < limit, real != tokens, wanted >= limit + fed.ahead)
            bits |= torch.where(is_wrong, violation_bit("W6"), 0)
        is_inside = (own >= null_slots) & (own < records.shape[0])
        if owners is not None:
            owner = owners[own.clamp(0, records.shape[0] - 1)]
            is_shared, uid = (owner == EVERYBODYS.value) | (owner <= SHARED_WRITER.value), truth.uids[number]
            foreign = torch.where(is_shared, violation_bit("W3"), violation_bit("W2"))
            foreign = torch.where(owner == GIVEN_BACK.value, violation_bit("W7"), foreign)
            is_own = (owner == uid) | (owner + uid == SHARED_WRITER.value) | (owner == UNJUDGED.value)
            bits |= torch.where(is_own, 0, foreign)
        tell_torch(cells, total, torch.full_like(row, i), wanted, torch.where(is_inside, bits, violation_bit("W1")))
        bounds = torch.tensor([0, count], device=tokens.device)
        chain_scan_torch(tokens, wanted, bounds, seeds[i, :1], keys=keys, out=chains[where])
        slots[where] = torch.where(is_inside, own, -1)
        if overwritten is not None:
            overwritten.is_another[ring_place, where] = _are_another(overwritten, records, slots[where], tokens)
        seal_torch(
            records, slots[where], tokens=tokens, positions=wanted, chains=chains[where],
            requests=truth.uids[number : number + 1], generations=torch.zeros_like(now[:1]),
            step=now[NOW_STEP:][:1], sites=now[NOW_SITE:][:1], pool_id=0, keys=keys,
        )  # fmt: skip
        last = torch.cat((seeds[i, :1], chains[where])).flip(0)[: tails.shape[1]]
        truth.lines[number, TAILS : TAILS + len(last)] = last
        truth.ends[number], truth.known[number] = past[i] + count, len(last)


advance_torch = partial(advance, launches=False)


def _are_another(overwritten: Overwritten, records: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
    """[n] bits of `Overwritten.is_another`, before anything is recorded of these slots."""
    held = records[slots.clamp(min=0)]
    differs = (held[:, record.TOKEN_POSITION] ^ tokens) & record.MASK_32 != 0
    bits = torch.zeros_like(slots)
    for pool, stamps in enumerate(overwritten.stamps):
        stamp = stamps[slots.clamp(min=0)]
        is_taken = (stamp == held[:, record.CHAIN]) & (stamp != 0) & differs
        bits |= torch.where((slots >= 0) & (is_taken | (stamp == FILLED_STAMP)), 1 << pool, 0)
    return bits


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "table_width",
        "table_stride",
        "tokens_stride",
        "truth_stride",
        "slots_stride",
        "violations_stride",
        "null_slots",
        "ahead",
    ],
    do_not_specialize_on_alignment=["numbers", "table", "lengths", "starts", "tokens", "positions", "fed_slots"],
)
def _advance_kernel(
    records,
    numbers,
    table,
    lengths,
    starts,
    tokens,
    positions,
    fed_slots,
    all_tokens,
    num_tokens,
    now,
    truth,
    constants,
    powers,
    seeds,
    slots,
    chains,
    violations,
    total,
    num_slots,
    table_width,
    table_stride,
    tokens_stride,
    truth_stride,
    slots_stride,
    violations_stride,
    null_slots,
    ahead,
    owners,
    stamp_ptrs,
    is_another,
    NUM_POOLS: tl.constexpr,
    PAGE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if i_row >= tl.load(now + NOW_ROWS):
        return
    at_step = tl.load(now + NOW_STEP)
    number = tl.load(numbers + i_row).to(tl.int64)
    begin = tl.load(starts + i_row).to(tl.int64)
    end = tl.load(starts + i_row + 1).to(tl.int64)
    past = tl.load(lengths + i_row).to(tl.int64) - (end - begin)
    line = truth + number * truth_stride
    tails = line + FIRST_TAIL
    num_tails = truth_stride - FIRST_TAIL
    is_followed = tl.load(line + END) >= 0
    if IS_FIRST:
        back = tl.load(line + END) - past
        is_known = (back >= 0) & (back < tl.load(line + KNOWN))
        carry, turn = tl.load(tails + back, mask=is_known, other=0), tl.load(line + TURN)
        tl.debug_barrier()  # every thread has read what is stored anew below
        tl.store(line + TURN, turn + 1)
        tl.store(seeds + 2 * i_row, carry)
        tl.store(seeds + 2 * i_row + 1, is_known.to(tl.int64))
    else:
        carry = tl.load(seeds + 2 * i_row)
    place = tl.load(now + NOW_PLACE)
    slots += place * slots_stride
    chains += place * slots_stride
    is_another += place * slots_stride
    cell = violations + place * violations_stride + i_row
    row = table + (number if IN_PLACE else i_row) * table_stride
    o_block = tl.arange(0, BLOCK_N)
    b_power = tl.load(powers + 1 + o_block)
    b_inverse = tl.load(powers + INVERSES + 1 + o_block)
    block_power = tl.load(powers + BLOCK_N)
    b_violation = tl.full([BLOCK_N], NONE, tl.int64)
    b_count = tl.zeros([BLOCK_N], tl.int32)
    b_zero = tl.zeros([BLOCK_N], tl.int64)
    b_request = pair(b_zero + tl.load(line + UID), b_zero)
    b_step_site = pair(b_zero + at_step, b_zero + tl.load(now + NOW_SITE))
    if is_followed & (end > begin) & (end - begin < num_tails):
        tl.store(tails + (end - begin), carry)
    num_known = past * 0
    if HAS_TOKENS:
        num_known = tl.load(num_tokens + number).to(tl.int64)
    for i_block in range(begin, end, BLOCK_N):
        o_n = i_block + o_block
        m_n = (o_n < end) & is_followed
        b_token = tl.load(tokens + o_n, mask=m_n, other=0).to(tl.int64)
        b_slot = tl.load(fed_slots + o_n, mask=m_n, other=-1).to(tl.int64)
        b_position = tl.load(positions + o_n, mask=m_n, other=0).to(tl.int64)
        b_wanted = past + (o_n - begin)
        b_place = device_slot_at(row, b_wanted, m_n, table_width, PAGE)
        b_bits = tl.where((b_slot != b_place) | (b_position != b_wanted), W5, 0)
        if HAS_TOKENS:
            m_known = m_n & (b_wanted < num_known)
            b_real = tl.load(all_tokens + number * tokens_stride + b_wanted, mask=m_known, other=0).to(tl.int64)
            b_bits += tl.where(m_known & (b_real != b_token) | m_n & (b_wanted >= num_known + ahead), W6, 0)
        m_in = m_n & (b_slot >= null_slots) & (b_slot < num_slots)
        if HAS_OWNERS:
            uid = tl.load(line + UID)
            b_owner = tl.load(owners + b_slot, mask=m_in, other=uid)
            m_shared = (b_owner == EVERYBODYS) | (b_owner <= SHARED_WRITER)
            m_own = (b_owner == uid) | (b_owner + uid == SHARED_WRITER) | (b_owner == UNJUDGED)
            b_foreign = tl.where(b_owner == GIVEN_BACK, W7, tl.where(m_shared, W3, W2))
            b_bits += tl.where(m_own, 0, b_foreign)
        b_violation, b_count = note(b_violation, b_count, b_wanted, tl.where(m_in, b_bits, W1), m_n)
        if NUM_POOLS:
            b_held = tl.load(records + b_slot * COLUMNS + CHAIN, mask=m_in, other=0)
            b_old = tl.load(records + b_slot * COLUMNS + TOKEN_POSITION, mask=m_in, other=0)
            b_another = b_zero
            for i_pool in tl.static_range(NUM_POOLS):
                stamps = tl.load(stamp_ptrs + i_pool).to(tl.pointer_type(tl.int64))
                b_stamp = tl.load(stamps + b_slot, mask=m_in, other=0)
                m_taken = (b_stamp == b_held) & (b_stamp != 0) & (low_word(b_old) != low_word(b_token))
                b_another += tl.where(m_taken | (b_stamp == FILLED), 1 << i_pool, 0)
            tl.store(is_another + o_n, b_another, mask=o_n < end)
            tl.debug_barrier()  # every thread has read what is recorded anew below
        b_term = tl.where(m_n, device_mix(b_token, b_wanted, constants) * b_inverse, 0)
        b_chain = b_power * (carry + tl.cumsum(b_term, 0))
        carry = block_power * (carry + tl.sum(b_term))
        tl.store(slots + o_n, tl.where(m_in, b_slot, -1), mask=o_n < end)
        tl.store(chains + o_n, b_chain, mask=m_n)
        o_back = end - 1 - o_n
        tl.store(tails + o_back, b_chain, mask=m_n & (o_back < num_tails))
        token_position = pair(b_token, b_wanted)
        store_record(records, b_slot, token_position, b_chain, b_request, b_step_site, 0, constants, m_in)
    tell(cell, total, b_violation, b_count)
    if is_followed & (end > begin):
        tl.store(line + END, past + end - begin)
        tl.store(line + KNOWN, tl.minimum(end - begin + 1, num_tails))
