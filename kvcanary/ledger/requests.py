"""Requests: tokens and their truth chains, the row of pages, and how much of it is final, read and judged."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.errors import LifetimeError, UnknownRequestError
from kvcanary.ledger.request_ids import RequestIds
from kvcanary.ledger.request_state import Chain, RequestState
from kvcanary.native.layout import REQUEST, ROWS
from kvcanary.pools.slot_maps import final_len
from kvcanary_kernels.record.layout import Identity, Keys, chain_root

NO_PAGE = -1
MOST_BATCHES = 16
MOST_IDENTITIES = 1024  # whose roots stay known to reports


class Judged(NamedTuple):
    """How many entries of a row were judged clean, in which step, and in which epoch of the record store."""

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


class Request(RequestState):
    """One request: what it is, what it owns, and how much of it is final.

    judged:      by pool, how much of the row was judged clean
    ahead:       by pool, entries that its row may hold beyond the committed length
    pages:       page i holds positions [i * page_size, (i + 1) * page_size); NO_PAGE where it was freed
    is_damaged:  something was found in what it holds, and it may have computed NaN from that
    brought_len: entries that a load or restore is said to have brought: no forward need have written them
    identity:    under which its rows are chained
    given:       [n] int64, the prompt as it was given where ids of spans stand for tokens of it; else None
    """

    identity = Identity()
    given: NDArray[np.int64] | None = None

    def __init__(
        self, request_id: str, uid: int, tokens: Sequence[int], chains: Sequence[Chain], keys: Keys, step: int
    ) -> None:
        super().__init__(uid, tokens, chains, keys, step)
        self.request_id, self.uid, self.ahead = request_id, uid, tuple(ahead for *_, ahead in chains)
        self.judged, self.pages = [Judged()] * len(chains), list[int]()
        self.released = self.is_damaged = False
        self.brought_len = 0

    def final_len(self, pool_id: int, committed_len: int | None = None) -> int:
        """Entries of this pool that are COMMITTED: final, and written by a forward that is no guess.

        committed_len: as it was at some time; None: as it is now
        """
        length = self.committed_len if committed_len is None else committed_len
        return final_len(length, self.ahead[pool_id], self.row_lens[pool_id])

    def most_final(self, pool_id: int, committed_len: int | None = None) -> int:
        """Entries of this pool that acceptance has made final, written or not: what lies behind them is no row's."""
        return (self.committed_len if committed_len is None else committed_len) + self.ahead[pool_id]

    def start_anew(self) -> None:
        """All pages are back: a request that goes on computes its rows again."""
        self.committed_len = 0
        self.row_lens = [0] * len(self.row_lens)
        for queue in self.reads:
            queue.clear()
        self.judged = [Judged()] * len(self.judged)
        self.uncollected = []
        self.is_damaged = False
        self.brought_len = self.lacks_pages = 0

    @property
    def growth(self) -> list[tuple[int, int]]:
        """(step, tokens known after it) of every step in which some became known."""
        return growth_of(self.steps)

    @growth.setter
    def growth(self, steps: Sequence[tuple[int, int]]) -> None:
        first = 0
        for step, end in steps:
            self.steps[first:end] = step
            first = end

    def tokens_since(self, step: int) -> int:
        """Tokens appended in steps after `step`."""
        return int(np.count_nonzero(self.steps > step))


def growth_of(steps: NDArray[np.int64]) -> list[tuple[int, int]]:
    """`Request.growth` of tokens, by the step in which each became known."""
    ends = np.flatnonzero(np.diff(steps, append=steps[-1:] + 1)) + 1
    return list(zip(steps[ends - 1].tolist(), ends.tolist(), strict=True))


class Batch:
    """Requests that steps name together: made once, as they name the same again and again.

    loop_arguments:    how many, and the address of the addresses of their structs, as compiled loops take them
    no_rows: [ROWS.size * requests + 1] zeros, to be copied (native/layout.py)
    """

    __slots__ = ("_structs", "loop_arguments", "names", "no_rows", "requests")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.names = tuple([request.request_id for request in self.requests])
        self._structs = array("q", [request.at for request in requests])
        self.loop_arguments = len(self._structs), self._structs.buffer_info()[0]
        self.no_rows = array("q", bytes(8 * (ROWS.size * len(self._structs) + 1)))

    def __len__(self) -> int:
        return len(self.requests)

    def make_room(self, counts: Iterable[int]) -> None:
        """For so many more tokens of each, and one more step."""
        for request, count in zip(self.requests, counts, strict=True):
            request.make_room(len(request.tokens) + count)
            for queue in request.reads:
                queue.make_room()

    def make_row_room(self, counts: Iterable[int]) -> None:
        """For so many more slots of each row."""
        for request, count in zip(self.requests, counts, strict=True):
            request.make_row_room(len(request.slots) + count)


class Batches(dict[tuple[str, ...], Batch]):
    """By names, those that steps have named together; `batches[names]` makes one that is not there."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests

    def __missing__(self, names: tuple[str, ...]) -> Batch:
        batch = self._make(names)
        if len(self) == MOST_BATCHES:
            self.clear()
        self[names] = batch
        return batch

    def once(self, names: tuple[str, ...]) -> Batch:
        """The same for an event after which nobody need name these together again: what is made is not kept."""
        batch = self.get(names)
        return self._make(names) if batch is None else batch

    def _make(self, names: tuple[str, ...]) -> Batch:
        return Batch([_named(self._requests, name) for name in names])


class RequestBook:
    """The live requests, by id, and in the batches in which steps name them."""

    def __init__(self, keys: Keys, roles: Sequence[Role]) -> None:
        self.requests: dict[str, Request] = {}
        self.batches = Batches(self.requests)
        self.uids, self._keys, self._roles = RequestIds(), keys, [Role(*role) for role in roles]
        self.weights, self.adapters = "", dict[str, str]()  # versions of now
        self.has_spans = False  # of some request
        self.roots: dict[Identity, tuple[int, ...]] = {}  # by pool, those that were met last

    def admit(self, request_id: str, token_ids: Sequence[int], step: int, salt: str = "", adapter: str = "") -> Request:
        """A request with its prompt. `salt` and `adapter` name what makes equal tokens mean other K and V."""
        if request_id in self.requests:
            raise LifetimeError(f"request {request_id!r} is admitted already")
        uid, identity = self.uids.new(request_id), self.identity(salt, adapter)
        own = zip(self.roots_of(identity), self._roles, strict=True)
        chains = [(root, role.token_offset, role.ahead) for root, role in own]
        self.requests[request_id] = request = Request(request_id, uid, list(token_ids), chains, self._keys, step)
        request.identity = identity
        return request

    def identity(self, salt: str = "", adapter: str = "") -> Identity:
        """Of a request that is admitted now."""
        return Identity(salt, adapter, self.adapters.get(adapter, ""), self.weights)

    def roots_of(self, identity: Identity) -> tuple[int, ...]:
        """By pool, the chain value that position 0 continues, unsigned."""
        roots = self.roots.pop(identity, None) or tuple(
            chain_root(self._keys, role.name, *identity) for role in self._roles
        )
        self.roots[identity] = roots
        if len(self.roots) > MOST_IDENTITIES:
            del self.roots[next(iter(self.roots))]
        return roots

    def change_identity(self, request: Request, identity: Identity) -> None:
        """From now on its rows are chained under this one: what it has written under another is not its own."""
        request.identity = identity
        request.set_roots(self.roots_of(identity))
        request.judged = [Judged()] * len(request.judged)

    def known(self, request_ids: Sequence[str]) -> list[Request]:
        """LifetimeError for one that is not admitted."""
        return self.batches[tuple(request_ids)].requests

    def confirm(self, request: Request, token_ids: Sequence[int]) -> None:
        """The engine declares tokens that the device has reported before; where they differ, the engine's word counts.

        What it has said goes out to its clients, and is what the next forwards must have been fed with.
        """
        uncollected, tokens = request.uncollected, [int(token) for token in token_ids]
        reported = uncollected[0].tokens
        if reported == tokens:
            return
        first = len(request.tokens) - sum(len(step.tokens) for step in uncollected)
        end = first + len(reported)
        steps = [*[int(request.steps[first])] * len(tokens), *request.steps[end:].tolist()]
        request.write(first, [*tokens, *request.tokens[end:].tolist()], steps)
        request.uncollected = [uncollected[0]._replace(tokens=tokens), *uncollected[1:]]
        request.forget_chains(first)

    def request(self, request_id: str) -> Request:
        return _named(self.requests, request_id)

    def forget(self, request_id: str) -> None:
        """The request is over; its name stays known to reports for a while."""
        request = self.request(request_id)
        if held := sum(page != NO_PAGE for page in request.pages):
            raise LifetimeError(f"request {request_id!r} still holds {held} pages: free them first")
        self.uids.retire(request.uid)
        del self.requests[request_id]
        request.struct[REQUEST.is_live] = False
        self.batches.clear()

    def truth(self, request: Request, pool_id: int, length: int) -> int | None:
        """Chain that the row's last entry must have at this length, unsigned; None: a token is not known yet."""
        chains = self.truths(request, pool_id, length)
        if chains is None:
            return None
        return int(chains[length - 1]) if length else request.root(pool_id)

    def truths(self, request: Request, pool_id: int, length: int) -> NDArray[np.uint64] | None:
        """By position the chain that the row's entries must have, at least `length` of them; None as for `truth`."""
        return request.chain(pool_id) if request.reaches(pool_id, length) else None


def _named(requests: Mapping[str, Request], request_id: str) -> Request:
    request = requests.get(request_id)
    if request is None:
        raise UnknownRequestError(f"request {request_id!r} is not admitted: call admit() first", request_id=request_id)
    return request
