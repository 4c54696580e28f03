"""Gated delta net: a layer that keeps one state a row, in place of K and V for every token.

A state is the last inputs of a short convolution, and for each head a matrix that every token decays, corrects by what
it should have said for the token's key (the delta rule), and reads by its query: Yang, Kautz and Hatamizadeh, "Gated
Delta Networks", 2024, as Qwen3-Next and Qwen3.5 have it. Tokens of a row follow each other, or are nodes of a tree.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcanary_kernels.engine.delta_shape import DeltaShape, DeltaWeights, Span
from kvcanary_kernels.record.device import tl, triton

BLOCK_CHANNELS = 128
EPS = tl.constexpr(1e-6)  # of the norms of queries and keys


def gated_delta(
    states: Tensor,
    span: Span,
    x: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    *,
    mixed: Tensor,
    out: Tensor,
    eps: float,
    launches: bool = True,
) -> None:
    """What each token reads of the state after it, normed and gated; states move on. May be captured.

    states: [entries, size], of one layer
    x:      [n, channels], inputs of the convolution: queries, keys, values
    gates:  [n, v_heads * v_dim + 2 * v_heads]: of the output, then by head how much a token corrects, and decays
    mixed:  [n, channels], scratch;  out: [n, v_heads * v_dim];  eps: of the output's norm
    """
    _expect(states, span, x, gates, shape, mixed=mixed, out=out)
    rows = len(span.sources)
    if rows == 0 or len(x) == 0:
        return
    if launches:
        _convolve_kernel[(rows, triton.cdiv(shape.channels, BLOCK_CHANNELS))](
            states, *span, x, weights.conv, mixed, states.stride(0), x.stride(0), shape.channels,
            WIDTH=shape.width, BLOCK=BLOCK_CHANNELS,
        )  # fmt: skip
        _delta_kernel[(rows, shape.v_heads)](
            states, *span, mixed, gates, weights.decay, weights.shift, weights.norm, out, states.stride(0),
            gates.stride(0), shape.channels, eps, K_HEADS=shape.k_heads, V_HEADS=shape.v_heads, K=shape.k_dim,
            V=shape.v_dim, BLOCK_K=triton.next_power_of_2(shape.k_dim), BLOCK_V=triton.next_power_of_2(shape.v_dim),
            WINDOW=shape.window, num_warps=8,
        )  # fmt: skip
        return
    row_of, parents = _rows_of(span), span.parents
    before = states[span.sources]
    windows, matrices = before[row_of, : shape.window], before[row_of, shape.window :]  # before each token, then after
    windows, matrices = windows.view(len(x), -1, shape.channels), matrices.view(len(x), *shape.matrix)
    for level in _levels(parents):
        at = torch.tensor(level, device=x.device)
        follow = parents[at] >= 0
        windows[at[follow]], matrices[at[follow]] = windows[parents[at[follow]]], matrices[parents[at[follow]]]
        seen = torch.cat((windows[at], x[at, None].to(windows.dtype)), 1)
        mixed[at] = F.silu((seen * weights.conv.t().to(seen.dtype)).sum(1)).to(mixed.dtype)
        windows[at] = seen[:, 1:]
        matrices[at], read = _advance(matrices[at], mixed[at], gates[at], weights, shape)
        out[at] = _gated(read, gates[at], weights.norm, shape, eps).to(out.dtype)
    left = span.targets >= 0
    states[span.targets[left]] = torch.cat((windows[left].flatten(1), matrices[left].flatten(1)), 1)


gated_delta_torch = partial(gated_delta, launches=False)


def _rows_of(span: Span) -> Tensor:
    """[n] the row of each token."""
    return torch.repeat_interleave(torch.arange(len(span.sources), device=span.starts.device), span.starts.diff())


def _levels(parents: Tensor) -> list[list[int]]:
    """Tokens by their number of ancestors in the forward."""
    depths, levels = list[int](), list[list[int]]()
    for token, parent in enumerate(parents.tolist()):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if depths[-1] == len(levels):
            levels.append([])
        levels[depths[-1]].append(token)
    return levels


def _advance(
    matrices: Tensor, mixed: Tensor, gates: Tensor, weights: DeltaWeights, shape: DeltaShape
) -> tuple[Tensor, Tensor]:
    """[m, v_heads, k_dim, v_dim] after one token of each of m rows, and what this reads, [m, v_heads, v_dim]."""
    m, keys, dtype = len(matrices), shape.k_heads * shape.k_dim, matrices.dtype
    q, k, v = mixed.to(dtype).split((keys, keys, shape.values), 1)
    q, k = (one.view(m, shape.k_heads, -1).repeat_interleave(shape.v_heads // shape.k_heads, 1) for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + EPS.value) for one in (q, k))
    corrects, decays = gates[:, shape.values :].to(dtype).unflatten(1, (2, -1)).unbind(1)
    decay = (-weights.decay.to(dtype).exp() * F.softplus(decays + weights.shift.to(dtype))).exp()
    matrices = matrices * decay[..., None, None]
    said = (matrices * k[..., None]).sum(2)
    correction = (v.view(m, shape.v_heads, -1) - said) * corrects.sigmoid()[..., None]
    matrices = matrices + k[..., None] * correction[:, :, None]
    return matrices, (matrices * (q * shape.k_dim**-0.5)[..., None]).sum(2)


def _gated(read: Tensor, gates: Tensor, norm: Tensor, shape: DeltaShape, eps: float) -> Tensor:
    """[m, v_heads * v_dim]: what each head has read, normed, times its gate."""
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + eps) * norm.to(read.dtype)
    return (normed * F.silu(gates[:, : shape.values].to(read.dtype).view_as(read))).flatten(1)


@triton.jit
def _step_back(parents, at, behind):
    """From a token to the one it follows; behind: steps beyond the row's first one."""
    parent = tl.load(parents + at)
    follows = (behind == 0) & (parent >= 0)
    return tl.where(follows, parent, at), tl.where(follows, 0, behind + 1)


@triton.jit(do_not_specialize=["states_stride", "x_stride", "channels"])
def _convolve_kernel(
    states,
    starts,
    parents,
    sources,
    targets,
    x,
    conv,
    mixed,
    states_stride,
    x_stride,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one row: every token of it, and the last inputs that it leaves."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < channels
    window = states + tl.load(sources + i_row) * states_stride + o_c
    first, end = tl.load(starts + i_row), tl.load(starts + i_row + 1)
    for token in range(first, end):
        b_sum = tl.zeros([BLOCK], tl.float32)
        at, behind = token, 0  # the token so many steps before, and how far it lies behind the row's first
        for step in tl.static_range(WIDTH):
            weight = tl.load(conv + o_c * WIDTH + WIDTH - 1 - step, mask=m_c, other=0).to(tl.float32)
            of_row = tl.load(window + (WIDTH - 1 - behind) * channels, mask=m_c & (behind > 0), other=0)
            own = tl.load(x + at * x_stride + o_c, mask=m_c & (behind == 0), other=0).to(tl.float32)
            b_sum += weight * tl.where(behind > 0, of_row, own)
            at, behind = _step_back(parents, at, behind)
        b_sum = b_sum / (1 + tl.exp(-b_sum))
        tl.store(mixed + token * channels + o_c, b_sum.to(mixed.dtype.element_ty), mask=m_c)
    # what a token leaves for its row is written when all have read what the row had: last first, oldest inputs first
    for back in range(first, end):
        token = first + end - 1 - back
        target = tl.load(targets + token)
        if target >= 0:
            left = states + target * states_stride + o_c
            for place in tl.static_range(WIDTH - 1):
                at, behind = token, 0
                for _ in tl.static_range(WIDTH - 2 - place):
                    at, behind = _step_back(parents, at, behind)
                of_row = tl.load(window + (WIDTH - 1 - behind) * channels, mask=m_c & (behind > 0), other=0)
                own = tl.load(x + at * x_stride + o_c, mask=m_c & (behind == 0), other=0).to(tl.float32)
                tl.store(left + place * channels, tl.where(behind > 0, of_row, own), mask=m_c)


@triton.jit(do_not_specialize=["states_stride", "gates_stride", "channels", "eps"])
def _delta_kernel(
    states,
    starts,
    parents,
    sources,
    targets,
    mixed,
    gates,
    decay,
    shift,
    norm,
    out,
    states_stride,
    gates_stride,
    channels,
    eps,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One head of one row, token by token: its matrix stays in registers, but where a node follows another branch."""
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_key = i_head // (V_HEADS // K_HEADS)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    own = states + WINDOW + i_head * K * V + o_k[:, None] * V + o_v[None, :]
    source = tl.load(sources + i_row) * states_stride
    b_state = tl.load(own + source, mask=m_kv, other=0)
    first, end = tl.load(starts + i_row), tl.load(starts + i_row + 1)
    log_decay = -tl.exp(tl.load(decay + i_head).to(tl.float32))
    b_shift = tl.load(shift + i_head).to(tl.float32)
    b_norm = tl.load(norm + o_v, mask=m_v, other=0).to(tl.float32)
    before = first - 1  # whose state is in registers: the row's own, as if a token had left it
    for token in range(first, end):
        parent = tl.load(parents + token)
        follows = tl.where(parent < 0, first - 1, parent)
        if follows != before:
            tl.debug_barrier()  # other threads may have stored what these load
            held = tl.load(targets + tl.maximum(parent, 0))
            where = tl.where((parent < 0) | (held < 0), source, held * states_stride)
            b_state = tl.load(own + where, mask=m_kv, other=0)
        at = mixed + token * channels
        b_q = tl.load(at + i_key * K + o_k, mask=m_k, other=0).to(tl.float32)
        b_k = tl.load(at + (K_HEADS + i_key) * K + o_k, mask=m_k, other=0).to(tl.float32)
        b_v = tl.load(at + 2 * K_HEADS * K + i_head * V + o_v, mask=m_v, other=0).to(tl.float32)
        b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * (K**-0.5)
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
        gate = gates + token * gates_stride
        corrects = tl.load(gate + V_HEADS * V + i_head).to(tl.float32)
        decays = tl.load(gate + V_HEADS * V + V_HEADS + i_head).to(tl.float32) + b_shift
        decays = tl.where(decays > 20, decays, tl.log(1 + tl.exp(tl.minimum(decays, 20))))
        b_state = b_state * tl.exp(log_decay * decays)
        b_v = (b_v - tl.sum(b_state * b_k[:, None], 0)) / (1 + tl.exp(-corrects))
        b_state = b_state + b_k[:, None] * b_v[None, :]
        b_out = tl.sum(b_state * b_q[:, None], 0)
        b_out = b_out * tl.rsqrt(tl.sum(b_out * b_out, 0) / V + eps) * b_norm
        b_gate = tl.load(gate + i_head * V + o_v, mask=m_v, other=0).to(tl.float32)
        b_out = b_out * b_gate / (1 + tl.exp(-b_gate))
        tl.store(out + (token * V_HEADS + i_head) * V + o_v, b_out.to(out.dtype.element_ty), mask=m_v)
        target = tl.load(targets + token)
        if target >= 0:
            tl.store(own + target * states_stride, b_state, mask=m_kv)
        before = token


def _expect(states: Tensor, span: Span, x: Tensor, gates: Tensor, shape: DeltaShape, **written: Tensor) -> None:
    n, values = len(x), shape.values
    wanted = {"states": (states, shape.size), "x": (x, shape.channels), "gates": (gates, values + 2 * shape.v_heads)}
    wanted |= {"mixed": (written["mixed"], shape.channels), "out": (written["out"], values)}
    for name, (own, size) in wanted.items():
        is_whole = own.is_contiguous() if name in written else own.stride(-1) == 1
        if own.dim() != 2 or own.shape[1] != size or not is_whole or (len(own) != n and name != "states"):
            raise ValueError(f"{name} must be [{n}, {size}] with whole rows, got {list(own.shape)} {own.stride()}")
    if len(span.parents) != n or len(span.targets) != n or len(span.starts) != len(span.sources) + 1:
        counts = len(span.starts), len(span.parents), len(span.sources), len(span.targets)
        raise ValueError(f"a span of {n} tokens must name each and every row once, got {counts}")
