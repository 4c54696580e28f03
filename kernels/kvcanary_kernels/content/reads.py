"""Reads: fingerprint a of rows, summed by the kernel that attends to them, and judged when all layers have been read.

A keyed word is the sum of 2^(8 i + 4 j) * byte i * digit j, the digits of a key being signed ones of base 16. Products
of bytes and digits are integers that 16-bit floats hold, and add up in float32 without loss: tensor cores form the
fingerprint (fingerprint.py) bit for bit, out of the operands that attention has loaded anyway. A head's part is added
where it is
read: the sum over heads and layers is compared once a forward.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import join, keyed_sums
from kvcanary_kernels.judge.forward import ForwardPlan, Planned
from kvcanary_kernels.record.arguments import expect_int64, expect_layered
from kvcanary_kernels.record.device import BLOCK, live_count, low_word, programs_for, tl, triton
from kvcanary_kernels.record.layout import CODE_BITS, MASK_32, Keys
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows
from kvcanary_kernels.record.table import device_entry_at, entry_at, segment_entries

SHIFTS = 16  # powers of BASE below 2^64
BASE, DIGITS = 16, 9  # signed digits that a 32-bit key needs
OFFSET = 1024  # a number of 16 bits whose last ones are a byte is this much more
PROGRAMS = 8  # that share a row, times those of other operations: there are as many fingerprints of an entry as layers
LAYERS_AT_ONCE = 8
MOST_BYTES = (1 << 24) // (BASE * (OFFSET + 255))  # of a head's row, for sums of both parts to be exact in float32
R9 = tl.constexpr(CODE_BITS["R9"])


@dataclass(frozen=True, eq=False)
class ReadSums:
    """What attention needs to fingerprint the rows of one layer as it reads them (`ReadKeys.of`).

    factors:    [2, kv_heads, bytes of an element, SHIFTS, head_dim] float16, of the bytes of K and of V
    missing:    [kv_heads] int64, what is added for bytes being OFFSET more than they are
    scale_keys: [2] int64, keys of the float32 scales of K and V, which attention reads too; [0] where rows have none
    sums:       [>= keys that rows read] int64, where each entry of the index array adds up
    """

    rows: PoolRows
    keys: Keys
    layer: int
    factors: Tensor
    missing: Tensor
    scale_keys: Tensor
    sums: Tensor

    def add_torch(self, places: slice, slots: Tensor) -> None:
        """What these entries of the index array, valid ``slots [n]``, add to the sums: the torch reference."""
        layer = slice(self.layer, self.layer + 1)
        pieces = self.keys.pieces[layer, :, : self.keys.pieces.shape[2] // 2]
        self.sums[places] += join(keyed_sums(self.rows.gather_layer(self.layer, slots)[None], pieces), self.keys)[0]


class ReadKeys:
    """Keys of fingerprint a as attention takes them, of every layer of one pool; `reads_fit` says of which."""

    def __init__(self, rows: PoolRows, keys: Keys, kv_heads: int) -> None:
        self._rows, self._keys = rows, keys
        layers, size = rows.num_layers, rows.element_sizes[0]
        words = keys.fingerprint_a.to(torch.int64) & MASK_32
        pairs = words[:, : 2 * rows.pieces[0].words].view(layers, 2, -1)
        factors = torch.zeros(*pairs.shape, WORD_BYTES, SHIFTS, dtype=torch.float16, device=pairs.device)
        rest = pairs
        for number in range(DIGITS):
            digit = (rest + BASE // 2) % BASE - BASE // 2
            rest = (rest - digit) // BASE
            for byte in range(WORD_BYTES):
                factors[..., byte, 2 * byte + number] = digit.to(torch.float16)
        by_byte = factors.view(layers, 2, kv_heads, -1, size, SHIFTS)
        self._factors = by_byte.permute(0, 1, 2, 4, 5, 3).contiguous()
        units = torch.stack([pairs << 8 * byte for byte in range(WORD_BYTES)], -1)
        self._missing = -OFFSET * units.view(layers, 2, kv_heads, -1).sum((1, 3))
        self._scale_keys = words[:, [piece.first for piece in rows.pieces[2:]]].contiguous()

    def of(self, layer: int, sums: Tensor) -> ReadSums:
        """Of one layer, adding to ``sums``."""
        own = self._factors[layer], self._missing[layer], self._scale_keys[layer]
        return ReadSums(self._rows, self._keys, layer, *own, sums)


def reads_fit(rows: PoolRows, kv_heads: int) -> bool:
    """Whether attention reads whole rows of this pool: K and V alike, of 1 to 4 bytes, and a scale of each or none."""
    k, *others = rows.pieces
    scales = others[1:]
    return (
        len(others) in (1, 3)
        and others[0].words == k.words
        and rows.element_sizes[0] == rows.element_sizes[1] <= WORD_BYTES
        and all(scale.words == 1 for scale in scales)
        and WORD_BYTES * k.words <= MOST_BYTES * kv_heads
    )


def judge_reads(
    forward: ForwardPlan,
    planned: Planned,
    *,
    sums: Tensor,
    content_a: Tensor,
    start_a: Tensor,
    codes: Tensor,
    null_slots: int,
    launches: bool = True,
) -> None:
    """R9 for every entry of live rows whose bytes, as attention read them, are not those of the record.

    May be captured; after `settle`. Rows that write nothing were not read.

    sums:      [nnz] int64, of all layers (ReadSums); zero again afterwards
    content_a: [layers, num_slots] int64, stored fingerprints;  start_a: [layers] int64, what they begin with
    codes:     [nnz] int64, read codes as verify left them
    """
    expect_int64(forward.capacity, sums=sums, codes=codes)
    expect_layered(content_a.shape[0], content_a.shape[1], content_a=content_a)
    expect_int64(content_a.shape[0], start_a=start_a)
    if forward.num_rows == 0:
        return
    if launches:
        _judge_reads_kernel[(forward.num_rows, programs_for(forward.capacity) * PROGRAMS)](
            forward.indices,
            forward.bounds,
            forward.num_live,
            planned.starts,
            planned.row_lengths,
            sums,
            content_a,
            start_a,
            codes,
            forward.num_rows,
            forward.capacity,
            content_a.shape[1],
            content_a.shape[0],
            content_a.stride(0),
            null_slots,
            BLOCK_N=BLOCK,
            BLOCK_L=LAYERS_AT_ONCE,
        )
        sums.zero_()
        return
    live = min(max(int(forward.num_live), 0), forward.num_rows)
    lengths = torch.where(forward.bounds.diff() > 0, planned.row_lengths, 0)[:live]
    (places,) = segment_entries(lengths, int(lengths.sum()), planned.starts[:live])
    slots = entry_at(forward.indices, places)
    own = (slots >= null_slots) & (slots < content_a.shape[1])
    places, slots = places[own], slots[own]
    wrong = (content_a[:, slots] - start_a[:, None]).sum(0) != sums[places]
    codes[places[wrong]] |= CODE_BITS["R9"]
    sums.zero_()


judge_reads_torch = partial(judge_reads, launches=False)


@triton.jit(do_not_specialize=["num_rows", "num_indices", "num_slots", "num_layers", "null_slots"])
def _judge_reads_kernel(
    indices,
    bounds,
    num_live,
    starts,
    row_lengths,
    sums,
    content_a,
    start_a,
    codes,
    num_rows,
    num_indices,
    num_slots,
    num_layers,
    content_stride,
    null_slots,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if i_row >= live_count(num_live, num_rows, True):
        return
    if tl.load(bounds + i_row + 1) <= tl.load(bounds + i_row):
        return
    first = tl.load(starts + i_row)
    length = tl.load(row_lengths + i_row)
    for i_n in range(tl.program_id(1) * BLOCK_N, length, tl.num_programs(1) * BLOCK_N):
        o_n = first + i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < first + length
        slot = device_entry_at(indices, o_n, m_n, num_indices)
        m_n &= (slot >= null_slots) & (slot < num_slots)
        b_sum = tl.load(sums + o_n, mask=m_n, other=0)
        for i_layer in range(0, num_layers, BLOCK_L):
            o_layer = i_layer + tl.arange(0, BLOCK_L).to(tl.int64)[:, None]
            m_layer = (o_layer < num_layers) & m_n[None, :]
            b_fingerprint = tl.load(content_a + o_layer * content_stride + slot[None, :], mask=m_layer, other=0)
            b_fingerprint -= tl.load(start_a + o_layer, mask=o_layer < num_layers, other=0)
            b_sum -= tl.sum(b_fingerprint, 0)
        m_wrong = m_n & (b_sum != 0)
        tl.store(codes + o_n, tl.load(codes + o_n, mask=m_wrong, other=0) | R9, mask=m_wrong)


@triton.jit
def byte_factors(factors, o_d, DIM: tl.constexpr, ITEM: tl.constexpr):
    """Factors of the bytes of an element, [SHIFTS, D] each, the first one again for those that it does not have."""
    rows = factors + tl.arange(0, 16)[:, None] * DIM + o_d[None, :]
    m_d = (o_d < DIM)[None, :]
    f_0 = tl.load(rows, mask=m_d, other=0.0)
    f_1 = f_0
    f_2 = f_0
    f_3 = f_0
    if ITEM > 1:
        f_1 = tl.load(rows + 16 * DIM, mask=m_d, other=0.0)
    if ITEM > 2:
        f_2 = tl.load(rows + 32 * DIM, mask=m_d, other=0.0)
        f_3 = tl.load(rows + 48 * DIM, mask=m_d, other=0.0)
    return f_0, f_1, f_2, f_3


@triton.jit
def add_fingerprints(
    sums, b_k, b_v, f_k0, f_k1, f_k2, f_k3, f_v0, f_v1, f_v2, f_v3, b_missing,
    slots, k_scale, k_scale_stride, v_scale, v_scale_stride, scale_keys, i_head, m_n, is_whole,
    BLOCK_N: tl.constexpr, ITEM: tl.constexpr, PACKED: tl.constexpr, HAS_SCALE_KEYS: tl.constexpr,
):  # fmt: skip
    """What these rows of a head, b_k and b_v [N, D] as they lie in the pool, add to ``sums [N]``, if is_whole."""
    b_none = tl.zeros([16, BLOCK_N], tl.float32)
    b_f = byte_sums(tl.trans(b_k), f_k0, f_k1, f_k2, f_k3, b_none, ITEM, PACKED)
    b_f = byte_sums(tl.trans(b_v), f_v0, f_v1, f_v2, f_v3, b_f, ITEM, PACKED)
    b_fingerprint = joined(b_f) + b_missing
    if HAS_SCALE_KEYS:
        b_fingerprint += scale_sums(k_scale, slots, k_scale_stride, m_n, scale_keys, i_head)
        b_fingerprint += scale_sums(v_scale, slots, v_scale_stride, m_n, scale_keys + 1, i_head)
    tl.atomic_add(sums, b_fingerprint, mask=m_n & is_whole, sem="relaxed")


@triton.jit
def byte_sums(b_columns, f_0, f_1, f_2, f_3, b_f, ITEM: tl.constexpr, PACKED: tl.constexpr):
    """b_f [SHIFTS, N] and the factors times the bytes of rows, given as columns [D, N]; all exact.

    PACKED: two numbers of 16 bits are taken apart by one instruction for each of their bytes, where an assembler knows.
    """
    if PACKED and ITEM == 2:
        b_low, b_high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0x64646464, 0x4240; prmt.b32 $1, $2, 0x64646464, 0x4341;",
            "=r,=r,r",
            [b_columns],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        b_f = tl.dot(f_0, b_low, b_f)
        return tl.dot(f_1, b_high, b_f)
    if ITEM == 1:
        b_bits = b_columns.to(tl.int8, bitcast=True).to(tl.int16)
    elif ITEM == 2:
        b_bits = b_columns.to(tl.int16, bitcast=True)
    else:
        b_bits = b_columns.to(tl.int32, bitcast=True)
    b_f = tl.dot(f_0, _byte(b_bits), b_f)
    if ITEM > 1:
        b_f = tl.dot(f_1, _byte(b_bits >> 8), b_f)
    if ITEM > 2:
        b_f = tl.dot(f_2, _byte(b_bits >> 16), b_f)
        b_f = tl.dot(f_3, _byte(b_bits >> 24), b_f)
    return b_f


@triton.jit
def _byte(b_bits):
    """The lowest byte as a number of 16 bits, and OFFSET more: its bits beside those of OFFSET."""
    return ((b_bits & 0xFF) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def joined(b_f):
    """[N] int64: the rows of [SHIFTS, N], shifted and added mod 2^64."""
    b_shift = 4 * tl.arange(0, 16).to(tl.int64)
    return tl.sum(b_f.to(tl.int32).to(tl.int64) << b_shift[:, None], 0)


@triton.jit
def scale_sums(scales, slots, stride, m_n, key, i_head):
    """[N] int64: the keyed scales of these slots, which the first head adds."""
    b_words = tl.load(scales + slots * stride, mask=m_n, other=0.0).to(tl.int32, bitcast=True)
    return low_word(b_words.to(tl.int64)) * tl.where(i_head == 0, tl.load(key), 0)
