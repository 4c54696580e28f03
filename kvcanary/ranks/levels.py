"""Levels: what every rank must have alike, as one digest each, and its numbers for when digests differ."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

#: By name ("" for what is no request's and no layer's): the numbers that every rank must have, 64 bits with a sign.
Rows = Mapping[str, Sequence[int]]
X1, X2 = "X1", "X2"


@dataclass(frozen=True)
class Level:
    """What is compared together.

    digest:     63 bits of it; None on a rank that holds no such thing: the others are compared
    rows:       its numbers; asked only where digests differ
    code:       X1 where ranks must decide alike, X2 where they must hold the same bits
    is_private: its numbers are tokens, which no text shows
    """

    digest: int | None
    rows: Callable[[], Rows]
    code: str = X1
    is_private: bool = False


Levels = Mapping[str, Level]


def level(rows: Rows, is_private: bool = False) -> Level:
    """Numbers that are there already."""
    return Level(digest(rows), lambda: rows, X1, is_private)


def digest(rows: Rows) -> int:
    """63 bits of names and their numbers, in their order: so that the complement fits as well."""
    numbers = array("q", map(len, rows.values()))
    numbers.extend(chain.from_iterable(rows.values()))
    hashed = hashlib.blake2b(repr(list(rows)).encode(), digest_size=8)
    hashed.update(numbers)
    return int.from_bytes(hashed.digest(), "little") >> 1
