"""Begin: rows of an engine's state that requests take, with the chain of what each of them has from elsewhere.

Where an engine keeps their tokens on the device, from which it feeds them, these are compared with what they came with.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record.chain import chain_scan_torch
from kvcanary_kernels.record.device import BLOCK, INVERSES, tl, triton
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.watch.walk import FIRST_TAIL, NONE, NOW_PLACE, ROOT_CHAIN, TAILS, Truth

#: Words of a new row: its number, its line of Truth up to the first tail, and where its tokens are in `Told`.
NEW_WIDTH = 2 + TAILS + 2
LINE, NEW = tl.constexpr(1 + TAILS), tl.constexpr(NEW_WIDTH)
BLOCK_TOLD = 1024  # tokens at a time, since they may come from the host


class Told(NamedTuple):
    """Tokens that requests came with.

    tokens:     [size] int64, on the device or pinned on the host, where the device reads by itself
    now:        of the step, as in `Watched`
    violations: [ring, rows of Truth] int64, NO_VIOLATION before; in the cell of a row the first place at which another
                token is kept
    total:      [1] int64, grows by the number of such rows
    """

    tokens: Tensor
    now: Tensor
    violations: Tensor
    total: Tensor


def begin(
    new: Tensor,
    truth: Truth,
    keys: Keys,
    all_tokens: Tensor | None = None,
    told: Told | None = None,
    *,
    launches: bool = True,
) -> None:
    """Write what is true of new rows. No allocation, no wait.

    new:        [n, NEW_WIDTH] int64: number in Truth (one that it does not have: padding), entries that it begins with
                or NOT_FOLLOWED, 1, chain of none, who writes, what its turns go on from, chain of these entries, where
                its tokens begin in `told`, and how many they are
    all_tokens: [rows of Truth, width] int32 or int64, where the chain is computed from; None: it is taken
    told:       what must lie there, from each row's first token on; None, or none of a row: nobody asks
    """
    if launches:
        tokens = truth.lines if all_tokens is None else all_tokens
        is_told = told is not None and all_tokens is not None
        asked = told if told is not None and is_told else Told(new, new, new, new)
        _begin_kernel[(new.shape[0],)](
            new,
            truth.lines,
            tokens,
            *asked,
            keys.constants,
            keys.powers,
            *truth.lines.shape,
            tokens.stride(0),
            tokens.shape[1],
            asked.violations.stride(0),
            HAS_TOKENS=all_tokens is not None,
            IS_TOLD=is_told,
            BLOCK_N=BLOCK,
            BLOCK_T=BLOCK_TOLD,
        )
        return
    new = new[(new[:, 0] >= 0) & (new[:, 0] < len(truth.lines))]
    truth.lines[new[:, 0], : TAILS + 1] = new[:, 1 : TAILS + 2]
    if all_tokens is not None and told is not None:
        _compare_torch(new, all_tokens, told)
    for number, end in new[:, :2].tolist() if all_tokens is not None else ():
        tokens = all_tokens[number, : max(end, 0)].long()  # type: ignore[index]
        chains = torch.empty_like(tokens)
        bounds, positions = torch.tensor([0, len(tokens)], device=new.device), torch.arange(len(tokens)).to(new.device)
        seed = truth.roots[number : number + 1]
        chain_scan_torch(tokens, positions, bounds, seed, keys=keys, out=chains)
        truth.lines[number, TAILS] = torch.cat((seed, chains))[-1]


begin_torch = partial(begin, launches=False)


def _compare_torch(new: Tensor, kept: Tensor, told: Told) -> None:
    place = int(told.now[NOW_PLACE.value])
    for number, first, count in new[:, [0, NEW_WIDTH - 2, NEW_WIDTH - 1]].tolist():
        n = min(count, kept.shape[1])
        wrong = (kept[number, :n].long() != told.tokens[first : first + n].to(kept.device)).nonzero()
        if len(wrong):
            told.violations[place, number] = wrong[0, 0]
            told.total.add_(1)


@triton.jit(
    do_not_specialize=["num_rows", "truth_stride", "tokens_stride", "width", "ring_stride"],
    do_not_specialize_on_alignment=["new"],
)
def _begin_kernel(
    new,
    truth,
    tokens,
    told,
    now,
    violations,
    total,
    constants,
    powers,
    num_rows,
    truth_stride,
    tokens_stride,
    width,
    ring_stride,
    HAS_TOKENS: tl.constexpr,
    IS_TOLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = new + tl.program_id(0).to(tl.int64) * NEW
    number = tl.load(row)
    if (number < 0) | (number >= num_rows):
        return
    line = truth + number * truth_stride
    for i_column in tl.static_range(LINE):
        tl.store(line + i_column, tl.load(row + 1 + i_column))
    if IS_TOLD:
        first, count = tl.load(row + NEW - 2), tl.minimum(tl.load(row + NEW - 1), width)
        o_told = tl.arange(0, BLOCK_T).to(tl.int64)
        wrong = count * 0 + NONE
        for i_block in range(0, count, BLOCK_T):
            o_n = i_block + o_told
            m_n = o_n < count
            b_kept = tl.load(tokens + number * tokens_stride + o_n, mask=m_n, other=0).to(tl.int64)
            b_told = tl.load(told + first + o_n, mask=m_n, other=0)
            wrong = tl.minimum(wrong, tl.min(tl.where(b_kept != b_told, o_n, NONE)))
        if wrong != NONE:
            tl.store(violations + tl.load(now + NOW_PLACE) * ring_stride + number, wrong)
            tl.atomic_add(total, 1)
    if HAS_TOKENS:
        tail = tl.load(row + 1 + ROOT_CHAIN)
        last = tl.minimum(tl.load(row + 1), width)
        o_block = tl.arange(0, BLOCK_N)
        b_inverse = tl.load(powers + INVERSES + 1 + o_block)
        for i_block in range(0, last, BLOCK_N):
            o_n = i_block + o_block
            m_n = o_n < last
            b_token = tl.load(tokens + number * tokens_stride + o_n, mask=m_n, other=0).to(tl.int64)
            b_term = tl.where(m_n, device_mix(b_token, o_n.to(tl.int64), constants) * b_inverse, 0)
            tail = tl.load(powers + tl.minimum(last - i_block, BLOCK_N)) * (tail + tl.sum(b_term))
        tl.store(line + FIRST_TAIL, tail)
