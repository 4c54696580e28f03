"""RequestState: what steps change of a request, where compiled loops read and write it by one address."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvcanary.ledger.reread_queue import ReadQueue
from kvcanary.native.layout import ALL, NOWHERE, REQUEST, ROW_CHAIN, UNCOLLECTED, filled
from kvcanary_kernels.record.layout import Keys, signed, unsigned

#: By pool: the value that position 0 continues, unsigned, the first token, and entries beyond the committed length.
Chain = tuple[int, int, int]
LEAST_ROOM = 64
LEAST_UNCOLLECTED = 4
TOKENS, STEPS, CHAINS = range(3)  # rows of a request's numbers; of every chain one


class UncollectedStep(NamedTuple):
    """What a step has accepted, as the device says before the engine does: tokens, what was final, and what is now."""

    tokens: list[int]
    before: int
    committed_len: int


class _StructField:
    """A number of a request that its struct holds, where compiled loops read and write it too (native/layout.py)."""

    def __init__(self, place: int) -> None:
        self._place = place

    @overload
    def __get__(self, request: None, owner: type[RequestState]) -> _StructField: ...
    @overload
    def __get__(self, request: RequestState, owner: type[RequestState]) -> int: ...
    def __get__(self, request: RequestState | None, owner: type[RequestState]) -> int | _StructField:
        return self if request is None else request.struct[self._place]

    def __set__(self, request: RequestState, number: int) -> None:
        request.struct[self._place] = number


class RequestState:
    """Of one request; what is there stays, and moves when it needs more room.

    struct: [REQUEST.size + pools * ROW_CHAIN.size] int64 (native/layout.py);  at: its address, which stays
    reads:  by pool, when the bytes of each committed position were last known good
    committed_len: entries [0, committed_len) are final;  commit_step: step of the last commit
    final_pages:   pages of the row's head that are final in every pool: committed, or acquired from a prefix cache
    in_flight:     captured forwards with its rows of which the host has not learned yet
    lacks_pages:   1 where pages of what is final were given back, while the request goes on
    pending_acceptances: captured steps with its rows that accept what the host has not learned yet
    """

    committed_len = _StructField(REQUEST.committed_len)
    final_pages = _StructField(REQUEST.final_pages)
    commit_step = _StructField(REQUEST.commit_step)
    in_flight = _StructField(REQUEST.num_in_flight)
    pending_acceptances = _StructField(REQUEST.num_pending_acceptances)
    lacks_pages = _StructField(REQUEST.row_lacks)

    def __init__(self, uid: int, tokens: Sequence[int], chains: Sequence[Chain], keys: Keys, step: int = 0) -> None:
        self.reads = [ReadQueue() for _ in chains]
        hashes = {"multiplier": signed(keys.multiplier), "mix_key": signed(keys.mix_key)}
        self.struct = filled(REQUEST, uid=uid, num_chains=len(chains), is_live=True, owned_len=ALL, **hashes)
        for (root, offset, ahead), queue in zip(chains, self.reads, strict=True):
            where = {"offset": offset, "ahead": ahead, "reads": queue.at, "tail_page": NOWHERE}
            self.struct += filled(ROW_CHAIN, root=signed(root), **where)
        self.at = self.struct.buffer_info()[0]
        self._row_lens = memoryview(self.struct)[REQUEST.size + ROW_CHAIN.written :: ROW_CHAIN.size]
        self._numbers: NDArray[np.int64] = np.empty((CHAINS + len(chains), 0), np.int64)
        self._uncollected = array("q")
        self._row: NDArray[np.int64] = np.empty(0, np.int64)
        self.write(0, tokens, step)

    @property
    def row_lens(self) -> memoryview:
        """By pool, entries that a prefill, decode, verify or extend has written."""
        return self._row_lens

    @row_lens.setter
    def row_lens(self, lens: Sequence[int]) -> None:
        self._row_lens[:] = array("q", lens)

    @property
    def owned_len(self) -> int | None:
        """Entries that are the request's own when it has ended inside what was accepted; None: all are."""
        length = self.struct[REQUEST.owned_len]
        return None if length == ALL else length

    @owned_len.setter
    def owned_len(self, length: int | None) -> None:
        self.struct[REQUEST.owned_len] = ALL if length is None else length

    @property
    def slots(self) -> NDArray[np.int64]:
        """[n], in row order; in place until there is no room for more."""
        return self._row[: self.struct[REQUEST.num_row]]

    @property
    def row(self) -> bytes:
        """Slots in row order, as the bytes of an index array."""
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
        self.struct[self._chain(pool_id, ROW_CHAIN.tail_page)] = NOWHERE

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
            struct[self._chain(pool_id, ROW_CHAIN.values)] = numbers[CHAINS + pool_id].ctypes.data

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

    # by pool, the chain of its tokens: by position a value, as far as it has been asked for

    def _chain(self, pool_id: int, field: int) -> int:
        """Where its ROW_CHAIN has this field."""
        return REQUEST.size + ROW_CHAIN.size * pool_id + field

    def chain(self, pool_id: int) -> NDArray[np.uint64]:
        return self._numbers[CHAINS + pool_id, : self.struct[self._chain(pool_id, ROW_CHAIN.count)]].view(np.uint64)

    def root(self, pool_id: int) -> int:
        """The chain value that position 0 continues, unsigned: role and identity."""
        return unsigned(self.struct[self._chain(pool_id, ROW_CHAIN.root)])

    def set_roots(self, roots: Sequence[int]) -> None:
        """By pool; all chains are others from now on."""
        for pool_id, root in enumerate(roots):
            self.struct[self._chain(pool_id, ROW_CHAIN.root)] = signed(root)
            self.struct[self._chain(pool_id, ROW_CHAIN.count)] = 0

    def reaches(self, pool_id: int, length: int) -> bool:
        """Whether the tokens of so many entries are known; then the chain has at least as many values."""
        from kvcanary.native.loops import grow_chain

        return bool(grow_chain(self.at, self._chain(pool_id, 0), length))

    def forget_chains(self, first: int) -> None:
        """Tokens from this one on are others now."""
        for pool_id in range(self.struct[REQUEST.num_chains]):
            offset, count = (self._chain(pool_id, field) for field in (ROW_CHAIN.offset, ROW_CHAIN.count))
            self.struct[count] = min(self.struct[count], max(first - self.struct[offset], 0))
