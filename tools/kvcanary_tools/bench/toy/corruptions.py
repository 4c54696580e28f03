"""Kinds of corruption of KV rows, each applied to many rows at once.

A kind takes rows [n, 2, heads, head_dim] (K, then V; integers as wide as an element) and gives corrupted ones of the
same shape, each row on its own. What it happens to leave as it was is the caller's to draw again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Kind = Callable[[Tensor, torch.Generator], Tensor]
KINDS: dict[str, Kind] = {}
#: Kinds that need two rows or more.
FROM_OTHER_ROWS = frozenset({"swapped slots", "row of another slot", "half a row of another slot"})
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_WORDS = 8


def kind(name: str) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        KINDS[name] = function
        return function

    return register


def as_elements(values: Tensor) -> Tensor:
    """The same memory as integers as wide as an element."""
    return values.view(INTEGERS[values.element_size()])


@kind("one bit")
def _one_bit(rows: Tensor, generator: torch.Generator) -> Tensor:
    words = _words(rows)
    bits = torch.ones(len(words), 1, dtype=torch.int32) << _below(32, (len(words), 1), generator).int()
    return _as_rows(words.scatter(1, *_xored(words, _places(words, 1, generator), bits)), rows)


@kind("bit rot in several words")
def _bit_rot(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Two to eight words, one bit of each."""
    words = _words(rows)
    places = _places(words, MOST_WORDS, generator)
    bits = torch.ones_like(places, dtype=torch.int32) << _below(32, places.shape, generator).int()
    return _as_rows(words.scatter(1, *_xored(words, places, bits * _some(places, generator))), rows)


@kind("random words")
def _random_words(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Two to eight words replaced by anything."""
    words = _words(rows)
    places = _places(words, MOST_WORDS, generator)
    noise = torch.randint(-(1 << 31), 1 << 31, places.shape, generator=generator).int()
    return _as_rows(words.scatter(1, *_xored(words, places, noise * _some(places, generator))), rows)


@kind("two top bits")
def _two_top_bits(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The top bits of two words: their sum mod 2^32 stays as it was."""
    words = _words(rows)
    places = _places(words, 2, generator)
    return _as_rows(words.scatter(1, *_xored(words, places, torch.full_like(places, -(1 << 31)).int())), rows)


@kind("opposite changes")
def _opposite_changes(rows: Tensor, generator: torch.Generator) -> Tensor:
    """What one word gains another loses: an unkeyed sum stays as it was."""
    words = _words(rows)
    places = _places(words, 2, generator)
    delta = torch.randint(1, 1 << 31, (len(words), 1), generator=generator).int()
    return _as_rows(words.scatter(1, places, words.gather(1, places) + torch.cat([delta, -delta], 1)), rows)


@kind("sign bits")
def _sign_bits(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The signs of some elements, or of all."""
    flips = torch.rand(rows.shape, generator=generator) < torch.rand(len(rows), 1, 1, 1, generator=generator)
    return torch.where(flips, rows ^ _sign(rows), rows)


@kind("signs of zeros")
def _signs_of_zeros(rows: Tensor, generator: torch.Generator) -> Tensor:
    """+0 for -0 and the reverse: equal numbers, other bytes."""
    zeros = (rows & ~_sign(rows)) == 0
    return torch.where(zeros & (torch.rand(rows.shape, generator=generator) < 0.5), rows ^ _sign(rows), rows)


@kind("swapped words")
def _swapped_words(rows: Tensor, generator: torch.Generator) -> Tensor:
    words = _words(rows)
    places = _places(words, 2, generator)
    return _as_rows(words.scatter(1, places, words.gather(1, places).flip(1)), rows)


@kind("swapped heads")
def _swapped_heads(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Two heads of K, of V, or one of each."""
    heads = rows.flatten(1, 2)
    places = _places(heads, 2, generator)[:, :, None].expand(-1, -1, heads.shape[2])
    return heads.scatter(1, places, heads.gather(1, places).flip(1)).view(rows.shape)


@kind("swapped slots")
def _swapped_slots(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Neighbours exchanged; the last of an odd number takes its neighbour's row."""
    struck = rows.clone()
    pairs = len(rows) // 2 * 2
    struck[0:pairs:2], struck[1:pairs:2] = rows[1:pairs:2], rows[0:pairs:2]
    struck[pairs:] = rows[pairs - 1 : pairs - 1 + len(rows) - pairs]
    return struck


@kind("row of another slot")
def _row_of_another_slot(rows: Tensor, generator: torch.Generator) -> Tensor:
    return rows.roll(1 + int(_below(max(len(rows) - 1, 1), (), generator)), 0)


@kind("half a row of another slot")
def _half_a_row_of_another_slot(rows: Tensor, generator: torch.Generator) -> Tensor:
    """A copy that stopped half-way: K and V of the upper heads are someone else's."""
    struck = rows.clone()
    half = rows.shape[2] // 2
    struck[:, :, half:] = rows.roll(1, 0)[:, :, half:]
    return struck


@kind("shift by an element")
def _shift_by_an_element(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The whole row read one element too early or too late."""
    step = 1 if bool(_below(2, (), generator)) else -1
    return rows.flatten(1).roll(step, 1).view(rows.shape)


@kind("shift by a head")
def _shift_by_a_head(rows: Tensor, generator: torch.Generator) -> Tensor:
    return rows.roll(1 + int(_below(max(rows.shape[2] - 1, 1), (), generator)), 2)


@kind("zeroed row")
def _zeroed_row(rows: Tensor, generator: torch.Generator) -> Tensor:
    return torch.zeros_like(rows)


@kind("zeroed K or V")
def _zeroed_part(rows: Tensor, generator: torch.Generator) -> Tensor:
    kept = _below(2, (len(rows), 1, 1, 1), generator).to(rows.dtype)
    return rows * torch.cat([kept, 1 - kept], 1)


@kind("K for V")
def _k_for_v(rows: Tensor, generator: torch.Generator) -> Tensor:
    """K where V belongs."""
    return rows[:, :1].expand(rows.shape).clone()


@kind("K and V exchanged")
def _k_and_v_exchanged(rows: Tensor, generator: torch.Generator) -> Tensor:
    return rows.flip(1)


@kind("byte swap")
def _byte_swap(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The bytes of each element in reverse order; those of pairs of elements that are single bytes."""
    width = max(2, rows.element_size())
    swapped = rows.flatten(1).view(torch.int8).unflatten(1, (-1, width)).flip(2)
    return swapped.contiguous().flatten(1).view(rows.dtype).view(rows.shape)


@kind("constant row")
def _constant_row(rows: Tensor, generator: torch.Generator) -> Tensor:
    """One bit pattern throughout, as freed memory may have."""
    return torch.randint(-128, 128, (len(rows), 1, 1, 1), generator=generator).to(rows.dtype).expand(rows.shape).clone()


def _words(rows: Tensor) -> Tensor:
    """[n, words] int32"""
    return rows.flatten(1).view(torch.int32)


def _as_rows(words: Tensor, rows: Tensor) -> Tensor:
    return words.view(rows.dtype).view(rows.shape)


def _xored(words: Tensor, places: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    return places, words.gather(1, places) ^ change


def _sign(rows: Tensor) -> int:
    return -(1 << 8 * rows.element_size() - 1)


def _below(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


def _places(items: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[n, count] different places a row."""
    return torch.rand(items.shape[:2], generator=generator).argsort(1)[:, : min(count, items.shape[1])]


def _some(places: Tensor, generator: torch.Generator) -> Tensor:
    """[n, count] of 0 and 1: the first two of each row, and some of the others."""
    count = _below(max(places.shape[1] - 1, 1), (len(places), 1), generator) + 2
    return (torch.arange(places.shape[1]) < count).int()
