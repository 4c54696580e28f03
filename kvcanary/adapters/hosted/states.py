"""Recurrent states of an engine that is watched: what each has absorbed, and which bytes it was left with.

A model with linear attention keeps one state for all tokens of a request, and its prefix cache keeps some of prefixes.
All that is known of an entry lies on the device: how many tokens its state has absorbed, the chain of these, and
fingerprints. When a forward is about to go on from entries, `taken` compares them with what the rows of K and V say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.calls.state_facts import LyingState, StateFacts
from kvcanary.calls.violation import Violation
from kvcanary.pools.launch_site import pack_site, unpack_site
from kvcanary.pools.state_views import StateView
from kvcanary.report.watched_evidence import WatchedPool
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.layout import MASK_32, make_keys

#: What an entry has absorbed, where that is no number of tokens: nobody knows, nobody has it, nothing was left there.
UNKNOWN, FREED, NOTHING = -1, -2, -3
CODES = ("", "R7", "R12", "R8", "R4", "R6", "R9", "T1", "W1", "W2", "W3")
MOVED = pack_site("move", 0) << 32
#: What a certificate says of states that are not watched, before the reason.
NOT_WATCHED = "states of linear attention, of which a request has one for all its tokens: "


@dataclass(eq=False)
class Found:
    """An event of a step: what is wrong with states, and what was known of each; n entries.

    codes: [n] int64, of CODES;  entries, wanted: [n]
    known: [3, n] tokens absorbed, who left it, step and site of that
    mismatch: [layers, n] bool
    """

    codes: Tensor
    entries: Tensor
    wanted: Tensor
    known: Tensor
    mismatch: Tensor
    requests: Sequence[str | None]
    states: WatchedStates
    site: tuple[str, int]

    def violations(self, step: int) -> Iterator[Violation]:
        """One of each entry that is wrong."""
        canary, view = self.states.canary, self.states.view
        pool = WatchedPool.of(view.whole, len(canary.groups) + self.states.number)
        for place in self.codes.nonzero()[:, 0].tolist():
            entry, wanted = int(self.entries[place]), int(self.wanted[place])
            absorbed, uid, left = self.known[:, place].tolist()
            kind, writer = unpack_site(left >> 32)[0] if left else "", canary.writers.get(uid)
            lies = LyingState(max(absorbed, 0), 0, writer, uid, kind if absorbed >= 0 else "", left & MASK_32)
            history: tuple[str, ...] = (
                (f"granted to {writer!r}", f"left by its {kind}, step {left & MASK_32}") if writer else ()
            )
            history += ("given back",) if absorbed == FREED else ()
            code = CODES[int(self.codes[place])]
            facts = StateFacts(
                None if code == "T1" else wanted, lies, writer if code == "R8" else None, is_free=absorbed == FREED,
                history=history,
            )  # fmt: skip
            layers = tuple(self.mismatch[:, place].nonzero()[:, 0].tolist())
            yield Violation(
                code, pool, entry, wanted, self.requests[place], self.site, step, layers,
                expected={"absorbed": wanted}, found={"absorbed": max(absorbed, 0)}, state=facts,
            )  # fmt: skip


class Left(NamedTuple):
    """[n] states that a forward leaves: tokens absorbed, who writes, and the chain of these tokens."""

    entries: Tensor
    ends: Tensor
    uids: Tensor
    chains: Tensor


@dataclass(eq=False)
class Taking:
    """A forward that is about to take states: [n] of its rows.

    rows: their numbers among all rows of the engine;  past: tokens that each has absorbed before
    between: states that it leaves on its way, beside the last of each row
    """

    requests: Sequence[str]
    rows: Tensor
    past: Tensor
    site: tuple[str, int]
    entries: Tensor | None = None
    between: list[Left] = field(default_factory=list)


class WatchedStates:
    """The states of one group of layers: of requests, and of a prefix cache."""

    def __init__(self, canary: PagedCanary, view: StateView, number: int = 0) -> None:
        """number: of the group among those of states"""
        self.canary, self.view, self.number = canary, view, number
        self.taking: Taking | None = None
        self._count, words = view.num_slices, view.slices.words_per_row
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=view.device)
        self._keys = make_keys(canary.memory.seed, view.num_layers, words, view.device)
        self._known = zeros(3, view.num_entries)  # tokens absorbed, who left it, step and site of that
        self._chains, self._phases = zeros(view.num_entries), zeros(view.num_entries)
        self._sums = zeros(view.num_layers, view.num_entries * self._count)
        self._told: list[tuple[Tensor, int]] = []
        self.forget()

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self._told, self.taking = [], None
        self._known[0].fill_(UNKNOWN)

    def prepare(self) -> None:
        """Compile what forwards launch."""
        self._fingerprints(torch.zeros(1, dtype=torch.int64, device=self.view.device))

    # lifetimes: told at once, done before the next look

    def granted(self, entries: Tensor) -> None:
        """Nothing counts of what lies in them."""
        self._told.append((entries.to(torch.int64), NOTHING))

    def freed(self, entries: Tensor) -> None:
        """Nobody has them any more."""
        self._told.append((entries.to(torch.int64), FREED))

    def cleared(self, entries: Tensor) -> None:
        """Their bytes are zero now."""
        self._apply()
        self._known[0].index_fill_(0, entries.to(torch.int64), NOTHING)

    def copied(self, sources: Tensor, entries: Tensor) -> None:
        """All bytes of sources [n] lie in entries [n] now: T1 where they do not."""
        self._apply()
        sources, entries = sources.to(torch.int64), entries.to(torch.int64)
        known, is_kept = self._known[:, sources], self._known[0, sources] >= 0
        self._known[:2, entries], self._chains[entries] = known[:2], self._chains[sources]
        self._known[2].index_fill_(0, entries, self.canary.step & MASK_32 | MOVED)
        differs = self._differs(sources, entries) & is_kept
        codes = differs.any(0).to(torch.int64) * CODES.index("T1")
        self._tell(Found(codes, entries, known[0], known, differs, [None] * len(entries), self, ("move", 0)))

    # forwards

    def begin(self, requests: Sequence[str], numbers: NDArray[np.integer], past: Tensor, site: tuple[str, int]) -> None:
        """A forward was read; past: [n] tokens that its rows have before it."""
        rows = self.canary.memory.upload(torch.from_numpy(np.asarray(numbers, dtype=np.int64)))
        self.taking = Taking(requests, rows, past.to(torch.int64, copy=True), site)

    def taken(self, entries: Tensor, sources: Tensor | None = None, moves: Tensor | None = None) -> None:
        """It has cleared and copied states, and goes on from those in entries [n] of its rows.

        sources: [n] entries that these states were copied from for it, which keep them; the same where they were not
        moves:   [n] whether there must have been a copy, since others may begin from where the state was left
        """
        taking = self.taking
        if taking is None:
            return
        self._apply()
        entries, begins = entries.to(torch.int64), taking.past == 0
        sources = entries if sources is None else torch.where(begins, entries, sources.to(torch.int64))
        is_outside = (torch.minimum(entries, sources) < 0) | (torch.maximum(entries, sources) >= self.view.num_entries)
        sources, entries = (torch.where(is_outside, 0, own) for own in (sources, entries))
        taking.entries = entries
        n, known, is_here = len(entries), self._known[:, sources], sources == entries
        absorbed = known[0]
        chains, is_known = self.canary.launches.seeds[:n].unbind(1)
        is_left = (absorbed >= 0) & ~begins
        differs = self._differs(sources, entries) & is_left
        is_another = known[1] != self.canary.memory.truth.uids[taking.rows]
        codes = torch.zeros_like(entries)
        for code, is_wrong in (
            ("T1", differs.any(0) & ~is_here),
            ("R9", differs.any(0) & is_here),
            ("R6", is_left & (is_known != 0) & (self._chains[sources] != chains)),
            ("R4", is_left & (absorbed != taking.past)),
            ("R8", is_left & is_here & is_another & (known[2] >> 32 != MOVED >> 32)),
            ("R12", (absorbed == NOTHING) & ~begins),
            ("R7", absorbed == FREED),
            ("W3", torch.zeros_like(begins) if moves is None else moves & is_here & ~begins),
            ("W2", entries < self.view.null_entries),
            ("W1", is_outside),
        ):
            codes.masked_fill_(is_wrong, CODES.index(code))
        self.canary.coverage.states_checked += n
        self._tell(Found(codes, entries, taking.past, known, differs, taking.requests, self, taking.site))

    def left(self) -> None:
        """The forward has run: each row's state has absorbed all of its tokens."""
        taking, self.taking = self.taking, None
        if taking is None or taking.entries is None:
            return
        truth, rows = self.canary.memory.truth, taking.rows
        own = Left(taking.entries, truth.ends[rows], truth.uids[rows], truth.tails[rows, 0])
        for entries, ends, uids, chains in (*taking.between, own):
            site = self.canary.step & MASK_32 | pack_site(*taking.site) << 32
            self._known[:, entries] = torch.stack((ends, uids, torch.full_like(ends, site)))
            self._chains[entries] = chains
            self._phases.index_fill_(0, entries, self.canary.step % self._count)  # a number that is stored waits
            if self.canary.config.content != "write":
                self._sums[:, self._slices(entries)] = self._fingerprints(entries)

    # bytes

    def _slices(self, entries: Tensor) -> Tensor:
        """[n, m] rows of the view's slices that are compared: all of them under `full`, else one of each entry."""
        if self.canary.config.content == "full":
            return entries[:, None] * self._count + torch.arange(self._count, device=entries.device)
        return (entries * self._count + self._phases[entries])[:, None]

    def _fingerprints(self, entries: Tensor) -> Tensor:
        """[layers, n, m] of what lies in these slices now."""
        slices = self._slices(entries)
        sums = slices.new_zeros(self.view.num_layers, slices.numel())
        fingerprint(
            self.view.slices, slices.flatten(), self._keys, fingerprint_a=sums, launches=slices.is_cuda
        )  # fmt: skip
        return sums.view(-1, *slices.shape)

    def _differs(self, sources: Tensor, entries: Tensor) -> Tensor:
        """[layers, n] whether the bytes of entries are not those that sources were left with, as they are to be from
        now on; each may be its own.
        """
        if self.canary.config.content == "write":
            return torch.zeros((self.view.num_layers, len(entries)), dtype=torch.bool, device=entries.device)
        kept = self._sums[:, self._slices(sources)]
        self._phases[entries] = self._phases[sources]
        self._sums[:, self._slices(entries)] = kept
        return (self._fingerprints(entries) != kept).any(2)

    def _tell(self, found: Found) -> None:
        """With the step that was read last, or the first that is."""
        self.canary.memory.total += (found.codes != 0).sum()
        steps = self.canary.steps
        (steps[-1].events if self.taking is not None and steps else self.canary.events).append(found)

    def _apply(self) -> None:
        told, self._told = self._told, []
        for entries, state in told:
            self._known[0].index_fill_(0, entries, state)
            if state == NOTHING:
                self._known[1:].index_fill_(1, entries, 0)
