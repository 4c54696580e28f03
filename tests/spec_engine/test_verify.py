"""Acceptance as lists: what is no path of its tree does not reach the host."""

from __future__ import annotations

import pytest
import torch

from kvcanary.invariants import TreeShapeError
from spec_engine.acceptance.walk import Acceptance, match
from spec_engine.drafting.tree import Tree, ancestor_mask
from spec_engine.step.verify import Accepted, Owner, to_host

TOKENS, PARENTS = torch.tensor([[9, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 2]])
MASK = ancestor_mask(PARENTS, 2)
TREE = Tree(TOKENS, PARENTS, MASK.sum(-1) - 1, MASK)
CHOSEN = torch.tensor([[5, 0, 6, 7]])


def test_a_path_comes_without_its_padding():
    """Nodes from the root down and the tokens that follow them, though the walk could have gone one deeper."""
    assert to_host(TREE, match(TOKENS, PARENTS, CHOSEN, 3)) == [Accepted([0, 2, 3], [5, 6, 7], 9)]


@pytest.mark.parametrize("node", [-1, 4])
def test_nodes_that_are_none_of_the_tree_are_refused(node):
    """Nothing is gathered by such an index: from behind, or beyond the end."""
    stray = Acceptance(torch.tensor([[0, node]]), torch.tensor([2]), CHOSEN)
    with pytest.raises(TreeShapeError, match=rf"accepted nodes must lie in \[0, 4\), they are \[0, {node}\]"):
        to_host(TREE, stray)


def test_nodes_that_are_no_path_are_refused():
    """A walk that jumps from one branch to another would commit K/V of two continuations."""
    jumped = Acceptance(torch.tensor([[0, 1, 3]]), torch.tensor([3]), CHOSEN)
    with pytest.raises(TreeShapeError, match=r"req-7: accepted nodes \[0, 1, 3\] are no path from the root"):
        to_host(TREE, jumped, [Owner("req-7")])
