"""Bytes of a pool in host memory: values that are stored, poison, what nobody has written, and what is not finite.

Bit for bit what `kvcanary_kernels.content` gives. The pool's card says where its rows lie (`layout`), the head of a
forward's card which slots were planned.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.native.fingerprints import FIRST, PAGE_STRIDE, RUN, RUN_STRIDE, SLOT_STRIDE, WORD_BYTES, keyed, keyed_once
from kvcanary.native.fingerprints import PAGE_SIZE as PIECE_PAGE_SIZE
from kvcanary.native.fingerprints import WORDS as PIECE_WORDS
from kvcanary.native.jit import longs_at, loop, words_at
from kvcanary.native.layout import (
    ADDRESSES,
    BASE,
    CONTENT_A,
    ENTRIES,
    HEAD,
    KEYS,
    LANES,
    LAYERS,
    LAYOUT,
    NULL_SLOTS,
    PARTS,
    PIECE_FIELDS,
    POOL,
    POOL_CARD,
    RECORDS,
    SLOTS,
    START_B,
    STARTS,
    WORDS,
)
from kvcanary_kernels.content.poison import FINITE_BITS, NAN_WORD
from kvcanary_kernels.record.layout import (
    COLUMNS,
    CONTENT_B,
    MASK_32,
    REQUEST_GENERATION,
    SPLITMIX_FIRST,
    SPLITMIX_SECOND,
)


@loop()
def _copy_words(source, target, count):
    values, place = words_at(source, count), words_at(target, count)
    for i in range(count):
        place[i] = values[i]


@loop()
def place_of(pool, part, layer, slot):
    """The address of one part of one row of a pool, and the `Piece` that says how it lies."""
    piece = longs_at(pool[LAYOUT] + 8 * PIECE_FIELDS * part, PIECE_FIELDS)
    size, first = piece[PIECE_PAGE_SIZE], longs_at(pool[ADDRESSES] + 8 * (part * pool[LAYERS] + layer), 1)[0]
    return first + WORD_BYTES * (slot // size * piece[PAGE_STRIDE] + slot % size * piece[SLOT_STRIDE]), piece


@loop()
def offsets_of(pool, slots):
    """[n, parts] int64: from slot 0 of a layer to these slots, in bytes; the same in every layer."""
    offsets = np.empty((slots.shape[0], pool[PARTS]), np.int64)
    for part in range(pool[PARTS]):
        piece = longs_at(pool[LAYOUT] + 8 * PIECE_FIELDS * part, PIECE_FIELDS)
        size, page_stride, slot_stride = piece[PIECE_PAGE_SIZE], piece[PAGE_STRIDE], piece[SLOT_STRIDE]
        for i in range(slots.shape[0]):
            offsets[i, part] = WORD_BYTES * (slots[i] // size * page_stride + slots[i] % size * slot_stride)
    return offsets


@loop()
def _put_part(source, pool, part, layer, slot, lanes):
    """One part of one row into its slot; both its keyed sums where `lanes`, else zeros."""
    target, piece = place_of(pool, part, layer, slot)
    run, words = piece[RUN], pool[WORDS]
    for number in range(piece[PIECE_WORDS] // max(run, 1)):
        at = source + WORD_BYTES * number * run
        _copy_words(at, target + WORD_BYTES * number * piece[RUN_STRIDE], run)
    key = pool[KEYS] + WORD_BYTES * (2 * words * layer + piece[FIRST])
    return keyed(source, piece[PIECE_WORDS], key, key + WORD_BYTES * words) if lanes else (0, 0)


@loop("boolean(int64, int64, int64, int64, int64, int64, int64, int64)")
def put_values(head, layer, slots, slots_step, first, first_step, second, second_step):
    """Store n rows of one layer that are made of two parts, and give their lanes to whom the head names.

    head:          address of `Forward.memory`
    slots:         address of where the engine stores them, `slots_step` numbers apart
    first, second: addresses of the parts of row 0, rows are so many bytes apart, each part dense and in logical order
    False, and nothing was done, where the engine's slots are not those that were planned, or the values are no words.
    """
    forward = longs_at(head, HEAD)
    n, pool = forward[ENTRIES], longs_at(forward[POOL], POOL_CARD)
    planned, asked = longs_at(head + 8 * HEAD, n), longs_at(slots, max(0, (n - 1) * slots_step + 1))
    if (first | second | first_step | second_step) % WORD_BYTES:
        return False
    for row in range(n):
        if asked[row * slots_step] != planned[row] or not 0 <= planned[row] < pool[SLOTS]:
            return False
    lanes, start = forward[LANES], longs_at(pool[STARTS], pool[LAYERS])[layer]
    out = longs_at(lanes + 16 * n * layer, 2 * n if lanes else 0)
    for row in range(n):
        a, b = _put_part(first + row * first_step, pool, 0, layer, planned[row], lanes)
        c, d = _put_part(second + row * second_step, pool, 1, layer, planned[row], lanes)
        if lanes:
            out[row] = start + a + c
            out[n + row] = b + d
    return True


@loop()
def _sum_part(at, piece, key, words, both):
    """Keyed sums of one part of what lies in a slot: of lane a, and of lane b where `both`."""
    lane_a, lane_b, run = np.int64(0), np.int64(0), piece[RUN]
    for number in range(piece[PIECE_WORDS] // max(run, 1)):
        place, own = at + WORD_BYTES * number * piece[RUN_STRIDE], key + WORD_BYTES * number * run
        if both:
            a, b = keyed(place, run, own, own + WORD_BYTES * words)
            lane_a += a
            lane_b += b
        else:
            lane_a += keyed_once(place, run, own)
    return lane_a, lane_b


@loop("boolean(int64, int64[::1], boolean)")
def match_slots(card, slots, both):
    """Whether lane a of the bytes in these slots is in every layer the one that is kept; `both`: and lane b.

    card: address of the pool's
    """
    pool, n = longs_at(card, POOL_CARD), slots.shape[0]
    layers, parts, size, words = pool[LAYERS], pool[PARTS], pool[SLOTS], pool[WORDS]
    for slot in slots:
        if not 0 <= slot < size:
            return False
    offsets, starts = offsets_of(pool, slots), longs_at(pool[STARTS], layers)
    pieces, firsts = longs_at(pool[LAYOUT], PIECE_FIELDS * parts), longs_at(pool[ADDRESSES], parts * layers)
    content, records = longs_at(pool[CONTENT_A], layers * size), longs_at(pool[RECORDS], COLUMNS * size)
    lane_b = np.full(n, pool[START_B])
    for layer in range(layers):
        keys = pool[KEYS] + 2 * WORD_BYTES * words * layer
        for i in range(n):
            lane_a = starts[layer]
            for part in range(parts):
                piece = pieces[PIECE_FIELDS * part : PIECE_FIELDS * (part + 1)]
                at, key = firsts[part * layers + layer] + offsets[i, part], keys + WORD_BYTES * piece[FIRST]
                a, b = _sum_part(at, piece, key, words, both)
                lane_a += a
                lane_b[i] += b
            if content[layer * size + slots[i]] != lane_a:
                return False
    differs = np.int64(0)
    for i in range(n if both else 0):
        differs |= records[COLUMNS * slots[i] + CONTENT_B] ^ lane_b[i]
    return differs == 0


@loop()
def _word(slot, number, nan):
    """`poison_words` of one word of all a slot's layers."""
    z = ((np.uint64(slot) << np.uint64(32)) | np.uint64(number)) * np.uint64(SPLITMIX_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SPLITMIX_SECOND)
    return np.uint32(NAN_WORD) if nan else np.uint32((z >> np.uint64(32)) & np.uint64(FINITE_BITS))


@loop()
def _poison_run(target, first, count, slot, nan, fills):
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
                    well &= _poison_run(at, first + number * run, run, slot, nan, fills)
    return well


@loop()
def _find_in_run(at, first, count, form):
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
                    found |= _find_in_run(at, number * run, run, form)
    return found == 0
