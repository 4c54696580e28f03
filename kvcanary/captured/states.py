"""CapturedStates: recurrent states whose forwards are captured, or launched ahead of what the host knows of tokens.

What each entry has absorbed is known and judged on the device (kvcanary_kernels/watch/states.py). A state is compared
with the chain of the K and V that its row has stored; so is what a forward leaves behind.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.state_facts import LyingState, StateFacts
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.config import CanaryConfig
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.launch_site import SUBSTEP_KINDS, pack_site, unpack_site
from kvcanary.pools.state_views import StateView
from kvcanary.records.dispatch import ops_for, watch_ops_for
from kvcanary.records.mailbox import MAX_IN_FLIGHT, Packed, to_device
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import MASK_32, chain_host, make_keys, signed
from kvcanary_kernels.watch.state_rows import rows_of
from kvcanary_kernels.watch.states import CODE, FREED, NOTHING, STATE_CODES, STEP, UNKNOWN, States, taken_of
from kvcanary_kernels.watch.walk import Rows

RING = 2 * MAX_IN_FLIGHT  # steps whose findings are there
CLEARED, COPIED = pack_site("grant", 0), pack_site("move", 0)


class Launched(NamedTuple):
    """A forward that the host has launched, over these requests."""

    turn: int
    step: int
    hook: CapturedStateHook
    requests: Sequence[str]


class CapturedStates:
    """The states of one view, made by `CanaryManager.capture_states`, which is told of them in place of its `States`.

    It is told the same of forwards that are not captured, whose tokens the host knows; `add` is for those that are.

    said: [2] int64, findings and states that were judged so far
    """

    def __init__(
        self,
        registry: SubstepRegistry,
        pool: PoolState,
        view: StateView,
        number: int,
        seed: int,
        rows: int,
        nodes: int,
        ledger: Ledger,
        coverage: Coverage,
        config: CanaryConfig,
    ) -> None:
        """pool: whose records have the chains;  number: of the view among all pools;  rows, nodes: as of `add`"""
        self.view, self.pool, self.registry, self.ledger, self._coverage = view, pool, registry, ledger, coverage
        device, layers, count = view.device, view.num_layers, view.num_slices
        content = config.content if {"R9", "T1"} - config.disable else "write"
        compared = {"write": 0, "full": count}.get(content, 1)
        self.ops, self._heard, self.launched = watch_ops_for(device), (0, 0), deque[Launched]()
        self._past = deque[Launched](maxlen=RING)  # of the last steps, what the host has heard of
        with torch.inference_mode(False):
            zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
            self._records, self.said = zeros(2, view.num_entries, 8), zeros(2)
            self.judged_in = PoolState(view.whole, number, 0, seed, *self._records)
            keys = make_keys(seed, layers, view.slices.words_per_row, device)
            known, (chains, phases) = zeros(3, view.num_entries), zeros(2, view.num_entries)
            sums = zeros(layers, view.num_entries * count)
            own = keys, known, chains, phases, sums, count, compared, view.null_entries, CLEARED
            self.known = States(view.slices, *own, zeroed=True)
            self.known.known[0].fill_(UNKNOWN.value)
            self._of_zeros = zeros(layers, 1)
            self.ops.fingerprint(view.slices, zeros(1), keys, fingerprint_a=self._of_zeros)
            self._step = zeros(1)
        sizes = {"verify": nodes} if nodes else {}
        self._eager = {kind: self.add(kind, rows, sizes.get(kind, 1), self._step) for kind in SUBSTEP_KINDS}

    @property
    def num_bytes(self) -> int:
        """Of device memory that is kept beside the states."""
        return self.known.num_bytes + self._records.nbytes

    def add(self, kind: str, rows: int, new: int, step: Tensor) -> CapturedStateHook:
        """For forwards of up to so many rows, which leave ``new`` states each; step: as of `SubstepRegistry.add`."""
        return CapturedStateHook(self, kind, rows, new, step)

    def beside(self) -> AbstractContextManager[None]:
        """Within a program: what is launched there follows all that was launched so far, and nobody waits for it."""
        return self.registry.shared.side_stream.behind()

    def join(self) -> None:
        """Within a program: what is launched from now on follows what was launched `beside`."""
        self.registry.shared.side_stream.join()

    # forwards that are not captured

    @torch.inference_mode()
    def take(self, kind: str, request_ids: Sequence[str], entries: Sequence[int], lengths: Sequence[int]) -> None:
        """As `States.take`."""
        hook, requests = self._eager[kind], self.ledger.known(request_ids)
        self._step.fill_(self.registry.now)
        pairs = list(zip(requests, map(int, lengths), strict=True))
        chains = [self._truth(request, length) for request, length in pairs]
        known = [-1 if chain is None else length for (_, length), chain in zip(pairs, chains, strict=True)]
        uids = [request.uid for request in requests]
        own = [len(uids)], entries, lengths, known, [signed(chain or 0) for chain in chains], uids
        hook.take(*map(self._on_device, own))

    @torch.inference_mode()
    def leave(
        self,
        kind: str,
        request_ids: Sequence[str],
        entries: Sequence[int],
        lengths: Sequence[int],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """As `States.leave`; comes behind each `take`."""
        requests, absorbed, chains = self.ledger.known(request_ids), list[int](), list[int]()
        for place, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            drafts = [] if drafted is None else list(map(int, drafted[place]))
            chain = self._truth(request, int(length) - len(drafts))
            if drafts and chain is not None:
                chain = chain_host(drafts, int(length) - len(drafts), chain, self.pool.keys)[-1]
            absorbed.append(UNKNOWN.value if chain is None else int(length))  # nobody could say whose tokens they are
            chains.append(signed(chain or 0))
        left = entries, absorbed, [request.uid for request in requests], chains
        self._eager[kind].launch(tuple(dict.fromkeys(request_ids)))
        self._eager[kind].left(self._on_device(left))

    @torch.inference_mode()
    def on_copy(self, sources: Sequence[int], entries: Sequence[int]) -> None:
        """As `States.on_copy`."""
        self._eager["verify"].copied(self._on_device(sources), self._on_device(entries))

    # lifetimes

    @torch.inference_mode()
    def on_alloc(self, request_id: str, entries: Sequence[int]) -> None:
        """As `States.on_alloc`; the first entry was cleared, for the request begins there."""
        own, count, zeros = self.known, self.known.slices, int(entries[0])
        where = slice(zeros, int(entries[-1]) + 1)
        own.known[0, where], own.known[1:, where] = NOTHING.value, 0
        own.known[0, zeros], own.known[2, zeros] = 0, CLEARED << 32
        own.sums[:, zeros * count : (zeros + 1) * count] = self._of_zeros

    @torch.inference_mode()
    def on_free(self, entries: Sequence[int]) -> None:
        """As `States.on_free`."""
        self.known.known[0, int(entries[0]) : int(entries[-1]) + 1] = FREED.value

    # what was found

    def violations(self, turn: int) -> list[Violation]:
        """Of all forwards that were launched up to this turn; they are over."""
        launched = list[Launched]()
        while self.launched and self.launched[0].turn <= turn:
            launched.append(self.launched.popleft())
        self._past.extend(launched)
        posts = [(one.hook.posted, one.turn) for one in launched]
        said = [posted.message_of(turn).numbers[:2].tolist() for posted, turn in posts if posted.has_run(turn)]
        (before, last), (errors, judged) = self._heard, map(max, zip(self._heard, *said, strict=True))
        self._heard, found = (errors, judged), list[Violation]()
        self._coverage.states_checked += judged - last
        planned = sum(len(one.requests) for one in launched)
        if judged - last != planned:
            site, step = launched[-1].hook.site, launched[-1].step
            missing = Violation("H1", self.judged_in, NO_SLOT, None, None, site, step)
            missing.expected, missing.found = {"states": planned}, {"states": judged - last}
            found.append(missing)
        if errors != before:
            found += [violation for one in launched for violation in self._found(one)]
        return found

    @torch.inference_mode()
    def _found(self, launched: Launched) -> Iterator[Violation]:
        """Waits for the device."""
        hook, n, place = launched.hook, len(launched.requests), launched.step % RING
        cells, mismatch = (own[place, :, :n].cpu() for own in (hook.taken.cells, hook.taken.mismatch))
        for row in (cells[CODE.value] * (cells[STEP.value] == launched.step)).nonzero()[:, 0].tolist():
            _, number, entry, _, wanted, absorbed, uid, left = cells[:, row].tolist()
            kind, writer = unpack_site(left >> 32)[0] if left else "", self.ledger.name(uid) if uid > 0 else None
            lies = LyingState(max(absorbed, 0), 0, writer, uid, kind if writer else "", left & MASK_32)
            facts = StateFacts(wanted, lies, writer, last_ran=self._last_ran(launched.requests[row], launched.step))
            layers = tuple(mismatch[:, row].nonzero()[:, 0].tolist())
            yield Violation(
                STATE_CODES[number], self.judged_in, entry, wanted, launched.requests[row], hook.site, launched.step,
                layers, expected={"absorbed": wanted}, found={"absorbed": lies.absorbed}, is_captured=True, state=facts,
            )  # fmt: skip

    def _last_ran(self, request: str, before: int) -> int | None:
        """Step of its last forward before this one; None: longer ago than is known."""
        steps = (one.step for one in reversed(self._past) if one.step < before and request in one.requests)
        return next(steps, None)

    def _truth(self, request: Request, length: int) -> int | None:
        return self.ledger.truth(request, self.pool.pool_id, length)

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.view.device)


class CapturedStateHook:
    """Of one forward, at fixed addresses: `take` before its layers; `leave` behind its K and V, or `left`; `pack`.

    site: kind and index;  taken: what is found;  posted: what the host learns of a run
    """

    def __init__(self, states: CapturedStates, kind: str, rows: int, new: int, step: Tensor) -> None:
        self._states, self.site, self._step = states, (kind, 0), step
        device, own = states.view.device, states.known
        with torch.inference_mode(False):
            self._rows = rows_of(rows, pack_site(kind, 0), device)
            self.taken = taken_of(own, RING, rows)
            self._left = self.taken if new == 1 else taken_of(own, 1, rows * new)
        self.posted = Packed((states.said,), step, ops_for(device).post)

    def launch(self, requests: Sequence[str]) -> None:
        """The forward of these requests runs next."""
        registry = self._states.registry
        self._states.launched.append(Launched(registry.turn, registry.now & MASK_32, self, requests))

    def take(self, live: Tensor, entries: Tensor, lens: Tensor, known: Tensor, chains: Tensor, uids: Tensor) -> None:
        """The forward goes on from these entries [rows], of which ``live [1]`` are no padding; as of `describe`."""
        states, own, n = self._states, self._rows, len(entries)
        rows = Rows(own.rows.numbers[:n], *own.rows[1:])
        told = {"step": self._step, "live": live, "entries": entries, "lens": lens, "known": known, "chains": chains}
        states.ops.describe(own, **told, uids=uids, judged=states.said[1:], ring=RING)
        judged = {"now": own.now, "total": states.said[:1], "seeds": own.seeds, "block_size": 0}
        states.ops.take_states(states.known, rows, own.truth, self.taken, **judged)

    def leave(self, live: Tensor, entries: Tensor, slots: Tensor, positions: Tensor, uids: Tensor) -> None:
        """It has run: as `note_left` has them. Records of its K and V are there."""
        states = self._states
        stored = {"live": live, "entries": entries, "slots": slots, "positions": positions, "uids": uids}
        states.ops.note_left(self._left, **stored, records=states.pool.records)
        states.ops.leave_states(states.known, self._left, self._rows.now, n=len(entries))

    def left(self, left: Tensor) -> None:
        """It has run, and leaves these states; left: [LEFT_WIDTH, n] int64, as in `Taken`."""
        n, states = left.shape[1], self._states
        self._left.left.unflatten(1, (2, -1))[:, 0, :n] = left
        states.ops.leave_states(states.known, self._left, self._rows.now, n=n)
        self.pack()

    def copied(self, sources: Tensor, entries: Tensor) -> None:
        """States were copied, [n] each; -1: none."""
        states = self._states
        states.ops.follow(states.known, sources, entries, self._rows.now, site=COPIED)

    def pack(self) -> None:
        """Behind all of it."""
        self.posted.pack()
