"""Captured steps: padding, live counts, and buffers that keep what the step before has left."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import GRAPH, GRAPH_CHAIN, GRAPH_OVERLAP, PLAIN_GRAPH

BREAKS = (
    Break(
        "padding_rows_live",
        "Rows of padding name the row of the last live request",
        (
            Edit(
                "spec_engine.graphs.feed",
                "self._numbers[end : where.stop] = 0",
                "self._numbers[end : where.stop] = values[-1] if name == 'rows' and len(values) else 0",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
            PLAIN_GRAPH,
            GRAPH_CHAIN,
        ),
        ends=("W9",),
        cause="graphs",
    ),
    Break(
        "padding_not_cleared",
        "Rows of padding keep the numbers of the step before",
        (Edit("spec_engine.graphs.feed", "self._numbers[end : where.stop] = 0", "pass"),),
        (
            GRAPH,
            GRAPH_OVERLAP,
            PLAIN_GRAPH,
            GRAPH_CHAIN,
        ),
        ends=("W9",),
        cause="graphs",
    ),
    Break(
        "padding_slot_in_extend",
        "Entries of padding in the extend write the last live entry's slot",
        (
            Edit(
                "spec_engine.graphs.extend",
                "forward.slots.copy_(torch.where(is_live, tails.flatten()[flat], 0))",
                "forward.slots.copy_(tails.flatten()[flat])",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
            GRAPH_CHAIN,
        ),
        ends=("W9",),
        cause="graphs",
    ),
    Break(
        "live_count_one_less",
        "The program is told of one live row less",
        (
            Edit(
                "spec_engine.graphs.drafting",
                "rows=[request.row for request in batch.requests], live=[live], branches=[branches]",
                "rows=[request.row for request in batch.requests], live=[max(1, live - 1)], branches=[max(topk, branches - topk)]",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
        ),
        ends=("W9",),
        cause="graphs",
    ),
    Break(
        "stale_verify_indices",
        "The verify builds its index rows in every other step",
        (
            Edit(
                "spec_engine.graphs.drafting",
                "forward.read(self._table, rows, lens, window, self._target.pool.num_slots)",
                "self._k = getattr(self, '_k', 0) + 1; (forward.read(self._table, rows, lens, window, self._target.pool.num_slots) if self._k % 2 else None)",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
        ),
        ends=("W5",),
        cause="graphs",
    ),
    Break(
        "stale_draft_positions",
        "Positions of draft forwards are those of the step before",
        (
            Edit(
                "spec_engine.graphs.drafting",
                "self._positions.copy_(lens[:, None] + self._steps)",
                "old = getattr(self, '_old', None); self._positions.copy_(lens[:, None] + self._steps if old is None else old); self._old = (lens[:, None] + self._steps).clone()",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
            Case(topk=1, num_steps=4, draft="self", engine={"graphs": "on"}),
        ),
        ends=("W5",),
        cause=("graphs", "draft"),
        says="earlier",
    ),
    Break(
        "captured_branch_slots_shifted",
        "Draft forward 1 writes where forward 0 wrote",
        (
            Edit(
                "spec_engine.graphs.drafting",
                "self._slots.copy_(slots.permute(2, 0, 1)[:-1])",
                "self._slots.copy_(slots.permute(2, 0, 1)[:-1]); (self._slots[1].copy_(self._slots[0]) if len(self._slots) > 1 else None)",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
        ),
        ends=("R12",),
        cause=("addressing", "draft", "graphs", "bounds"),
    ),
    Break(
        "undecided_rows_published",
        "The program advances every row, decided or not",
        (
            Edit(
                "spec_engine.graphs.decision",
                "relay.lens[rows] = torch.where(is_decided, lens + accepted.lens, relay.lens[rows])",
                "relay.lens[rows] = lens + accepted.lens",
            ),
        ),
        (
            GRAPH,
            GRAPH_OVERLAP,
        ),
        silent="what it leaves is written over before it is read",
    ),
    Break(
        "extend_count_of_before",
        "The extend takes the counts of the step before",
        (
            Edit(
                "spec_engine.graphs.drafting",
                'counts = torch.where(rows < self._feed["live"], accepted.lens, 0)',
                "now = torch.where(rows < self._feed[\"live\"], accepted.lens, 0); counts = getattr(self, '_was', now).clone(); self._was = now.clone()",
            ),
        ),
        (
            GRAPH_OVERLAP,
            GRAPH_CHAIN,
        ),
        ends=("R5", "R12"),
        cause="lengths",
    ),
)
