"""States: what an engine tells of the entries of one StateView, and what is judged when it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.state_facts import StateFacts
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.calls.violation_log import ViolationLog
from kvcanary.config import CanaryConfig
from kvcanary.errors import ENGINES_DOING, ContradictionError, LifetimeError, PlanError
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.launch_site import SUBSTEP_KINDS
from kvcanary.pools.state_views import NO_STATE, StateView
from kvcanary.records.state import PoolState
from kvcanary.states.entries import FREE, GRANTED, HELD, NOBODY, SHARED, Entries, packed
from kvcanary.states.judging import Event, Judge
from kvcanary.states.parcels import LeftState, StateSnapshot
from kvcanary.states.state_bytes import StateBytes

Names = Sequence[str | None]
Drafts = Sequence[Sequence[int]]
UNKNOWN = "states of tokens that the host did not know yet, or not any more"
TRUSTED = "states that came without a snapshot, trusted as they lie"

P = ParamSpec("P")
T = TypeVar("T")


def _told(method: Callable[Concatenate[States, P], T]) -> Callable[Concatenate[States, P], T]:
    """What an engine does wrong is an error in mode raise; else L1, and nothing has happened."""

    @wraps(method)
    def event(states: States, *args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return method(states, *args, **kwargs)
        except ENGINES_DOING as error:
            if states.config.mode == "raise":
                raise
            states.contradicted(str(error))

    return event


class States:
    """The recurrent states of one view. An event names as many requests, entries and lengths, one of each for a state.

    A length is the number of tokens that a state has absorbed. Calls come in the order in which the engine's kernels
    run: `take` before a forward, `leave` behind it, `on_copy` behind the copy.
    """

    def __init__(
        self,
        view: StateView,
        number: int,
        seed: int,
        ledger: Ledger,
        violations: ViolationLog,
        coverage: Coverage,
        config: CanaryConfig,
        now: Callable[[], int],
        chain_pool: int,
    ) -> None:
        """`number`: of the view among all pools;  `now`: the step;  `chain_pool`: whose chains name prefixes."""
        records = torch.zeros(view.num_entries, 8, dtype=torch.int64, device=view.device)
        self.view, self._ledger, self._now = view, ledger, now
        self._violations, self._coverage, self.config = violations, coverage, config
        self.pool = PoolState(view.whole, number, 0, seed, records, records.clone())
        self.entries = Entries(view.num_entries, ledger, self.pool.keys, chain_pool)
        self._bytes = StateBytes(view, self.pool, config, coverage, seed)
        self._judge = Judge(view, self.pool, self.entries, self._bytes)
        self._misled: set[str | None] = set()  # requests whose rows named what is not theirs in the last forward

    @property
    def num_bytes(self) -> int:
        """Of device memory that is kept beside the states."""
        return self._bytes.num_bytes + self.pool.records.nbytes + self.pool.expected.nbytes

    # forwards

    @_told
    def take(self, kind: str, request_ids: Names, entries: Sequence[int], lengths: Sequence[int]) -> None:
        """A forward begins: row i goes on behind `lengths[i]` tokens from the state in `entries[i]`.

        kind:        of the forward: prefill, decode, draft, verify, extend
        request_ids: None for a row of padding
        entries:     NO_STATE (-1) for a row that begins from nothing; an entry with length 0 is read, and must be zero
        """
        event, live = self._event(kind, request_ids, entries, lengths), _live(request_ids)
        names = [name for place in live if (name := request_ids[place]) is not None]
        own, lens = [int(entries[place]) for place in live], [int(lengths[place]) for place in live]
        requests = self._ledger.known(names) if names else []
        self._coverage.states_checked += len(own)
        found = self._identities(requests, own, lens, event)
        wrong = {violation.slot for violation in found}
        whole = [place for place, entry in enumerate(own) if entry >= 0 and entry not in wrong]
        found += self._judge.changed([own[place] for place in whole], [names[place] for place in whole], event)
        self._misled = {violation.request_id for violation in found if violation.code in ("R2", "R7", "R8")}
        self._violations += found

    @_told
    def leave(
        self,
        kind: str,
        request_ids: Names,
        entries: Sequence[int],
        lengths: Sequence[int],
        drafted: Drafts | None = None,
    ) -> None:
        """The forward has run: `entries[i]` holds the state after the first `lengths[i]` tokens of the request's row.

        request_ids: as of `take`; a request that leaves states of several nodes or lengths is named once for each
        entries:     NO_STATE (-1): that row's state went nowhere; the same is said of padding that writes nothing
        drafted:     by state the last tokens that it has absorbed, where the engine does not know yet whether they
                     stay: the way down to a tree's node; None: all are the request's own
        """
        event = self._event(kind, request_ids, entries, lengths)
        if drafted is not None and len(drafted) != len(entries):
            raise PlanError(f"each state must have its drafts, got {len(drafted)} for {len(entries)} states")
        written, found = dict[int, str | None](), list[Violation]()
        for place, (name, entry, length) in enumerate(zip(request_ids, entries, lengths, strict=True)):
            drafts = () if drafted is None else tuple(map(int, drafted[place]))
            found += self._left(name, int(entry), int(length), drafts, event, written)
        self._bytes.left([entry for entry, name in written.items() if name is not None])
        self._violations += found

    # lifetimes

    @_told
    def on_alloc(self, request_id: str, entries: Sequence[int]) -> None:
        """Free entries are the request's own. Nothing counts of what lies in them."""
        request = self._ledger.request(request_id)
        for entry in self._inside(entries, "granted"):
            if entry < self.view.null_entries or self.entries.status[entry] != FREE:
                self._refuse(entry, f"entry {entry} must be free to be granted to {request_id!r}, it is", request_id)
            self.entries.grant(entry, request.uid)
            self._note(entry, f"granted to {request_id!r}")
        self._bytes.forget(entries)

    @_told
    def on_free(self, entries: Sequence[int]) -> None:
        """Nobody has them any more: a request that ends or moves on, or a prefix cache that gives them up."""
        for entry in self._inside(entries, "freed"):
            if self.entries.status[entry] == FREE:
                self._refuse(entry, f"entry {entry} must be somebody's to be freed, it is", None)
            else:
                self.entries.free(entry)
                self._note(entry, "freed")

    @_told
    def on_share(self, request_id: str, entries: Sequence[int], lengths: Sequence[int]) -> None:
        """A prefix cache takes these states, as those of the first `lengths[i]` tokens: nobody writes them from now on.

        A state that has absorbed another length, or other tokens, is found here, before anybody takes it.
        """
        request, event = self._ledger.request(request_id), Event("publish", self._now())
        _expect_one_each(entries, lengths, "length")
        own, found = self._inside(entries, "published"), list[Violation]()
        for entry, length in zip(own, lengths, strict=True):
            if self.entries.status[entry] != SHARED and self.entries.owners[entry] != request.uid:
                found.append(self._judge.violation("R8", entry, request, event, int(length)))
            elif violation := self._judge.absorbed(request, entry, int(length), event):
                found.append(violation)
        wrong = {violation.slot for violation in found}
        right = [entry for entry in own if entry not in wrong]
        self._violations += [*found, *self._judge.changed(right, [request_id] * len(right), event)]
        for entry in own:
            self.entries.chain(entry)  # while the request is known
            self.entries.status[entry], self.entries.owners[entry] = SHARED, NOBODY
            self._note(entry, f"published as {int(self.entries.lengths[entry])} tokens of {request_id!r}")
        self._coverage.states_checked += len(own)
        self._bytes.keep(own)

    # bytes in motion

    @_told
    def on_copy(self, sources: Sequence[int], entries: Sequence[int]) -> None:
        """All bytes of `sources[i]` were copied to `entries[i]`, every source read before any entry is written.

        Entries must be granted. A copy of another state is found where it is taken; bytes that arrived otherwise (T1),
        and a source that is not what was left there (R9), are found here.
        """
        _expect_one_each(sources, entries, "entry to go to")
        event, src, dst = Event("move", self._now()), self._inside(sources, "copied"), self._inside(entries, "copied")
        self._coverage.states_checked += len(src)
        found, went = list[Violation](), list[tuple[int, int]]()
        for source, entry in zip(src, dst, strict=True):
            violation = self._not_copied(source, entry, event)
            if violation is not None:
                found.append(violation)
            if violation is None or violation.code not in ("W2", "W3"):
                went.append((source, entry))
        found += self._arrived(went, event)
        records = [(entry, source) for source, entry in went if self.entries.writers[source]]
        self._follow(records, event)
        self._violations += found

    @_told
    def on_offload(self, entries: Sequence[int]) -> StateSnapshot:
        """Bytes of these states are about to be copied elsewhere; give the snapshot to the `on_load` of the way back.

        The entries stay what they are: free them, when the copy is done, as any others.
        """
        own, event = self._inside(entries, "put away"), Event("move", self._now())
        self._violations += self._judge.changed(
            own, [self.entries.name(int(self.entries.owners[e])) for e in own], event
        )
        left = tuple(
            LeftState(
                int(self.entries.writers[entry]),
                int(self.entries.lengths[entry]),
                self.entries.chain(entry),
                self.entries.drafts.get(entry, ()),
                entry,
            )
            for entry in own
        )
        fingerprint_a = None if self._bytes.content == "write" else self._bytes.fingerprints(own)[0]
        for entry in own:
            self._note(entry, "put away")
        return StateSnapshot(left, fingerprint_a, self.pool.keys.seed_id, self._layout)

    @_told
    def on_load(
        self,
        request_id: str,
        entries: Sequence[int],
        lengths: Sequence[int],
        snapshot: StateSnapshot | None = None,
    ) -> None:
        """Bytes that were put away lie in these granted entries, as states of the first `lengths[i]` tokens of the row.

        snapshot: of `on_offload`, of as many states in the same order: bytes that are not those of then are T1, and a
                  state of another length or of other tokens is found at once. Without it bytes are trusted as they lie.
        """
        request, event = self._ledger.request(request_id), Event("load", self._now())
        _expect_one_each(entries, lengths, "length")
        own = self._inside(entries, "loaded")
        if snapshot is not None:
            snapshot.expect_own(own, self.pool.keys.seed_id, self._layout)
        else:
            self._coverage.skip(TRUSTED, len(own))
        found = self._brought(request, own, snapshot, lengths, event)
        self._bytes.keep(own)
        self._coverage.states_checked += len(own)
        self._violations += found

    def contradicted(self, message: str) -> None:
        """L1: an event that cannot be, in a mode that ends nobody for it."""
        site = "event", 0
        self._violations += [
            Violation("L1", self.pool, NO_SLOT, None, None, site, self._now(), message=message, state=StateFacts())
        ]

    # helpers

    def _event(self, kind: str, request_ids: Names, entries: Sequence[int], lengths: Sequence[int]) -> Event:
        if kind not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}: name the forward's own")
        if not len(request_ids) == len(entries) == len(lengths):
            counts = f"{len(request_ids)}, {len(entries)} and {len(lengths)}"
            raise PlanError(f"request_ids, entries and lengths must be one each a row, got {counts}")
        return Event(kind, self._now())

    def _identities(
        self, requests: Sequence[Request], entries: Sequence[int], lengths: Sequence[int], event: Event
    ) -> list[Violation]:
        """What is wrong with the states that rows take; nothing where one look over all of them says so."""
        if self._are_own(requests, entries, lengths):
            return []
        found = []
        for request, entry, length in zip(requests, entries, lengths, strict=True):
            violation = self._judge.taken(request, entry, length, event)
            if violation is not None:
                found.append(violation)
            elif entry >= 0 and self._is_unknown(request, entry, length):
                self._coverage.skip(UNKNOWN, 1)
        return found

    def _are_own(self, requests: Sequence[Request], entries: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether each is the request's own state after so many tokens, none of them a draft."""
        own, kept = np.array(entries, np.int64), self.entries
        if not len(own) or own.min() < self.view.null_entries or own.max() >= len(kept):
            return not len(own)
        uids = [request.uid for request in requests]
        is_own = (kept.owners[own] == uids) & (kept.writers[own] == uids) & (kept.lengths[own] == lengths)
        return bool(is_own.all() and (kept.status[own] == HELD).all()) and kept.drafts.keys().isdisjoint(entries)

    def _is_unknown(self, request: Request, entry: int, length: int) -> bool:
        entries = self.entries
        if entries.writers[entry] == request.uid or not entries.writers[entry]:
            return entries.has_drafts_of(entry, request) is None
        return entries.truth(request, length) is None or entries.chain(entry) is None

    def _left(
        self,
        name: str | None,
        entry: int,
        length: int,
        drafts: tuple[int, ...],
        event: Event,
        written: dict[int, str | None],
    ) -> list[Violation]:
        """One state of a forward goes into an entry."""
        if name is None:
            violation = self._judge.padded(entry, event)
            return [] if violation is None else [violation]
        if entry == NO_STATE:
            return []
        request = self._ledger.request(name)
        if len(drafts) > length:
            raise PlanError(f"a state of {length} tokens must have at most as many drafts, got {len(drafts)}")
        if violation := self._judge.written(request, entry, event):
            return [] if name in self._misled else [violation]  # by the same index
        if entry in written:
            others = [other for other in (written[entry],) if other not in (None, name)]
            return [self._judge.violation("W4", entry, request, event, others=tuple(others), found={"writes": 2})]
        written[entry] = name
        self.entries.leave(entry, request.uid, length, drafts, packed(event.step, event.kind))
        return []

    def _not_copied(self, source: int, entry: int, event: Event) -> Violation | None:
        """What speaks against a copy: R7 or R12 of its source, W2 or W3 of where it goes."""
        status, owner = self.entries.status, self.entries.name(int(self.entries.owners[entry]))
        if status[entry] == SHARED:
            return self._judge.violation("W3", entry, owner, event)
        if status[entry] == FREE or entry < self.view.null_entries:
            return self._judge.violation("W2", entry, owner, event)
        if status[source] == FREE or source < self.view.null_entries:
            return self._judge.violation("R7" if source >= self.view.null_entries else "R2", source, owner, event)
        return self._judge.violation("R12", source, owner, event) if status[source] == GRANTED else None

    def _arrived(self, went: Sequence[tuple[int, int]], event: Event) -> list[Violation]:
        """T1 where a copy does not hold its source's bytes, or overwrote them; R9 where that was damaged before."""
        if self._bytes.content == "write" or not went:
            return []
        sources, entries = [source for source, _ in went], [entry for _, entry in went]
        (left, _), (came, _) = self._bytes.fingerprints(sources), self._bytes.fingerprints(entries)
        differs = (left != came).cpu().numpy()
        overwritten = set(entries)
        damaged = dict(self._bytes.changed([source for source in dict.fromkeys(sources) if source not in overwritten]))
        found = []
        for place, (source, entry) in enumerate(went):
            owner = self.entries.name(int(self.entries.owners[entry]))
            expected = {"bytes": f"those of entry {source}"}
            if source in damaged:
                code = "R9" if differs[:, place].any() else "T1"
                found.append(
                    self._judge.violation(code, source, owner, event, layers=damaged[source], expected=expected)
                )
            elif differs[:, place].any() and source not in overwritten:
                layers = tuple(np.flatnonzero(differs[:, place]).tolist())
                found.append(self._judge.violation("T1", entry, owner, event, layers=layers, expected=expected))
        return found

    def _follow(self, records: Sequence[tuple[int, int]], event: Event) -> None:
        """Records go where bytes went, all of them read first."""
        kept = self.entries
        sources = [source for _, source in records]
        known = [(kept.chain(s), int(kept.writers[s]), int(kept.lengths[s]), kept.drafts.get(s, ())) for s in sources]
        for (entry, source), (chain, writer, length, drafts) in zip(records, known, strict=True):
            kept.leave(entry, writer, length, drafts, packed(event.step, "move"))
            if chain is not None:
                kept.chains[entry] = chain
            self._note(entry, f"copied from entry {source}")
        self._bytes.left([entry for entry, _ in records])

    def _brought(
        self,
        request: Request,
        entries: Sequence[int],
        snapshot: StateSnapshot | None,
        lengths: Sequence[int],
        event: Event,
    ) -> list[Violation]:
        """Records of what came back, and what is wrong with it."""
        found, kept, site = list[Violation](), self.entries, packed(event.step, "load")
        for place, entry in enumerate(entries):
            if violation := self._judge.written(request, entry, event):
                found.append(violation)
                continue
            length = int(lengths[place])
            if snapshot is None:
                kept.leave(entry, request.uid, length, (), site)
            else:
                left = snapshot.states[place]
                kept.leave(entry, left.uid or request.uid, left.absorbed, left.drafts, site)
                if left.chain is not None:
                    kept.chains[entry] = left.chain
            self._note(entry, f"loaded as {length} tokens of {request.request_id!r}")
            if violation := self._judge.absorbed(request, entry, length, event):
                found.append(violation)
        return found + self._unlike(request, entries, snapshot, event)

    def _unlike(
        self, request: Request, entries: Sequence[int], snapshot: StateSnapshot | None, event: Event
    ) -> list[Violation]:
        """T1 where bytes are not those that left."""
        if snapshot is None or snapshot.fingerprint_a is None or self._bytes.content == "write" or not entries:
            return []
        differs = (self._bytes.fingerprints(entries)[0] != snapshot.fingerprint_a).cpu().numpy()
        found = []
        for place in np.flatnonzero(differs.any(0)).tolist():
            layers, entry = tuple(np.flatnonzero(differs[:, place]).tolist()), entries[place]
            expected = {"bytes": f"those that left entry {snapshot.states[place].entry}"}
            found.append(self._judge.violation("T1", entry, request, event, layers=layers, expected=expected))
        return found

    def _inside(self, entries: Sequence[int], event: str) -> list[int]:
        own = [int(entry) for entry in entries]
        for entry in own:
            if not 0 <= entry < len(self.entries):
                raise ContradictionError(
                    f"entry {entry} of the {self.view.name!r} states cannot be {event}: they have {len(self.entries)}"
                )
        return own

    def _refuse(self, entry: int, rule: str, request_id: str | None) -> None:
        """An event that cannot be: an error in mode raise, else L1."""
        status = ("free", "granted", "held", "published")[int(self.entries.status[entry])]
        status = "padding's" if entry < self.view.null_entries else status
        message = f"{rule} {status}; {'; '.join(self.entries.history(entry)[-2:]) or 'nothing was told of it'}"
        if self.config.mode == "raise":
            raise LifetimeError(message)
        event = Event("event", self._now())
        self._violations += [self._judge.violation("L1", entry, request_id, event, message=message)]

    def _note(self, entry: int, event: str) -> None:
        self.entries.note(entry, f"{event} at step {self._now()}")

    @property
    def _layout(self) -> str:
        view = self.view.whole
        return f"{self.view.name!r}, {view.num_layers} layers of {view.rows.words_per_row} words"


def _live(request_ids: Names) -> list[int]:
    return [place for place, name in enumerate(request_ids) if name is not None]


def _expect_one_each(first: Sequence[int], second: Sequence[int], what: str) -> None:
    if len(first) != len(second):
        raise PlanError(f"each state must have one {what}, got {len(first)} and {len(second)}")
