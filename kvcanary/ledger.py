"""Host truth: requests with their tokens and chains, pages with their grants, all in plain Python."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.errors import LifetimeError
from kvcanary_kernels.record import Keys, chain_host

HISTORY_EVENTS = 8  # kept a page, newest last
REMEMBERED_UIDS = 4096  # ended requests whose names reports can still tell
NO_PAGE = -1


@dataclass
class TruthChain:
    """The chain of one request in one pool: by position its value, as far as it has been asked for, unsigned."""

    root: int
    token_offset: int
    values: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def up_to(self, length: int, tokens: list[int], keys: Keys) -> NDArray[np.uint64] | None:
        """Chain values of the first `length` entries, or of more; None where a token is not known yet."""
        first, offset = len(self.values), self.token_offset
        if length + offset > len(tokens):
            return None
        if first < length:
            new = tokens[first + offset : length + offset]
            last = int(self.values[-1]) if first else self.root
            self.values = np.append(self.values, np.array(chain_host(new, first, last, keys), np.uint64))
        return self.values


class ReadQueue:
    """Ranges of positions in the order in which their bytes were last looked at, oldest first."""

    def __init__(self) -> None:
        self.length = 0  # positions [0, length) are in the queue
        self._ranges: deque[tuple[int, int, int]] = deque()  # (start, end, step in which it was known good)

    def extend_to(self, length: int, step: int) -> None:
        """Positions [self.length, length) are final; their bytes were known good in `step`, when written."""
        if length > self.length:
            self._ranges.append((self.length, length, step))
            self.length = length

    def take(self, count: int, step: int) -> list[tuple[int, int, int]]:
        """The `count` positions that waited longest and are looked at now: (start, end, step when last known good)."""
        taken: list[tuple[int, int, int]] = []
        while count > 0 and self._ranges and self._ranges[0][2] < step:
            start, end, read = self._ranges.popleft()
            cut = min(end, start + count)
            if cut < end:
                self._ranges.appendleft((cut, end, read))
            self._ranges.append((start, cut, step))
            taken.append((start, cut, read))
            count -= cut - start
        return taken

    def oldest(self) -> int | None:
        """The step of the position that waits longest."""
        return min((step for _, _, step in self._ranges), default=None)

    def clear(self) -> None:
        self.length = 0
        self._ranges.clear()


class Judged(NamedTuple):
    """How many entries of a row were judged clean, in which step, and in which epoch of the mirror."""

    length: int = 0
    step: int = 0
    epoch: int = 0


@dataclass
class Request:
    """One request: what it is, what it owns, and how much of it is final.

    pages:         page i holds positions [i * page_size, (i + 1) * page_size); NO_PAGE where it was freed
    row:           their slots in row order, as the bytes of an index array
    committed_len: entries [0, committed_len) are final
    commit_step:   step of the last commit
    row_lens:      by pool, entries that a prefill, decode, verify or extend has written
    reads:         by pool, when the bytes of each committed position were last known good
    judged:        by pool, how much of the row was judged clean
    growth:        (step, tokens known after it)
    """

    request_id: str
    uid: int
    tokens: list[int]
    truths: list[TruthChain]
    row_lens: list[int]
    reads: list[ReadQueue]
    judged: list[Judged]
    pages: list[int] = field(default_factory=list)
    row: bytes = b""
    committed_len: int = 0
    commit_step: int = 0
    released: bool = False
    growth: list[tuple[int, int]] = field(default_factory=list)

    def final_len(self, pool_id: int) -> int:
        """Entries of this pool that are COMMITTED: final, and written by a forward that is no guess."""
        return min(self.committed_len, self.row_lens[pool_id])

    def start_anew(self) -> None:
        """All pages are back: a request that goes on computes its rows again."""
        self.committed_len = 0
        self.row_lens = [0] * len(self.row_lens)
        for queue in self.reads:
            queue.clear()
        self.judged = [Judged()] * len(self.judged)

    def tokens_since(self, step: int) -> int:
        """Tokens appended in steps after `step`."""
        place = bisect_right(self.growth, (step, 1 << 62))
        return len(self.tokens) - (self.growth[place - 1][1] if place else 0)


@dataclass(frozen=True)
class PageEvent:
    """A grant or a free of a page."""

    kind: str  # "granted" | "freed"
    step: int
    request_id: str


class Ledger:
    """Requests by id, pages by number; every contradiction is a `LifetimeError`."""

    def __init__(self, num_pages: int, page_size: int, null_pages: int, keys: Keys, roots: Sequence[tuple[int, int]]):
        """`roots`: for each pool the chain root and the token offset."""
        self.page_size, self.null_pages = page_size, null_pages
        self.requests: dict[str, Request] = {}
        self.generations = np.zeros(num_pages, np.int64)
        self.owners: list[str | None] = [None] * num_pages
        self.history: dict[int, list[PageEvent]] = {}
        self.names: OrderedDict[int, str] = OrderedDict()
        self._keys, self._roots = keys, tuple(roots)

    # requests

    def admit(self, request_id: str, token_ids: Sequence[int], step: int) -> Request:
        if request_id in self.requests:
            raise LifetimeError(f"request {request_id!r} is admitted already")
        tokens = [int(token) for token in token_ids]
        request = Request(
            request_id,
            self._new_uid(request_id),
            tokens,
            truths=[TruthChain(root, offset) for root, offset in self._roots],
            row_lens=[0] * len(self._roots),
            reads=[ReadQueue() for _ in self._roots],
            judged=[Judged()] * len(self._roots),
            growth=[(step, len(tokens))],
        )
        self.requests[request_id] = request
        return request

    def append(self, request_id: str, token_ids: Sequence[int], step: int) -> None:
        request = self.request(request_id)
        request.tokens.extend(int(token) for token in token_ids)
        request.growth.append((step, len(request.tokens)))

    def request(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise LifetimeError(f"request {request_id!r} is not admitted: call admit() first")
        return request

    def forget(self, request_id: str) -> None:
        """The request is over; its name stays known to reports for a while."""
        request = self.requests.pop(request_id)
        self.names.move_to_end(request.uid)
        while len(self.names) > REMEMBERED_UIDS + len(self.requests):
            self.names.popitem(last=False)

    def truth(self, request: Request, pool_id: int, length: int) -> int | None:
        """Chain that the row's last entry must have at this length, unsigned; None: a token is not known yet."""
        chains = self.truths(request, pool_id, length)
        if chains is None:
            return None
        return int(chains[length - 1]) if length else request.truths[pool_id].root

    def truths(self, request: Request, pool_id: int, length: int) -> NDArray[np.uint64] | None:
        """By position the chain that the row's entries must have, at least `length` of them; None as for `truth`."""
        return request.truths[pool_id].up_to(length, request.tokens, self._keys)

    # pages

    def grant(self, request_id: str, pages: Sequence[int], step: int) -> None:
        request = self.request(request_id)
        for page in pages:
            self._expect_page(page)
            if self.owners[page] is not None:
                owner = self.owners[page]
                raise LifetimeError(f"page {page} is granted to {request_id!r} while {owner!r} still owns it")
            self._bump(page, "granted", step, request_id)
            self.owners[page] = request_id
            request.pages.append(page)
        request.row += self._slots_of(pages)

    def free(self, request_id: str, pages: Sequence[int], step: int) -> None:
        request = self.request(request_id)
        for page in pages:
            self._expect_page(page)
            if self.owners[page] != request_id:
                raise LifetimeError(f"page {page} is freed by {request_id!r}, its owner is {self.owners[page]!r}")
            self._bump(page, "freed", step, request_id)
            self.owners[page] = None
            request.pages[request.pages.index(page)] = NO_PAGE
        while request.pages and request.pages[-1] == NO_PAGE:
            request.pages.pop()
        request.row = self._slots_of(request.pages)
        if not request.pages:
            request.start_anew()

    def _slots_of(self, pages: Sequence[int]) -> bytes:
        size = self.page_size
        return array("q", (slot for page in pages for slot in range(page * size, (page + 1) * size))).tobytes()

    def slot(self, request: Request, position: int) -> int:
        """The slot granted for a position, or -1."""
        number, offset = divmod(position, self.page_size)
        if number >= len(request.pages) or request.pages[number] == NO_PAGE:
            return -1
        return request.pages[number] * self.page_size + offset

    def slots(self, request: Request, start: int, end: int) -> list[int]:
        """The slots granted for positions [start, end), without the freed and the not yet granted ones."""
        if self.page_size == 1:
            return [page for page in request.pages[start:end] if page != NO_PAGE]
        slots = (self.slot(request, position) for position in range(start, end))
        return [slot for slot in slots if slot >= 0]

    def name(self, uid: int) -> str | None:
        """The request that has or had this uid."""
        return self.names.get(uid)

    def _bump(self, page: int, kind: str, step: int, request_id: str) -> None:
        self.generations[page] = int(self.generations[page]) + 1 & 0xFFFFFFFF or 1  # generation 0 is never granted
        events = self.history.setdefault(page, [])
        events.append(PageEvent(kind, step, request_id))
        del events[:-HISTORY_EVENTS]

    def _expect_page(self, page: int) -> None:
        if not self.null_pages <= page < len(self.generations):
            raise LifetimeError(f"page must be in [{self.null_pages}, {len(self.generations)}), got {page}")

    def _new_uid(self, request_id: str) -> int:
        """32 bits of blake2b, never 0, never the uid of a request whose name is still told."""
        attempt = 0
        while True:
            text = f"{request_id}\0{attempt}".encode() if attempt else request_id.encode()
            uid = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
            if uid and (uid not in self.names or self.names[uid] == request_id):
                self.names[uid] = request_id
                return uid
            attempt += 1
