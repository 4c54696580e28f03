"""Copies: whole entries of states go to other entries, in every layer."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import tl, triton

BLOCK = 4096


def copy_entries(states: Tensor, sources: Tensor, targets: Tensor, *, launches: bool = True) -> None:
    """states[:, targets] = states[:, sources], where a target is not -1; no entry is both. May be captured.

    states: [layers, entries, size];  sources, targets: [n] int64
    """
    layers, _, size = states.shape
    expect_int64(len(sources), sources=sources, targets=targets)
    if states.stride(2) != 1:
        raise ValueError(f"states must have whole entries, got strides {states.stride()}")
    if len(sources) == 0:
        return
    if launches:
        grid = len(sources), layers, triton.cdiv(size, BLOCK)
        _copy_kernel[grid](states, sources, targets, *states.stride()[:2], size, BLOCK_N=BLOCK, num_warps=8)
        return
    copied = targets >= 0
    states[:, targets[copied]] = states[:, sources[copied]]


copy_entries_torch = partial(copy_entries, launches=False)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["sources", "targets"])
def _copy_kernel(states, sources, targets, layer_stride, entry_stride, size, BLOCK_N: tl.constexpr):
    i_n, i_layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    target = tl.load(targets + i_n)
    if target < 0:
        return
    o_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    layer = states + i_layer * layer_stride + o_n
    m_n = o_n < size
    b_state = tl.load(layer + tl.load(sources + i_n) * entry_stride, mask=m_n)
    tl.store(layer + target * entry_stride, b_state, mask=m_n)
