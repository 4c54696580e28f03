"""Begin: rows of an engine's state that requests take, with the chain of what each of them has from elsewhere."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.chain import chain_scan_torch
from kvcanary_kernels.record.device import BLOCK, INVERSES, tl, triton
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.watch.walk import FIRST_TAIL, ROOT_CHAIN, TAILS, Truth

NEW_WIDTH = 2 + TAILS  # words of a new row: its number, then its line of Truth up to the first tail
NEW = tl.constexpr(NEW_WIDTH)


def begin(new: Tensor, truth: Truth, keys: Keys, all_tokens: Tensor | None = None, *, launches: bool = True) -> None:
    """Write what is true of new rows. No allocation, no wait.

    new:        [n, NEW_WIDTH] int64: number in Truth (one that it does not have: padding), entries that it begins with
                or NOT_FOLLOWED, 1, chain of none, who writes, what its turns go on from, chain of these entries
    all_tokens: [rows of Truth, width] int32 or int64, where the last of these is computed from; None: it is taken
    """
    if launches:
        tokens = truth.lines if all_tokens is None else all_tokens
        _begin_kernel[(new.shape[0],)](
            new,
            truth.lines,
            tokens,
            keys.constants,
            keys.powers,
            *truth.lines.shape,
            tokens.stride(0),
            tokens.shape[1],
            HAS_TOKENS=all_tokens is not None,
            BLOCK_N=BLOCK,
        )
        return
    new = new[(new[:, 0] >= 0) & (new[:, 0] < len(truth.lines))]
    truth.lines[new[:, 0], : TAILS + 1] = new[:, 1:]
    for number, end in new[:, :2].tolist() if all_tokens is not None else ():
        tokens = all_tokens[number, : max(end, 0)].long()  # type: ignore[index]
        chains = torch.empty_like(tokens)
        bounds, positions = torch.tensor([0, len(tokens)], device=new.device), torch.arange(len(tokens)).to(new.device)
        seed = truth.roots[number : number + 1]
        chain_scan_torch(tokens, positions, bounds, seed, keys=keys, out=chains)
        truth.lines[number, TAILS] = torch.cat((seed, chains))[-1]


begin_torch = partial(begin, launches=False)


@triton.jit(
    do_not_specialize=["num_rows", "truth_stride", "tokens_stride", "width"],
    do_not_specialize_on_alignment=["new"],
)
def _begin_kernel(
    new,
    truth,
    tokens,
    constants,
    powers,
    num_rows,
    truth_stride,
    tokens_stride,
    width,
    HAS_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = new + tl.program_id(0).to(tl.int64) * NEW
    number = tl.load(row)
    if (number < 0) | (number >= num_rows):
        return
    line = truth + number * truth_stride
    for i_column in tl.static_range(NEW - 1):
        tl.store(line + i_column, tl.load(row + 1 + i_column))
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
