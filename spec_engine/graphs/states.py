"""The recurrent states of a captured forward: between which entries its tokens go, and what the canary is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary_kernels.engine.delta_shape import Span
from spec_engine.graphs.hooks import STEP
from spec_engine.memory.recurrent import RecurrentPool, SpanStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcanary.captured import CapturedStates
    from spec_engine.acceptance.walk import Acceptance
    from spec_engine.graphs.hooks import Hooked


class StateSource(NamedTuple):
    """The states of a model's recurrent layers, and who judges them; None: nobody."""

    pool: RecurrentPool
    canary: CapturedStates | None


class StaticStates:
    """Of one static forward, each of whose rows has as many tokens: one of a decode, or the nodes of a tree.

    access: what the model's layers go on by
    """

    def __init__(self, source: StateSource, hooked: Hooked) -> None:
        forward, (pool, canary) = hooked.forward, source
        self._pool, self._hooked, self._canary = pool, hooked, canary
        rows, device = forward.num_rows, forward.slots.device
        self._sources = torch.zeros(rows, dtype=torch.int64, device=device)
        self._copied, self._rows = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._targets = torch.full((rows * forward.new,), -1, dtype=torch.int64, device=device)
        parents = self._targets.clone() if forward.parents is None else forward.parents
        self._columns = torch.arange(forward.new, device=device) + (forward.parents is not None)
        self.access = SpanStates(pool, Span(forward.bounds, parents, self._sources, self._targets))
        own = forward.kind, rows, forward.new
        self._hook = None if canary is None else canary.add(*own, hooked.rows.feed[STEP])

    def launch(self, requests: Sequence[str]) -> None:
        """The forward of these requests runs next."""
        if self._hook is not None:
            self._hook.launch(requests)

    # within the program

    def begin(self, table_rows: Tensor, lens: Tensor) -> None:
        """Before the forward: rows of the request table, 0 for padding, and committed lengths, [rows] each."""
        rows = seam("states.rows_of_a_replay", table_rows)
        torch.mul(rows, self._pool.entries_per_row, out=self._sources)
        left = self._sources[:, None] + self._columns
        self._targets.copy_(torch.where(table_rows[:, None] > 0, left, -1).flatten())
        self.judge(lens)

    def judge(self, lens: Tensor) -> None:
        """What the forward goes on from, before it does."""
        if self._canary is None or self._hook is None:
            return
        rows = self._hooked.rows
        truth = rows.section("prefix_lens"), rows.section("truths")
        if rows.truth is not None:
            truth = rows.truth.prefix_lens, rows.truth.truths
        with self._canary.beside():
            self._hook.take(rows.feed[rows.live], self._sources, lens, *truth, rows.section("uids"))
        self._canary.join()

    def end(self) -> None:
        """Behind it, when its K and V have been judged."""
        if self._canary is None or self._hook is None:
            return
        forward, rows = self._hooked.forward, self._hooked.rows
        with self._canary.beside():
            stored = forward.slots, forward.positions, rows.section("uids")
            self._hook.leave(rows.feed[rows.live], self._targets, *stored)
            self._hook.pack()

    def commit(self, accepted: Acceptance, is_decided: Tensor) -> None:
        """The state of each row's last accepted node becomes the row's own, where that is decided."""
        last = accepted.nodes.gather(1, (accepted.lens - 1)[:, None])[:, 0]
        last, is_decided = seam("states.root_kept", last), seam("states.commit_of_nobody", is_decided)
        torch.add(self._sources + 1, last, out=self._copied)
        self._rows.copy_(torch.where(is_decided, self._sources, -1))
        self._pool.copy(self._copied, self._rows)
        if self._canary is not None and self._hook is not None:
            with self._canary.beside():  # which reads tensors that stay: others may be given away before it does
                self._hook.copied(self._copied, self._rows)
