"""Slots in host memory that nobody has written, and elements that are not finite, as `kvcanary_kernels.finite` says."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.cards import ADDRESSES, BASE, LAYERS, LAYOUT, NULL_SLOTS, PARTS, PIECE_FIELDS, POOL_CARD, SLOTS
from kvcanary.loops.lanes import RUN, RUN_STRIDE, WORD_BYTES
from kvcanary.loops.lanes import WORDS as PIECE_WORDS
from kvcanary.loops.memory import longs_at, loop, words_at
from kvcanary.loops.store import offsets_of
from kvcanary_kernels.record import MASK_32, REQUEST_GENERATION


@loop()
def _run(at, first, count, form):
    """Bits that are set where an element of `count` words is not finite; `first`: of them, in their piece."""
    words, found = words_at(at, count), np.uint32(0)
    same, other = (form[1], form[0]) if first % 2 else (form[0], form[1])
    even, odd, value = np.uint32(same), np.uint32(other), np.uint32(form[2])
    lows, highs = np.uint32(form[3]), np.uint32(form[4])
    for i in range(count):
        lanes = np.uint32((words[i] & (odd if i % 2 else even)) ^ value)
        found |= np.uint32(lanes - lows) & ~lanes & highs
    return found


@loop("int64(int64, int64[::1], int64[::1], int64, int64[::1], int64[:, ::1], int64[::1])")
def find_unwritten(card, slots, names, page_size, generations, table, which):
    """Those of n slots that no forward has written since their pages were granted; how many these are.

    card:  address of the pool's;  names: [n] what plans call the slots
    table: [rows, 8] the records of all pools as written
    which: [n] out; null slots, and those outside the pool, are not among them
    """
    pool, count = longs_at(card, POOL_CARD), 0
    for i in range(slots.shape[0]):
        if pool[NULL_SLOTS] <= slots[i] < pool[SLOTS]:
            written = table[pool[BASE] + slots[i], REQUEST_GENERATION] >> 32 & MASK_32
            if written != generations[names[i] // page_size]:
                which[count] = i
                count += 1
    return count


@loop("boolean(int64, int64[::1], int64[:, ::1])")
def are_finite(card, slots, formats):
    """Whether all elements of the rows of valid slots are finite.

    card:    address of the pool's
    formats: [parts, fields] what each `Format` of a row says
    """
    pool, found = longs_at(card, POOL_CARD), np.uint32(0)
    layers, parts, offsets = pool[LAYERS], pool[PARTS], offsets_of(pool, slots)
    pieces, firsts = longs_at(pool[LAYOUT], PIECE_FIELDS * parts), longs_at(pool[ADDRESSES], parts * layers)
    for layer in range(layers):
        for i in range(slots.shape[0]):
            for part in range(parts):
                form, piece = formats[part], pieces[PIECE_FIELDS * part : PIECE_FIELDS * (part + 1)]
                run, target = piece[RUN], firsts[part * layers + layer] + offsets[i, part]
                for number in range(piece[PIECE_WORDS] // max(run, 1) if form[0] | form[1] else 0):
                    at = target + WORD_BYTES * number * piece[RUN_STRIDE]
                    found |= _run(at, number * run, run, form)
    return found == 0
