"""Begin: rows of an engine's state that requests take, with the chain of what each of them has from elsewhere."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.record.chain import chain_scan_torch
from kvcanary_kernels.record.device import BLOCK, INVERSES, tl, triton
from kvcanary_kernels.record.device import mix as device_mix
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.watch.walk import Truth

#: Columns of a new row; TAIL is used where nobody knows its tokens on the device.
NUMBER, END, ROOT, UID, TAIL = range(5)
NEW_WIDTH = 5
NEW = tl.constexpr(NEW_WIDTH)
END_OF = tl.constexpr(END)
ROOT_OF = tl.constexpr(ROOT)
UID_OF = tl.constexpr(UID)
TAIL_OF = tl.constexpr(TAIL)


def begin(new: Tensor, truth: Truth, keys: Keys, all_tokens: Tensor | None = None) -> None:
    """Write what is true of new rows. No allocation, no wait.

    new:        [n, NEW_WIDTH] int64: number in Truth (one that it does not have: padding), entries that it begins with
                or NOT_FOLLOWED, chain of none, who writes, chain of these entries
    all_tokens: [rows of Truth, width] int32 or int64, where the last of these is computed from; None: it is taken
    """
    tokens = truth.tails if all_tokens is None else all_tokens
    _begin_kernel[(new.shape[0],)](
        new,
        truth.ends,
        truth.known,
        truth.tails,
        truth.roots,
        truth.uids,
        tokens,
        keys.constants,
        keys.powers,
        truth.ends.shape[0],
        truth.tails.stride(0),
        tokens.stride(0),
        tokens.shape[1],
        HAS_TOKENS=all_tokens is not None,
        BLOCK_N=BLOCK,
    )


def begin_torch(new: Tensor, truth: Truth, keys: Keys, all_tokens: Tensor | None = None) -> None:
    """The torch reference of `begin`."""
    new = new[(new[:, NUMBER] >= 0) & (new[:, NUMBER] < truth.ends.shape[0])]
    numbers = new[:, NUMBER]
    truth.ends[numbers], truth.roots[numbers], truth.uids[numbers] = new[:, END], new[:, ROOT], new[:, UID]
    truth.known[numbers], truth.tails[numbers, 0] = 1, new[:, TAIL]
    for number, end, root in new[:, : ROOT + 1].tolist() if all_tokens is not None else ():
        tokens = all_tokens[number, : max(end, 0)].long()  # type: ignore[index]
        chains = torch.empty_like(tokens)
        bounds, seed = (torch.tensor(values, device=new.device) for values in ([0, len(tokens)], [root]))
        positions = torch.arange(len(tokens), device=new.device)
        chain_scan_torch(tokens, positions, bounds, seed, keys=keys, out=chains)
        truth.tails[number, 0] = torch.cat((seed, chains))[-1]


@triton.jit(
    do_not_specialize=["num_rows", "tail_stride", "tokens_stride", "width"],
    do_not_specialize_on_alignment=["new"],
)
def _begin_kernel(
    new,
    ends,
    known,
    tails,
    roots,
    uids,
    tokens,
    constants,
    powers,
    num_rows,
    tail_stride,
    tokens_stride,
    width,
    HAS_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = new + tl.program_id(0).to(tl.int64) * NEW
    number = tl.load(row)
    if (number < 0) | (number >= num_rows):
        return
    end = tl.load(row + END_OF)
    root = tl.load(row + ROOT_OF)
    tail = tl.load(row + TAIL_OF)
    if HAS_TOKENS:
        tail = root
        last = tl.minimum(end, width)
        o_block = tl.arange(0, BLOCK_N)
        b_inverse = tl.load(powers + INVERSES + 1 + o_block)
        for i_block in range(0, last, BLOCK_N):
            o_n = i_block + o_block
            m_n = o_n < last
            b_token = tl.load(tokens + number * tokens_stride + o_n, mask=m_n, other=0).to(tl.int64)
            b_term = tl.where(m_n, device_mix(b_token, o_n.to(tl.int64), constants) * b_inverse, 0)
            tail = tl.load(powers + tl.minimum(last - i_block, BLOCK_N)) * (tail + tl.sum(b_term))
    tl.store(ends + number, end)
    tl.store(known + number, tl.full([], 1, tl.int64))
    tl.store(roots + number, root)
    tl.store(uids + number, tl.load(row + UID_OF))
    tl.store(tails + number * tail_stride, tail)
