"""Recurrent states: one a request and layer, where attention keeps one row a token.

A state cannot be cut back by a length. So a verify leaves the states of all its tree's nodes beside the committed
ones, and the state of the node accepted last is committed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from kvcanary import StateView
from kvcanary.faults import seam
from kvcanary.invariants import check_state_commit, check_state_settled
from kvcanary_kernels.engine.delta_shape import DeltaShape, DeltaWeights, Span
from spec_engine.memory.pools.recurrent_watch import StateWatch


class RecurrentPool:
    """``states [layers, rows + 1, size]``, by request-table row; row 0 is the null state, always zero.

    ``nodes [layers, rows + 1, max_nodes, size]`` are the states after each node of a row's open verify. Both are views
    of ``entries [layers, (rows + 1) * (1 + max_nodes), size]``: of each row its state, then those of its nodes.
    ``watch``: tells a canary of all that happens here; None: there is none.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        max_nodes: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        """``parts``: by name the numbers of a state's parts, ``size`` in all; None: it has one."""
        self.entries_per_row = 1 + max_nodes
        shape = num_layers, (num_rows + 1) * self.entries_per_row, size
        self.entries = torch.zeros(shape, dtype=dtype, device=device)
        rows = self.entries.unflatten(1, (num_rows + 1, self.entries_per_row))
        self.states, self.nodes = rows[:, :, 0], rows[:, :, 1:]
        self.parts = {"state": size} if parts is None else dict(parts)
        self.watch: StateWatch | None = None
        self._pending = [0] * (num_rows + 1)  # nodes of each row's open verify

    def view(self) -> StateView:
        """The entries as a canary watches them; those of row 0 are padding's."""
        cut = self.entries.split(list(self.parts.values()), 2)
        parts = {name: list(part.unbind(0)) for name, part in zip(self.parts, cut, strict=True)}
        return StateView("recurrent", parts, null_entries=self.entries_per_row)

    def reset(self, row: int) -> None:
        """A new request holds the row; what a verify left open is dropped."""
        self.states[:, seam("states.cleared_another", row, live=self.live)] = 0
        self._pending[row] = 0
        if self.watch is not None:
            self.watch.reset(row)

    def chain(self, rows: Sequence[int], lens: Sequence[int], kept: Sequence[int] | None = None) -> SpanStates:
        """The states of a forward in which row r goes on by ``lens[r]`` tokens for good: prefill or decode.

        ``kept``: by row, behind how many of them its state is kept; None: behind all
        """
        self._check_settled(rows)
        firsts = list(accumulate(lens, initial=0))[:-1]
        parents = [
            first + token - 1 if token else -1 for first, n in zip(firsts, lens, strict=True) for token in range(n)
        ]
        targets = [-1] * len(parents)
        for first, n, row in zip(firsts, lens if kept is None else kept, rows, strict=True):
            if n and row:
                targets[first + n - 1] = row * self.entries_per_row
        return self._span(rows, lens, torch.tensor(parents, dtype=torch.int64), targets)

    def tree(self, rows: Sequence[int], parents: Tensor, columns: Sequence[int] | None = None) -> SpanStates:
        """The states of a verify of ``parents [len(rows), N] int64``, -1 for roots; commit or reset each row after.

        ``columns``: where the states of nodes go; None: node n's to n
        """
        self._check_settled(rows)
        num_nodes = parents.shape[1]
        self.open_verify(rows, num_nodes)
        columns = range(num_nodes) if columns is None else columns
        first = torch.arange(len(rows), device=parents.device)[:, None] * num_nodes
        flat = torch.where(parents < 0, -1, parents + first).flatten()
        targets = [self.node_entry(row, column) if row else -1 for row in rows for column in columns]
        return self._span(rows, [num_nodes] * len(rows), flat, targets)

    def open_verify(self, rows: Sequence[int], num_nodes: int) -> None:
        """Each of these rows has to be committed, or reset, before its next forward."""
        for row in rows:
            self._pending[row] = num_nodes if row else 0

    def node_entry(self, row: int, node: int) -> int:
        """Where the state after this node of the row's tree lies."""
        return row * self.entries_per_row + 1 + node

    def _span(self, rows: Sequence[int], lens: Sequence[int], parents: Tensor, targets: Sequence[int]) -> SpanStates:
        self.states[:, seam("states.null_row", 0, rows=rows, live=self.live)] = 0  # what padding goes on from
        starts, sources = list(accumulate((0, *lens))), [row * self.entries_per_row for row in rows]
        device = self.entries.device
        numbers = (torch.tensor(own, dtype=torch.int64, device=device) for own in (starts, sources, list(targets)))
        starts_on, sources_on, targets_on = numbers
        return SpanStates(self, Span(starts_on, parents.to(device), sources_on, targets_on))

    def commit(self, rows: Sequence[int], nodes: Sequence[int]) -> None:
        """Row r goes on from ``nodes[r]``, its last accepted node; RecurrentStateError where it has no such node."""
        rows, nodes = seam("draft.state_not_restored", (rows, nodes))
        for row, node in zip(rows, nodes, strict=True):
            check_state_commit(row, node, self._pending[row])
        for row in rows:
            self._pending[row] = 0
        rows, targets, nodes = seam("states.copy_left_out", (rows, rows, nodes))
        targets = seam("states.commit_into_neighbour", targets)
        self._copy(rows, targets, nodes)
        if self.watch is not None:
            self.watch.committed(rows, targets, nodes)

    def _copy(self, rows: Sequence[int], targets: Sequence[int], nodes: Sequence[int]) -> None:
        targets = seam("states.bytes_into_neighbour", targets)
        sources = [self.node_entry(row, node) for row, node in zip(rows, nodes, strict=True)]
        entries = [row * self.entries_per_row for row in targets]
        both = (torch.tensor(own, dtype=torch.int64, device=self.entries.device) for own in (sources, entries))
        sources_on, entries_on = both
        if seam("states.copied_backwards", False):
            sources_on, entries_on = entries_on, sources_on
        self.copy(sources_on, entries_on)

    def copy(self, sources: Tensor, entries: Tensor) -> None:
        """Bytes of all layers, [n] each; entry -1: none. No entry is both. Within a program, too."""
        copies = _copies()
        (copies.copy_entries if self.entries.is_cuda else copies.copy_entries_torch)(self.entries, sources, entries)

    @property
    def live(self) -> list[int]:
        """Rows in which requests have left states, as far as a canary was told."""
        return [] if self.watch is None else self.watch.rows

    def _check_settled(self, rows: Sequence[int]) -> None:
        for row in rows:
            check_state_settled(row, self._pending[row])


class SpanStates:
    """One forward's access to the states of its layers, from entry to entry."""

    def __init__(self, pool: RecurrentPool, span: Span) -> None:
        self._pool, self._span = pool, span

    def advance(
        self, layer: int, x: Tensor, gates: Tensor, weights: DeltaWeights, shape: DeltaShape, eps: float
    ) -> Tensor:
        """As `StateAccess` has it."""
        entries, n = self._pool.entries[layer], len(x)
        mixed, out = x.new_empty(n, shape.channels), x.new_empty(n, shape.values)
        run = (
            _operations().gated_delta
            if x.is_cuda and entries.dtype is torch.float32
            else _operations().gated_delta_torch
        )
        run(entries, self._span, x, gates, weights, shape, mixed=mixed, out=out, eps=eps)
        return out


@cache
def _operations() -> ModuleType:
    """An engine whose model has attention alone loads none."""
    from kvcanary_kernels.engine import delta

    return delta


@cache
def _copies() -> ModuleType:
    from kvcanary_kernels.engine import copies

    return copies
