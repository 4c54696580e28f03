"""Bytes of a pool in host memory: values that are stored, poison, what nobody has written, and what is not finite.

Bit for bit what `kvcanary_kernels.content` gives. The pool's struct says where its rows lie (`layout`), the head of a
forward's struct which slots were planned. `struct`: the address of the pool's.
"""

import numpy as np

from kvcanary.native.fingerprints import WORD_BYTES, find_in_run, find_not_finite, keyed, offset_of, sum_part
from kvcanary.native.jit import longs_at, loop, nth, view, words_at
from kvcanary.native.layout import FORMAT, FORWARD, PIECE, POOL
from kvcanary_kernels.content.poison import FINITE_BITS, NAN_WORD
from kvcanary_kernels.record.formulas import poison_of
from kvcanary_kernels.record.layout import COLUMNS, CONTENT_B, MASK_32, REQUEST_GENERATION

_poison_of = loop()(poison_of)


@loop()
def _copy_words(source, target, count):
    values, place = words_at(source, count), words_at(target, count)
    for i in range(count):
        place[i] = values[i]


@loop()
def place_of(pool, part, layer, slot):
    """The address of one part of one row of a pool."""
    first = longs_at(pool.addresses + 8 * (part * pool.layers + layer), 1)[0]
    return first + offset_of(nth(PIECE, pool.layout, part), slot)


@loop()
def offsets_of(pool, slots):
    """[n, parts] int64: from slot 0 of a layer to these slots, in bytes; the same in every layer."""
    offsets = np.empty((slots.shape[0], pool.parts), np.int64)
    for part in range(pool.parts):
        for i in range(slots.shape[0]):
            offsets[i, part] = offset_of(nth(PIECE, pool.layout, part), slots[i])
    return offsets


@loop()
def _put_part(source, pool, part, layer, slot, fingerprints):
    """One part of one row into its slot; both its keyed sums where `fingerprints`, else zeros."""
    target, piece = place_of(pool, part, layer, slot), nth(PIECE, pool.layout, part)
    run, words = piece.run, pool.words
    for number in range(piece.words // max(run, 1)):
        at = source + WORD_BYTES * number * run
        _copy_words(at, target + WORD_BYTES * number * piece.run_stride, run)
    key = pool.keys + WORD_BYTES * (2 * words * layer + piece.first)
    return keyed(source, piece.words, key, key + WORD_BYTES * words) if fingerprints else (0, 0)


@loop("boolean(int64, int64, int64, int64, int64, int64, int64, int64)")
def put_values(head, layer, slots, slots_step, first, first_step, second, second_step):
    """Store n rows of one layer that are made of two parts, and give their fingerprints to whom the head names.

    head:          address of `Forward.memory`
    slots:         address of where the engine stores them, `slots_step` numbers apart
    first, second: addresses of the parts of row 0, rows are so many bytes apart, each part dense and in logical order
    False, and nothing was done, where the engine's slots are not those that were planned, or the values are no words.
    """
    forward = view(FORWARD, head)
    n, pool = forward.entries, view(POOL, forward.pool)
    planned, asked = longs_at(head + 8 * FORWARD.size, n), longs_at(slots, max(0, (n - 1) * slots_step + 1))
    if (first | second | first_step | second_step) % WORD_BYTES:
        return False
    for row in range(n):
        if asked[row * slots_step] != planned[row] or not 0 <= planned[row] < pool.num_slots:
            return False
    fingerprints, start = forward.fingerprints, longs_at(pool.starts, pool.layers)[layer]
    out = longs_at(fingerprints + 16 * n * layer, 2 * n if fingerprints else 0)
    for row in range(n):
        a, b = _put_part(first + row * first_step, pool, 0, layer, planned[row], fingerprints)
        c, d = _put_part(second + row * second_step, pool, 1, layer, planned[row], fingerprints)
        if fingerprints:
            out[row] = start + a + c
            out[n + row] = b + d
    words = nth(PIECE, pool.layout, 0).words
    find_not_finite(forward, pool, layer, first, first_step, words, second, second_step)
    return True


@loop("boolean(int64, int64[::1], boolean)")
def match_slots(struct, slots, both):
    """Whether bytes in these slots have the fingerprint a that is kept of every layer; `both`: and fingerprint b."""
    pool, n = view(POOL, struct), slots.shape[0]
    layers, parts, size, words = pool.layers, pool.parts, pool.num_slots, pool.words
    for slot in slots:
        if not 0 <= slot < size:
            return False
    offsets, starts = offsets_of(pool, slots), longs_at(pool.starts, layers)
    firsts = longs_at(pool.addresses, parts * layers)
    content, records = longs_at(pool.content_a, layers * size), longs_at(pool.records, COLUMNS * size)
    fingerprint_b = np.full(n, pool.start_b)
    for layer in range(layers):
        keys = pool.keys + 2 * WORD_BYTES * words * layer
        for i in range(n):
            fingerprint_a = starts[layer]
            for part in range(parts):
                piece = nth(PIECE, pool.layout, part)
                at, key = firsts[part * layers + layer] + offsets[i, part], keys + WORD_BYTES * piece.first
                a, b = sum_part(at, piece, key, words, both)
                fingerprint_a += a
                fingerprint_b[i] += b
            if content[layer * size + slots[i]] != fingerprint_a:
                return False
    differs = np.int64(0)
    for i in range(n if both else 0):
        differs |= records[COLUMNS * slots[i] + CONTENT_B] ^ fingerprint_b[i]
    return differs == 0


@loop()
def _poison_run(target, first, count, slot, nan, fills):
    """Fill words of a slot as `poison_words`, or look whether they are so; `first`: of those of all its layers."""
    words, differs = words_at(target, count), np.uint32(0)
    for i in range(count):
        word = np.uint32(NAN_WORD) if nan else np.uint32(_poison_of(slot, first + i) & FINITE_BITS)
        if fills:
            words[i] = word
        differs |= words[i] ^ word
    return differs == 0


@loop("boolean(int64, int64[::1], boolean, boolean)")
def poison(struct, slots, nan, fills):
    """Fill all rows of valid slots with the pattern, or tell whether they are it; `nan`: the same NaN in every word."""
    pool, well = view(POOL, struct), True
    for layer in range(pool.layers):
        for slot in slots:
            for part in range(pool.parts):
                target, piece = place_of(pool, part, layer, slot), nth(PIECE, pool.layout, part)
                run, first = piece.run, layer * pool.words + piece.first
                for number in range(piece.words // max(run, 1)):
                    at = target + WORD_BYTES * number * piece.run_stride
                    well &= _poison_run(at, first + number * run, run, slot, nan, fills)
    return well


@loop("int64(int64, int64[::1], int64[::1], int64, int64[::1], int64[:, ::1], int64[::1])")
def find_unwritten(struct, slots, names, page_size, generations, table, which):
    """Those of n slots that no forward has written since their pages were granted; how many these are.

    names: [n] what plans call the slots;  table: [rows, 8] the records of all pools as written
    which: [n] out; null slots, and those outside the pool, are not among them
    """
    pool, count = view(POOL, struct), 0
    for i in range(slots.shape[0]):
        if pool.null_slots <= slots[i] < pool.num_slots:
            written = table[pool.base + slots[i], REQUEST_GENERATION] >> 32 & MASK_32
            if written != generations[names[i] // page_size]:
                which[count] = i
                count += 1
    return count


@loop("boolean(int64, int64[::1], int64[:, ::1])")
def are_finite(struct, slots, formats):
    """Whether all elements of the rows of valid slots are finite; `formats`: [parts, FORMAT]."""
    pool, found = view(POOL, struct), np.uint32(0)
    layers, parts, offsets = pool.layers, pool.parts, offsets_of(pool, slots)
    firsts = longs_at(pool.addresses, parts * layers)
    for layer in range(layers):
        for i in range(slots.shape[0]):
            for part in range(parts):
                form, piece = formats[part], nth(PIECE, pool.layout, part)
                run, target = piece.run, firsts[part * layers + layer] + offsets[i, part]
                for number in range(piece.words // max(run, 1) if form[FORMAT.even] | form[FORMAT.odd] else 0):
                    at = target + WORD_BYTES * number * piece.run_stride
                    found |= find_in_run(at, number * run, run, form)
    return found == 0
