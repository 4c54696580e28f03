"""SGLang's recurrent states: what each has absorbed and which bytes it was left with, judged where it is taken.

A model with linear attention keeps one state a request in its `MambaPool`, and its prefix cache keeps copies. All that
is known of an entry lies on the device: how many tokens its state has absorbed, the chain of these, and fingerprints.
A forward clears entries and copies those of the prefix cache when it begins; behind that `taken` compares them with
what the rows of K and V say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.calls.state_facts import LyingState, StateFacts
from kvcanary.calls.violation import Violation
from kvcanary.errors import PlanError
from kvcanary.pools.launch_site import pack_site, unpack_site
from kvcanary.pools.state_views import StateView
from kvcanary.report.watched_evidence import WatchedPool
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.layout import MASK_32, make_keys

RUN_INIT = "_maybe_execute_deferred_mamba_cow_and_clear"  # of a model runner: clears and copies as a forward begins
#: What an entry has absorbed, where that is no number of tokens: nobody knows, nobody has it, nothing was left there.
UNKNOWN, FREED, NOTHING = -1, -2, -3
CODES = ("", "R7", "R12", "R8", "R4", "R6", "R9", "T1")
MOVED = pack_site("move", 0) << 32
SIDE_STATES = ("mamba_ckpt_pool", "mamba_v2p_table")  # of a table of rows: states lie in other types, or elsewhere


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
    canary: PagedCanary
    view: StateView
    site: tuple[str, int]

    def violations(self, step: int) -> Iterator[Violation]:
        """One of each entry that is wrong."""
        pool = WatchedPool.of(self.view.whole, len(self.canary.groups))
        for place in self.codes.nonzero()[:, 0].tolist():
            entry, wanted = int(self.entries[place]), int(self.wanted[place])
            absorbed, uid, left = self.known[:, place].tolist()
            kind, writer = unpack_site(left >> 32)[0] if left else "", self.canary.writers.get(uid)
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


@dataclass(eq=False)
class Taking:
    """A forward that is about to take states: [n] of its rows.

    numbers: in `req_to_token`;  past: [n] tokens that each has absorbed before
    """

    requests: Sequence[str]
    numbers: NDArray[np.integer]
    past: Tensor
    site: tuple[str, int]
    entries: Tensor = field(default_factory=lambda: torch.empty(0))


class WatchedStates:
    """The states of one scheduler's requests, and of its prefix cache."""

    def __init__(self, canary: PagedCanary, rows: Any) -> None:
        """rows: SGLang's `HybridReqToTokenPool`"""
        self._canary, self._rows, self.view = canary, rows, view_of(rows.mamba_pool)
        self._count, words = self.view.num_slices, self.view.slices.words_per_row
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=self.view.device)
        self._keys = make_keys(canary.memory.seed, self.view.num_layers, words, self.view.device)
        self._known = zeros(3, self.view.num_entries)  # tokens absorbed, who left it, step and site of that
        self._chains, self._phases = zeros(self.view.num_entries), zeros(self.view.num_entries)
        self._sums = zeros(self.view.num_layers, self.view.num_entries * self._count)
        self._told: list[tuple[Tensor, int]] = []
        self._taking: Taking | None = None
        self.forget()

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self._told, self._taking = [], None
        self._known[0].fill_(UNKNOWN)

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
        self._known[2, entries] = self._canary.step & MASK_32 | MOVED
        self._phases[entries] = self._phases[sources]
        differs = self._differs(entries, self._kept(sources)) & is_kept
        codes = differs.any(0).to(torch.int64) * CODES.index("T1")
        self._keep(entries, self._kept(sources))
        names = [None] * len(entries)
        self._tell(Found(codes, entries, known[0], known, differs, names, self._canary, self.view, ("move", 0)))

    # forwards

    def begin(self, requests: Sequence[str], numbers: NDArray[np.integer], past: Tensor, site: tuple[str, int]) -> None:
        """A forward was read; past: [n] tokens that its rows have before it."""
        self._taking = Taking(requests, numbers, past.clone(), site)

    def taken(self) -> None:
        """It has cleared and copied entries, and goes on from those of its rows."""
        taking = self._taking
        if taking is None:
            return
        self._apply()
        rows = self._canary.memory.upload(torch.from_numpy(np.asarray(taking.numbers, dtype=np.int64)))
        own = self._rows.translate_mamba_indices(self._rows.get_mamba_indices(rows)).to(torch.int64)
        taking.entries = entries = own.clamp(0, self.view.num_entries - 1)
        n, known = len(entries), self._known[:, entries]
        absorbed, begins = known[0], taking.past == 0
        chains, is_known = self._canary.launches.seeds[:n].unbind(1)
        is_left = (absorbed >= 0) & ~begins
        differs = self._differs(entries, self._kept(entries)) & is_left
        codes = torch.zeros_like(entries)
        for code, is_wrong in (
            ("R9", differs.any(0)),
            ("R6", is_left & (is_known != 0) & (self._chains[entries] != chains)),
            ("R4", is_left & (absorbed != taking.past)),
            ("R8", is_left & (known[1] != self._canary.memory.truth.uids[rows]) & (known[2] >> 32 != MOVED >> 32)),
            ("R12", (absorbed == NOTHING) & ~begins),
            ("R7", absorbed == FREED),
        ):
            codes.masked_fill_(is_wrong, CODES.index(code))
        self._canary.coverage.states_checked += n
        own = self._canary, self.view, taking.site
        self._tell(Found(codes, entries, taking.past, known, differs, taking.requests, *own))

    def left(self) -> None:
        """The forward has run: each row's state has absorbed all of its tokens."""
        taking, self._taking = self._taking, None
        if taking is None or not len(taking.entries):
            return
        entries, truth = taking.entries, self._canary.memory.truth
        rows = self._canary.memory.upload(torch.from_numpy(np.asarray(taking.numbers, dtype=np.int64)))
        site = self._canary.step & MASK_32 | pack_site(*taking.site) << 32
        self._known[:, entries] = torch.stack((truth.ends[rows], truth.uids[rows], torch.full_like(rows, site)))
        self._chains[entries] = truth.tails[rows, 0]
        self._phases[entries] = self._canary.step % self._count
        if self._canary.config.content != "write":
            self._keep(entries, self._fingerprints(entries))

    # bytes

    def _slices(self, entries: Tensor) -> Tensor:
        """[n, m] rows of the view's slices that are compared: all of them under `full`, else one of each entry."""
        if self._canary.config.content == "full":
            return entries[:, None] * self._count + torch.arange(self._count, device=entries.device)
        return (entries * self._count + self._phases[entries])[:, None]

    def _kept(self, entries: Tensor) -> Tensor:
        """[layers, n, m] fingerprints of these slices, as they were left."""
        return self._sums[:, self._slices(entries)]

    def _keep(self, entries: Tensor, sums: Tensor) -> None:
        self._sums[:, self._slices(entries)] = sums

    def _fingerprints(self, entries: Tensor) -> Tensor:
        """The same of what lies there now."""
        slices = self._slices(entries)
        sums = slices.new_zeros(self.view.num_layers, slices.numel())
        fingerprint(
            self.view.slices, slices.flatten(), self._keys, fingerprint_a=sums, launches=slices.is_cuda
        )  # fmt: skip
        return sums.view(-1, *slices.shape)

    def _differs(self, entries: Tensor, kept: Tensor) -> Tensor:
        """[layers, n] whether bytes are not those that were kept."""
        if self._canary.config.content == "write":
            return torch.zeros(kept.shape[:2], dtype=torch.bool, device=kept.device)
        return (self._fingerprints(entries) != kept).any(2)

    def _tell(self, found: Found) -> None:
        """With the step that was read last, or the first that is."""
        self._canary.memory.total += (found.codes != 0).sum()
        steps = self._canary.steps
        (steps[-1].events if self._taking is not None and steps else self._canary.events).append(found)

    def _apply(self) -> None:
        told, self._told = self._told, []
        for entries, state in told:
            self._known[0].index_fill_(0, entries, state)
            if state == NOTHING:
                self._known[1:].index_fill_(1, entries, 0)


def view_of(pool: Any) -> StateView:
    """Where the states of a `MambaPool` lie: its convolution windows, and its matrices where it has any. PlanError
    where they are no dense rows of whole words.
    """
    cache = pool.mamba_cache
    parts = {f"conv {number}": list(tensor.unbind(0)) for number, tensor in enumerate(cache.conv)}
    if cache.temporal.numel():
        parts["temporal"] = list(cache.temporal.unbind(0))
    return StateView("states", parts)


def not_followed(rows: Any, drafts: bool) -> str | None:
    """Why states of these rows are not watched; None: they are, or there are none."""
    if getattr(rows, "mamba_pool", None) is None:
        return None
    why = None
    if drafts:
        why = "a server that drafts keeps several of each request"
    elif any(getattr(rows, name, None) is not None for name in SIDE_STATES):
        why = "they lie in other types, or under other numbers, in its prefix cache"
    elif getattr(rows, "enable_mamba_extra_buffer", False):
        why = "with --mamba-scheduler-strategy extra_buffer kernels leave further ones within a forward"
    else:
        try:
            view_of(rows.mamba_pool)
        except PlanError as error:
            why = str(error)
    return why and f"states of linear attention, of which a request has one for all its tokens: {why}"


def follow(scheduler: Any, own: Any, replace: Callable[..., None]) -> None:
    """Hear of what happens to the states of this scheduler, if `own`, the target's runner, watches them."""
    rows, states = own.rows, own.states
    if states is None:
        return
    for owner, name, hook in (
        (own.runner, RUN_INIT, _initialised),
        (rows.mamba_pool, "copy_from", _copied),
        (rows.mamba_pool, "clear_slots", _cleared),
        (rows.mamba_allocator, "alloc", _granted),
        (rows.mamba_allocator, "free", _freed),
    ):
        replace(owner, name, functools.partial(hook, states), own.guard)


def _initialised(states: WatchedStates, method: Any, forward_batch: Any) -> None:
    method(forward_batch)
    states.taken()


def _copied(states: WatchedStates, method: Any, src_indices: Tensor, dst_indices: Tensor) -> None:
    method(src_indices, dst_indices)
    states.copied(src_indices, dst_indices)


def _cleared(states: WatchedStates, method: Any, indices: Tensor) -> None:
    method(indices)
    states.cleared(indices)


def _granted(states: WatchedStates, method: Any, need_size: int) -> Any:
    entries = method(need_size)
    if entries is not None:
        states.granted(entries)
    return entries


def _freed(states: WatchedStates, method: Any, free_index: Tensor) -> None:
    states.freed(free_index)
    method(free_index)
