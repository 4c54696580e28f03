"""Finite: slots of which an element is NaN or infinite.

A reader of whole pages multiplies what it masks by zero, and NaN times zero is NaN: what nobody has written must be
finite too. All formats are looked through as 32-bit words: in a lane of a word as wide as an element, the bits that the
format masks are a value that no finite number has. Integers have no such value.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_dense, expect_int64, expect_records, live_indices
from kvcanary_kernels.record.bitmap import bitmaps_of, layers_at_once, layers_where
from kvcanary_kernels.record.device import COLUMNS, REQUEST_GENERATION, live_count, low_word, tl, triton
from kvcanary_kernels.record.layout import MASK_32
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows


class Format(NamedTuple):
    """How to see in a word of a piece that an element is not finite: a lane of ``word & mask ^ value`` is zero.

    even, odd: the mask, in words 0, 2, ... and 1, 3, ... of the piece; they differ where an element has two words
    value:     what no finite element has under the mask
    lows, highs: the lowest and the highest bit of every lane
    """

    even: int
    odd: int
    value: int
    lows: int
    highs: int


#: By type, the mask and the value of elements that are not finite.
_NOT_FINITE = {
    torch.float32: (0x7F800000, 0x7F800000),
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float16: (0x7C00, 0x7C00),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e4m3fnuz: (0xFF, 0x80),
    torch.float8_e5m2fnuz: (0xFF, 0x80),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
_UPPER_DOUBLE = 0x7FF00000  # the exponent of a float64, in the upper of its words
FORMAT_FIELDS = tl.constexpr(len(Format._fields))


def format_of(dtype: torch.dtype) -> Format:
    """The format of words that hold elements of this type; nothing is not finite in one of integers."""
    if dtype is torch.float64:
        return Format(0, _UPPER_DOUBLE, _UPPER_DOUBLE, 1, 1 << 31)
    bits = 8 * min(dtype.itemsize, WORD_BYTES)
    mask, value = _NOT_FINITE.get(dtype, (0, 1))
    mask, value, low, high = (_in_every_lane(lane, bits) for lane in (mask, value, 1, 1 << bits - 1))
    return Format(mask, mask, value, low, high)


def formats_of(rows: PoolRows) -> tuple[Format, ...]:
    """By piece."""
    return tuple(format_of(dtype) for dtype in rows.dtypes)


def finite_check(
    rows: PoolRows,
    slots: Tensor,
    *,
    mismatch: Tensor,
    num_live: Tensor | None = None,
    records: Tensor | None = None,
    grants: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Look for elements of the rows of `slots` that are NaN or infinite (R9, in its clause U1). May be captured.

    slots:    [n] int64; a slot outside the pool leaves its output as it is
    mismatch: [n, 2] int64 out, bit l of the 128: layer l has such an element (columns: layers 0 to 63, 64 to 127)
    num_live: [1] int64, entries at and after it are padding and stay as they are; None: all live
    records:  [num_slots, 8] int64, as the canary wrote them; None: every slot is asked, whoever wrote it
    grants:   [n] int64, generations: an entry whose record is of this one was written since and stays as it is

    Slots and grants may lie in pinned memory of the host.
    """
    n = slots.numel()
    if (records is None) is not (grants is None):
        raise ValueError("records and grants must be given together, got one of them: a record has no grant to be of")
    if records is not None:
        expect_records(records)
    expect_int64(n, slots=slots, grants=grants)
    expect_int64(1, num_live=num_live)
    expect_dense((n, 2), mismatch=mismatch)
    if n == 0:
        return
    if launches:
        _finite_check_kernel[(n,)](
            rows.ptrs,
            slots,
            mismatch,
            slots if num_live is None else num_live,
            slots if records is None else records,
            slots if grants is None else grants,
            n,
            rows.num_slots,
            rows.num_layers,
            PIECES=rows.constants,
            FORMATS=tuple(number for form in formats_of(rows) for number in form),
            ALIGNMENT=rows.alignment,
            LAYERS=layers_at_once(rows.num_layers),
            CHUNK=rows.chunk,
            HAS_LIVE=num_live is not None,
            HAS_GRANTS=grants is not None,
        )
        return
    entries = live_indices(slots, rows.num_slots, num_live)
    if records is not None and grants is not None:
        entries = torch.arange(n, device=slots.device)[entries]
        written = records[slots[entries], record.REQUEST_GENERATION] >> 32
        entries = entries[written != grants[entries]]
    slots = slots[entries]
    masks, values, lows, highs = _by_word(rows)

    def is_not_finite(layer: int) -> Tensor:
        lanes = (rows.gather_layer(layer, slots).to(torch.int64) & masks) ^ values
        return ((lanes - lows) & ~lanes & highs).any(1)

    mismatch[entries] = bitmaps_of(map(is_not_finite, range(rows.num_layers)))


finite_check_torch = partial(finite_check, launches=False)


@triton.jit(do_not_specialize=["n"])
def _finite_check_kernel(
    ptrs,
    slots,
    mismatch,
    num_live,
    records,
    grants,
    n,
    num_slots,
    num_layers,
    PIECES: tl.constexpr,
    FORMATS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_GRANTS: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    if i_n >= live_count(num_live, n, HAS_LIVE):
        return
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    if HAS_GRANTS:
        written = tl.load(records + slot * COLUMNS + REQUEST_GENERATION) >> 32
        if written == tl.load(grants + i_n):
            return
    low, high = layers_where(_is_not_finite, slot, ptrs, num_layers, FORMATS, PIECES, ALIGNMENT, LAYERS, CHUNK)
    tl.store(mismatch + 2 * i_n, low)
    tl.store(mismatch + 2 * i_n + 1, high)


@triton.jit
def _is_not_finite(b_x, slot, o_layer, o_w, FORMATS: tl.constexpr, PIECES: tl.constexpr, I_PIECE: tl.constexpr):
    """Whether a word has an element that is not finite (bitmap.layers_where)."""
    EVEN: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS]
    ODD: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 1]
    VALUE: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 2]
    LOWS: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 3]
    HIGHS: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 4]
    b_mask = tl.where(o_w % 2 == 0, tl.full([], EVEN, tl.int64), tl.full([], ODD, tl.int64))
    b_lanes = (low_word(b_x.to(tl.int64)) & b_mask) ^ tl.full([], VALUE, tl.int64)
    b_zero = (b_lanes - tl.full([], LOWS, tl.int64)) & (b_lanes ^ -1) & tl.full([], HIGHS, tl.int64)
    return b_zero != 0


def _by_word(rows: PoolRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask, value, lowest and highest bits of every word of a row, [words_per_row] int64 each."""
    columns = [
        (form.odd if word % 2 else form.even, form.value, form.lows, form.highs)
        for piece, form in zip(rows.pieces, formats_of(rows), strict=True)
        for word in range(piece.words)
    ]
    masks, values, lows, highs = torch.tensor(columns, device=rows.ptrs.device).unbind(1)
    return masks, values, lows, highs


def _in_every_lane(lane: int, bits: int) -> int:
    """A word with this in each of its lanes of so many bits."""
    return sum(lane << first for first in range(0, 8 * WORD_BYTES, bits)) & MASK_32
