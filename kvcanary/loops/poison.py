"""Poison of slots in host memory, bit for bit that of `kvcanary_kernels.poison`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.cards import LAYERS, PARTS, POOL_CARD, WORDS
from kvcanary.loops.lanes import FIRST, RUN, RUN_STRIDE, WORD_BYTES
from kvcanary.loops.lanes import WORDS as PIECE_WORDS
from kvcanary.loops.memory import longs_at, loop, words_at
from kvcanary.loops.store import place_of
from kvcanary_kernels.poison import FINITE_BITS, NAN_WORD
from kvcanary_kernels.record import SPLITMIX_FIRST, SPLITMIX_SECOND


@loop()
def _word(slot, number, nan):
    """`poison_words` of one word of all a slot's layers."""
    z = ((np.uint64(slot) << np.uint64(32)) | np.uint64(number)) * np.uint64(SPLITMIX_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SPLITMIX_SECOND)
    return np.uint32(NAN_WORD) if nan else np.uint32((z >> np.uint64(32)) & np.uint64(FINITE_BITS))


@loop()
def _run(target, first, count, slot, nan, fills):
    """Fill so many words, or look whether they are the pattern."""
    words, differs = words_at(target, count), np.uint32(0)
    for i in range(count):
        word = _word(slot, first + i, nan)
        if fills:
            words[i] = word
        differs |= words[i] ^ word
    return differs == 0


@loop("boolean(int64, int64[::1], boolean, boolean)")
def poison(card, slots, nan, fills):
    """Fill all rows of valid slots with the pattern, or tell whether they are the pattern; `card`: its pool's address.

    nan: the same NaN in every word instead
    """
    pool, well = longs_at(card, POOL_CARD), True
    for layer in range(pool[LAYERS]):
        for slot in slots:
            for part in range(pool[PARTS]):
                target, piece = place_of(pool, part, layer, slot)
                run, first = piece[RUN], layer * pool[WORDS] + piece[FIRST]
                for number in range(piece[PIECE_WORDS] // max(run, 1)):
                    at = target + WORD_BYTES * number * piece[RUN_STRIDE]
                    well &= _run(at, first + number * run, run, slot, nan, fills)
    return well
