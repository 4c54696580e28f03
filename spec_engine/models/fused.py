"""A decoder layer by our kernels: what stands around its attention, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcanary_kernels.engine.layers import add_norm, gated, norm, rotate
from kvcanary_kernels.engine.product import product

#: Of so many float32 rows at most each reads a weight anew, so many bytes of it in all, before a library is faster.
MOST_ROWS, REREAD_BYTES = 64, 1 << 24


class Layer(Protocol):
    """What is needed of a decoder layer: its weights [rows, size], norms and biases [size], and how heads lie in qkv.

    reduce: sums a product over all ranks, in place, where each holds a part of the layer.
    num_heads_all: of q, k and v together; qk_split: heads of q, heads of k (v has as many); half_dim: of a head.
    """

    input_norm_weight: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    o_weight: Tensor
    o_bias: Tensor | None
    post_norm_weight: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor
    eps: float
    num_heads_all: int
    qk_split: tuple[int, int]
    half_dim: int
    reduce: Callable[[Tensor], object] | None


def project(layer: Layer, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, the joint product and the rotation: x [n, input_size] -> q, k, v by head."""
    if layer.input_norm_weight is not None:
        x = normed(x, layer.input_norm_weight, layer.eps)
    qkv = linear(x, layer.qkv_weight, layer.qkv_bias).view(len(x), layer.num_heads_all, 2 * layer.half_dim)
    q_heads, kv_heads = layer.qk_split
    norms = {"q_norm": layer.q_norm_weight, "k_norm": layer.k_norm_weight, "eps": layer.eps}
    rotate(qkv, *rotation, num_heads=q_heads + kv_heads, num_q_heads=q_heads, **norms)
    q, k, v = qkv.split_with_sizes((q_heads, kv_heads, kv_heads), 1)
    return q, k, v


def finish(layer: Layer, hidden: Tensor, attention: Tensor) -> Tensor:
    """Output product, residual, norm, MLP, residual."""
    output = linear(attention.flatten(1), layer.o_weight, layer.o_bias)
    if layer.reduce is not None:
        layer.reduce(output)
    total, x = torch.empty_like(output), torch.empty_like(output)
    add_norm(hidden, output, layer.post_norm_weight, layer.eps, total=total, normed=x)
    x = gate(x, layer.gate_up_weight)
    if layer.reduce is not None:  # the residual is added once, behind the sum
        part = linear(x, layer.down_weight)
        layer.reduce(part)
        return total.add_(part)
    if not goes_by_row(x, layer.down_weight):
        return total.addmm_(x, layer.down_weight.t())
    product(x, layer.down_weight, out=total, residual=total)
    return total


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [n, size] times the transpose of weight [m, size] in float32: what was summed in it is not rounded."""
    if hidden.dtype is torch.float32 or goes_by_row(hidden, weight):
        return linear(hidden, weight, dtype=torch.float32)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def goes_by_row(x: Tensor, weight: Tensor) -> bool:
    """Whether each row of x [n, size] reads the weight for itself: a single one, and few of float32 a small weight.

    A library's float32 product of a few rows takes 27 to 55 us on an H200, however small the weight is.
    """
    n = len(x)
    is_few = n <= MOST_ROWS and n * weight.nbytes <= REREAD_BYTES
    return n == 1 or (x.dtype is torch.float32 and is_few)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [n, size] times the transpose of weight [m, size], plus bias [m]; ``dtype``: of the result, else that of x."""
    if not goes_by_row(x, weight):
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    product(x, weight, out=out, bias=bias)
    return out


def gate(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), of gate_up_weight [2 * m, size]."""
    out = x.new_empty(len(x), len(gate_up_weight) // 2)
    if goes_by_row(x, gate_up_weight):
        product(x, gate_up_weight, out=out, gated=True)
    else:
        gated(F.linear(x, gate_up_weight), out)
    return out


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, size] over the root of its mean square, times weight [size]."""
    out = torch.empty_like(x)
    norm(x, weight, eps, normed=out)
    return out
