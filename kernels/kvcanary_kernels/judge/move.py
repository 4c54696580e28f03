"""Move: let records follow bytes from slot to slot."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_layered, expect_records, live_indices
from kvcanary_kernels.record.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    CONTENT_B,
    REQUEST_GENERATION,
    SEAL,
    STEP_SITE,
    TOKEN_POSITION,
    high_word,
    low_word,
    pair,
    seal_of,
    stride_of,
    tl,
    triton,
)
from kvcanary_kernels.record.layout import MASK_32, Keys
from kvcanary_kernels.record.seal import identity_words, pair_columns, seal_values, take


def move(
    records: Tensor,
    content_a: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    generations: Tensor,
    step: Tensor,
    sites: Tensor,
    requests: Tensor,
    page_generations: Tensor,
    page_size: int,
    arrived: Tensor,
    pool_id: int,
    keys: Keys,
    scratch: Tensor,
    launches: bool = True,
) -> None:
    """Let records follow moved bytes; every source is read before any destination is written.

    Token, position, chain and content stay; request, generation, step and site are new. The seal is carried over by
    difference, so that a damaged source stays damaged. A source that nobody has written since its page was granted
    arrives blank, as a slot that was never written. May be captured.

    records:     [num_slots, 8] int64;  content_a: [layers, num_slots] int64
    src, dst:    [n] int64, each distinct, they may overlap; an entry with either outside the pool writes nothing
    generations, step, sites, requests: [n] or [1] int64
    page_generations: [num_pages] int64, current grant of the pages of the sources
    arrived:     [n] int64 out: `dst`, or -1 where nothing is written or a blank has arrived
    scratch:     [>= n, 8 + layers] int64, needed by the kernel, not by the reference
    """
    n = src.numel()
    expect_records(records)
    expect_int64(n, src=src, dst=dst, arrived=arrived)
    expect_int64(n, may_broadcast=True, generations=generations, step=step, sites=sites, requests=requests)
    expect_int64(page_generations.numel(), page_generations=page_generations)
    expect_layered(content_a.shape[0], records.shape[0], content_a=content_a)
    width = record.COLUMNS + content_a.shape[0]
    is_right = scratch.shape[0] >= n and scratch.shape[1] == width and scratch.dtype is torch.int64
    if not is_right or not scratch.is_contiguous():
        shape = f"{list(scratch.shape)} {scratch.dtype}"
        raise ValueError(f"scratch must be contiguous [>= {n}, {width}] int64, got {shape}")
    if n == 0:
        return
    if launches:
        grid = (triton.cdiv(n, BLOCK),)
        common = src, dst, n, records.shape[0], content_a.shape[0], content_a.stride(0)
        _take_kernel[grid](records, content_a, scratch, *common, BLOCK_N=BLOCK)
        _put_kernel[grid](
            records,
            content_a,
            scratch,
            *common,
            generations,
            step,
            sites,
            requests,
            page_generations,
            arrived,
            keys.constants,
            *map(stride_of, (generations, step, sites, requests)),
            pool_id,
            page_size,
            BLOCK_N=BLOCK,
        )
        return
    inside = (dst >= 0) & (dst < records.shape[0])
    entries = live_indices(torch.where(inside, src, -1), records.shape[0])
    arrived.fill_(-1)
    src, dst = src[entries], dst[entries]
    requests, generations, step, sites = (take(values, entries) for values in (requests, generations, step, sites))
    rows, fingerprints = records.index_select(0, src), content_a.index_select(1, src)
    seals = rows[:, record.SEAL] - seal_values(identity_words(rows), src, pool_id, keys)
    held = rows[:, record.REQUEST_GENERATION] >> 32 & MASK_32
    rows[:, record.REQUEST_GENERATION] = pair_columns(requests, generations)
    rows[:, record.STEP_SITE] = pair_columns(step, sites)
    is_blank = held != page_generations[src // page_size] & MASK_32
    rows[is_blank, : record.SEAL], fingerprints[:, is_blank] = 0, 0
    arrived[entries] = torch.where(is_blank, -1, dst)
    rows[:, record.SEAL] = seals + seal_values(identity_words(rows), dst, pool_id, keys)
    records.index_copy_(0, dst, rows)
    content_a.index_copy_(1, dst, fingerprints)


move_torch = partial(move, launches=False)


@triton.jit(do_not_specialize=["n"])
def _take_kernel(
    records,
    content_a,
    scratch,
    src,
    dst,
    n,
    num_slots,
    num_layers,
    content_stride,
    BLOCK_N: tl.constexpr,
):
    """Copy every source into scratch; the launch boundary is what keeps all reads before all writes."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.load(src + o_n, mask=o_n < n, other=-1)
    m_n = (source >= 0) & (source < num_slots)
    held = scratch + o_n * (COLUMNS + num_layers)
    for i_column in range(COLUMNS):
        tl.store(held + i_column, tl.load(records + source * COLUMNS + i_column, mask=m_n), mask=m_n)
    content = content_a + source
    for i_layer in range(num_layers):
        tl.store(held + COLUMNS + i_layer, tl.load(content, mask=m_n), mask=m_n)
        content += content_stride


@triton.jit(do_not_specialize=["n"])
def _put_kernel(
    records,
    content_a,
    scratch,
    src,
    dst,
    n,
    num_slots,
    num_layers,
    content_stride,
    generations,
    step,
    sites,
    requests,
    page_generations,
    arrived,
    constants,
    generation_stride,
    step_stride,
    site_stride,
    request_stride,
    pool_id,
    page_size,
    BLOCK_N: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_all = o_n < n
    source = tl.load(src + o_n, mask=m_all, other=-1)
    target = tl.load(dst + o_n, mask=m_all, other=-1)
    m_n = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
    held = scratch + o_n * (COLUMNS + num_layers)
    token_position = tl.load(held + TOKEN_POSITION, mask=m_n, other=0)
    chain = tl.load(held + CHAIN, mask=m_n, other=0)
    old_owner = tl.load(held + REQUEST_GENERATION, mask=m_n, other=0)
    old_site = tl.load(held + STEP_SITE, mask=m_n, other=0)
    request = tl.load(requests + o_n * request_stride, mask=m_n, other=0)
    owner = pair(request, tl.load(generations + o_n * generation_stride, mask=m_n, other=0))
    b_step = tl.load(step + o_n * step_stride, mask=m_n, other=0)
    site = pair(b_step, tl.load(sites + o_n * site_stride, mask=m_n, other=0))
    current = tl.load(page_generations + source // page_size, mask=m_n, other=0)
    is_blank = high_word(old_owner) != low_word(current)
    value = tl.load(held + SEAL, mask=m_n, other=0)
    value -= seal_of(token_position, chain, old_owner, old_site, source, pool_id, constants)
    token_position, chain = tl.where(is_blank, 0, token_position), tl.where(is_blank, 0, chain)
    owner, site = tl.where(is_blank, 0, owner), tl.where(is_blank, 0, site)
    value += seal_of(token_position, chain, owner, site, target, pool_id, constants)
    row = records + target * COLUMNS
    tl.store(row + TOKEN_POSITION, token_position, mask=m_n)
    tl.store(row + CHAIN, chain, mask=m_n)
    tl.store(row + REQUEST_GENERATION, owner, mask=m_n)
    tl.store(row + STEP_SITE, site, mask=m_n)
    tl.store(row + SEAL, value, mask=m_n)
    for i_column in range(CONTENT_B, SEAL):
        tl.store(row + i_column, tl.where(is_blank, 0, tl.load(held + i_column, mask=m_n, other=0)), mask=m_n)
    content = content_a + target
    for i_layer in range(num_layers):
        fingerprint = tl.load(held + COLUMNS + i_layer, mask=m_n, other=0)
        tl.store(content, tl.where(is_blank, 0, fingerprint), mask=m_n)
        content += content_stride
    tl.store(arrived + o_n, tl.where(m_n & (is_blank == 0), target, -1), mask=m_all)
