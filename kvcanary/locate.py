"""Locate: which word changed, and what it was, from the differences of the two content lanes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from kvcanary.lanes import lanes_of_slots
from kvcanary.state import PoolState
from kvcanary_kernels.record import CONTENT_B, MASK_32, MASK_64, Keys, signed, unsigned

WORD_BYTES = 4


@dataclass(frozen=True)
class ChangedWord:
    """The one word of a slot's bytes that changed.

    byte, bit: first changed byte, and the bit when it is one, counted within the element
    old, new:  bits of the element; old_value, new_value: the numbers that they mean
    """

    layer: int
    part: str  # "K" | "V"
    head: int
    dim: int
    byte: int
    bit: int | None
    old: int
    new: int
    old_value: float | None
    new_value: float | None


def locate_word(pool: PoolState, slot: int, layer: int) -> ChangedWord | None:
    """The changed word of a slot whose lane a disagrees in this one layer; None unless exactly one word fits."""
    differs_a, differs_b = _lane_differences(pool, slot, layer)
    words = _words(pool, slot, layer)
    fits = [
        (number, difference)
        for number, difference in _candidates(pool.keys, layer, differs_a, differs_b)
        if 0 <= words[number] - difference <= MASK_32
    ]
    if len(fits) != 1:
        return None
    number, difference = fits[0]
    return _describe(pool, layer, words, number, words[number] - difference)


def _lane_differences(pool: PoolState, slot: int, layer: int) -> tuple[int, int]:
    """New minus old of lane a in this layer and of lane b over all layers, mod 2^64."""
    lane_a, lane_b = lanes_of_slots(pool, torch.tensor([slot], device=pool.records.device))
    differs_a = int(lane_a[layer, 0]) - int(pool.content_a[layer, slot])
    return differs_a & MASK_64, int(lane_b[0]) - int(pool.records[slot, CONTENT_B]) & MASK_64


def _candidates(keys: Keys, layer: int, differs_a: int, differs_b: int) -> list[tuple[int, int]]:
    """(word, new - old) of every word for which one change explains both lanes."""
    found = []
    pairs = zip(keys.lane_a[layer].tolist(), keys.lane_b[layer].tolist(), strict=True)
    for number, (key_a, key_b) in enumerate(pairs):
        difference = signed(differs_a * pow(key_a & MASK_32, -1, 1 << 64))
        if 0 < abs(difference) <= MASK_32 and unsigned((key_b & MASK_32) * difference) == differs_b:
            found.append((number, difference))
    return found


def _words(pool: PoolState, slot: int, layer: int) -> list[int]:
    """The K row, then the V row, as unsigned 32-bit words."""
    rows = torch.stack((pool.view.k[layer][slot], pool.view.v[layer][slot]))
    return [word & MASK_32 for word in rows.flatten().view(torch.int32).tolist()]


def _describe(pool: PoolState, layer: int, words: list[int], number: int, old_word: int) -> ChangedWord:
    view, size = pool.view, pool.view.k[0].element_size()
    half = len(words) // 2
    part, first_word = ("K", 0) if number < half else ("V", half)
    row = b"".join(word.to_bytes(WORD_BYTES, "little") for word in words[first_word : first_word + half])
    start = (number - first_word) * WORD_BYTES
    old_row = row[:start] + old_word.to_bytes(WORD_BYTES, "little") + row[start + WORD_BYTES :]
    first_byte = next(place for place in range(start, start + WORD_BYTES) if row[place] != old_row[place])
    element = first_byte // size
    bounds = slice(element * size, (element + 1) * size)
    old, new = (int.from_bytes(bits[bounds], "little") for bits in (old_row, row))
    one_bit = (words[number] ^ old_word).bit_count() == 1
    return ChangedWord(
        layer=layer,
        part=part,
        head=element // view.head_dim,
        dim=element % view.head_dim,
        byte=first_byte % size,
        bit=(old ^ new).bit_length() - 1 if one_bit else None,
        old=old,
        new=new,
        old_value=_number(old_row[bounds], view.dtype),
        new_value=_number(row[bounds], view.dtype),
    )


def _number(raw: bytes, dtype: torch.dtype) -> float | None:
    """The number that an element's bits mean, for the types that python can read."""
    if dtype is torch.bfloat16:
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    code = {torch.float64: "<d", torch.float32: "<f", torch.float16: "<e"}.get(dtype)
    return None if code is None else float(struct.unpack(code, raw)[0])
