"""Post: numbers of the device into a box in host memory, by a kernel, so that no copy stands between two launches."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.checks import expect_int64
from kvcanary_kernels.device import tl, triton

BLOCK = 1024  # numbers of a program


def post(numbers: Tensor, turn: Tensor, *, box: Tensor) -> None:
    """Write the numbers into line `turn >> 32` of the box, counted around. May be captured.

    The host finds them there when it has waited for what was launched, and until the line's turn comes again.

    numbers: [n] int64
    turn:    [1] int64, not negative
    box:     [lines, n] int64 in host memory, pinned where the numbers are on a GPU
    """
    _check(numbers, turn, box)
    n = numbers.numel()
    if n == 0:
        return
    _post_kernel[(triton.cdiv(n, BLOCK),)](numbers, turn, box, n, box.shape[0], BLOCK_N=BLOCK)


def post_torch(numbers: Tensor, turn: Tensor, *, box: Tensor) -> None:
    """The torch reference of `post`."""
    _check(numbers, turn, box)
    box[(int(turn) >> 32) % box.shape[0]] = numbers.cpu()


@triton.jit(do_not_specialize=["n"])
def _post_kernel(numbers, turn, box, n, num_lines, BLOCK_N: tl.constexpr):
    line = (tl.load(turn) >> 32) % num_lines
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    tl.store(box + line * n + o_n, tl.load(numbers + o_n, mask=m_n), mask=m_n)


def _check(numbers: Tensor, turn: Tensor, box: Tensor) -> None:
    expect_int64(numbers.numel(), numbers=numbers)
    expect_int64(1, turn=turn)
    right_type = box.dtype is torch.int64 and box.is_cpu and box.is_contiguous()
    if box.dim() != 2 or box.shape[1] != numbers.numel() or not right_type:
        raise ValueError(
            f"box must be contiguous [lines, {numbers.numel()}] int64 in host memory, got {list(box.shape)} "
            f"{box.dtype} on {box.device}"
        )
