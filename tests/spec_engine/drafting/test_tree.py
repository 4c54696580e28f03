"""Selection, reselection and tree shape, against a tree worked out by hand."""

import pytest
import torch

from kvcanary.invariants import TreeShapeError
from spec_engine.drafting.tree import TreeGrowth, ancestor_mask, build_tree
from spec_engine.verify import Accepted, accept


def grown_tree():
    """Requests A and B, K = 2, T = 3, N = 4."""
    growth = TreeGrowth(2)
    growth.add(torch.tensor([[[0.6, 0.32]], [[0.9, 0.05]]]), torch.tensor([[[10, 11]], [[40, 41]]]))
    survivors = [growth.survive()]
    growth.add(
        torch.tensor([[[0.5, 0.4], [0.9, 0.05]], [[0.8, 0.1], [0.9, 0.05]]]),
        torch.tensor([[[20, 21], [22, 23]], [[50, 51], [52, 53]]]),
    )
    survivors.append(growth.survive())
    growth.add(
        torch.tensor([[[0.7, 0.2], [0.8, 0.1]], [[0.7, 0.2], [0.6, 0.3]]]),
        torch.tensor([[[30, 31], [32, 33]], [[60, 61], [62, 63]]]),
    )
    return survivors, growth.finish(torch.tensor([9, 39]), 4)


def test_survive_keeps_the_likeliest_paths_and_names_their_parents():
    """Survivors come in descending score, and B's second survivor descends from its first branch."""
    [(roots, root_parents), (tokens, parents)], _ = grown_tree()
    assert roots.tolist() == [[10, 11], [40, 41]]
    assert root_parents.tolist() == [[0, 0], [0, 0]]
    assert tokens.tolist() == [[20, 22], [50, 51]]
    assert parents.tolist() == [[0, 1], [0, 0]]


def test_finish_builds_the_tree_of_the_likeliest_candidates():
    """A is a small bush, B a chain; masks hold exactly the ancestors."""
    _, tree = grown_tree()
    assert tree.tokens.tolist() == [[9, 10, 11, 20], [39, 40, 50, 60]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1], [-1, 0, 1, 2]]
    assert tree.depths.tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]
    assert tree.mask[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert tree.mask[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_accept_follows_the_targets_choices():
    """A accepts node 2 and stops, B accepts two drafts; the last token is the new bonus."""
    _, tree = grown_tree()
    chosen = torch.tensor([[11, 77, 22, 78], [40, 50, 99, 60]])
    assert accept(tree, chosen) == [Accepted([0, 2], [11, 22]), Accepted([0, 1, 2], [40, 50, 99])]


def test_a_node_without_a_parent_is_never_accepted():
    """A candidate whose parent was not chosen stays in the tree as a leaf that nothing reaches."""
    chosen = torch.tensor([[0, 4]])  # K = 2: candidate 4 is a child of candidate 1, which was not chosen
    tree = build_tree(torch.tensor([[9, 10, 22]]), chosen, torch.tensor([[-1, 0, 1]]), 2, 2)
    assert tree.parents.tolist() == [[-1, 0, -1]]
    assert accept(tree, torch.tensor([[10, 22, 5]])) == [Accepted([0, 1], [10, 22])]


def test_ancestor_mask_is_bounded_on_a_cycle():
    """Parents that point at each other cost accepted tokens, never a hang."""
    mask = ancestor_mask(torch.tensor([[-1, 2, 1]]), 4)
    assert mask.shape == (1, 3, 3)
    assert not mask[0, 1:, 0].any()


def test_accept_refuses_siblings_with_one_token():
    """Two children that both are what the target chose are no path: their tree is biased."""
    chosen = torch.tensor([[0, 1]])
    tree = build_tree(torch.tensor([[9, 10, 10]]), chosen, torch.tensor([[-1, 0, 1]]), 2, 2)
    with pytest.raises(TreeShapeError, match=r"req-7: accepted nodes \[0, 1, 2\] are no path from the root"):
        accept(tree, torch.tensor([[10, 11, 12]]), ("req-7",))


def test_accept_refuses_parents_outside_of_the_tree():
    """A parent beyond the tree is named before it is used as an index."""
    _, tree = grown_tree()
    tree.parents[1, 2] = 9
    with pytest.raises(
        TreeShapeError, match=r"request 1 of the batch: node 2 of 4 has parent 9, must lie in \[-1, 2\)"
    ):
        accept(tree, torch.zeros(2, 4, dtype=torch.int64))


def test_finish_refuses_more_nodes_than_candidates():
    """One step of two proposals makes a tree of three nodes at most."""
    growth = TreeGrowth(2)
    growth.add(torch.tensor([[[0.6, 0.3]]]), torch.tensor([[[10, 11]]]))
    with pytest.raises(TreeShapeError, match="a tree of 4 nodes needs 3 candidates beside its root, has 2"):
        growth.finish(torch.tensor([9]), 4)
