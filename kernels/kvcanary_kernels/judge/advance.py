"""Advance: the truth of rows that have gone on by what a step accepted that the host has not collected."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import MULTIPLIER, chain_step, tl, triton
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import Keys, mix, signed

BLOCK = 64


def advance(
    accepted: Tensor,
    table_rows: Tensor,
    uncollected: Tensor,
    known_lens: Tensor,
    known_chains: Tensor,
    *,
    width: int,
    shift: int,
    keys: Keys,
    lens: Tensor,
    chains: Tensor,
    launches: bool = True,
) -> None:
    """Length and chain value of each row, from those that the host knows. May be captured.

    accepted:     [num_table_rows, 1 + places] int64, by row of the request table what was accepted last: how many
                  tokens, then these
    table_rows:        [requests] int64, row r is one of request r // width; a row that there is not counts as row 0
    uncollected:      [rows] int64, 0: the host knows the row as it is, and that is the answer
    known_lens, known_chains: [rows] int64, entries whose tokens the host knows, and the chain value behind them
    shift:        entries that a row has beyond those and the accepted tokens: -1, or 0
    lens, chains: [rows] int64 out
    """
    rows = table_rows.numel() * width
    expect_int64(table_rows.numel(), table_rows=table_rows)
    expect_int64(
        rows, uncollected=uncollected, known_lens=known_lens, known_chains=known_chains, lens=lens, chains=chains
    )
    if accepted.dim() != 2 or accepted.dtype is not torch.int64 or not accepted.is_contiguous():
        shape = f"{list(accepted.shape)} {accepted.dtype}"
        raise ValueError(f"accepted must be contiguous [num_table_rows, 1 + places] int64, got {shape}")
    if rows == 0:
        return
    places = accepted.shape[1] - 1
    if launches:
        _advance_kernel[(triton.cdiv(rows, BLOCK),)](
            accepted,
            table_rows,
            uncollected,
            known_lens,
            known_chains,
            keys.constants,
            lens,
            chains,
            rows,
            len(accepted),
            places,
            width,
            shift,
            BLOCK_N=BLOCK,
        )
        return
    own = table_rows.where((table_rows >= 0) & (table_rows < len(accepted)), 0)
    last = accepted[own.repeat_interleave(width)]
    counts = torch.where(uncollected != 0, (last[:, 0] + shift).clamp(0, places), 0)
    lens.copy_(known_lens)
    chains.copy_(known_chains)
    for place in range(places):
        is_there = place < counts
        after = mix(last[:, 1 + place], lens, keys).add_(chains, alpha=signed(keys.multiplier))
        chains.copy_(torch.where(is_there, after, chains))
        lens.add_(is_there)


advance_torch = partial(advance, launches=False)


@triton.jit(do_not_specialize=["num_rows", "num_table_rows", "most", "width", "shift"])
def _advance_kernel(
    accepted,
    table_rows,
    uncollected,
    known_lens,
    known_chains,
    constants,
    lens,
    chains,
    num_rows,
    num_table_rows,
    most,
    width,
    shift,
    BLOCK_N: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_r = o_r < num_rows
    table_row = tl.load(table_rows + o_r // width, mask=m_r, other=0)
    table_row = tl.where((table_row >= 0) & (table_row < num_table_rows), table_row, 0)
    last = accepted + table_row * (most + 1)
    count = tl.load(last, mask=m_r, other=0) + shift
    count = tl.minimum(tl.maximum(count, 0), most)
    count = tl.where(tl.load(uncollected + o_r, mask=m_r, other=0) != 0, count, 0)
    length = tl.load(known_lens + o_r, mask=m_r, other=0)
    chain = tl.load(known_chains + o_r, mask=m_r, other=0)
    multiplier = tl.load(constants + MULTIPLIER)
    for i_place in range(most):
        m_there = m_r & (i_place < count)
        token = tl.load(last + 1 + i_place, mask=m_there, other=0)
        chain = tl.where(m_there, chain_step(chain, device_mix(token, length, constants), multiplier), chain)
        length += m_there.to(tl.int64)
    tl.store(lens + o_r, length, mask=m_r)
    tl.store(chains + o_r, chain, mask=m_r)
