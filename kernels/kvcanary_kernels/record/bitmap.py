"""Bitmaps of layers: which layers of a slot have a word of which something is true."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import word_offsets
from kvcanary_kernels.record.device import PIECE_FIELDS, UNROLL, WORDS_FIELD, tl, triton

MOST_LAYERS = 16  # whose words are on their way together


def layers_at_once(num_layers: int) -> int:
    """LAYERS of `layers_where`."""
    return min(MOST_LAYERS, 1 << (num_layers - 1).bit_length())


def bitmaps_of(by_layer: Iterable[Tensor]) -> Tensor:
    """[n, 2] int64 from [n] bool of each layer; its columns: layers 0 to 63, 64 to 127. No wait."""
    own = torch.stack(tuple(by_layer)).to(torch.int64)
    bits = own << torch.arange(len(own), device=own.device)[:, None] % 64
    return torch.stack((bits[:64].sum(0), bits[64:].sum(0)), 1)


@triton.jit
def layers_where(
    IS_SO,
    slot,
    ptrs,
    num_layers,
    CONSTANTS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Bits of layers 0 to 63, and of 64 to 127, in which a word of the slot is so.

    IS_SO(b_x, slot, o_layer, o_w, CONSTANTS, PIECES, I_PIECE): [LAYERS, CHUNK] bool, for words b_x [LAYERS, CHUNK] of
    layers o_layer [LAYERS, 1], at places o_w [1, CHUNK] of a piece
    """
    low = tl.zeros([], tl.int64)
    high = tl.zeros([], tl.int64)
    for i_first in range(0, num_layers, LAYERS):
        o_layer = (i_first + tl.arange(0, LAYERS)).to(tl.int64)
        b_found = tl.zeros([LAYERS, CHUNK], tl.int64)
        for i_piece in tl.static_range(len(PIECES) // PIECE_FIELDS):
            base = tl.load(ptrs + i_piece * num_layers + o_layer, mask=o_layer < num_layers, other=0)
            base = tl.multiple_of(base.to(tl.pointer_type(tl.int32)), [ALIGNMENT])
            b_found = _search(IS_SO, b_found, base, slot, o_layer, num_layers, CONSTANTS, PIECES, i_piece, CHUNK)
        b_bit = tl.max(b_found, 1) << (o_layer % 64)
        low |= tl.sum(tl.where(o_layer < 64, b_bit, 0))
        high |= tl.sum(tl.where(o_layer < 64, 0, b_bit))
    return low, high


@triton.jit
def _search(
    IS_SO,
    b_found,
    base,
    slot,
    o_layer,
    num_layers,
    CONSTANTS: tl.constexpr,
    PIECES: tl.constexpr,
    I_PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    WORDS: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + WORDS_FIELD]
    m_layer = (o_layer < num_layers)[:, None]
    for i_word in tl.range(0, WORDS, CHUNK, loop_unroll_factor=UNROLL):
        o_w = (i_word + tl.arange(0, CHUNK)).to(tl.int64)[None, :]
        m_x = m_layer & (o_w < WORDS)
        b_x = tl.load(base[:, None] + word_offsets(slot, o_w, PIECES, I_PIECE), mask=m_x, other=0)
        is_so = IS_SO(b_x, slot, o_layer[:, None], o_w, CONSTANTS, PIECES, I_PIECE)
        b_found |= (m_x & is_so).to(tl.int64)
    return b_found
