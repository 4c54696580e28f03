"""Chain values: each entry continues its predecessor, along sequences (a scan) or along tree parents."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import BLOCK, INVERSES, MULTIPLIER, chain_step, live_count, tl, triton
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import MASK_64, POWER_BITS, POWERS, Keys, mix, signed

MOST_PROGRAMS = 512  # of a scan whose segments are long: their parts side by side
TABLE = tl.constexpr(POWERS)


def chain_scan(
    tokens: Tensor,
    positions: Tensor,
    indptr: Tensor,
    seeds: Tensor,
    *,
    keys: Keys,
    out: Tensor,
    num_live: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Chain values of consecutive entries, segment by segment. May be captured.

    tokens, positions: [n] int64
    indptr:   [segments + 1] int64, segment s is entries [indptr[s], indptr[s + 1]), n in all
    seeds:    [segments] int64, chain value of each segment's predecessor
    out:      [n] int64
    num_live: [1] int64, segments at and after it are padding and stay as they are; None: all live
    """
    n, num_segments = tokens.numel(), seeds.numel()
    if n >= POWERS * POWERS:
        raise ValueError(f"a scan takes fewer than {POWERS * POWERS} entries, got {n}")
    expect_int64(n, tokens=tokens, positions=positions, out=out)
    expect_int64(num_segments + 1, indptr=indptr)
    expect_int64(num_segments, seeds=seeds)
    expect_int64(1, num_live=num_live)
    if num_segments == 0:
        return
    if launches:
        parts = max(min(n // (num_segments * BLOCK), MOST_PROGRAMS // num_segments), 1)
        live = indptr if num_live is None else num_live
        operands = tokens, positions, indptr, seeds, keys.constants, keys.powers, out, live, num_segments, parts
        constants = {"BLOCK_N": BLOCK, "HAS_LIVE": num_live is not None}
        if parts > 1:
            _chain_scan_kernel[(num_segments, parts)](*operands, SUMS=True, **constants)
            _chain_join_kernel[(num_segments,)](*operands[2:], BLOCK_P=1 << (parts - 1).bit_length(), **constants)
        _chain_scan_kernel[(num_segments, parts)](*operands, SUMS=False, **constants)
        return
    if num_live is not None:
        num_segments = min(max(int(num_live), 0), num_segments)
        indptr, seeds = indptr[: num_segments + 1], seeds[:num_segments]
        n = int(indptr[-1])
    if n == 0:
        return
    # in closed form: chain_i = A^(i+1) (seed / A^start + sum of mix_j / A^(j+1) for start <= j <= i)
    powers, inverses = _powers(keys, 0, n + 1), _powers(keys, 1, n + 1)
    sums = (mix(tokens[:n], positions[:n], keys) * inverses[1:]).cumsum(0)
    begins = indptr[:-1]
    before = torch.cat((sums.new_zeros(1), sums)).index_select(0, begins)
    offsets = inverses.index_select(0, begins).mul_(seeds).sub_(before)
    sums += torch.repeat_interleave(offsets, indptr[1:] - begins, output_size=n)
    torch.mul(sums, powers[1:], out=out[:n])


chain_scan_torch = partial(chain_scan, launches=False)


def chain_tree(
    tokens: Tensor,
    positions: Tensor,
    parents: Tensor,
    seeds: Tensor,
    *,
    max_depth: int,
    keys: Keys,
    out: Tensor,
    num_live: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Chain values of tree nodes from their parents. May be captured.

    tokens, positions: [n] int64
    parents:   [n] int64, index of the parent among these entries; -1: the entry continues `seeds`; any other
               value outside [0, live) has no chain to continue (value 0), so that every reader reports R5
    seeds:     [n] int64, chain value of the row that an entry with parent -1 continues; else unused
    max_depth: at least the number of parent steps from any entry to its first ancestor
    out:       [n] int64
    num_live:  [1] int64, entries at and after it are padding and stay as they are; None: all live
    """
    n = tokens.numel()
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    expect_int64(n, tokens=tokens, positions=positions, parents=parents, seeds=seeds, out=out)
    expect_int64(1, num_live=num_live)
    if n == 0:
        return
    if launches:
        _chain_tree_kernel[(triton.cdiv(n, BLOCK),)](
            tokens,
            positions,
            parents,
            seeds,
            keys.constants,
            out,
            parents if num_live is None else num_live,
            n,
            max_depth,
            BLOCK_N=BLOCK,
            HAS_LIVE=num_live is not None,
        )
        return
    if num_live is not None:
        n = min(max(int(num_live), 0), n)
        tokens, positions, parents, seeds = tokens[:n], positions[:n], parents[:n], seeds[:n]
    multiplier = keys.multiplier  # every round doubles the ancestors that a value has taken in
    own = mix(tokens, positions, keys)
    torch.where(parents == -1, torch.add(own, seeds, alpha=signed(multiplier)), own, out=own)
    values = torch.zeros(n + 1, dtype=torch.int64, device=own.device)  # the last is the parent of those without one
    values[:n] = own
    jumps = torch.cat((torch.where((parents >= 0) & (parents < n), parents, n), parents.new_full((1,), n)))
    for _ in range(max_depth.bit_length()):
        # a node that still jumps has taken in as many nodes as the power of A says
        values.add_(values.index_select(0, jumps), alpha=signed(multiplier))
        jumps = jumps.index_select(0, jumps)
        multiplier = multiplier * multiplier & MASK_64
    out[:n] = values[:n]


chain_tree_torch = partial(chain_tree, launches=False)


@triton.jit(do_not_specialize=["num_segments", "parts"])
def _chain_scan_kernel(
    tokens,
    positions,
    indptr,
    seeds,
    constants,
    powers,
    out,
    num_live,
    num_segments,
    parts,
    SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """Chain values of a part of a segment, which continues what `out` holds before it.

    SUMS: only its last value, as if the chain began at the part; of all parts but the segment's last.
    """
    i_segment = tl.program_id(0).to(tl.int64)
    if i_segment >= live_count(num_live, num_segments, HAS_LIVE):
        return
    begin, end, share = _parts_of(indptr + i_segment, parts, BLOCK_N)
    first = begin + tl.program_id(1) * share
    last = tl.minimum(first + share, end)
    carry = tl.zeros([], tl.int64)
    if SUMS:
        if last == end:
            return
    elif first == begin:
        carry = tl.load(seeds + i_segment)
    elif first < end:
        carry = tl.load(out + first - 1)
    unknown = tl.where(last < end, last - 1, last)  # the part behind reads what is known
    o_block = tl.arange(0, BLOCK_N)
    b_power = tl.load(powers + 1 + o_block)  # A^(i+1)
    b_inverse = tl.load(powers + INVERSES + 1 + o_block)
    block_power = tl.load(powers + BLOCK_N)
    for i_block in range(first, last, BLOCK_N):
        o_n = i_block + o_block
        m_n = o_n < last
        token = tl.load(tokens + o_n, mask=m_n, other=0)
        position = tl.load(positions + o_n, mask=m_n, other=0)
        b_term = tl.where(m_n, device_mix(token, position, constants) * b_inverse, 0)
        if not SUMS:
            tl.store(out + o_n, b_power * (carry + tl.cumsum(b_term, 0)), mask=o_n < unknown)
        carry = block_power * (carry + tl.sum(b_term))
    if SUMS:
        tl.store(out + last - 1, carry)


@triton.jit(do_not_specialize=["num_segments", "parts"])
def _chain_join_kernel(
    indptr,
    seeds,
    constants,
    powers,
    out,
    num_live,
    num_segments,
    parts,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """Where all parts of a segment but its last end: from chains that began at the parts to the segment's own."""
    i_segment = tl.program_id(0).to(tl.int64)
    if i_segment >= live_count(num_live, num_segments, HAS_LIVE):
        return
    begin, end, share = _parts_of(indptr + i_segment, parts, BLOCK_N)
    o_length = (1 + tl.arange(0, BLOCK_P)) * share
    m_part = begin + o_length < end
    last = out + begin + o_length - 1
    b_term = tl.load(last, mask=m_part, other=0) * _device_power(powers + INVERSES, o_length, m_part)
    b_sum = tl.load(seeds + i_segment) + tl.cumsum(b_term, 0)
    tl.store(last, _device_power(powers, o_length, m_part) * b_sum, mask=m_part)


@triton.jit
def _parts_of(bounds, parts, BLOCK_N: tl.constexpr):
    """Begin and end of a segment, and how many entries each of its parts has: whole blocks."""
    begin = tl.load(bounds)
    end = tl.load(bounds + 1)
    return begin, end, tl.cdiv(tl.cdiv(end - begin, parts), BLOCK_N) * BLOCK_N


@triton.jit
def _device_power(table, exponents, m_n):
    """_powers at these exponents."""
    low = tl.load(table + exponents % TABLE, mask=m_n, other=0)
    return low * tl.load(table + TABLE + exponents // TABLE, mask=m_n, other=0)


@triton.jit(do_not_specialize=["n", "max_depth"])
def _chain_tree_kernel(
    tokens,
    positions,
    parents,
    seeds,
    constants,
    out,
    num_live,
    n,
    max_depth,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_nodes = live_count(num_live, n, HAS_LIVE)
    m_n = o_n < num_nodes
    multiplier = tl.load(constants + MULTIPLIER)
    b_node = o_n
    m_node = m_n
    b_value = tl.zeros([BLOCK_N], tl.int64)
    b_power = tl.zeros([BLOCK_N], tl.int64) + 1
    for _ in range(max_depth + 1):  # the entry itself, then its ancestors
        token = tl.load(tokens + b_node, mask=m_node, other=0)
        position = tl.load(positions + b_node, mask=m_node, other=0)
        b_parent = tl.load(parents + b_node, mask=m_node, other=-2)
        seed = tl.load(seeds + b_node, mask=b_parent == -1, other=0)
        b_own = chain_step(seed, device_mix(token, position, constants), multiplier)
        b_value += tl.where(m_node, b_power * b_own, 0)
        b_power *= multiplier
        b_node = b_parent
        m_node = (b_parent >= 0) & (b_parent < num_nodes)
    tl.store(out + o_n, b_value, mask=m_n)


def _powers(keys: Keys, table: int, n: int) -> Tensor:
    """[n] int64: multiplier (table 0) or inverse (table 1) to the powers 0, 1, 2, ..."""
    low, high = keys.powers[table]
    if n <= POWERS:
        return low[:n]
    return (high[: (n >> POWER_BITS) + 1, None] * low).flatten()[:n]
