"""Content lanes of values and of slots, bit for bit those of `fingerprint_torch`, in one reading of the words.

keys:    [layers, 2, words] uint32, of lane a and lane b
layout:  [pieces, 2 + fields] int64: of each part of a row what `Piece` says of it
address: [pieces, layers] int64, of slot 0
Sums are mod 2^64; signed and unsigned ones have the same bits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.native.jit import longs_at, loop, words_at
from kvcanary.native.layout import HEADS, PIECE
from kvcanary_kernels.record.layout import CONTENT_B

WORD_BYTES = 4


@loop()
def keyed(words, count, key_a, key_b):
    """Both keyed sums of `count` words."""
    x, keys_a, keys_b = words_at(words, count), words_at(key_a, count), words_at(key_b, count)
    lane_a = lane_b = np.uint64(0)
    for i in range(count):
        word = np.uint64(x[i])
        lane_a += word * np.uint64(keys_a[i])
        lane_b += word * np.uint64(keys_b[i])
    return np.int64(lane_a), np.int64(lane_b)


@loop()
def keyed_once(words, count, keys):
    """One keyed sum of `count` words."""
    x, own = words_at(words, count), words_at(keys, count)
    lane = np.uint64(0)
    for i in range(count):
        lane += np.uint64(x[i]) * np.uint64(own[i])
    return np.int64(lane)


@loop("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def sum_values(first, first_step, first_words, second, second_step, second_words, n, keys, start, lanes):
    """Lanes of n rows of one layer that are made of two parts; the second may have no words.

    first, second: addresses of the parts of row 0, rows are so many bytes apart
    keys:          address of the layer's keys
    start:         of lane a
    lanes:         address of [2, n] int64 out: lane a, and what the layer adds to lane b
    """
    other_lane = WORD_BYTES * (first_words + second_words)
    other_part = keys + WORD_BYTES * first_words
    out = longs_at(lanes, 2 * n)
    for row in range(n):
        a, b = keyed(first + row * first_step, first_words, keys, keys + other_lane)
        c, d = keyed(second + row * second_step, second_words, other_part, other_part + other_lane)
        out[row] = start + a + c
        out[n + row] = b + d


@loop()
def _heads(k, v, row, place, keys, start):
    """Both lanes of one entry whose heads lie apart."""
    words = k[HEADS.heads] * k[HEADS.words] + v[HEADS.heads] * v[HEADS.words]
    lane_a, lane_b, key = np.int64(start), np.int64(0), keys
    for part in (k, v):
        at = part[HEADS.address] + row * part[HEADS.batch_step] + place * part[HEADS.entry_step]
        for head in range(part[HEADS.heads]):
            a, b = keyed(at + head * part[HEADS.head_step], part[HEADS.words], key, key + WORD_BYTES * words)
            lane_a += a
            lane_b += b
            key += WORD_BYTES * part[HEADS.words]
    return lane_a, lane_b


@loop("void(int64[::1], int64[::1], int64, int64, int64, int64[:, ::1])")
def sum_heads(k, v, count, keys, start, lanes):
    """Lanes of entries [batch, n] of one layer, whose heads lie apart: K and V are [batch, heads, n, dim].

    k, v:  HEADS (layout.py)
    count: entries of each row;  keys: address of the layer's keys;  start: of lane a
    lanes: [2, batch * n] int64 out: lane a, and what the layer adds to lane b
    """
    for entry in range(lanes.shape[1]):
        lanes[0, entry], lanes[1, entry] = _heads(k, v, entry // count, entry % count, keys, start)


@loop("boolean(int64[::1], int64[::1], int64, int64, int64, int64, int64, int64, int64)")
def same_heads(k, v, batch, count, keys, start, lanes, side_bytes, row_bytes):
    """Whether the lanes of entries [batch, n], as `sum_heads` gives them, are those that lie at `lanes` [2, batch, n].

    side_bytes, row_bytes: from lane a to lane b, and from row to row of the batch
    """
    for row in range(batch):
        wanted_a = longs_at(lanes + row * row_bytes, count)
        wanted_b = longs_at(lanes + side_bytes + row * row_bytes, count)
        for place in range(count):
            lane_a, lane_b = _heads(k, v, row, place, keys, start)
            if lane_a != wanted_a[place] or lane_b != wanted_b[place]:
                return False
    return True


@loop()
def _row(address, layout, layer, slot, keys, words):
    """Both sums of what lies in one slot of one layer."""
    lane_a = lane_b = np.int64(0)
    for i in range(layout.shape[0]):
        piece = layout[i]
        size, run = piece[PIECE.page_size], piece[PIECE.run]
        offset = slot // size * piece[PIECE.page_stride] + slot % size * piece[PIECE.slot_stride]
        for number in range(piece[PIECE.words] // max(run, 1)):
            at = address[i, layer] + WORD_BYTES * (offset + number * piece[PIECE.run_stride])
            key = keys + WORD_BYTES * (piece[PIECE.first] + number * run)
            a, b = keyed(at, run, key, key + WORD_BYTES * words)
            lane_a += a
            lane_b += b
    return lane_a, lane_b


@loop("void(int64[:, ::1], int64[:, ::1], int64, int64, int64[::1], int64, int64[::1], int64[:, ::1], int64[::1])")
def sum_slots(address, layout, keys, words, start_a, start_b, slots, lane_a, lane_b):
    """Lane a by layer [layers, n] and lane b [n], both out, of the bytes that lie in n valid slots of the pool."""
    lane_b[:] = start_b
    for layer in range(lane_a.shape[0]):
        for i in range(slots.shape[0]):
            a, b = _row(address, layout, layer, slots[i], keys + 2 * WORD_BYTES * words * layer, words)
            lane_a[layer, i] = start_a[layer] + a
            lane_b[i] += b


@loop("void(int64[::1], int64[:, :, ::1], int64, int64[:, ::1], int64[:, ::1], int64[:, ::1])")
def keep_lanes(slots, lanes, start_b, content_a, records, expected):
    """Write lanes [layers, 2, n] of the values of n slots where they are kept; of equal slots the last counts."""
    for i in range(slots.shape[0]):
        slot, lane_b = slots[i], start_b
        for layer in range(lanes.shape[0]):
            content_a[layer, slot] = lanes[layer, 0, i]
            lane_b += lanes[layer, 1, i]
        records[slot, CONTENT_B] = lane_b
        expected[slot, CONTENT_B] = lane_b
