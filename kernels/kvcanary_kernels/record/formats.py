"""Formats: how to see in the words of a row that an element is NaN or infinite.

All formats are looked through as 32-bit words: in a lane of a word as wide as an element, the bits that the format
masks are a value that no finite number has. Integers have no such value.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record.device import tl, triton
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


def format_constants(rows: PoolRows) -> tuple[int, ...]:
    """The fields of the formats of all pieces, one after the other, as kernels take them."""
    return tuple(number for form in formats_of(rows) for number in form)


def lanes_of(rows: PoolRows) -> tuple[Tensor, ...]:
    """`lanes_of_parts` of the rows of a pool."""
    words = [piece.words for piece in rows.pieces]
    return lanes_of_parts(tuple(zip(rows.dtypes, words, strict=True)), rows.ptrs.device)


def lanes_of_parts(parts: tuple[tuple[torch.dtype, int], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Mask, value, lowest and highest bits of every word of a row of such parts (type, words), [words] int64 each."""
    columns = [
        (form.odd if word % 2 else form.even, form.value, form.lows, form.highs)
        for form, words in ((format_of(dtype), words) for dtype, words in parts)
        for word in range(words)
    ]
    return torch.tensor(columns, device=device).unbind(1)


def words_not_finite(words: Tensor, lanes: tuple[Tensor, ...]) -> Tensor:
    """Which words of rows [..., words_per_row] int32 hold an element that is not finite; `lanes_of` these rows."""
    masks, values, lows, highs = lanes
    found = (words.to(torch.int64) & masks) ^ values
    return ((found - lows) & ~found & highs) != 0


@triton.jit
def is_not_finite(b_x, slot, o_layer, o_w, FORMATS: tl.constexpr, PIECES: tl.constexpr, I_PIECE: tl.constexpr):
    """Whether a word has an element that is not finite (bitmap.layers_where)."""
    return lanes_not_finite(b_x, o_w, FORMATS, I_PIECE) != 0


@triton.jit
def lanes_not_finite(b_x, o_w, FORMATS: tl.constexpr, I_PIECE: tl.constexpr):
    """uint32 like the words b_x: not 0 where an element is not finite. In 32 bits, since every stored word comes by."""
    EVEN: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS]
    ODD: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 1]
    VALUE: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 2]
    LOWS: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 3]
    HIGHS: tl.constexpr = FORMATS[I_PIECE * FORMAT_FIELDS + 4]
    b_mask = tl.full([], EVEN, tl.uint32)
    if EVEN != ODD:
        b_mask = tl.where(o_w % 2 == 0, b_mask, tl.full([], ODD, tl.uint32))
    b_lanes = (b_x.to(tl.uint32) & b_mask) ^ tl.full([], VALUE, tl.uint32)
    b_others = b_lanes ^ tl.full([], 0xFFFFFFFF, tl.uint32)
    return (b_lanes - tl.full([], LOWS, tl.uint32)) & b_others & tl.full([], HIGHS, tl.uint32)


def _in_every_lane(lane: int, bits: int) -> int:
    """A word with this in each of its lanes of so many bits."""
    return sum(lane << first for first in range(0, 8 * WORD_BYTES, bits)) & MASK_32
