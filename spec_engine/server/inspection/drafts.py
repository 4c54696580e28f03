"""DraftWatch: the last draft tree of every running request, kept for whoever debugs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_engine.core import Batch
from spec_engine.drafting.drafter import Drafter
from spec_engine.drafting.tree import Tree
from spec_engine.engine import Engine
from spec_engine.request import Request

NUM_KEPT = 256  # requests


class DraftWatch:
    """Looks over a drafter's shoulder; trees stay on the device until somebody asks for one."""

    def __init__(self, drafter: Drafter) -> None:
        self._draft, self._table = drafter.draft, drafter.table
        self._trees: dict[str, tuple[Request, int, Tree, Tensor, int]] = {}  # its length, trees, slots, its place
        drafter.draft = self._watched  # type: ignore[method-assign]

    def _watched(self, batch: Batch, num_steps: int | None = None) -> Tree:
        tree = self._draft(batch, num_steps)
        columns = batch.lens_tensor[:, None] + torch.arange(tree.tokens.shape[1], device=batch.rows.device)
        slots = self._table.table[batch.rows[:, None], columns]  # where verify stores the nodes
        for place, (request, length) in enumerate(zip(batch.requests, batch.lens, strict=True)):
            self._trees.pop(request.request_id, None)
            self._trees[request.request_id] = request, length, tree, slots, place
        while len(self._trees) > NUM_KEPT:
            del self._trees[next(iter(self._trees))]
        return tree

    def tree_of(self, engine: Engine, request_id: str) -> dict[str, Any] | None:
        """Nodes with parent, depth, slot and whether they were accepted; None where the request has no draft.

        Tokens and their texts are there only where the canary may show tokens.
        """
        kept = self._trees.get(request_id)
        if kept is None:
            return None
        request, length, tree, slots, place = kept
        tokens, parents, depths = (column[place].tolist() for column in (tree.tokens, tree.parents, tree.depths))
        accepted = _accepted(tokens, parents, depths, request.tokens[length:])
        nodes = [
            {"parent": parent, "depth": depth, "slot": slot, "accepted": node in accepted}
            for node, (parent, depth, slot) in enumerate(zip(parents, depths, slots[place].tolist(), strict=True))
        ]
        if engine.config.canary.show_tokens:
            for node, token in zip(nodes, tokens, strict=True):
                node |= {"token": token, "text": engine.tokenizer.decode([token])}
        return {"request_id": request_id, "committed_len": length, "nodes": nodes}


def _accepted(tokens: list[int], parents: list[int], depths: list[int], emitted: list[int]) -> set[int]:
    """Nodes whose path from the root is what the request went on with; parents come before their children."""
    accepted = {0}
    for node in range(1, len(tokens)):
        depth = depths[node]
        if parents[node] in accepted and depth < len(emitted) and emitted[depth] == tokens[node]:
            accepted.add(node)
    return accepted
