"""Seal: write who a slot belongs to into its record, under a keyed sum that damage breaks."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_records, live_indices
from kvcanary_kernels.record.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    CONTENT_B,
    LAYERS_HIGH,
    LAYERS_LOW,
    REQUEST_GENERATION,
    SEAL,
    STEP_SITE,
    TOKEN_POSITION,
    live_count,
    pair,
    seal_of,
    stride_of,
    tl,
    triton,
)
from kvcanary_kernels.record.layout import MASK_32, MASK_64, Keys, signed


def seal(
    records: Tensor,
    slots: Tensor,
    *,
    tokens: Tensor,
    positions: Tensor,
    chains: Tensor,
    requests: Tensor,
    generations: Tensor,
    step: Tensor,
    sites: Tensor,
    pool_id: int,
    keys: Keys,
    num_live: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Write the identity words and the seal of `slots`, zero content_b and layers. May be captured.

    records:     [num_slots, 8] int64, written
    slots:       [n] int64, distinct; a slot outside the pool is refused, nothing is written for it
    tokens, positions, chains:             [n] int64
    requests, generations, step, sites:    [n] or [1] int64; the low 32 bits count
    num_live:    [1] int64, entries at and after it are padding and write nothing; None: all live
    """
    n = slots.numel()
    expect_records(records)
    expect_int64(n, slots=slots, tokens=tokens, positions=positions, chains=chains)
    expect_int64(n, may_broadcast=True, requests=requests, generations=generations, step=step, sites=sites)
    expect_int64(1, num_live=num_live)
    if n == 0:
        return
    if launches:
        _seal_kernel[(triton.cdiv(n, BLOCK),)](
            records,
            slots,
            tokens,
            positions,
            chains,
            requests,
            generations,
            step,
            sites,
            keys.constants,
            slots if num_live is None else num_live,
            n,
            records.shape[0],
            *map(stride_of, (requests, generations, step, sites)),
            pool_id,
            BLOCK_N=BLOCK,
            HAS_LIVE=num_live is not None,
        )
        return
    entries = live_indices(slots, records.shape[0], num_live)
    slots, tokens, positions, chains = (values[entries] for values in (slots, tokens, positions, chains))
    requests, generations, step, sites = (take(values, entries) for values in (requests, generations, step, sites))
    rows = torch.zeros(slots.numel(), record.COLUMNS, dtype=torch.int64, device=records.device)
    rows[:, record.TOKEN_POSITION] = pair_columns(tokens, positions)
    rows[:, record.CHAIN] = chains
    rows[:, record.REQUEST_GENERATION] = pair_columns(requests, generations)
    rows[:, record.STEP_SITE] = pair_columns(step, sites)
    rows[:, record.SEAL] = seal_values(identity_words(rows), slots, pool_id, keys)
    records.index_copy_(0, slots, rows)


seal_torch = partial(seal, launches=False)


@triton.jit(do_not_specialize=["n"])
def _seal_kernel(
    records,
    slots,
    tokens,
    positions,
    chains,
    requests,
    generations,
    step,
    sites,
    constants,
    num_live,
    n,
    num_slots,
    request_stride,
    generation_stride,
    step_stride,
    site_stride,
    pool_id,
    BLOCK_N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < live_count(num_live, n, HAS_LIVE)
    slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n &= (slot >= 0) & (slot < num_slots)
    chain = tl.load(chains + o_n, mask=m_n, other=0)
    token = tl.load(tokens + o_n, mask=m_n, other=0)
    position = tl.load(positions + o_n, mask=m_n, other=0)
    request = tl.load(requests + o_n * request_stride, mask=m_n, other=0)
    generation = tl.load(generations + o_n * generation_stride, mask=m_n, other=0)
    b_step = tl.load(step + o_n * step_stride, mask=m_n, other=0)
    site = tl.load(sites + o_n * site_stride, mask=m_n, other=0)
    store_record(
        records,
        slot,
        pair(token, position),
        chain,
        pair(request, generation),
        pair(b_step, site),
        pool_id,
        constants,
        m_n,
    )


@triton.jit
def store_record(records, slot, token_position, chain, request_generation, step_site, pool_id, constants, m_n):
    """Identity and seal of these slots; content_b and layers become zero."""
    row = records + slot * COLUMNS
    tl.store(row + TOKEN_POSITION, token_position, mask=m_n)
    tl.store(row + CHAIN, chain, mask=m_n)
    tl.store(row + REQUEST_GENERATION, request_generation, mask=m_n)
    tl.store(row + STEP_SITE, step_site, mask=m_n)
    tl.store(row + CONTENT_B, tl.zeros_like(chain), mask=m_n)
    tl.store(row + LAYERS_LOW, tl.zeros_like(chain), mask=m_n)
    tl.store(row + LAYERS_HIGH, tl.zeros_like(chain), mask=m_n)
    value = seal_of(token_position, chain, request_generation, step_site, slot, pool_id, constants)
    tl.store(row + SEAL, value, mask=m_n)


def identity_words(rows: Tensor) -> Tensor:
    """[n, 8] int64: the unsigned 32-bit words of records [n, 8] that the seal covers."""
    return rows.view(torch.int32)[:, : record.IDENTITY_WORDS].to(torch.int64).bitwise_and_(MASK_32)


def seal_values(words: Tensor, slots: Tensor, pool_id: int, keys: Keys) -> Tensor:
    """[n] int64: the seal that identities [n, 8] should carry in these slots."""
    start = signed(keys.seal_start + keys.seal_keys[-1] * (pool_id & MASK_32))
    word_keys = keys.constants[record.SEAL_KEYS : record.SEAL_SLOT_KEY]
    sums = words @ word_keys if words.is_cpu else (words * word_keys).sum(1)  # CUDA has no int64 matmul
    return torch.add(sums.add_(start), slots, alpha=keys.seal_keys[-2])


def seal_offset(keys: Keys, pool_id: int, base: int) -> int:
    """What to add to seals of pool 0 when slots of this pool are counted from `base`, unsigned."""
    return keys.seal_keys[-1] * pool_id - keys.seal_keys[-2] * base & MASK_64


def pair_columns(low: Tensor, high: Tensor) -> Tensor:
    return (high << 32) | (low & MASK_32)


def take(values: Tensor, entries: Tensor | slice) -> Tensor:
    return values if values.numel() == 1 else values[entries]
