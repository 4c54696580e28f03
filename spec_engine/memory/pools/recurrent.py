"""Recurrent states: one a request and layer, where attention keeps one row a token.

A state cannot be cut back by a length. So a verify leaves the states of all its tree's nodes beside the committed
ones, and the state of the node accepted last is committed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary.invariants import check_state_commit, check_state_settled


class RecurrentPool:
    """``states [layers, rows + 1, size]``, by request-table row; row 0 is the null state, always zero.

    ``nodes [layers, rows + 1, max_nodes, size]`` are the states after each node of a row's open verify.
    """

    def __init__(
        self, *, num_layers: int, num_rows: int, max_nodes: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.states = torch.zeros(num_layers, num_rows + 1, size, dtype=dtype, device=device)
        self.nodes = torch.zeros(num_layers, num_rows + 1, max_nodes, size, dtype=dtype, device=device)
        self._pending = [0] * (num_rows + 1)  # nodes of each row's open verify

    def reset(self, row: int) -> None:
        """A new request holds the row; what a verify left open is dropped."""
        self.states[:, row] = 0
        self._pending[row] = 0

    def chain(self, rows: Sequence[int], lens: Sequence[int]) -> ChainStates:
        """The states of a forward in which row r goes on by ``lens[r]`` tokens for good: prefill or decode."""
        self._check_settled(rows)
        return ChainStates(self, rows, lens)

    def tree(self, rows: Sequence[int], parents: Tensor) -> TreeStates:
        """The states of a verify of ``parents [len(rows), N] int64``, -1 for roots; commit or reset each row after."""
        self._check_settled(rows)
        for row in rows:
            self._pending[row] = parents.shape[1] if row else 0
        return TreeStates(self, rows, parents)

    def commit(self, rows: Sequence[int], nodes: Sequence[int]) -> None:
        """Row r goes on from ``nodes[r]``, its last accepted node; RecurrentStateError where it has no such node."""
        rows, nodes = seam("draft.state_not_restored", (rows, nodes))
        for row, node in zip(rows, nodes, strict=True):
            check_state_commit(row, node, self._pending[row])
        device = self.states.device
        at, chosen = (torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (rows, nodes))
        self.states[:, at] = self.nodes[:, at, chosen]
        for row in rows:
            self._pending[row] = 0

    def store(self, layer: int, rows: Tensor, states: Tensor) -> None:
        """Write one layer's ``states [n, size]`` at ``rows [n]``; those of row 0 come to nothing."""
        self.states[layer, rows] = states
        self.states[layer, 0] = 0

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
        state, after = self.pool.states[layer, self.rows], torch.empty_like(update)
        for going, tokens in self.steps:
            after[tokens] = state[going] = decay[tokens] * state[going] + update[tokens]
        self.pool.store(layer, self.rows, state)
        return after


class TreeStates:
    """One verify's access to the states: each node starts from its parent's, roots from the committed one."""

    def __init__(self, pool: RecurrentPool, rows: Sequence[int], parents: Tensor) -> None:
        self.pool = pool
        self.rows, self.parents = torch.tensor(rows, device=pool.states.device), parents

    def recur(self, layer: int, decay: Tensor, update: Tensor) -> Tensor:
        """State after each node ``[rows * N, size]``, parents before children; committed states stay as they are."""
        bs, num_nodes = self.parents.shape
        committed, batch = self.pool.states[layer, self.rows], torch.arange(bs, device=update.device)
        decay, update = decay.view(bs, num_nodes, -1), update.view(bs, num_nodes, -1)
        after = torch.zeros_like(update)
        for node in range(num_nodes):
            parent = self.parents[:, node]
            before = torch.where(parent[:, None] < 0, committed, after[batch, parent.clamp_min(0)])
            after[:, node] = decay[:, node] * before + update[:, node]
        self.pool.nodes[layer, self.rows, :num_nodes] = after
        return after.flatten(0, 1)
