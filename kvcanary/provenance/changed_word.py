"""Changed word: which word changed, and what it was, from the differences of the two fingerprints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.pools.parts import Part
from kvcanary.provenance.slipped_rows import row_of, span
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import CONTENT_B, MASK_32, Keys
from kvcanary_kernels.record.rows import WORD_BYTES, Piece


@dataclass(frozen=True)
class ChangedWord:
    """The one word of a slot's bytes that changed.

    part:      "K", "V" or the name of an extra
    byte, bit: first changed byte, and the bit when it is one, counted within the element
    old, new:  bits of the element; old_value, new_value: the numbers that they mean
    size:      bytes of the element
    """

    layer: int
    part: str
    head: int
    dim: int
    byte: int
    bit: int | None
    old: int
    new: int
    old_value: float
    new_value: float
    size: int


@dataclass(frozen=True)
class WordChange:
    """One word, counted over a layer's row (K, V, extras in logical order), with its unsigned bits before and now."""

    layer: int
    number: int
    old: int
    new: int


def locate_word(pool: PoolState, slot: int, layer: int) -> ChangedWord | None:
    """The changed word of a slot whose fingerprint a disagrees in this one layer; None unless exactly one word fits."""
    differs_a, differs_b = fingerprint_differences(pool, slot)
    fits = fitting_changes(pool, slot, layer, differs_a[layer], differs_b)
    return describe_change(pool, slot, fits[0]) if len(fits) == 1 else None


def fingerprint_differences(pool: PoolState, slot: int) -> tuple[list[int], int]:
    """Bytes as they lie there minus record, mod 2^64 and signed: fingerprint a by layer, fingerprint b over all."""
    fingerprint_a, fingerprint_b = fingerprints_of_slots(pool, torch.tensor([slot], device=pool.records.device))
    differs_a = fingerprint_a[:, 0] - pool.content_a[:, slot]
    return differs_a.tolist(), int(fingerprint_b[0] - pool.records[slot, CONTENT_B])


def fitting_changes(pool: PoolState, slot: int, layer: int, differs_a: int, differs_b: int) -> list[WordChange]:
    """Every change of one word of this layer that explains both fingerprints' differences and has a 32-bit old word.

    Da = key_a * d gives d = Da / key_a for each word; it fits where |d| < 2^32, key_b * d = Db and word - d is a word.
    """
    return fitting_words(pool.keys, layer, row_of(pool, layer, slot), differs_a, differs_b)


def fitting_words(keys: Keys, layer: int, row: Tensor, differs_a: int, differs_b: int) -> list[WordChange]:
    """`fitting_changes` of a row [words] int32 that lies in no pool."""
    words, difference, fits = _explained(keys, layer, row, differs_a)
    fits &= _unsigned(keys.fingerprint_b[layer]) * difference == differs_b
    return [
        WordChange(layer, n, int(words[n] - difference[n]), int(words[n])) for n in fits.nonzero().flatten().tolist()
    ]


def single_words(keys: Keys, layer: int, rows: Tensor, differs_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [n, words] int32 the one word whose change explains fingerprint a alone, [n] int64 each.

    Its number, -1 where that is none, what it changed by, and what that adds to fingerprint b: fingerprint b over all
    layers must confirm it.
    """
    _, difference, fits = _explained(keys, layer, rows, differs_a[:, None])
    key_b = _unsigned(keys.fingerprint_b[layer])
    number = fits.to(torch.uint8).argmax(1)
    changed = difference.gather(1, number[:, None])[:, 0]
    return torch.where(fits.sum(1) == 1, number, -1), changed, key_b[number] * changed


def describe_change(pool: PoolState, slot: int, change: WordChange) -> ChangedWord:
    """Where in the row a change of the bytes that lie in the pool now stands, and what it means."""
    part, piece = part_of_word(pool, change.number)
    words = row_of(pool, change.layer, slot)[span(piece)]
    return describe_word(part, piece.first, words, change)


def describe_word(part: Part, first: int, words: Tensor, change: WordChange) -> ChangedWord:
    """`describe_change` of a part [words] int32 that begins with word `first` of the row."""
    size = part.element_size
    row = b"".join(_bytes(word) for word in words.tolist())
    start = (change.number - first) * WORD_BYTES
    old_row = row[:start] + _bytes(change.old) + row[start + WORD_BYTES :]
    first_byte = next(place for place in range(start, start + WORD_BYTES) if row[place] != old_row[place])
    element = first_byte // size
    bounds = slice(element * size, (element + 1) * size)
    old, new = (int.from_bytes(bits[bounds], "little") for bits in (old_row, row))
    one_bit = (change.new ^ change.old).bit_count() == 1
    return ChangedWord(
        layer=change.layer,
        part=part.name,
        head=element // part.dim,
        dim=element % part.dim,
        byte=first_byte % size,
        bit=(old ^ new).bit_length() - 1 if one_bit else None,
        old=old,
        new=new,
        old_value=_number(old_row[bounds], part.dtype),
        new_value=_number(row[bounds], part.dtype),
        size=size,
    )


def part_of_word(pool: PoolState, number: int) -> tuple[Part, Piece]:
    """The part of the row in which a word lies, and where that part lies in the pool."""
    pairs = zip(pool.view.parts, pool.rows.pieces, strict=True)
    return next((part, piece) for part, piece in pairs if number < piece.first + piece.words)


def _explained(keys: Keys, layer: int, rows: Tensor, differs_a: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned words, what each must have changed by to explain fingerprint a alone, and whether it may have."""
    words, difference = _unsigned(rows), _inverse(_unsigned(keys.fingerprint_a[layer])) * differs_a
    old = words - difference
    fits = (difference != 0) & (difference.clamp(-MASK_32, MASK_32) == difference) & (old >= 0) & (old <= MASK_32)
    return words, difference, fits


def _unsigned(words: Tensor) -> Tensor:
    """int64 of the bits of 32-bit words."""
    return words.to(torch.int64) & MASK_32


def _inverse(odd: Tensor) -> Tensor:
    """Inverses of odd numbers mod 2^64: an odd number is its own to 3 bits, and each round doubles them."""
    inverse = odd.clone()
    for _ in range(5):
        inverse *= 2 - odd * inverse
    return inverse


def _bytes(word: int) -> bytes:
    return (word & MASK_32).to_bytes(WORD_BYTES, "little")


def _number(raw: bytes, dtype: torch.dtype) -> float:
    """The number that an element's bits mean."""
    return float(torch.frombuffer(bytearray(raw), dtype=dtype).to(torch.float64))
