"""Fingerprints of values and of slots, bit for bit those of `fingerprint_torch`, in one reading of the words.

keys:    [layers, 2, words] uint32, of fingerprint a and fingerprint b
layout:  [pieces, PIECE] int64: of each part of a row what `Piece` says of it
address: [pieces, layers] int64, of slot 0
Sums are mod 2^64; signed and unsigned ones have the same bits.
"""

import numpy as np

from kvcanary.native.jit import longs_at, loop, nth, view, words_at
from kvcanary.native.layout import FORMAT, FORWARD, HEADS, PIECE, POOL
from kvcanary_kernels.record.layout import CONTENT_B

WORD_BYTES = 4


@loop()
def keyed(words, count, key_a, key_b):
    """Both keyed sums of `count` words."""
    x, keys_a, keys_b = words_at(words, count), words_at(key_a, count), words_at(key_b, count)
    fingerprint_a = fingerprint_b = np.uint64(0)
    for i in range(count):
        word = np.uint64(x[i])
        fingerprint_a += word * np.uint64(keys_a[i])
        fingerprint_b += word * np.uint64(keys_b[i])
    return np.int64(fingerprint_a), np.int64(fingerprint_b)


@loop()
def keyed_once(words, count, keys):
    """One keyed sum of `count` words."""
    x, own = words_at(words, count), words_at(keys, count)
    fingerprint = np.uint64(0)
    for i in range(count):
        fingerprint += np.uint64(x[i]) * np.uint64(own[i])
    return np.int64(fingerprint)


@loop()
def find_in_run(at, first, count, form):
    """Bits that are set where an element of `count` words is not finite; `first`: of them, in their piece."""
    words, found = words_at(at, count), np.uint32(0)
    same, other = (form[FORMAT.odd], form[FORMAT.even]) if first % 2 else (form[FORMAT.even], form[FORMAT.odd])
    even, odd, value = np.uint32(same), np.uint32(other), np.uint32(form[FORMAT.value])
    lows, highs = np.uint32(form[FORMAT.lows]), np.uint32(form[FORMAT.highs])
    for i in range(count):
        fingerprints = np.uint32((words[i] & (odd if i % 2 else even)) ^ value)
        found |= np.uint32(fingerprints - lows) & ~fingerprints & highs
    return found


@loop()
def find_not_finite(forward, pool, layer, first, first_step, first_words, second, second_step):
    """Note the first of a forward's rows, each made of two parts as for `sum_values`, that is not finite."""
    forms = longs_at(pool.formats, pool.parts * FORMAT.size)
    for row in range(forward.entries if pool.asks_finite and not forward.not_finite else 0):
        found = np.uint32(0)
        for part in range(pool.parts):
            piece, form = nth(PIECE, pool.layout, part), forms[part * FORMAT.size : (part + 1) * FORMAT.size]
            behind = piece.first - first_words
            at = first + row * first_step + WORD_BYTES * piece.first
            if behind >= 0:
                at = second + row * second_step + WORD_BYTES * behind
            if form[FORMAT.even] | form[FORMAT.odd]:
                found |= find_in_run(at, 0, piece.words, form)
        if found and not forward.not_finite:
            forward.not_finite = 1 + layer * forward.entries + row


@loop("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def sum_values(first, first_step, first_words, second, second_step, second_words, n, keys, start, fingerprints, head):
    """Fingerprints of n rows of one layer that are made of two parts; the second may have no words.

    first, second: addresses of the parts of row 0, rows are so many bytes apart
    keys:          address of the layer's keys
    start:         of fingerprint a
    fingerprints:         address of [2, n] int64 out: fingerprint a, and what the layer adds to fingerprint b
    head:          address of `Forward.memory`, which says where they are not finite; 0: nobody asks
    """
    other_fingerprint = WORD_BYTES * (first_words + second_words)
    other_part = keys + WORD_BYTES * first_words
    out = longs_at(fingerprints, 2 * n)
    for row in range(n):
        a, b = keyed(first + row * first_step, first_words, keys, keys + other_fingerprint)
        c, d = keyed(second + row * second_step, second_words, other_part, other_part + other_fingerprint)
        out[row] = start + a + c
        out[n + row] = b + d
    if head and n:
        forward = view(FORWARD, head)
        layer = (fingerprints - forward.fingerprints) // (16 * n)
        pool = view(POOL, forward.pool)
        find_not_finite(forward, pool, layer, first, first_step, first_words, second, second_step)


@loop()
def _heads(k, v, row, place, keys, start):
    """Both fingerprints of one entry whose heads lie apart."""
    words = k[HEADS.heads] * k[HEADS.words] + v[HEADS.heads] * v[HEADS.words]
    fingerprint_a, fingerprint_b, key = np.int64(start), np.int64(0), keys
    for part in (k, v):
        at = part[HEADS.address] + row * part[HEADS.batch_step] + place * part[HEADS.entry_step]
        for head in range(part[HEADS.heads]):
            a, b = keyed(at + head * part[HEADS.head_step], part[HEADS.words], key, key + WORD_BYTES * words)
            fingerprint_a += a
            fingerprint_b += b
            key += WORD_BYTES * part[HEADS.words]
    return fingerprint_a, fingerprint_b


@loop()
def _find_in_heads(k, v, row, place, forms):
    """Bits that are set where an element of one entry, whose heads lie apart, is not finite."""
    found = np.uint32(0)
    for part, form in ((k, forms[0]), (v, forms[1])):
        at = part[HEADS.address] + row * part[HEADS.batch_step] + place * part[HEADS.entry_step]
        for head in range(part[HEADS.heads] if form[FORMAT.even] | form[FORMAT.odd] else 0):
            found |= find_in_run(at + head * part[HEADS.head_step], 0, part[HEADS.words], form)
    return found


@loop("int64(int64[::1], int64[::1], int64, int64, int64, int64[:, ::1], int64[:, ::1])")
def sum_heads(k, v, count, keys, start, fingerprints, forms):
    """Fingerprints of entries [batch, n] of one layer, whose heads lie apart: K and V are [batch, heads, n, dim].

    k, v:  HEADS (layout.py)
    count: entries of each row;  keys: address of the layer's keys;  start: of fingerprint a
    fingerprints: [2, batch * n] int64 out: fingerprint a, and what the layer adds to fingerprint b
    forms: [2, FORMAT] of K and V; zeros: nobody asks whether they are finite
    1 + the first entry that is not finite; 0: all are.
    """
    first = 0
    for entry in range(fingerprints.shape[1]):
        fingerprints[0, entry], fingerprints[1, entry] = _heads(k, v, entry // count, entry % count, keys, start)
        if not first and _find_in_heads(k, v, entry // count, entry % count, forms):
            first = entry + 1
    return first


@loop("boolean(int64[::1], int64[::1], int64, int64, int64, int64, int64, int64, int64)")
def same_heads(k, v, batch, count, keys, start, fingerprints, side_bytes, row_bytes):
    """Whether fingerprints of entries [batch, n], as of `sum_heads`, are those at this address, [2, batch, n].

    side_bytes, row_bytes: from fingerprint a to fingerprint b, and from row to row of the batch
    """
    for row in range(batch):
        wanted_a = longs_at(fingerprints + row * row_bytes, count)
        wanted_b = longs_at(fingerprints + side_bytes + row * row_bytes, count)
        for place in range(count):
            fingerprint_a, fingerprint_b = _heads(k, v, row, place, keys, start)
            if fingerprint_a != wanted_a[place] or fingerprint_b != wanted_b[place]:
                return False
    return True


@loop()
def offset_of(piece, slot):
    """From slot 0 of a layer to a part of this slot, in bytes."""
    size = piece.page_size
    return WORD_BYTES * (slot // size * piece.page_stride + slot % size * piece.slot_stride)


@loop()
def sum_part(at, piece, key, words, both):
    """Keyed sums of one part of what lies in a slot: of fingerprint a, and of fingerprint b where `both`."""
    fingerprint_a, fingerprint_b, run = np.int64(0), np.int64(0), piece.run
    for number in range(piece.words // max(run, 1)):
        place, own = at + WORD_BYTES * number * piece.run_stride, key + WORD_BYTES * number * run
        if both:
            a, b = keyed(place, run, own, own + WORD_BYTES * words)
            fingerprint_a += a
            fingerprint_b += b
        else:
            fingerprint_a += keyed_once(place, run, own)
    return fingerprint_a, fingerprint_b


@loop("void(int64[:, ::1], int64[:, ::1], int64, int64, int64[::1], int64, int64[::1], int64[:, ::1], int64[::1])")
def sum_slots(address, layout, keys, words, start_a, start_b, slots, fingerprint_a, fingerprint_b):
    """Fingerprint a by layer [layers, n] and fingerprint b [n], both out, of the bytes in n valid slots of the pool."""
    fingerprint_b[:] = start_b
    for layer in range(fingerprint_a.shape[0]):
        fingerprint_a[layer] = start_a[layer]
        for i in range(slots.shape[0]):
            for part in range(layout.shape[0]):
                piece = nth(PIECE, layout.ctypes.data, part)
                at, key = address[part, layer] + offset_of(piece, slots[i]), keys + WORD_BYTES * piece.first
                a, b = sum_part(at, piece, key + 2 * WORD_BYTES * words * layer, words, True)
                fingerprint_a[layer, i] += a
                fingerprint_b[i] += b


@loop("void(int64[::1], int64[:, :, ::1], int64, int64[:, ::1], int64[:, ::1], int64[:, ::1])")
def keep_fingerprints(slots, fingerprints, start_b, content_a, records, expected):
    """Keep fingerprints [layers, 2, n] of the values of n slots; of equal slots the last counts."""
    for i in range(slots.shape[0]):
        slot, fingerprint_b = slots[i], start_b
        for layer in range(fingerprints.shape[0]):
            content_a[layer, slot] = fingerprints[layer, 0, i]
            fingerprint_b += fingerprints[layer, 1, i]
        records[slot, CONTENT_B] = expected[slot, CONTENT_B] = fingerprint_b
