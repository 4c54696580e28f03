"""Entries: what the host knows of every recurrent state: whose it is, what it has absorbed, and since when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvcanary.calls.state_facts import LyingState
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.launch_site import KIND_NUMBERS, unpack_site
from kvcanary_kernels.record.layout import Keys, chain_host

FREE, GRANTED, HELD, SHARED = range(4)  # nobody's; granted, nothing left in it; a request's; a prefix cache's too
NOBODY = -1
KEPT_EVENTS = 6


class Entries:
    """By entry, [num_entries] each; a record is (uid, absorbed length, chain after it, generation), step and site.

    status:   FREE, GRANTED, HELD, SHARED;  owners: uid of the request that it is granted to, NOBODY
    generations: count up at every grant and free
    lengths:  tokens that the state has absorbed;  writers: uid of the request whose tokens they are; 0: nothing is left
    steps, kinds: of the forward, copy or load that left it (KIND_NUMBERS)
    drafts:   by entry, the last tokens that it has absorbed and that were drafts when it was left
    chains:   by entry, the chain after what it has absorbed, where it was asked for
    """

    def __init__(self, num_entries: int, ledger: Ledger, keys: Keys, chain_pool: int) -> None:
        """`chain_pool`: number of the pool whose chains name prefixes."""
        self.ledger, self._keys, self._chain_pool = ledger, keys, chain_pool
        self.status = np.zeros(num_entries, np.int8)
        self.owners = np.full(num_entries, NOBODY, np.int64)
        self.generations, self.lengths, self.writers, self.steps, self.kinds = np.zeros((5, num_entries), np.int64)
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.chains: dict[int, int] = {}
        self._events: dict[int, deque[str]] = {}

    def __len__(self) -> int:
        return len(self.status)

    def note(self, entry: int, event: str) -> None:
        self._events.setdefault(entry, deque(maxlen=KEPT_EVENTS)).append(event)

    def history(self, entry: int) -> tuple[str, ...]:
        return tuple(self._events.get(entry, ()))

    def name(self, uid: int) -> str | None:
        return self.ledger.name(uid) if uid > 0 else None

    def grant(self, entry: int, uid: int) -> None:
        self.status[entry], self.owners[entry] = GRANTED, uid
        self._begin(entry)

    def free(self, entry: int) -> None:
        """What lies there stays known to reports."""
        self.status[entry], self.owners[entry] = FREE, NOBODY
        self.generations[entry] += 1

    def leave(self, entry: int, uid: int, length: int, drafts: tuple[int, ...], site: tuple[int, int]) -> None:
        """A state was written there; `site`: step and kind."""
        if self.status[entry] == GRANTED:
            self.status[entry] = HELD
        self.writers[entry], self.lengths[entry] = uid, length
        self.steps[entry], self.kinds[entry] = site
        self.chains.pop(entry, None)
        if drafts:
            self.drafts[entry] = drafts
        else:
            self.drafts.pop(entry, None)

    def follow(self, entry: int, source: int, site: tuple[int, int]) -> None:
        """The state of another entry lies there now, and so does what is known of it."""
        chain = self.chain(source)
        self.leave(entry, int(self.writers[source]), int(self.lengths[source]), self.drafts.get(source, ()), site)
        if chain is not None:
            self.chains[entry] = chain

    def chain(self, entry: int) -> int | None:
        """After what the state has absorbed; None where nobody knows its tokens any more."""
        if entry not in self.chains:
            request = self._live(int(self.writers[entry]))
            drafts = self.drafts.get(entry, ())
            first = int(self.lengths[entry]) - len(drafts)
            base = None if request is None else self.truth(request, first)
            if base is None:
                return None
            self.chains[entry] = chain_host(list(drafts), first, base, self._keys)[-1] if drafts else base
        return self.chains[entry]

    def truth(self, request: Request, length: int) -> int | None:
        """The chain that a state of this request has after so many tokens; None: one of them is not known yet."""
        return self.ledger.truth(request, self._chain_pool, length)

    def lies(self, entry: int) -> LyingState:
        """For reports."""
        writer = int(self.writers[entry])
        kind = unpack_site(int(self.kinds[entry]))[0] if writer else ""
        drafted = len(self.drafts.get(entry, ()))
        where = self.name(writer), writer, kind, int(self.steps[entry])
        return LyingState(int(self.lengths[entry]), drafted, *where, self.chain(entry) or 0 if writer else 0)

    def of_request(self, uid: int, length: int, other: int) -> int | None:
        """Another entry in which this request's state after so many tokens lies: the one written last."""
        fits = (self.writers == uid) & (self.lengths == length) & (self.status != FREE)
        fits[other] = False
        found = np.flatnonzero(fits)
        return int(found[self.steps[found].argmax()]) if len(found) else None

    def first_difference(self, entry: int, request: Request) -> int | None:
        """First position at which it has absorbed another token than the request has; None: not known, or none."""
        drafts, length = self.drafts.get(entry, ()), int(self.lengths[entry])
        writer = request if self.writers[entry] == request.uid else self._live(int(self.writers[entry]))
        if writer is None:
            return None
        absorbed = [*writer.tokens[: length - len(drafts)].tolist(), *drafts]
        pairs = zip(absorbed, request.tokens.tolist(), strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), None)

    def has_drafts_of(self, entry: int, request: Request) -> bool | None:
        """Whether the drafts that a state has absorbed are the request's tokens now; None: they are not known yet."""
        drafts = self.drafts.get(entry)
        if not drafts:
            return True
        end = int(self.lengths[entry])
        known: Sequence[int] = request.tokens[end - len(drafts) : end].tolist()
        if list(drafts[: len(known)]) != known:
            return False
        return True if len(known) == len(drafts) else None

    def _begin(self, entry: int) -> None:
        self.generations[entry] += 1
        self.lengths[entry] = self.writers[entry] = self.steps[entry] = self.kinds[entry] = 0
        self.drafts.pop(entry, None)
        self.chains.pop(entry, None)

    def _live(self, uid: int) -> Request | None:
        name = self.ledger.book.uids.live.get(uid)
        return None if name is None else self.ledger.requests.get(name)


def packed(step: int, kind: str) -> tuple[int, int]:
    """`site` of `Entries.leave`."""
    return step, KIND_NUMBERS[kind]
