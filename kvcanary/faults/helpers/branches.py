"""What goes wrong between drafting and acceptance: copies that branches need, moves, proposals, children."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcanary.faults.helpers.reach import words_of
from kvcanary.faults.strike import UNDECLARED
from kvcanary.faults.target import Move, Target

if TYPE_CHECKING:
    from torch import Tensor


def not_copied(copies: Tensor) -> Tensor:
    """Tails of the prefix go nowhere: what each branch should have of them is never written."""
    return copies.new_zeros(copies.shape)


def where_it_was_due(copies: Tensor, changed: Tensor) -> Mapping[str, Any]:
    """The slots that a tail should have come to."""
    return {"pool": "draft", "slot": frozenset(copies[copies != changed].tolist())}


def of_the_row_beside(rows: Tensor) -> Tensor:
    """Each request takes what was proposed to the one before it in the batch."""
    return rows.roll(1)


def first_child(acceptance: Any, *, parents: Tensor) -> Any:
    """Where no draft was accepted the root's first child is, whatever the target chose."""
    nodes, lens = acceptance.nodes.clone(), acceptance.lens.clone()
    if nodes.shape[1] < 2 or parents.shape[1] < 2:
        return acceptance
    alone = (lens == 1) & (parents[:, 1] == 0)
    if not bool(alone.any()):
        return acceptance
    nodes[alone, 1], lens[alone] = 1, 2
    return replace(acceptance, nodes=nodes, lens=lens)


def page_of_another(match: Any, *, tree: Any) -> Any:
    """The last page that was found is another one of the cache."""
    others = sorted(set(tree.pages) - set(match.pages))
    return replace(match, pages=[*match.pages[:-1], others[0]]) if match.pages and others else match


def changed_by(target: Target, move: Move) -> frozenset[int]:
    """Slots in which other bytes lie when this move is done than before it."""
    view, pairs = target.pools[move.pool], zip(move.source.tolist(), move.destination.tolist(), strict=True)
    return frozenset(slot for source, slot in pairs if (words_of(view, 0, source) != words_of(view, 0, slot)).any())


def move_undeclared(target: Target) -> None:
    """Accepted entries move to the front of their window, and the canary hears nothing of it."""

    def undeclared(move: Move) -> bool:
        moved = changed_by(target, move)
        if move.pool != "target" or not moved:
            return False
        canary, declare = target.canary, target.canary.on_move

        def swallow(*event: Any, **settings: Any) -> None:
            canary.on_move = declare  # type: ignore[method-assign]

        canary.on_move = swallow  # type: ignore[method-assign]
        target.record(UNDECLARED, pool="target", slot=moved, late=True)
        return True

    target.on_move(undeclared)
