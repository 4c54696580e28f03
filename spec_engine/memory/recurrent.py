"""Recurrent states: one a request and layer, where attention keeps one row a token.

A state cannot be cut back by a length. So a verify leaves the states of all its tree's nodes beside the committed
ones, and the state of the node accepted last is committed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvcanary import StateView
from kvcanary.faults import seam
from kvcanary.invariants import check_state_commit, check_state_settled
from spec_engine.memory.pools.recurrent_watch import StateWatch

Advance = Callable[..., tuple[Tensor, Tensor]]


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

    def chain(self, rows: Sequence[int], lens: Sequence[int]) -> ChainStates:
        """The states of a forward in which row r goes on by ``lens[r]`` tokens for good: prefill or decode."""
        self._check_settled(rows)
        return ChainStates(self, rows, lens)

    def tree(self, rows: Sequence[int], parents: Tensor, columns: Sequence[int] | None = None) -> TreeStates:
        """The states of a verify of ``parents [len(rows), N] int64``, -1 for roots; commit or reset each row after.

        ``columns``: where the states of nodes go; None: node n's to n
        """
        self._check_settled(rows)
        for row in rows:
            self._pending[row] = parents.shape[1] if row else 0
        return TreeStates(self, rows, parents, range(parents.shape[1]) if columns is None else columns)

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
        device = self.states.device
        targets = seam("states.bytes_into_neighbour", targets)
        at, to, chosen = (torch.tensor(own, dtype=torch.int64, device=device) for own in (rows, targets, nodes))
        if seam("states.copied_backwards", False):
            self.nodes[:, at, chosen] = self.states[:, to]
            return
        self.states[:, to] = self.nodes[:, at, chosen]

    def store(self, layer: int, rows: Tensor, states: Tensor) -> None:
        """Write one layer's ``states [n, size]`` at ``rows [n]``; those of row 0 come to nothing."""
        self.states[layer, rows] = states
        self.states[layer, seam("states.null_row", 0, rows=rows, live=self.live)] = 0

    @property
    def live(self) -> list[int]:
        """Rows in which requests have left states, as far as a canary was told."""
        return [] if self.watch is None else self.watch.rows

    def _check_settled(self, rows: Sequence[int]) -> None:
        for row in rows:
            check_state_settled(row, self._pending[row])


class ChainStates:
    """One forward's access to the states, for rows of consecutive tokens of any number."""

    def __init__(self, pool: RecurrentPool, rows: Sequence[int], lens: Sequence[int]) -> None:
        self.pool = pool
        device = pool.states.device
        self.rows, counts = torch.tensor(rows, device=device), torch.tensor(lens, device=device)
        first = counts.cumsum(0) - counts
        going = [(counts > step).nonzero().flatten() for step in range(max(lens, default=0))]
        self.steps = [(rows_on, first[rows_on] + step) for step, rows_on in enumerate(going)]

    def recur(self, layer: int, decay: Tensor, update: Tensor) -> Tensor:
        """State after each token: ``decay * state before + update``, all [n, size]; the last of a row stays."""
        return self.scan(layer, _gated, decay, update)

    def scan(self, layer: int, advance: Advance, *inputs: Tensor) -> Tensor:
        """``advance(state [m, size], *inputs [m, ...])`` gives the state after a token, and an output; all [n, ...]."""
        state, out = self.pool.states[layer, self.rows], inputs[0].new_empty(0)
        for going, tokens in self.steps:
            after, given = advance(state[going], *(own[tokens] for own in inputs))
            out = given.new_zeros(len(inputs[0]), *given.shape[1:]) if not len(out) else out
            state[going], out[tokens] = after, given
        self.pool.store(layer, self.rows, state)
        return out


class TreeStates:
    """One verify's access to the states: each node starts from its parent's, roots from the committed one."""

    def __init__(self, pool: RecurrentPool, rows: Sequence[int], parents: Tensor, columns: Sequence[int]) -> None:
        self.pool = pool
        self.rows, self.parents = torch.tensor(rows, device=pool.states.device), parents
        self.columns = torch.tensor(list(columns), device=pool.states.device)

    def recur(self, layer: int, decay: Tensor, update: Tensor) -> Tensor:
        """State after each node ``[rows * N, size]``, parents before children; committed states stay as they are."""
        return self.scan(layer, _gated, decay, update)

    def scan(self, layer: int, advance: Advance, *inputs: Tensor) -> Tensor:
        """As of `ChainStates`, after each node, [rows * N, ...]."""
        bs, num_nodes = self.parents.shape
        committed, batch = self.pool.states[layer, self.rows], torch.arange(bs, device=self.rows.device)
        inputs = tuple(own.unflatten(0, (bs, num_nodes)) for own in inputs)
        after, out = committed.new_zeros(bs, num_nodes, committed.shape[1]), []
        for node in range(num_nodes):
            parent = self.parents[:, node]
            before = torch.where(parent[:, None] < 0, committed, after[batch, parent.clamp_min(0)])
            after[:, node], given = advance(before, *(own[:, node] for own in inputs))
            out.append(given)
        self.pool.nodes[layer, self.rows[:, None], self.columns] = after
        return torch.stack(out, 1).flatten(0, 1)


def _gated(state: Tensor, decay: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    state = decay * state + update
    return state, state
