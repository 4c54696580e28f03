"""Decode attention that hashes the K and V which it reads: the ways that ``kvcanary bench fused`` compares.

One query token a row, bf16 heads of 128, slots of any order. A program takes one row and one KV head, N keys at a time.
Each way writes, for every key, its head's part of lane a: what the heads of a slot sum up to, with the layer's starting
constant, is the very lane that `kvcanary_kernels.fingerprint` computes.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvcanary_kernels.record import Keys

DIM = 128
WORDS = DIM // 2  # of one head of K, or of V
LIMBS = 5  # signed digits of base 256 that a 32-bit key needs
SHIFTS = 8  # powers of 256 below 2^64
UNSIGNED = -128  # XORed to a byte it makes an unsigned one signed, 128 less
ROW_BLOCK = tl.constexpr(16)  # queries that a matrix product takes at least
LEAST = tl.constexpr(-1.0e30)
FLIP = gl.constexpr(UNSIGNED)

# What a program of _attend_and_hash_kernel hashes, and how.
NOTHING = tl.constexpr(0)
WORDS_ONE_BY_ONE = tl.constexpr(1)
BYTES_READ_TWICE = tl.constexpr(2)


def byte_keys(keys: Keys, num_heads: int) -> tuple[Tensor, Tensor]:
    """[heads, 2, 256, 8] int8 factors of the bytes of a head's K and V, and [heads] int64 what their signs leave out.

    A keyed word is the sum of 2^(8 (i + j)) * byte i * digit j: column i + j of a byte's row holds digit j. Products of
    int8 add up in int32 without loss, and the columns, shifted, are the keyed sum mod 2^64.
    """
    words = keys.lane_a[0].to(torch.int64).bitwise_and_(2**32 - 1).view(2, num_heads, WORDS).transpose(0, 1)
    factors = torch.zeros(num_heads, 2, WORDS, 4, SHIFTS, dtype=torch.int8, device=words.device)
    rest = words.clone()
    for limb in range(LIMBS):
        digit = (rest + 128) % 256 - 128
        rest = (rest - digit) >> 8
        for byte in range(min(4, SHIFTS - limb)):
            factors[:, :, :, byte, byte + limb] = digit.to(torch.int8)
    missing = words.sum((1, 2)) * -UNSIGNED * sum(256**byte for byte in range(4))
    return factors.view(num_heads, 2, 4 * WORDS, SHIFTS), missing


@triton.jit
def _attend_and_hash_kernel(
    q,
    k,
    v,
    slots,
    keys,
    factors,
    out,
    sums,
    length,
    num_keys,
    stride,
    scale,
    HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    WAY: tl.constexpr,
):
    """Triton. k, v: int32 words of a slot's K and V for WORDS_ONE_BY_ONE, else bf16; num_keys of all rows."""
    i_head = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1).to(tl.int64)
    W: tl.constexpr = D // 2
    BY_WORDS: tl.constexpr = WAY == WORDS_ONE_BY_ONE
    o_m = tl.arange(0, ROW_BLOCK)
    o_n = tl.arange(0, N)
    o_w = tl.arange(0, W)
    o_d = tl.arange(0, D)
    m_q = (o_m < FOLD)[:, None]
    row = ((i_row * HEADS + i_head) * FOLD + o_m)[:, None] * D
    slots += i_row * length
    b_max = tl.full([ROW_BLOCK], LEAST, tl.float32)
    b_sum = tl.zeros([ROW_BLOCK], tl.float32)
    if BY_WORDS:
        b_even = tl.load(q + row + 2 * o_w[None, :], mask=m_q, other=0.0)
        b_odd = tl.load(q + row + 2 * o_w[None, :] + 1, mask=m_q, other=0.0)
        b_acc_even = tl.zeros([ROW_BLOCK, W], tl.float32)
        b_acc_odd = tl.zeros([ROW_BLOCK, W], tl.float32)
        b_key_k = _unsigned(tl.load(keys + i_head * W + o_w))[None, :]
        b_key_v = _unsigned(tl.load(keys + (HEADS + i_head) * W + o_w))[None, :]
    else:
        b_q = tl.load(q + row + o_d[None, :], mask=m_q, other=0.0)
        b_acc = tl.zeros([ROW_BLOCK, D], tl.float32)
    if WAY == BYTES_READ_TWICE:
        o_byte = tl.arange(0, 2 * D)
        o_s = tl.arange(0, 16)
        table = factors + i_head * 4 * D * 8 + o_byte[:, None] * 8 + o_s[None, :]
        b_factor_k = tl.load(table, mask=(o_s < 8)[None, :], other=0)
        b_factor_v = tl.load(table + 2 * D * 8, mask=(o_s < 8)[None, :], other=0)
    for i_n in range(0, length, N):
        b_slot = tl.load(slots + i_n + o_n)
        if BY_WORDS:
            words = (b_slot * (stride // 2) + i_head * W)[:, None] + o_w[None, :]
            b_k = tl.load(k + words)
            b_v = tl.load(v + words)
            b_s = tl.dot(b_even, tl.trans(_low(b_k))) + tl.dot(b_odd, tl.trans(_high(b_k)))
        else:
            elements = (b_slot * stride + i_head * D)[:, None] + o_d[None, :]
            b_k = tl.load(k + elements)
            b_v = tl.load(v + elements)
            b_s = tl.dot(b_q, tl.trans(b_k))
        b_s *= scale
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_old = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_max = b_new
        b_p = b_p.to(tl.bfloat16)
        if BY_WORDS:
            b_acc_even = tl.dot(b_p, _low(b_v), b_acc_even * b_old[:, None])
            b_acc_odd = tl.dot(b_p, _high(b_v), b_acc_odd * b_old[:, None])
        else:
            b_acc = tl.dot(b_p, b_v, b_acc * b_old[:, None])
        lanes = sums + i_head * num_keys + i_row * length + i_n + o_n
        if BY_WORDS:
            tl.store(lanes, tl.sum(_unsigned(b_k) * b_key_k + _unsigned(b_v) * b_key_v, 1))
        if WAY == BYTES_READ_TWICE:
            bytes_of = (b_slot * (2 * stride) + i_head * 2 * D)[:, None] + o_byte[None, :]
            b_k8 = tl.load(k.to(tl.pointer_type(tl.int8)) + bytes_of) ^ -128
            b_v8 = tl.load(v.to(tl.pointer_type(tl.int8)) + bytes_of) ^ -128
            b_f = tl.dot(b_k8, b_factor_k, tl.zeros([N, 16], tl.int32), out_dtype=tl.int32)
            b_f = tl.dot(b_v8, b_factor_v, b_f, out_dtype=tl.int32)
            b_shifted = b_f.to(tl.int64) << (8 * (o_s % 8).to(tl.int64))[None, :]
            tl.store(lanes, tl.sum(b_shifted, 1))
    b_norm = b_sum[:, None]
    if BY_WORDS:
        tl.store(out + row + 2 * o_w[None, :], (b_acc_even / b_norm).to(tl.bfloat16), mask=m_q)
        tl.store(out + row + 2 * o_w[None, :] + 1, (b_acc_odd / b_norm).to(tl.bfloat16), mask=m_q)
    else:
        tl.store(out + row + o_d[None, :], (b_acc / b_norm).to(tl.bfloat16), mask=m_q)


@triton.jit
def _unsigned(words):
    return words.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _low(words):
    return (words & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _high(words):
    return (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@gluon.jit
def _attend_and_hash_in_place_kernel(
    q,
    k,
    v,
    slots,
    factors,
    out,
    sums,
    length,
    num_keys,
    stride,
    scale,
    HEADS: gl.constexpr,
    FOLD: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    HASHES: gl.constexpr,
):
    """Gluon: attention and hash read the same shared memory, as bf16 and as bytes."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    FACTORS: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    AS_NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    AS_BYTES: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, order=[1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], instr_shape=[16, 8])
    LANES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], instr_shape=[16, 8])
    i_head = gl.program_id(0).to(gl.int64)
    i_row = gl.program_id(1).to(gl.int64)
    k_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], AS_NUMBERS)
    v_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], AS_NUMBERS)
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))
    o_n = gl.arange(0, N, layout=gl.SliceLayout(1, LOADED))
    row = ((i_row * HEADS + i_head) * FOLD + o_m)[:, None] * D + o_d[None, :]
    m_q = (o_m < FOLD)[:, None]
    b_q = gl.convert_layout(gl.load(q + row, mask=m_q, other=0.0), gl.DotOperandLayout(0, SCORES, 2))
    if HASHES:
        o_byte = gl.arange(0, 2 * D, layout=gl.SliceLayout(1, FACTORS))
        table = factors + i_head * 4 * D * 8 + o_byte[:, None] * 8
        table += gl.arange(0, 8, layout=gl.SliceLayout(0, FACTORS))[None, :]
        b_factor_k = gl.convert_layout(gl.load(table), gl.DotOperandLayout(1, LANES, 4))
        b_factor_v = gl.convert_layout(gl.load(table + 2 * D * 8), gl.DotOperandLayout(1, LANES, 4))
        b_shift = 8 * gl.arange(0, 8, layout=gl.SliceLayout(0, LANES)).to(gl.int64)
        lanes = sums + i_head * num_keys + i_row * length + gl.arange(0, N, layout=gl.SliceLayout(1, LANES))
    b_acc = gl.zeros([ROWS, D], gl.float32, SCORES)
    b_max = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    b_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    slots += i_row * length
    k += i_head * D + o_d[None, :]
    v += i_head * D + o_d[None, :]
    for i_stage in gl.static_range(STAGES - 1):
        b_slot = gl.load(slots + i_stage * N + o_n)
        _copy(k_buffer.index(i_stage), v_buffer.index(i_stage), k, v, b_slot * stride)
    b_slot = gl.load(slots + (STAGES - 1) * N + o_n)
    num_blocks = length // N
    for i_block in range(num_blocks):
        async_copy.wait_group(STAGES - 2)
        i_ahead = i_block + STAGES - 1
        if i_ahead < num_blocks:
            _copy(k_buffer.index(i_ahead % STAGES), v_buffer.index(i_ahead % STAGES), k, v, b_slot * stride)
        else:
            async_copy.commit_group()
        b_slot = gl.load(slots + gl.minimum(i_ahead + 1, num_blocks - 1) * N + o_n)
        k_block = k_buffer.index(i_block % STAGES)
        v_block = v_buffer.index(i_block % STAGES)
        b_k = k_block.permute((1, 0)).load(gl.DotOperandLayout(1, SCORES, 2))
        b_s = mma_v2(b_q, b_k, gl.zeros([ROWS, N], gl.float32, SCORES)) * scale
        b_new = gl.maximum(b_max, gl.max(b_s, 1))
        b_p = gl.exp2(b_s - b_new[:, None])
        b_old = gl.exp2(b_max - b_new)
        b_sum = b_sum * b_old + gl.sum(b_p, 1)
        b_max = b_new
        b_p = gl.convert_layout(b_p.to(gl.bfloat16), gl.DotOperandLayout(0, SCORES, 2))
        b_acc = mma_v2(b_p, v_block.load(gl.DotOperandLayout(1, SCORES, 2)), b_acc * b_old[:, None])
        if HASHES:
            b_bytes = k_block._reinterpret(gl.int8, [N, 2 * D], AS_BYTES).load(gl.DotOperandLayout(0, LANES, 4))
            b_f = mma_v2(b_bytes ^ FLIP, b_factor_k, gl.zeros([N, 8], gl.int32, LANES))
            b_bytes = v_block._reinterpret(gl.int8, [N, 2 * D], AS_BYTES).load(gl.DotOperandLayout(0, LANES, 4))
            b_f = mma_v2(b_bytes ^ FLIP, b_factor_v, b_f)
            gl.store(lanes + i_block * N, gl.sum(b_f.to(gl.int64) << b_shift[None, :], 1))
    b_out = gl.convert_layout(b_acc / b_sum[:, None], LOADED)
    gl.store(out + row, b_out.to(gl.bfloat16), mask=m_q)


@gluon.jit
def _copy(k_block, v_block, k, v, rows):
    """Rows of K and V on their way into shared memory, as one group."""
    async_copy.async_copy_global_to_shared(k_block, k + rows[:, None])
    async_copy.async_copy_global_to_shared(v_block, v + rows[:, None])
    async_copy.commit_group()
