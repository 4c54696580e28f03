"""Recurrent states of an engine that is watched: what each has absorbed, and which bytes it was left with.

A model with linear attention keeps one state for all tokens of a request, and its prefix cache keeps some of prefixes.
All that is known of an entry lies on the device, and is judged there (kvcanary_kernels/watch/states.py): `taken` when a
forward is about to go on from entries, `left` when it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import FEWEST_ROWS, PagedCanary, at_least, sizes
from kvcanary.adapters.observed.state import RING, Forward, Step
from kvcanary.calls.state_facts import LyingState, StateFacts
from kvcanary.calls.violation import Violation
from kvcanary.pools.launch_site import pack_site, unpack_site
from kvcanary.pools.state_views import StateView
from kvcanary.records.dispatch import watch_ops_for
from kvcanary.report.watched_evidence import WatchedPool
from kvcanary_kernels.record.layout import MASK_32, make_keys
from kvcanary_kernels.watch.drafted_states import Blocks, Draft, places_of
from kvcanary_kernels.watch.states import CHOSEN, CODE, FREED, NOTHING, STATE_CODES, STEP, UNKNOWN, States, taken_of
from kvcanary_kernels.watch.walk import Rows

MOVED = pack_site("move", 0)
#: What a certificate says of states that are not watched, before the reason.
NOT_WATCHED = "states of linear attention, of which a request has one for all its tokens: "


@dataclass(eq=False)
class Found:
    """States that were judged together; n of them.

    cells:    [CELL_WIDTH, n] int64, and [layers, n] mismatch int64, as in `Taken`
    """

    cells: Tensor
    mismatch: Tensor
    requests: Sequence[str | None]
    states: WatchedStates
    site: tuple[str, int]

    def violations(self, step: int) -> Iterator[Violation]:
        """One of each entry that is wrong."""
        canary, view = self.states.canary, self.states.view
        pool = WatchedPool.of(view.whole, len(canary.groups) + self.states.number)
        cells, mismatch = self.cells.cpu(), self.mismatch.cpu()
        for place in cells[CODE.value].nonzero()[:, 0].tolist():
            _, number, entry, _, wanted, absorbed, uid, left = cells[:, place].tolist()
            kind, writer = unpack_site(left >> 32)[0] if left else "", canary.writers.get(uid)
            lies = LyingState(max(absorbed, 0), 0, writer, uid, kind if absorbed >= 0 else "", left & MASK_32)
            history: tuple[str, ...] = (
                (f"granted to {writer!r}", f"left by its {kind}, step {left & MASK_32}") if writer else ()
            )
            history += ("given back",) if absorbed == FREED.value else ()
            code, ran = STATE_CODES[number], self._verified_before(self.requests[place], step)
            facts = StateFacts(
                None if code == "T1" else wanted, lies, writer if code == "R8" else None,
                is_free=absorbed == FREED.value, last_ran=ran if (ran or 0) > lies.step else None, history=history,
            )  # fmt: skip
            layers = tuple(mismatch[:, place].nonzero()[:, 0].tolist())
            yield Violation(
                code, pool, entry, wanted, self.requests[place], self.site, step, layers,
                expected={"absorbed": wanted}, found={"absorbed": max(absorbed, 0)}, state=facts,
            )  # fmt: skip

    def _verified_before(self, request: str | None, step: int) -> int | None:
        """The step of a request's last forward before this one, if that was a verify."""
        ran = [own for own in self.states.canary.steps if own.number < step and request in own.requests]
        return ran[-1].number if ran and ran[-1].site[0] == "verify" else None


class Left(NamedTuple):
    """Which states a forward leaves of its rows, in batch order.

    entries, after: [num_rows, parts] int64, behind so many of a row's new tokens its state lies in this entry; -1: none
    """

    entries: Tensor
    after: Tensor


class WatchedStates:
    """The states of one group of layers: of requests, and of a prefix cache."""

    def __init__(
        self, canary: PagedCanary, view: StateView, number: int = 0, most_left: int = 1, counted: bool = True
    ) -> None:
        """number: of the group among those of states;  most_left: states that a row leaves in one forward, behind
        tokens of which some may be drafts;  counted: as of `States`
        """
        self.canary, self.view, self.number, self._most_left = canary, view, number, most_left
        self._ops, count, words = watch_ops_for(view.device), view.num_slices, view.slices.words_per_row
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=view.device)
        keys = make_keys(canary.memory.seed, view.num_layers, words, view.device)
        known, (chains, phases) = zeros(3, view.num_entries), zeros(2, view.num_entries)
        sums = zeros(view.num_layers, view.num_entries * count)
        compared = {"write": 0, "full": count}.get(canary.config.content, 1)
        own = keys, known, chains, phases, sums, count, compared, view.null_entries, MOVED
        self._states = States(view.slices, *own, counted=counted)
        self._taken = taken_of(self._states, RING, canary.num_rows)
        self._column = torch.zeros(canary.num_rows, 1, dtype=torch.int64, device=view.device)
        self._left_by = self._taken if most_left == 1 else taken_of(self._states, 1, canary.num_rows * most_left)
        self._told: list[tuple[Tensor, int]] = []
        self.forward: Forward | None = None  # that is about to take states
        self._leaving: tuple[int, bool] | None = None  # of how many rows, and whether others are left as well
        canary.beside.add(self)
        self.forget()

    @property
    def num_bytes(self) -> int:
        return self._states.num_bytes

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self._told, self.forward, self._leaving = [], None, None
        self._states.known[0].fill_(UNKNOWN.value)

    # lifetimes: told at once, done before the next look

    def granted(self, entries: Tensor) -> None:
        """Nothing counts of what lies in them."""
        self._told.append((entries.to(torch.int64), NOTHING.value))

    def freed(self, entries: Tensor) -> None:
        """Nobody has them any more."""
        self._told.append((entries.to(torch.int64), FREED.value))

    def cleared(self, entries: Tensor) -> None:
        """Their bytes are zero now."""
        self._apply()
        self._states.known[0].index_fill_(0, entries.to(torch.int64), NOTHING.value)

    def copied(self, sources: Tensor, entries: Tensor) -> None:
        """All bytes of sources [n] lie in entries [n] now: T1 where they do not."""
        self._apply()
        own, step = self._states, self.canary.step & MASK_32
        sources, entries = sources.to(torch.int64), entries.to(torch.int64)
        known = own.known[:, sources]
        own.known[:2, entries], own.chains[entries] = known[:2], own.chains[sources]
        own.known[2].index_fill_(0, entries, step | MOVED << 32)
        differs = self._differs(sources, entries) & (known[0] >= 0)
        self._tell("T1", differs, sources, entries, known)

    def kept(self, entries: Tensor, requests: Sequence[str]) -> None:
        """A verify is about to put other bytes into entries [n] of these rows: R9 where they are not what was left."""
        self._apply()
        is_inside, entries = self.inside(entries) >= 0, self._null_outside(entries)
        known = self._states.known[:, entries]
        differs = self._differs(entries, entries) & (known[0] >= 0) & is_inside
        self._tell("R9", differs, entries, entries, known, requests)

    def renewed(self, entries: Tensor) -> None:
        """It has put others into entries [n], of tokens that it will tell of: from now on these count."""
        entries = self._null_outside(entries)
        if self._states.compared:
            self._states.sums[:, self._slices(entries)] = self._fingerprints(entries)

    def lost(self, entries: Tensor) -> None:
        """Nobody answers for the bytes of entries [n] any more."""
        self._states.known[0].index_fill_(0, self._null_outside(entries), UNKNOWN.value)

    def inside(self, entries: Tensor) -> Tensor:
        """[n] int64, -1 for those that there are not."""
        return torch.where((entries >= 0) & (entries < self.view.num_entries), entries, -1).to(torch.int64)

    def _null_outside(self, entries: Tensor) -> Tensor:
        """[n] int64, the null entry for those that there are not."""
        return self.inside(entries).clamp(min=0)

    def brought(
        self, view: StateView, sources: Tensor, entries: Tensor, is_brought: Tensor, requests: Sequence[str]
    ) -> None:
        """Entries [n] of these rows hold what sources [n] of another view do, of entries of that size: T1 where they do
        not.

        is_brought: [n] bool, others are not looked at
        """
        own, is_brought = self._states, is_brought & (self.inside(entries) >= 0)
        if not own.compared:
            return
        entries = self._null_outside(entries)
        parts = self._slices(entries) - entries[:, None] * own.slices
        sources = torch.where(is_brought, sources, 0).to(torch.int64)
        right = self._fingerprints_of(view, sources[:, None] * own.slices + parts)
        differs = (right != self._fingerprints(entries)).any(2) & is_brought
        self._tell("T1", differs, sources, entries, own.known[:, entries], requests)

    def _tell(
        self, code: str, differs: Tensor, sources: Tensor, entries: Tensor, known: Tensor,
        requests: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """differs: [layers, n] of entries [n], which come from sources [n], of which [3, n] was known.

        requests: whose a verify has put there; None: the engine copied them
        """
        canary = self.canary
        codes = differs.any(0).to(torch.int64) * STATE_CODES.index(code)
        step = torch.full_like(codes, canary.step & MASK_32)
        cells = torch.stack((step, codes, entries, sources, known[0], *known))
        canary.memory.total += codes.count_nonzero()
        whose, kind = ([None] * len(entries), "move") if requests is None else (requests, "verify")
        found = Found(cells, differs.to(torch.int64), whose, self, (kind, 0))
        (canary.steps[-1].events if self.forward is not None else canary.events).append(found)

    # forwards

    @property
    def rows(self) -> Tensor:
        """[n] numbers of the rows of the forward that is about to take states."""
        return self.canary.launches.numbers[: 0 if self.forward is None else len(self.forward.numbers)]

    def begin(self, forward: Forward) -> None:
        """A forward was read."""
        self.forward = forward

    def taken_from(self, entries: Tensor, left: Left | None = None) -> None:
        """As `taken`, where each row has one entry for all its tokens; entries: [n] of its rows."""
        self._column[: len(entries), 0].copy_(entries)
        self.taken(self._column, 0, left=left)

    def taken(self, table: Tensor, block_size: int, checkpoints: int = 0, left: Left | None = None) -> None:
        """It has cleared and copied states, and goes on from those of its rows; as `take_states` has the others.

        left: where it leaves them, if that is not behind all tokens of a row, in its entry
        """
        forward = self.forward
        if forward is None:
            return
        self._apply()
        n = len(forward.numbers)
        size = at_least(n, FEWEST_ROWS, self.canary.num_rows)
        checkpoints = checkpoints if forward.num_tokens > n else 0
        self._take(forward, size, table, block_size, checkpoints, left)
        self._leaving = size, checkpoints > 0
        self.canary.coverage.states_checked += n if self._states.counted else 0

    def _take(
        self, forward: Forward, size: int, table: Tensor, block_size: int, checkpoints: int, left: Left | None
    ) -> None:
        """size: rows that it is launched for"""
        launches, leaves_more = self.canary.launches, checkpoints or left is not None
        chains = launches.stored_chains(self.canary.groups[0]) if leaves_more else None

        def launch(now: Tensor, numbers: Tensor) -> None:
            rows = Rows(numbers, table, forward.lengths, forward.starts)
            self._ops.take_states(
                self._states, rows, self.canary.memory.truth, self._taken, now=now, total=self.canary.memory.total,
                seeds=launches.seeds, block_size=block_size, checkpoints=checkpoints, stored=chains,
            )  # fmt: skip
            if left is not None:
                told = {"entries": left.entries, "after": left.after, "stored": chains}
                self._ops.note_drafted(self._left_by, rows, self.canary.memory.truth, now=now, **told)

        lies = [tensor.data_ptr() for tensor in (table, forward.lengths, forward.starts)]
        launches.beside(("taken", self.number, checkpoints, *lies), size, launch)

    def left(self) -> None:
        """The forward has run: each row's state has absorbed all of its tokens."""
        leaving, self._leaving, self.forward = self._leaving, None, None
        if leaving is not None:
            self._leave(*leaving)

    def _leave(self, size: int, between: bool) -> None:
        """size, between: as `_take` had it, and whether there were checkpoints"""

        def launch(now: Tensor, _: Tensor) -> None:
            self._ops.leave_states(self._states, self._left_by, now, n=size * self._most_left, between=between)

        self.canary.launches.beside(("left", self.number, between), size, launch)

    def prepare(
        self, forward: Forward, table: Tensor | None = None, block_size: int = 0, checkpoints: int = 0,
        left: Left | None = None,
    ) -> None:  # fmt: skip
        """Compile and capture, when called twice, what forwards of every size launch. No row is judged.

        forward: an empty one, over the same tensors;  table: None: of `taken_from`;  the others as of `taken`
        """
        table = self._column if table is None else table
        for size in {min(rows, self.canary.num_rows) for rows in sizes(FEWEST_ROWS, self.canary.num_rows)}:
            for own in {0, checkpoints}:
                self._take(forward, size, table, block_size, own, left)
                self._leave(size, own > 0)

    def followed(self, sources: Tensor, entries: Tensor) -> None:
        """What sources [n] hold lies in entries [n] as well, -1: in none; without a wait. Who goes on from there looks
        whether it does.
        """
        self._ops.follow(self._states, sources, entries, self.canary.launches.now, site=MOVED)

    def violations(self, step: Step) -> Iterator[Violation]:
        """Of one of the last forwards."""
        n, place = len(step.requests), step.number % RING
        cells, mismatch = self._taken.cells[place, :, :n], self._taken.mismatch[place, :, :n]
        if n and int(cells[STEP.value, 0]) == step.number:
            yield from Found(cells, mismatch, step.requests, self, step.site).violations(step.number)

    # bytes

    def _slices(self, entries: Tensor) -> Tensor:
        """[n, m] rows of the view's slices that are compared."""
        own = self._states
        if own.compared == own.slices:
            return entries[:, None] * own.slices + torch.arange(own.slices, device=entries.device)
        return (entries * own.slices + own.phases[entries])[:, None]

    def _fingerprints(self, entries: Tensor) -> Tensor:
        """[layers, n, m] of what lies in these slices now."""
        return self._fingerprints_of(self.view, self._slices(entries))

    def _fingerprints_of(self, view: StateView, slices: Tensor) -> Tensor:
        """[layers, n, m] of these slices [n, m] of a view with as many layers."""
        sums = slices.new_zeros(self.view.num_layers, slices.numel())
        self._ops.fingerprint(view.slices, slices.flatten(), self._states.keys, fingerprint_a=sums)
        return sums.view(-1, *slices.shape)

    def _differs(self, sources: Tensor, entries: Tensor) -> Tensor:
        """[layers, n] whether the bytes of entries are not those that sources were left with, as they are to be from
        now on.
        """
        own = self._states
        if not own.compared:
            return torch.zeros((self.view.num_layers, len(entries)), dtype=torch.bool, device=entries.device)
        kept = own.sums[:, self._slices(sources)]
        own.phases[entries] = own.phases[sources]
        own.sums[:, self._slices(entries)] = kept
        return (self._fingerprints(entries) != kept).any(2)

    def _apply(self) -> None:
        told, self._told = self._told, []
        for entries, state in told:
            self._states.known[0].index_fill_(0, entries, state)
            if state == NOTHING.value:
                self._states.known[1:].index_fill_(1, entries, 0)


class DraftedStates:
    """The states of one group of layers of an engine that drafts.

    A forward leaves one behind each token of a row, in the entry of its number. The next one goes on from that of the
    last token that was accepted; windows of convolutions lie in the first entry, whichever this is.
    """

    def __init__(self, watched: WatchedStates, windows: WatchedStates, blocks: Blocks, parts: int) -> None:
        """parts: states that a row leaves in one forward at most"""
        self.watched, self.windows, self._blocks = watched, windows, blocks
        self._canary, device = watched.canary, watched.view.device
        self._ops, self.places = watch_ops_for(device), places_of(watched.canary.num_rows, parts, device)
        self._copied = torch.zeros(2, watched.canary.num_rows, dtype=torch.int64, device=device)
        self._table: Tensor | None = None  # of the forward of which nobody knows yet what was accepted
        self._count = 0  # of its rows

    def taken(self, draft: Draft, table: Tensor) -> None:
        """As `WatchedStates.taken`, once it is known which entries the kernels will take; table: in batch order."""
        forward = self.watched.forward
        if forward is None:
            return
        self._table, self._count = table, len(forward.numbers)
        if self._count:
            rows = Rows(self.watched.rows, table, forward.lengths, forward.starts)
            self._ops.choose(draft, rows, self._canary.memory.truth, self.places, self._blocks, n=self._count)
        self._take_chosen(self.watched.taken, self.windows.taken)

    def _take_chosen(self, watched: Callable[..., None], windows: Callable[..., None]) -> None:
        watched(self.places.taken, CHOSEN, left=Left(self.places.entries, self.places.after))
        windows(self.places.first, CHOSEN)

    def prepare(self, forward: Forward, table: Tensor) -> None:
        """As `WatchedStates.prepare`."""
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=table.device)
        rows = Rows(self._canary.launches.numbers[:1], table, forward.lengths, forward.starts)
        drafted = Draft(zeros(1).bool(), zeros(1, self.places.after.shape[1]), zeros(1), zeros(1))
        for draft in drafted, Draft(None, None, None, zeros(1)):
            self._ops.choose(draft, rows, self._canary.memory.truth, self.places, self._blocks, n=1)
        self._take_chosen(
            functools.partial(self.watched.prepare, forward), functools.partial(self.windows.prepare, forward)
        )
        if self._blocks.size:
            self._ops.note_accepted(self.places, table, zeros(1), self._copied, n=1, blocks=self._blocks)
            self.watched.followed(*self._copied[:, :1].fill_(-1))
        for own in self.places:
            own.zero_()

    def accepted(self, counts: Tensor) -> None:
        """So many tokens of each row were accepted, [n] in batch order, and what had to be copied for it was."""
        table, self._table = self._table, None
        if table is None or not self._count or not self._blocks.size:
            return
        self._ops.note_accepted(self.places, table, counts, self._copied, n=self._count, blocks=self._blocks)
        self.watched.followed(*self._copied[:, : self._count])
