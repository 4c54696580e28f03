"""Requests: tokens and their truth chains, the row of pages, and how much of it is final, read and judged."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.errors import LifetimeError
from kvcanary.known import Known, TruthChain, append_tokens, is_known
from kvcanary.uids import Uids
from kvcanary_kernels.record import Keys, chain_root

NO_PAGE = -1


class ReadQueue:
    """Ranges of positions in the order in which their bytes were last looked at, oldest first."""

    def __init__(self) -> None:
        self.length = 0  # positions [0, length) are in the queue
        self.ranges: deque[tuple[int, int, int]] = deque()  # (start, end, step in which it was known good)

    def extend_to(self, length: int, step: int) -> None:
        """Positions [self.length, length) are final; their bytes were known good in `step`, when written."""
        if length > self.length:
            self.ranges.append((self.length, length, step))
            self.length = length

    def take(self, count: int, step: int, again: bool = False) -> list[tuple[int, int, int]]:
        """The `count` positions that waited longest and are looked at now: (start, end, step when last known good).

        again: also those that were looked at in this very step
        """
        taken: list[tuple[int, int, int]] = []
        while count > 0 and self.ranges and self.ranges[0][2] < step + again:
            start, end, read = self.ranges.popleft()
            cut = min(end, start + count)
            if cut < end:
                self.ranges.appendleft((cut, end, read))
            self.ranges.append((start, cut, step))
            taken.append((start, cut, read))
            count -= cut - start
        return taken

    def looks(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges (start, end, step in which their bytes were last known good), oldest look first."""
        return tuple(self.ranges)

    def oldest(self) -> int | None:
        """The step of the position that waits longest."""
        return min((step for _, _, step in self.ranges), default=None)

    def last_look(self, position: int) -> int:
        """The step in which the bytes at this position were known good; -1: in none."""
        return next((step for start, end, step in self.ranges if start <= position < end), -1)

    def clear(self) -> None:
        self.length = 0
        self.ranges.clear()


class Judged(NamedTuple):
    """How many entries of a row were judged clean, in which step, and in which epoch of the mirror."""

    length: int = 0
    step: int = 0
    epoch: int = 0


class Role(NamedTuple):
    """What one pool holds of a request: the name in its chain roots, and how its entries relate to tokens and lengths.

    token_offset: the slot of position p holds token p + token_offset
    ahead:        entries that a row holds beyond the committed length
    """

    name: str
    token_offset: int = 0
    ahead: int = 0


class Unheard(NamedTuple):
    """What a step has accepted, as the device says before the engine does: tokens, what was final, and what is now."""

    tokens: list[int]
    before: int
    committed_len: int


@dataclass
class Request:
    """One request: what it is, what it owns, and how much of it is final.

    pages:         page i holds positions [i * page_size, (i + 1) * page_size); NO_PAGE where it was freed
    row:           their slots in row order, as the bytes of an index array
    committed_len: entries [0, committed_len) are final
    final_pages:   pages of the row's head that are final in every pool: committed, or acquired from a prefix cache
    commit_step:   step of the last commit
    owned_len:     entries that are the request's own when it has ended inside what was accepted; None: all are
    row_lens:      by pool, entries that a prefill, decode, verify or extend has written
    reads:         by pool, when the bytes of each committed position were last known good
    judged:        by pool, how much of the row was judged clean
    ahead:         by pool, entries that its row may hold beyond the committed length
    growth:        (step, tokens known after it)
    known:         tokens and chain values, for the compiled loops
    in_the_air:    captured forwards with its rows of which the host has not learned yet
    unlanded:      captured steps with its rows that accept what the host has not learned yet
    unheard:       steps that are in these books and of which the engine has not told yet, oldest first
    is_damaged:    something was found in what it holds, and it may have computed NaN from that
    """

    request_id: str
    uid: int
    tokens: list[int]
    known: Known
    truths: list[TruthChain]
    row_lens: list[int]
    reads: list[ReadQueue]
    judged: list[Judged]
    ahead: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    row: bytes = b""
    committed_len: int = 0
    final_pages: int = 0
    commit_step: int = 0
    released: bool = False
    owned_len: int | None = None
    growth: list[tuple[int, int]] = field(default_factory=list)
    in_the_air: int = 0
    unlanded: int = 0
    unheard: deque[Unheard] = field(default_factory=deque)
    is_damaged: bool = False

    @property
    def heard_len(self) -> int:
        """The committed length that the engine has told last."""
        return self.unheard[0].before if self.unheard else self.committed_len

    def final_len(self, pool_id: int, committed_len: int | None = None) -> int:
        """Entries of this pool that are COMMITTED: final, and written by a forward that is no guess.

        committed_len: as it was at some time; None: as it is now
        """
        return min(self.most_final(pool_id, committed_len), self.row_lens[pool_id])

    def most_final(self, pool_id: int, committed_len: int | None = None) -> int:
        """Entries of this pool that acceptance has made final, written or not: what lies behind them is no row's."""
        return (self.committed_len if committed_len is None else committed_len) + self.ahead[pool_id]

    def root(self, pool_id: int) -> int:
        """The chain value that position 0 of this request continues in a pool, unsigned: role, salt and adapter."""
        return self.truths[pool_id].root

    def start_anew(self) -> None:
        """All pages are back: a request that goes on computes its rows again."""
        self.committed_len = 0
        self.row_lens = [0] * len(self.row_lens)
        for queue in self.reads:
            queue.clear()
        self.judged = [Judged()] * len(self.judged)
        self.unheard.clear()
        self.is_damaged = False

    def tokens_since(self, step: int) -> int:
        """Tokens appended in steps after `step`."""
        place = bisect_right(self.growth, (step, 1 << 62))
        return len(self.tokens) - (self.growth[place - 1][1] if place else 0)


#: What many requests have, by `map`; CARD: the address of what is known of them.
KNOWN, CARD, HEARD_LEN = attrgetter("known"), attrgetter("known.at"), attrgetter("heard_len")
TOKENS, ROW_LENS, COMMITTED, UNHEARD, UNLANDED = map(
    attrgetter, ("tokens", "row_lens", "committed_len", "unheard", "unlanded")
)


def commit_rows(requests: Sequence[Request], committed_lens: Sequence[int], step: int) -> None:
    """Entries [0, committed length) are final; what was final before joins the queues of looks."""
    for pool_id, ahead in enumerate(requests[0].ahead if requests else ()):
        finals = final_lens(requests, pool_id)
        for request, final, committed_len in zip(requests, finals, committed_lens, strict=True):
            row_lens = request.row_lens
            request.reads[pool_id].extend_to(final, request.commit_step)
            if committed_len + ahead < row_lens[pool_id]:  # rejected nodes lie beyond
                row_lens[pool_id] = committed_len + ahead
    for request, committed_len in zip(requests, committed_lens, strict=True):
        request.committed_len, request.commit_step = committed_len, step


def final_lens(requests: Sequence[Request], pool_id: int) -> list[int]:
    """`Request.final_len` of each."""
    if not requests:
        return []
    ahead = requests[0].ahead[pool_id]  # that of the pool's role
    return list(map(min, map(ahead.__add__, map(COMMITTED, requests)), lens_of_rows(requests, pool_id)))


def lens_of_rows(requests: Sequence[Request], pool_id: int) -> Iterator[int]:
    """Of each, how far its row in this pool is written."""
    return map(itemgetter(pool_id), map(ROW_LENS, requests))


class RequestBook:
    """The live requests, by id."""

    def __init__(self, keys: Keys, roles: Sequence[Role]) -> None:
        self.requests: dict[str, Request] = {}
        self._uids, self._keys, self._roles = Uids(), keys, [Role(*role) for role in roles]

    def admit(self, request_id: str, token_ids: Sequence[int], step: int, salt: str = "", adapter: str = "") -> Request:
        """A request with its prompt. `salt` and `adapter` name what makes equal tokens mean other K and V."""
        if request_id in self.requests:
            raise LifetimeError(f"request {request_id!r} is admitted already")
        tokens = list(token_ids)
        roots = [(chain_root(self._keys, role.name, salt, adapter), role.token_offset) for role in self._roles]
        uid = self._uids.new(request_id)
        known = Known(uid, tokens, roots, self._keys)
        request = Request(
            request_id,
            uid,
            tokens,
            known=known,
            truths=[TruthChain(known, pool_id) for pool_id in range(len(roots))],
            row_lens=[0] * len(roots),
            reads=[ReadQueue() for _ in roots],
            judged=[Judged()] * len(roots),
            ahead=tuple(role.ahead for role in self._roles),
            growth=[(step, len(tokens))],
        )
        self.requests[request_id] = request
        return request

    def known(self, request_ids: Sequence[str]) -> list[Request]:
        """The requests of these ids; LifetimeError for one that is not admitted."""
        try:
            return list(map(self.requests.__getitem__, request_ids))
        except KeyError:
            return [self.request(request_id) for request_id in request_ids]

    def append(self, requests: Sequence[Request], token_ids: Sequence[Sequence[int]], step: int) -> None:
        """Tokens that were accepted, by request."""
        counts, flat = array("q", map(len, token_ids)), array("q")
        for request, new in zip(requests, token_ids, strict=True):
            own, tokens = [*map(int, new)], request.tokens
            tokens.extend(own)
            request.growth.append((step, len(tokens)))
            flat.extend(own)
        append_tokens(list(map(KNOWN, requests)), counts, flat)

    def confirm(self, request: Request, token_ids: Sequence[int]) -> None:
        """The engine tells tokens that the device has told before; where they differ, the engine's word counts.

        What it has said goes out to its clients, and is what the next forwards must have been fed with.
        """
        told, tokens = request.unheard[0].tokens, [int(token) for token in token_ids]
        if told == tokens:
            return
        first = len(request.tokens) - sum(len(step.tokens) for step in request.unheard)
        request.tokens[first : first + len(told)] = tokens
        request.unheard[0] = request.unheard[0]._replace(tokens=tokens)
        request.known.write(first, request.tokens[first:])
        for truth in request.truths:
            truth.forget_behind(max(first - truth.token_offset, 0))

    def request(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise LifetimeError(f"request {request_id!r} is not admitted: call admit() first")
        return request

    def forget(self, request_id: str) -> None:
        """The request is over; its name stays known to reports for a while."""
        request = self.request(request_id)
        if held := sum(page != NO_PAGE for page in request.pages):
            raise LifetimeError(f"request {request_id!r} still holds {held} pages: free them first")
        self._uids.retire(request.uid)
        del self.requests[request_id]

    def remember(self, uid: int, name: str) -> None:
        """The request that had this uid, before anybody was told of it here."""
        self._uids.remember(uid, name)

    def name(self, uid: int) -> str | None:
        """The request that has this uid, or had it last."""
        return self._uids.name(uid)

    def truth(self, request: Request, pool_id: int, length: int) -> int | None:
        """Chain that the row's last entry must have at this length, unsigned; None: a token is not known yet."""
        chains = self.truths(request, pool_id, length)
        if chains is None:
            return None
        return int(chains[length - 1]) if length else request.root(pool_id)

    def truths(self, request: Request, pool_id: int, length: int) -> NDArray[np.uint64] | None:
        """By position the chain that the row's entries must have, at least `length` of them; None as for `truth`."""
        return request.truths[pool_id].values if is_known(request.known, pool_id, length) else None
