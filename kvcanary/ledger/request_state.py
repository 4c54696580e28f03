"""Known: what steps change of a request, where compiled loops read and write it by one address."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.ledger.reread_queue import ReadQueue
from kvcanary.native.layout import ALL, NOWHERE, REQUEST, ROW_CHAIN, UNCOLLECTED, filled
from kvcanary_kernels.record.layout import Keys, signed, unsigned

LEAST_ROOM = 64
LEAST_UNCOLLECTED = 4
TOKENS, STEPS, CHAINS = range(3)  # rows of a request's numbers; of every chain one


class UncollectedStep(NamedTuple):
    """What a step has accepted, as the device says before the engine does: tokens, what was final, and what is now."""

    tokens: list[int]
    before: int
    committed_len: int


class Known:
    """Of one request; what is there stays, and moves when it needs more room.

    struct: [REQUEST.size + pools * ROW_CHAIN.size] int64 (native/layout.py);  at: its address, which stays
    slots: [n] int64, in row order;  row: the same as bytes
    row_lens: by pool, entries that a prefill, decode, verify or extend has written;  reads: by pool, `ReadQueue`
    """

    __slots__ = ("_numbers", "_row", "_uncollected", "at", "reads", "row_lens", "struct")

    def __init__(
        self, uid: int, tokens: Sequence[int], chains: Sequence[tuple[int, int, int]], keys: Keys, step: int = 0
    ) -> None:
        """`chains`: by pool the value that position 0 continues, unsigned, the first token of its chain, and entries
        that a row holds beyond the committed length.
        """
        self.reads = [ReadQueue() for _ in chains]
        hashes = {"multiplier": signed(keys.multiplier), "mix_key": signed(keys.mix_key)}
        self.struct = filled(REQUEST, uid=uid, num_chains=len(chains), is_live=True, owned_len=ALL, **hashes)
        for (root, offset, ahead), queue in zip(chains, self.reads, strict=True):
            where = {"offset": offset, "ahead": ahead, "reads": queue.at, "tail_page": NOWHERE}
            self.struct += filled(ROW_CHAIN, root=signed(root), **where)
        self.at = self.struct.buffer_info()[0]
        self.row_lens = memoryview(self.struct)[REQUEST.size + ROW_CHAIN.written :: ROW_CHAIN.size]
        self._numbers: NDArray[np.int64] = np.empty((CHAINS + len(chains), 0), np.int64)
        self._uncollected = array("q")
        self._row: NDArray[np.int64] = np.empty(0, np.int64)
        self.write(0, tokens, step)

    @property
    def slots(self) -> NDArray[np.int64]:
        """In place until there is no room for more."""
        return self._row[: self.struct[REQUEST.num_row]]

    @property
    def row(self) -> bytes:
        return self.slots.tobytes()

    @row.setter
    def row(self, row: bytes) -> None:
        slots = np.frombuffer(row, np.int64)
        self.make_row_room(len(slots))
        self._row[: len(slots)] = slots
        self.struct[REQUEST.num_row] = len(slots)
        self.struct[REQUEST.row_lacks] |= bool((slots < 0).any())

    def make_row_room(self, count: int) -> None:
        """For so many slots."""
        if count > self.struct[REQUEST.row_room]:
            before, self._row = self.slots, np.empty(max(2 * count, LEAST_ROOM), np.int64)
            self._row[: len(before)] = before
            self.struct[REQUEST.row], self.struct[REQUEST.row_room] = self._row.ctypes.data, len(self._row)

    def forget_tail(self, pool_id: int) -> None:
        """The end of the row is read again."""
        self.struct[REQUEST.size + ROW_CHAIN.size * pool_id + ROW_CHAIN.tail_page] = NOWHERE

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[n], in place until more than there is room for are known."""
        return self._numbers[TOKENS, : self.struct[REQUEST.num_tokens]]

    @property
    def steps(self) -> NDArray[np.int64]:
        """[n], in which each became known."""
        return self._numbers[STEPS, : self.struct[REQUEST.num_tokens]]

    def write(self, first: int, tokens: Sequence[int], steps: int | Sequence[int]) -> None:
        """The tokens from this place on; chains are known so far as tokens are the same."""
        count = first + len(tokens)
        self.make_room(count)
        self._numbers[TOKENS, first:count] = tokens
        self._numbers[STEPS, first:count] = steps
        self.struct[REQUEST.num_tokens] = count

    def make_room(self, count: int) -> None:
        """For so many tokens, as many values of every chain, and one more step that the engine has not declared."""
        struct = self.struct
        if struct[REQUEST.num_uncollected] == struct[REQUEST.uncollected_room]:
            self._uncollected.extend([0] * UNCOLLECTED.size * max(struct[REQUEST.num_uncollected], LEAST_UNCOLLECTED))
            struct[REQUEST.uncollected], size = self._uncollected.buffer_info()
            struct[REQUEST.uncollected_room] = size // UNCOLLECTED.size
        if count <= struct[REQUEST.tokens_room] and self._numbers.size:
            return
        room = max(2 * count, LEAST_ROOM)
        numbers = np.empty((len(self._numbers), room), np.int64)
        numbers[:, : struct[REQUEST.tokens_room]] = self._numbers
        self._numbers = numbers
        struct[REQUEST.tokens], struct[REQUEST.token_steps] = numbers[TOKENS].ctypes.data, numbers[STEPS].ctypes.data
        struct[REQUEST.tokens_room] = room
        for pool_id in range(struct[REQUEST.num_chains]):
            struct[REQUEST.size + ROW_CHAIN.size * pool_id + ROW_CHAIN.values] = numbers[CHAINS + pool_id].ctypes.data

    @property
    def uncollected(self) -> list[UncollectedStep]:
        """Steps in the ledger that the engine has not declared yet, oldest first; their tokens are last."""
        numbers = self._uncollected[: UNCOLLECTED.size * self.struct[REQUEST.num_uncollected]]
        steps = list(zip(*[iter(numbers)] * UNCOLLECTED.size, strict=True))
        end, uncollected = self.struct[REQUEST.num_tokens], list[UncollectedStep]()
        for count, *lens in reversed(steps):
            uncollected.insert(0, UncollectedStep(self.tokens[end - count : end].tolist(), *lens))
            end -= count
        return uncollected

    @uncollected.setter
    def uncollected(self, steps: Sequence[UncollectedStep]) -> None:
        self.struct[REQUEST.num_uncollected] = 0
        for number, (tokens, *lens) in enumerate(steps):
            self.make_room(0)
            place = slice(UNCOLLECTED.size * number, UNCOLLECTED.size * (number + 1))
            self._uncollected[place] = array("q", (len(tokens), *lens))
            self.struct[REQUEST.num_uncollected] = number + 1

    def values(self, pool_id: int) -> NDArray[np.uint64]:
        """Of a pool's chain, as many as have been asked for."""
        count = self.struct[REQUEST.size + ROW_CHAIN.size * pool_id + ROW_CHAIN.count]
        return self._numbers[CHAINS + pool_id, :count].view(np.uint64)


class TruthChain:
    """The chain of one request in one pool: by position its value, as far as it has been asked for, unsigned.

    token_offset: entry p holds token p + token_offset
    """

    __slots__ = ("_known", "_place", "_pool_id", "root", "token_offset")

    def __init__(self, known: Known, pool_id: int) -> None:
        self._known, self._pool_id, self._place = known, pool_id, REQUEST.size + ROW_CHAIN.size * pool_id
        self.root = unsigned(known.struct[self._place + ROW_CHAIN.root])
        self.token_offset = known.struct[self._place + ROW_CHAIN.offset]

    @property
    def values(self) -> NDArray[np.uint64]:
        """[n], as many as have been asked for."""
        return self._known.values(self._pool_id)

    def forget_behind(self, length: int) -> None:
        """Tokens behind these entries are others now."""
        place = self._place + ROW_CHAIN.count
        self._known.struct[place] = min(self._known.struct[place], length)

    def reaches(self, length: int) -> bool:
        """Whether the tokens of so many entries are known; then it has at least as many values."""
        from kvcanary.native.loops import grow_chain

        return bool(grow_chain(self._known.at, self._place, length))
