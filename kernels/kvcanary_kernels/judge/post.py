"""Post: numbers of the device into a box in host memory, by a kernel, so that no copy stands between two launches."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import tl, triton

BLOCK = 1024  # numbers of a program


@dataclass(frozen=True, eq=False)
class Parts:
    """Tensors whose numbers go into a line of a box, one behind the other.

    tensors: by part, [n] int64, contiguous, on one device; they keep the memory alive
    where:   [3, parts] int64 beside them: addresses, first numbers in the line, counts
    """

    tensors: tuple[Tensor, ...]
    where: Tensor

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)


def parts_of(tensors: Sequence[Tensor]) -> Parts:
    """At least one tensor; ValueError unless each is contiguous [n] int64."""
    for tensor in tensors:
        expect_int64(tensor.numel(), part=tensor)
    sizes = [tensor.numel() for tensor in tensors]
    firsts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    where = torch.tensor([[tensor.data_ptr() for tensor in tensors], firsts, sizes])
    return Parts(tuple(tensors), where.to(tensors[0].device))


def post(parts: Parts, turn: Tensor, *, box: Tensor, launches: bool = True) -> None:
    """Write the numbers into line `turn >> 32` of the box, counted around. May be captured.

    The host finds them there when it has waited for what was launched, and until the line's turn comes again.

    turn: [1] int64, not negative
    box:  [lines, n] int64 in host memory, pinned where the numbers are on a GPU; n numbers have all parts together
    """
    expect_int64(1, turn=turn)
    right_type = box.dtype is torch.int64 and box.is_cpu and box.is_contiguous()
    if box.dim() != 2 or box.shape[1] != parts.numel or not right_type:
        raise ValueError(
            f"box must be contiguous [lines, {parts.numel}] int64 in host memory, got {list(box.shape)} "
            f"{box.dtype} on {box.device}"
        )
    longest = max(tensor.numel() for tensor in parts.tensors)
    if longest == 0:
        return
    if launches:
        grid = triton.cdiv(longest, BLOCK), len(parts.tensors)
        _post_kernel[grid](parts.where, turn, box, *reversed(box.shape), BLOCK_N=BLOCK)
        return
    box[(int(turn) >> 32) % box.shape[0]] = torch.cat(parts.tensors).cpu()


post_torch = partial(post, launches=False)


@triton.jit(do_not_specialize=["n"])
def _post_kernel(where, turn, box, n, num_lines, BLOCK_N: tl.constexpr):
    part, num_parts = where + tl.program_id(1), tl.num_programs(1)
    numbers, first = tl.load(part).to(tl.pointer_type(tl.int64)), tl.load(part + num_parts)
    line = (tl.load(turn) >> 32) % num_lines
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < tl.load(part + 2 * num_parts)
    tl.store(box + line * n + first + o_n, tl.load(numbers + o_n, mask=m_n), mask=m_n)
