"""Known: the tokens of a request and the chain values of its rows, where compiled loops read them by one address."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcanary.cards import (
    CHAIN_CARD,
    CHAIN_COUNT,
    CHAIN_OFFSET,
    CHAIN_ROOT,
    CHAIN_VALUES,
    NUM_TOKENS_KNOWN,
    REQUEST_CARD,
    TOKENS_KNOWN,
    TOKENS_ROOM,
)
from kvcanary_kernels.record import Keys, signed, unsigned

LEAST_ROOM = 64


class Known:
    """Of one request; what is there stays, and moves when it needs more room.

    card: [REQUEST_CARD + pools * CHAIN_CARD] int64 (cards.py);  at: its address, which stays
    granted_at: address of the slots of its row
    """

    __slots__ = ("_numbers", "_row", "at", "card", "granted_at")

    def __init__(self, uid: int, tokens: Sequence[int], roots: Sequence[tuple[int, int]], keys: Keys) -> None:
        """`roots`: by pool the chain value that position 0 continues, unsigned, and the first token of its chain."""
        self.card = array("q", (0, 0, 0, signed(keys.multiplier), signed(keys.mix_key), uid))
        for root, token_offset in roots:
            self.card.extend((0, 0, signed(root), token_offset))
        self.at = self.card.buffer_info()[0]
        self._numbers: NDArray[np.int64] = np.empty((1 + len(roots), 0), np.int64)
        self._row, self.granted_at = b"", 0
        self.write(0, tokens)

    def follow(self, row: bytes) -> None:
        """Slots of the row from now on, as the bytes of an index array."""
        if row is not self._row:
            self._row = row
            self.granted_at = np.frombuffer(row, np.int64).ctypes.data if row else 0

    def write(self, first: int, tokens: Sequence[int]) -> None:
        """The tokens from this place on; chains are known so far as tokens are the same."""
        count = first + len(tokens)
        self.make_room(count)
        self._numbers[0, first:count] = tokens
        self.card[NUM_TOKENS_KNOWN] = count

    def make_room(self, count: int) -> None:
        """For so many tokens, and as many values of every chain."""
        card = self.card
        if count <= card[TOKENS_ROOM] and self._numbers.size:
            return
        room = max(2 * count, LEAST_ROOM)
        numbers = np.empty((len(self._numbers), room), np.int64)
        numbers[:, : card[TOKENS_ROOM]] = self._numbers
        self._numbers = numbers
        card[TOKENS_KNOWN], card[TOKENS_ROOM] = numbers.ctypes.data, room
        for pool_id in range(len(numbers) - 1):
            card[REQUEST_CARD + CHAIN_CARD * pool_id + CHAIN_VALUES] = numbers[1 + pool_id].ctypes.data

    def values(self, pool_id: int) -> NDArray[np.uint64]:
        """Of a pool's chain, as many as have been asked for."""
        return self._numbers[1 + pool_id, : self.card[REQUEST_CARD + CHAIN_CARD * pool_id + CHAIN_COUNT]].view(
            np.uint64
        )


class TruthChain:
    """The chain of one request in one pool: by position its value, as far as it has been asked for, unsigned.

    token_offset: entry p holds token p + token_offset
    count: of these;  values_at: their address, with room for one of every token
    """

    __slots__ = ("_known", "_place", "_pool_id", "root", "signed_root", "token_offset")

    def __init__(self, known: Known, pool_id: int) -> None:
        self._known, self._pool_id, self._place = known, pool_id, REQUEST_CARD + CHAIN_CARD * pool_id
        self.signed_root, self.token_offset = (
            known.card[self._place + CHAIN_ROOT],
            known.card[self._place + CHAIN_OFFSET],
        )
        self.root = unsigned(self.signed_root)

    @property
    def values(self) -> NDArray[np.uint64]:
        """[count]"""
        return self._known.values(self._pool_id)

    @property
    def count(self) -> int:
        return self._known.card[self._place + CHAIN_COUNT]

    @property
    def values_at(self) -> int:
        return self._known.card[self._place + CHAIN_VALUES]

    def grown(self, length: int) -> None:
        """A loop has filled the room up to here."""
        self._known.card[self._place + CHAIN_COUNT] = max(self.count, length)

    def forget_behind(self, length: int) -> None:
        """Tokens behind these entries are others now."""
        self._known.card[self._place + CHAIN_COUNT] = min(self.count, length)


def append_tokens(known: Sequence[Known], counts: array[int], tokens: array[int]) -> None:
    """Tokens that follow: of each so many, one after another."""
    from kvcanary.loops import append_tokens as append

    cards = array("q", [one.at for one in known])
    told = len(cards), cards.buffer_info()[0], counts.buffer_info()[0], tokens.buffer_info()[0]
    if not append(*told):
        for one, count in zip(known, counts, strict=True):
            one.make_room(one.card[NUM_TOKENS_KNOWN] + count)
        append(*told)


def rows_at(cards: array[int], pool_id: int, lengths: Sequence[int], unlanded: Sequence[int]) -> tuple[array[int], int]:
    """[ROW_NUMBERS * requests] (cards.py) of rows of this pool, and how many of their lengths are UNKNOWN.

    lengths: final entries;  unlanded: steps that accept what the host has not learned yet
    """
    from kvcanary.loops import tell_rows

    n = len(cards)
    rows = array("q", [*([0] * n), *lengths, *([0] * (2 * n)), *unlanded])
    place = REQUEST_CARD + CHAIN_CARD * pool_id
    return rows, tell_rows(n, cards.buffer_info()[0], place, rows.buffer_info()[0])


def is_known(known: Known, pool_id: int, length: int) -> bool:
    """Whether the tokens of so many entries are; then the chain in this pool has at least as many values."""
    return not rows_at(array("q", (known.at,)), pool_id, (length,), (0,))[1]
