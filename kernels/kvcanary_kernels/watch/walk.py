"""Walk and advance: the rows of block tables, where nobody tells of grants and frees and records speak for themselves.

An engine that is only watched has rows, lengths and tokens, but its canary never hears who owns a page. So a row is
judged by what its records say: each continues the one before it, at its own position, and the last one ends in the
chain that the canary has followed by itself, from the tokens that were fed. `advance` records what a forward writes,
before it does; `walk` judges what it reads, since rows of one forward may read what others write in it.

What changes from step to step lies on the device, in `now`: launches are the same in every step, and may be captured.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.chain import chain_scan_torch
from kvcanary_kernels.record.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    CONTENT_B,
    INVERSES,
    LAYERS_HIGH,
    LAYERS_LOW,
    MULTIPLIER,
    REQUEST_GENERATION,
    SEAL,
    STEP_SITE,
    TOKEN_POSITION,
    chain_step,
    high_word,
    low_word,
    pair,
    seal_of,
    tl,
    triton,
)
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import MASK_32, Keys, mix, signed
from kvcanary_kernels.record.seal import identity_words, pair_columns, seal_values

#: What a hit says: position * CODES_PER_ENTRY + its place here. The order is that in which findings speak.
WALK_CODES = ("R10", "R1", "R2", "R12", "R3", "R4", "R5", "R6")
ADVANCE_CODES = ("W1", "W4", "W5", "W6")
CODES_PER_ENTRY = 16
NO_HIT = (1 << 63) - 1
NOT_FOLLOWED = -1  # in `ends`: a row whose tokens nobody knows
#: Columns of `now` [NOW_WIDTH] int64: how many rows and tokens the forward has, which step it is, and its site.
NOW_ROWS, NOW_TOKENS, NOW_STEP, NOW_SITE = range(4)
NOW_WIDTH = 4
HIT = tl.constexpr(CODES_PER_ENTRY)
NONE = tl.constexpr(NO_HIT)
ROWS_NOW = tl.constexpr(NOW_ROWS)
TOKENS_NOW = tl.constexpr(NOW_TOKENS)
STEP_NOW = tl.constexpr(NOW_STEP)
SITE_NOW = tl.constexpr(NOW_SITE)


class Truth(NamedTuple):
    """What the canary knows of the engine's request rows, by row number; it follows them by itself.

    ends:  [n] int64, tokens that are recorded, accepted or not; NOT_FOLLOWED: the row is not judged
    known: [n] int64, how many of `tails` are true
    tails: [n, T] int64, chain of the first ends - i tokens
    roots: [n] int64, chain of none
    uids:  [n] int64, who writes, for the report
    """

    ends: Tensor
    known: Tensor
    tails: Tensor
    roots: Tensor
    uids: Tensor


class Rows(NamedTuple):
    """The rows of one forward; those at and behind the number that `now` says are padding.

    numbers: [rows] int32 or int64, where they stand in Truth
    table:   [>= rows, width] int32 or int64, block of the row's entries i * block_size and on
    lengths: [>= rows] int32 or int64, entries of each row, those that this forward writes included
    starts:  [>= rows + 1] int32 or int64, where each row's new entries begin
    """

    numbers: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor


class Fed(NamedTuple):
    """What a forward writes: [n] tokens, positions and slots, int32 or int64.

    all_tokens, num_tokens: [rows of Truth, width] and [rows of Truth], tokens that the engine knows; None: nobody does
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    all_tokens: Tensor | None = None
    num_tokens: Tensor | None = None


def advance(
    records: Tensor,
    rows: Rows,
    fed: Fed,
    truth: Truth,
    keys: Keys,
    *,
    now: Tensor,
    seeds: Tensor,
    block_size: int,
    null_slots: int,
    slots: Tensor,
    chains: Tensor,
    hits: Tensor,
    total: Tensor,
    is_first: bool = True,
) -> None:
    """Record what a forward is about to write, and follow its rows. No allocation, no wait.

    seeds:  [2, >= rows] int64 out, chain of what each row has so far, as the canary knows it, and whether it does
    slots:  [ring, >= n] int64 out, in the line of this step where it writes; -1 where a record would lie outside the
            pool or in a null slot
    chains: [ring, >= n] int64 out, chain of each entry
    hits:   [ring, >= rows] int64 out, first hit of the row by ADVANCE_CODES, or NO_HIT (W4 is for who takes the lanes)
    is_first: False: the rows were followed already, in another pool: `seeds` are true, and the truth is of after this
              forward
    """
    has_tokens = fed.all_tokens is not None
    known, counts = (fed.all_tokens, fed.num_tokens) if has_tokens else (fed.tokens, fed.tokens)
    _advance_kernel[(rows.numbers.shape[0],)](
        records,
        rows.numbers,
        rows.table,
        rows.lengths,
        rows.starts,
        fed.tokens,
        fed.positions,
        fed.slots,
        known,
        counts,
        now,
        truth.ends,
        truth.known,
        truth.tails,
        truth.uids,
        keys.constants,
        keys.powers,
        seeds,
        slots,
        chains,
        hits,
        total,
        records.shape[0],
        rows.table.stride(0),
        known.stride(0) if has_tokens else 0,  # type: ignore[union-attr]
        truth.tails.stride(0),
        truth.tails.shape[1],
        seeds.stride(0),
        hits.shape[0],
        slots.stride(0),
        hits.stride(0),
        null_slots,
        BLOCK_SIZE=block_size,
        HAS_TOKENS=has_tokens,
        IS_FIRST=is_first,
        BLOCK_N=BLOCK,
    )


def advance_torch(
    records: Tensor,
    rows: Rows,
    fed: Fed,
    truth: Truth,
    keys: Keys,
    *,
    now: Tensor,
    seeds: Tensor,
    block_size: int,
    null_slots: int,
    slots: Tensor,
    chains: Tensor,
    hits: Tensor,
    total: Tensor,
    is_first: bool = True,
) -> None:
    """The torch reference of `advance`."""
    step, site = int(now[NOW_STEP]), int(now[NOW_SITE])
    rows, cell = live_rows(rows, now), step % hits.shape[0]
    slots, chains, hits = slots[cell], chains[cell], hits[cell]
    lengths, numbers = context_lengths(rows), rows.numbers.long()
    if is_first:
        back = truth.ends[numbers] - lengths
        is_known = (back >= 0) & (back < truth.known[numbers])
        behind = truth.tails[numbers].gather(1, back.clamp(0, truth.tails.shape[1] - 1)[:, None])[:, 0]
        seeds[0, : len(numbers)], seeds[1, : len(numbers)] = torch.where(is_known, behind, 0), is_known
    starts, past = rows.starts.tolist(), lengths.tolist()
    hits[: len(past)] = NO_HIT
    for i, number in enumerate(numbers.tolist()):
        where = slice(starts[i], starts[i + 1])
        slots[where] = -1
        if int(truth.ends[number]) == NOT_FOLLOWED or starts[i] == starts[i + 1]:
            continue
        tokens, positions, own = (values[where].long() for values in (fed.tokens, fed.positions, fed.slots))
        count = len(tokens)
        wanted = torch.arange(past[i], past[i] + count, device=tokens.device)
        place = table_slots(rows.table[i : i + 1], wanted[None], block_size)[0]
        inside = (own >= null_slots) & (own < records.shape[0])
        codes = torch.where((own != place) | (positions != wanted), 2, -1)
        if fed.all_tokens is not None and fed.num_tokens is not None:
            limit = min(int(fed.num_tokens[number]), fed.all_tokens.shape[1])
            known = wanted < limit
            real = fed.all_tokens[number, wanted.clamp(max=max(limit - 1, 0))].long()
            codes = torch.where(known & (real != tokens) & (codes < 0), 3, codes)
        codes = torch.where(inside, codes, 0)
        found = torch.where(codes >= 0, wanted * CODES_PER_ENTRY + codes, NO_HIT)
        total += (codes >= 0).sum()
        hits[i] = found.min()
        values = _scan(tokens, wanted, int(seeds[0, i]), keys)
        chains[where], slots[where] = values, torch.where(inside, own, -1)
        rows_of = torch.zeros(count, record.COLUMNS, dtype=torch.int64, device=records.device)
        rows_of[:, record.TOKEN_POSITION] = pair_columns(tokens, wanted)
        rows_of[:, record.CHAIN] = values
        rows_of[:, record.REQUEST_GENERATION] = truth.uids[number] & MASK_32
        rows_of[:, record.STEP_SITE] = pair_columns(torch.full_like(tokens, step), torch.full_like(tokens, site))
        rows_of[:, record.SEAL] = seal_values(identity_words(rows_of), own, 0, keys)
        records[own[inside]] = rows_of[inside]
        kept = min(truth.tails.shape[1], count + 1)
        last = torch.cat((seeds[0, i : i + 1], values)).flip(0)
        truth.tails[number, :kept] = last[:kept]
        truth.ends[number], truth.known[number] = past[i] + count, kept


def walk(
    records: Tensor,
    rows: Rows,
    truth: Truth,
    keys: Keys,
    *,
    now: Tensor,
    block_size: int,
    null_slots: int,
    window: int,
    seeds: Tensor,
    hits: Tensor,
    total: Tensor,
    counted: Tensor,
) -> None:
    """Judge the entries that the rows had before this forward, after `advance`. No allocation, no wait.

    window:  tokens that attention sees, the reader's own included; 0: all
    seeds:   of `advance`
    hits:    [ring, splits, >= rows] int64 out, in the cell of this step the first hit of the row in that share of it,
             or NO_HIT (WALK_CODES)
    total:   [1] int64, grows by the number of wrong entries
    counted: [1] int64, grows by the number of entries that were judged
    """
    _walk_kernel[(rows.numbers.shape[0], hits.shape[1])](
        records,
        rows.numbers,
        rows.table,
        rows.lengths,
        rows.starts,
        now,
        truth.ends,
        truth.roots,
        keys.constants,
        seeds,
        hits,
        total,
        counted,
        records.shape[0],
        rows.table.stride(0),
        seeds.stride(0),
        hits.shape[0],
        hits.stride(0),
        hits.stride(1),
        null_slots,
        window,
        BLOCK_SIZE=block_size,
        SPLITS=hits.shape[1],
        BLOCK_N=BLOCK,
    )


def walk_torch(
    records: Tensor,
    rows: Rows,
    truth: Truth,
    keys: Keys,
    *,
    now: Tensor,
    block_size: int,
    null_slots: int,
    window: int,
    seeds: Tensor,
    hits: Tensor,
    total: Tensor,
    counted: Tensor,
) -> None:
    """The torch reference of `walk`; it gives the hits of a row in its first share."""
    rows, cell = live_rows(rows, now), hits[int(now[NOW_STEP]) % hits.shape[0]]
    n = rows.numbers.shape[0]
    numbers, past = rows.numbers.long(), context_lengths(rows)
    followed, is_known = truth.ends[numbers] != NOT_FOLLOWED, seeds[1, :n] != 0
    cell[:, :n] = NO_HIT
    first_hit = torch.where(followed & ~is_known, past * CODES_PER_ENTRY, NO_HIT)
    total += (followed & ~is_known).sum()
    positions = torch.arange(int(past.max()) if n else 0, device=past.device)
    if positions.numel():
        first = (past + 1 - window).clamp(min=0) if window else torch.zeros_like(past)
        live = (positions >= first[:, None]) & (positions < past[:, None]) & followed[:, None]
        counted += live.sum()
        slots = table_slots(rows.table[:n], positions.expand(n, -1), block_size)
        codes = _codes(records, slots, positions, first, truth.roots[numbers], keys, null_slots)
        is_last = is_known[:, None] & (positions == past[:, None] - 1)
        chain = records[slots.clamp(0, records.shape[0] - 1), record.CHAIN]
        codes = torch.where((codes < 0) & is_last & (chain != seeds[0, :n, None]), 7, codes)
        wrong = live & (codes >= 0)
        total += wrong.sum()
        found = torch.where(wrong, positions * CODES_PER_ENTRY + codes, NO_HIT)
        first_hit = torch.minimum(first_hit, found.min(1).values)
    cell[0, :n] = first_hit


def live_rows(rows: Rows, now: Tensor) -> Rows:
    """Without padding."""
    n = int(now[NOW_ROWS])
    return Rows(rows.numbers[:n], rows.table, rows.lengths, rows.starts)


def context_lengths(rows: Rows) -> Tensor:
    """[rows] int64: entries that each row had before this forward."""
    n = rows.numbers.shape[0]
    starts = rows.starts[: n + 1].long()
    return rows.lengths[:n].long() - (starts[1:] - starts[:-1])


def table_slots(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[rows, n] int64: slots of positions [rows, n] along a table [rows, width]; -1 behind its end."""
    blocks = positions // block_size
    inside = blocks < table.shape[1]
    found = table.long().gather(1, torch.where(inside, blocks, 0))
    return torch.where(inside, found * block_size + positions % block_size, -1)


def _codes(
    records: Tensor,
    slots: Tensor,
    positions: Tensor,
    first: Tensor,
    roots: Tensor,
    keys: Keys,
    null_slots: int,
) -> Tensor:
    """[rows, n] int64: place in WALK_CODES of what is wrong with the record of each slot (but R6), -1: nothing."""
    inside = (slots >= 0) & (slots < records.shape[0])
    held = records[torch.where(inside, slots, 0)]
    position = held[..., record.TOKEN_POSITION] >> 32 & MASK_32
    chain = held[..., record.CHAIN]
    before = torch.cat((roots[:, None], chain[:, :-1]), 1)
    own = mix(held[..., record.TOKEN_POSITION] & MASK_32, position, keys)
    seals = seal_values(identity_words(held.flatten(0, 1)), slots.flatten(), 0, keys).view(slots.shape)
    continues = torch.add(own, before, alpha=signed(keys.multiplier)) == chain
    checks = (
        (~inside, 1),
        (slots < null_slots, 2),
        (held[..., record.STEP_SITE] == 0, 3),
        (held[..., record.SEAL] != seals, 4),
        (position != positions, 5),
        (~continues & ((positions == 0) | (positions > first[:, None])), 6),
    )
    codes = torch.full_like(slots, -1)
    for is_wrong, code in reversed(checks):
        codes = torch.where(is_wrong, code, codes)
    return codes


def _scan(tokens: Tensor, positions: Tensor, seed: int, keys: Keys) -> Tensor:
    """[n] int64: chain values of consecutive entries of one row."""
    indptr = torch.tensor([0, len(tokens)], device=tokens.device)
    out = torch.empty_like(tokens)
    chain_scan_torch(tokens, positions, indptr, torch.tensor([seed], device=tokens.device), keys=keys, out=out)
    return out


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "table_stride",
        "seeds_stride",
        "ring",
        "ring_stride",
        "hits_stride",
        "null_slots",
        "window",
    ],
    do_not_specialize_on_alignment=["numbers", "table", "lengths", "starts", "counted"],
)
def _walk_kernel(
    records,
    numbers,
    table,
    lengths,
    starts,
    now,
    ends,
    roots,
    constants,
    seeds,
    hits,
    total,
    counted,
    num_slots,
    table_stride,
    seeds_stride,
    ring,
    ring_stride,
    hits_stride,
    null_slots,
    window,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1).to(tl.int64)
    if i_row >= tl.load(now + ROWS_NOW):
        return
    number = tl.load(numbers + i_row).to(tl.int64)
    past = (tl.load(lengths + i_row) - (tl.load(starts + i_row + 1) - tl.load(starts + i_row))).to(tl.int64)
    seed = tl.load(seeds + i_row)
    is_known = tl.load(seeds + seeds_stride + i_row) != 0
    root = tl.load(roots + number)
    multiplier = tl.load(constants + MULTIPLIER)
    hit = tl.full([], NONE, tl.int64)
    count = tl.zeros([], tl.int64)
    if tl.load(ends + number) < 0:
        past = past * 0
    elif (i_split == 0) & (not is_known):
        hit = past * HIT
        count += 1
    first = past * 0
    if window > 0:
        first = tl.maximum(past + 1 - window, 0)
    if (i_split == 0) & (past > first):
        tl.atomic_add(counted, past - first, sem="relaxed")
    row = table + i_row * table_stride
    for i_block in range(first + i_split * BLOCK_N, past, SPLITS * BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        m_n = o_n < past
        b_slot = tl.load(row + o_n // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64) * BLOCK_SIZE + o_n % BLOCK_SIZE
        m_in = m_n & (b_slot >= 0) & (b_slot < num_slots)
        held = records + b_slot * COLUMNS
        b_token = tl.load(held + TOKEN_POSITION, mask=m_in, other=0)
        b_chain = tl.load(held + CHAIN, mask=m_in, other=0)
        b_request = tl.load(held + REQUEST_GENERATION, mask=m_in, other=0)
        b_step = tl.load(held + STEP_SITE, mask=m_in, other=0)
        b_seal = tl.load(held + SEAL, mask=m_in, other=0)
        m_first = o_n == 0
        o_before = tl.maximum(o_n - 1, 0)
        b_before = tl.load(row + o_before // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64) * BLOCK_SIZE
        b_before += o_before % BLOCK_SIZE
        m_before = m_n & (b_before >= 0) & (b_before < num_slots)
        b_parent = tl.load(records + b_before * COLUMNS + CHAIN, mask=m_before, other=0)
        b_parent = tl.where(m_first, root, b_parent)
        b_position = high_word(b_token)
        b_value = chain_step(b_parent, device_mix(low_word(b_token), b_position, constants), multiplier)
        b_code = tl.full([BLOCK_N], -1, tl.int64)
        b_code = tl.where((o_n == past - 1) & (b_chain != seed) & is_known, 7, b_code)
        b_code = tl.where((b_value != b_chain) & (m_first | (o_n > first)), 6, b_code)
        b_code = tl.where(b_position != o_n, 5, b_code)
        b_code = tl.where(b_seal != seal_of(b_token, b_chain, b_request, b_step, b_slot, 0, constants), 4, b_code)
        b_code = tl.where(b_step == 0, 3, b_code)
        b_code = tl.where(b_slot < null_slots, 2, b_code)
        b_code = tl.where((b_slot < 0) | (b_slot >= num_slots), 1, b_code)
        m_wrong = m_n & (b_code >= 0)
        count += tl.sum(m_wrong.to(tl.int64))
        hit = tl.minimum(hit, tl.min(tl.where(m_wrong, o_n * HIT + b_code, NONE)))
    cell = hits + tl.load(now + STEP_NOW) % ring * ring_stride
    tl.store(cell + i_split * hits_stride + i_row, hit)
    if count > 0:
        tl.atomic_add(total, count, sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "table_stride",
        "tokens_stride",
        "tail_stride",
        "width",
        "seeds_stride",
        "ring",
        "slots_stride",
        "hits_stride",
        "null_slots",
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
    ends,
    known,
    tails,
    uids,
    constants,
    powers,
    seeds,
    slots,
    chains,
    hits,
    total,
    num_slots,
    table_stride,
    tokens_stride,
    tail_stride,
    width,
    seeds_stride,
    ring,
    slots_stride,
    hits_stride,
    null_slots,
    BLOCK_SIZE: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if i_row >= tl.load(now + ROWS_NOW):
        return
    at_step = tl.load(now + STEP_NOW)
    site = tl.load(now + SITE_NOW)
    number = tl.load(numbers + i_row).to(tl.int64)
    begin = tl.load(starts + i_row).to(tl.int64)
    end = tl.load(starts + i_row + 1).to(tl.int64)
    past = tl.load(lengths + i_row).to(tl.int64) - (end - begin)
    own_tails = tails + number * tail_stride
    is_followed = tl.load(ends + number) >= 0
    if IS_FIRST:
        back = tl.load(ends + number) - past
        is_known = (back >= 0) & (back < tl.load(known + number))
        carry = tl.load(own_tails + back, mask=is_known, other=0)
        tl.debug_barrier()  # every thread has read what is stored anew below
        tl.store(seeds + i_row, carry)
        tl.store(seeds + seeds_stride + i_row, is_known.to(tl.int64))
    else:
        carry = tl.load(seeds + i_row)
    place = at_step % ring
    slots += place * slots_stride
    chains += place * slots_stride
    uid = tl.load(uids + number)
    row = table + i_row * table_stride
    o_block = tl.arange(0, BLOCK_N)
    b_power = tl.load(powers + 1 + o_block)
    b_inverse = tl.load(powers + INVERSES + 1 + o_block)
    block_power = tl.load(powers + BLOCK_N)
    hit = tl.full([], NONE, tl.int64)
    count = tl.zeros([], tl.int64)
    if is_followed & (end > begin) & (end - begin < width):
        tl.store(own_tails + (end - begin), carry)
    num_known = past * 0
    if HAS_TOKENS:
        num_known = tl.load(num_tokens + number).to(tl.int64)
    for i_block in range(begin, end, BLOCK_N):
        o_n = i_block + o_block
        m_n = (o_n < end) & is_followed
        b_token = tl.load(tokens + o_n, mask=m_n, other=0).to(tl.int64)
        b_slot = tl.load(fed_slots + o_n, mask=m_n, other=-1).to(tl.int64)
        b_wanted = past + (o_n - begin)
        b_place = tl.load(row + b_wanted // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64) * BLOCK_SIZE
        b_place += b_wanted % BLOCK_SIZE
        b_position = tl.load(positions + o_n, mask=m_n, other=0).to(tl.int64)
        b_code = tl.full([BLOCK_N], -1, tl.int64)
        if HAS_TOKENS:
            m_known = m_n & (b_wanted < num_known)
            b_real = tl.load(all_tokens + number * tokens_stride + b_wanted, mask=m_known, other=0).to(tl.int64)
            b_code = tl.where(m_known & (b_real != b_token), 3, b_code)
        b_code = tl.where((b_slot != b_place) | (b_position != b_wanted), 2, b_code)
        m_in = m_n & (b_slot >= null_slots) & (b_slot < num_slots)
        b_code = tl.where(m_in, b_code, 0)
        m_wrong = m_n & (b_code >= 0)
        count += tl.sum(m_wrong.to(tl.int64))
        hit = tl.minimum(hit, tl.min(tl.where(m_wrong, b_wanted * HIT + b_code, NONE)))
        b_term = tl.where(m_n, device_mix(b_token, b_wanted, constants) * b_inverse, 0)
        b_chain = b_power * (carry + tl.cumsum(b_term, 0))
        carry = block_power * (carry + tl.sum(b_term))
        tl.store(slots + o_n, tl.where(m_in, b_slot, -1), mask=o_n < end)
        tl.store(chains + o_n, b_chain, mask=m_n)
        o_back = end - 1 - o_n
        tl.store(own_tails + o_back, b_chain, mask=m_n & (o_back < width))
        token_position = pair(b_token, b_wanted)
        request = (uid & 0xFFFFFFFF) + tl.zeros([BLOCK_N], tl.int64)
        step_site = pair(at_step + tl.zeros([BLOCK_N], tl.int64), site + tl.zeros([BLOCK_N], tl.int64))
        held = records + b_slot * COLUMNS
        tl.store(held + TOKEN_POSITION, token_position, mask=m_in)
        tl.store(held + CHAIN, b_chain, mask=m_in)
        tl.store(held + REQUEST_GENERATION, request, mask=m_in)
        tl.store(held + STEP_SITE, step_site, mask=m_in)
        tl.store(held + CONTENT_B, tl.zeros_like(b_chain), mask=m_in)
        tl.store(held + LAYERS_LOW, tl.zeros_like(b_chain), mask=m_in)
        tl.store(held + LAYERS_HIGH, tl.zeros_like(b_chain), mask=m_in)
        tl.store(held + SEAL, seal_of(token_position, b_chain, request, step_site, b_slot, 0, constants), mask=m_in)
    if is_followed & (end > begin):
        tl.store(ends + number, past + end - begin)
        tl.store(known + number, tl.minimum(end - begin + 1, width))
    tl.store(hits + place * hits_stride + i_row, hit)
    if count > 0:
        tl.atomic_add(total, count, sem="relaxed")
