"""Selection, reselection and tree shape, against trees worked out by hand."""

from contextlib import nullcontext

import pytest
import torch

from kvcanary.invariants import TreeShapeError, check_parents
from spec_engine.acceptance.walk import match, sound_parents
from spec_engine.drafting import tree as tree_module
from spec_engine.drafting.tree import Tree, TreeGrowth, ancestor_mask, build_tree
from spec_engine.step.verify import Accepted, Owner, to_host


def accept(tree: Tree, chosen: torch.Tensor, *requests: str) -> list[Accepted]:
    """The paths along which drafts equal what was chosen."""
    accepted = match(tree.tokens, tree.parents, chosen, tree.tokens.shape[1] - 1)
    return to_host(tree, accepted, [Owner(request) for request in requests])


def num_lost(tree: Tree) -> torch.Tensor:
    """Nodes that the root does not reach, [bs]."""
    return (~tree.mask[:, :, 0]).sum(-1)


def links_of(parents: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Published trees are lists of children: by node its first child and its next sibling, -1 for none."""
    first, following = ([[-1] * len(own) for own in parents.tolist()] for _ in range(2))
    for own, child, sibling in zip(parents.tolist(), first, following, strict=True):
        for node in range(len(own) - 1, 0, -1):  # backwards, so that siblings come out ascending
            if 0 <= own[node] < node:
                sibling[node], child[own[node]] = child[own[node]], node
    return first, following


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


def test_build_tree_reads_chosen_candidates_and_parent_list():
    """The same trees from their flat arrays: width K (T - 1) + 1, the root's -1 and then the survivors."""
    tree = build_tree(
        torch.tensor([[9, 10, 11, 20], [39, 40, 50, 60]]),
        torch.tensor([[0, 1, 2], [0, 2, 6]]),
        torch.tensor([[-1, 0, 1, 2, 4], [-1, 0, 1, 2, 3]]),
        2,
        3,
    )
    _, grown = grown_tree()
    for name in ("tokens", "parents", "depths", "mask"):
        assert torch.equal(getattr(tree, name), getattr(grown, name))
    assert (torch.tensor([[7], [8]]) + tree.depths).tolist() == [[7, 8, 8, 9], [8, 9, 10, 11]]
    assert num_lost(tree).tolist() == [0, 0]


def test_lists_of_children_of_the_bush_and_the_chain():
    """A's root has two children, of which the first has one; B is a chain."""
    _, tree = grown_tree()
    next_token, next_sibling = links_of(tree.parents)
    assert next_token == [[1, 3, -1, -1], [1, 2, 3, -1]]
    assert next_sibling == [[-1, 2, -1, -1], [-1, -1, -1, -1]]


def walk(links, tokens, chosen, b):
    """The nodes that a greedy walk along the lists accepts, numbered through the batch, and the next token."""
    next_token, next_sibling = (array[b] for array in links)
    index = [b * len(next_token) + node for node in range(len(next_token))]
    path, node = [index[0]], next_token[0]
    wanted = chosen[b][0]
    while node >= 0:
        if tokens[b][node] == wanted:
            path.append(index[node])
            wanted, node = chosen[b][node], next_token[node]
        else:
            node = next_sibling[node]
    return path, wanted


def test_a_walk_along_the_links_accepts_what_accept_accepts():
    """A takes its second child and stops, B two levels: indices, bonus tokens and new lengths."""
    _, tree = grown_tree()
    chosen = [[11, 77, 22, 78], [40, 50, 99, 60]]
    walks = [walk(links_of(tree.parents), tree.tokens.tolist(), chosen, b) for b in range(2)]
    assert walks == [([0, 2], 22), ([4, 5, 6], 99)]
    paths = accept(tree, torch.tensor(chosen))
    assert [(path.nodes, path.tokens[-1]) for path in paths] == [([0, 2], 22), ([0, 1, 2], 99)]
    assert [length + len(path.nodes) for length, path in zip((7, 8), paths, strict=True)] == [9, 11]


def test_links_depths_and_positions_of_a_published_tree_agree():
    """K = 4, four levels, N = 8: parents read off the child lists give the positions and the same lists again."""
    next_token = [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]]
    next_sibling = [[-1, 2, -1, -1, -1, -1, -1, -1], [-1, -1, 3, 4, 5, -1, -1, -1]]
    parents = [[-1] * 8, [-1] * 8]
    for own, children, siblings in zip(parents, next_token, next_sibling, strict=True):
        for node, child in enumerate(children):
            while child >= 0:
                own[child] = node
                child = siblings[child]
    positions = torch.tensor([[5], [10]]) + ancestor_mask(torch.tensor(parents), 4).sum(-1) - 1
    assert positions.tolist() == [[5, 6, 6, 7, 7, 8, 8, 9], [10, 11, 12, 12, 12, 12, 13, 14]]
    assert links_of(torch.tensor(parents)) == (next_token, next_sibling)


def test_accept_follows_the_targets_choices():
    """A accepts node 2 and stops, B accepts two drafts; the last token is the new bonus."""
    _, tree = grown_tree()
    chosen = torch.tensor([[11, 77, 22, 78], [40, 50, 99, 60]])
    assert accept(tree, chosen) == [Accepted([0, 2], [11, 22], 9), Accepted([0, 1, 2], [40, 50, 99], 39)]


def test_a_node_without_a_parent_is_refused():
    """A candidate whose parent was not chosen is a leaf that nothing reaches; the host says so when it collects it."""
    chosen = torch.tensor([[0, 4]])  # K = 2: candidate 4 is a child of candidate 1, which was not chosen
    tree = build_tree(torch.tensor([[9, 10, 22]]), chosen, torch.tensor([[-1, 0, 1]]), 2, 2)
    assert tree.parents.tolist() == [[-1, 0, -1]]
    assert num_lost(tree).tolist() == [1]
    with pytest.raises(
        TreeShapeError, match=r"request 0 of the batch: node 2 of 3 has parent -1, must lie in \[0, 2\)"
    ):
        accept(tree, torch.tensor([[10, 22, 5]]))


def test_ancestor_mask_is_bounded_on_a_cycle():
    """Parents that point at each other cost accepted tokens, never a hang."""
    mask = ancestor_mask(torch.tensor([[-1, 2, 1]]), 4)
    assert mask.shape == (1, 3, 3)
    assert not mask[0, 1:, 0].any()


def test_parents_that_are_no_earlier_node_have_no_children():
    """Itself, a later one, one beyond the tree and none at all: such nodes see no ancestors and no walk meets them."""
    parents = torch.tensor([[-1, 0, 2, 9, -1, 0, 7, -3]])
    assert sound_parents(torch.arange(8)[None], parents).tolist() == [[-1, 0, -1, -1, -1, 0, -1, -1]]
    mask = ancestor_mask(parents, 4)[0]
    assert [mask[node].nonzero().flatten().tolist() for node in (2, 3, 4, 5, 7)] == [[2], [3], [4], [0, 5], [7]]


CHOSEN, PARENT_LIST = [0, 1, 2], [-1, 0, 1, 2, 4]  # the bush A


@pytest.mark.parametrize(
    ("chosen", "parent_list", "expected", "lost"),
    [
        pytest.param([0, 4, 5], PARENT_LIST, [-1, 0, -1, -1], 2, id="parent-not-chosen"),
        pytest.param([1, 2, 4], PARENT_LIST, [-1, 0, -1, 1], 1, id="one-of-two-parents-not-chosen"),
        pytest.param(CHOSEN, [-1, 2, 1, 2, 4], [-1, 0, 0, -1], 1, id="own-parent"),
        pytest.param([0, 2, 4], [-1, 4, 2, 2, 4], [-1, 0, -1, 2], 2, id="cycle-of-two"),
        pytest.param(CHOSEN, [-1, 1 << 62, 1, 2, 4], [-1, 0, 0, -1], 1, id="parent-beyond-all"),
        pytest.param(CHOSEN, [-1, -(1 << 62), 1, 2, 4], [-1, 0, 0, -1], 1, id="parent-below-all"),
        pytest.param(CHOSEN, [-1] * 5, [-1, 0, 0, -1], 1, id="no-parents-known"),
        pytest.param([-1, 0, 2], [-1, -1, 1, 2, 4], [-1, -1, 0, -1], 2, id="none-chosen-and-its-child"),
        pytest.param([0, 1, 1 << 40], PARENT_LIST, [-1, 0, 0, -1], 1, id="chosen-beyond-all"),
        pytest.param([6, 2, 0], PARENT_LIST, [-1, -1, -1, 0], 2, id="children-before-parents"),
        pytest.param([0, 0, 2], PARENT_LIST, [-1, 0, 0, 1], 0, id="chosen-twice"),
        pytest.param(CHOSEN, [7, 0, 1, 2, 4], [-1, 0, 0, 1], 0, id="root-with-a-parent"),
    ],
)
def test_a_malformed_tree_is_refused_by_name(chosen, parent_list, expected, lost):
    """K = 2, T = 3, N = 4: who has no parent before it makes its own tree none; the one beside it is left as it is."""
    arrays = [[10, 11, 12, 13], [9, 10, 11, 20]], [chosen, CHOSEN], [parent_list, PARENT_LIST]
    tree = build_tree(*(torch.tensor(array) for array in arrays), 2, 3)
    assert tree.parents.tolist() == [expected, [-1, 0, 0, 1]]
    assert tree.depths[1].tolist() == [0, 1, 1, 2]
    assert num_lost(tree).tolist() == [lost, 0]
    after = tree.tokens.gather(1, torch.tensor(links_of(tree.parents)[0]).clamp_min(0))  # the first child of each
    with pytest.raises(TreeShapeError, match=r"req-7: node \d of 4 has parent -1") if lost else nullcontext():
        assert accept(tree, after, "req-7", "req-8")[1].nodes == [0, 1, 3]
    assert accept(Tree(*(part[1:] for part in (tree.tokens, tree.parents, tree.depths, tree.mask))), after[1:])


def test_random_indices_never_make_a_cycle_or_leave_the_tree():
    """2,000 trees of random candidates and parent lists: parents come first, depths are bounded."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randint(-3, 14, (2000, 5), generator=generator)
    parent_list = torch.randint(-3, 14, (2000, 5), generator=generator)
    tree = build_tree(torch.arange(6).repeat(2000, 1), chosen, parent_list, 2, 3)
    for parents, lost in zip(tree.parents.tolist(), num_lost(tree).tolist(), strict=True):
        with pytest.raises(TreeShapeError, match="has parent -1") if lost else nullcontext():
            check_parents("req-7", parents)
    assert 0 <= int(tree.depths.min()) <= int(tree.depths.max()) <= 3
    assert not tree.mask.triu(1).any()
    assert 0 < int(num_lost(tree).sum()) < 2000 * 5


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("values", [(1.0,), (0.0,), (0.0, 1.0), (0.5, 1.0), (float("nan"), 0.5, 1.0), (float("nan"),)])
def test_a_parent_never_loses_a_tie_to_its_child(topk, num_steps, values):
    """Where probabilities are 0, 1 or NaN, the tree of every size keeps a parent beside each of its children."""
    generator = torch.Generator().manual_seed(topk + 10 * num_steps)
    growth = TreeGrowth(topk)
    for step in range(num_steps):
        shape = (16, topk if step else 1, topk)
        growth.add(
            torch.tensor(values)[torch.randint(len(values), shape, generator=generator)], torch.zeros(shape).long()
        )
        if step < num_steps - 1:
            growth.survive()
    for num_nodes in range(2, topk + (num_steps - 1) * topk**2 + 2):
        tree = growth.finish(torch.zeros(16, dtype=torch.int64), num_nodes)
        assert not num_lost(tree).any()


@pytest.mark.parametrize(
    ("chosen", "parent_list", "message"),
    [
        (
            torch.zeros(1, 3).int(),
            torch.zeros(1, 5).long(),
            r"chosen must be contiguous int64 \[1, 3\], got contiguous int32",
        ),
        (
            torch.zeros(1, 3).long(),
            torch.zeros(1, 5).int(),
            "parent_list must be contiguous int64 .*, got contiguous int32",
        ),
        (torch.zeros(1, 3).long(), torch.zeros(1, 10).long()[:, ::2], r"int64 \[1, 5\], got strided int64 \[1, 5\]"),
        (torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), r"int64 \[1, 5\], got contiguous int64 \[1, 3\]"),
        (
            torch.zeros(1, 2).long(),
            torch.zeros(1, 5).long(),
            r"chosen must be .* \[1, 3\], got contiguous int64 \[1, 2\]",
        ),
    ],
)
def test_build_tree_refuses_arrays_that_a_kernel_would_misread(chosen, parent_list, message):
    """Narrow, strided or misshaped index arrays are named before anything is read from them."""
    with pytest.raises(TreeShapeError, match=message):
        build_tree(torch.zeros(1, 4).long(), chosen, parent_list, 2, 3)


def test_finish_refuses_a_narrow_parent_list(monkeypatch):
    """Parents of 32 bits, read 8 bytes a step, would come from beside the list."""
    monkeypatch.setattr(tree_module, "INDEX_DTYPE", torch.int32)
    with pytest.raises(TreeShapeError, match=r"parent_list must be contiguous int64 \[2, 5\], got contiguous int32"):
        grown_tree()


def test_accept_refuses_siblings_with_one_token():
    """Two children that propose one token are named before the walk: their mass would count twice."""
    chosen = torch.tensor([[0, 1]])
    tree = build_tree(torch.tensor([[9, 10, 10]]), chosen, torch.tensor([[-1, 0, 1]]), 2, 2)
    with pytest.raises(TreeShapeError, match=r"req-7: nodes 1 and 2 of 3, children of node 0, both propose token 10"):
        accept(tree, torch.tensor([[10, 11, 12]]), "req-7")


def test_accept_refuses_parents_outside_of_the_tree():
    """A parent beyond the tree is named before it is used as an index."""
    _, tree = grown_tree()
    tree.parents[1, 2] = 9
    with pytest.raises(TreeShapeError, match=r"request 1 of the batch: node 2 of 4 has parent 9, must lie in \[0, 2\)"):
        accept(tree, torch.zeros(2, 4, dtype=torch.int64))


def test_finish_refuses_more_nodes_than_candidates():
    """One step of two proposals makes a tree of three nodes at most."""
    growth = TreeGrowth(2)
    growth.add(torch.tensor([[[0.6, 0.3]]]), torch.tensor([[[10, 11]]]))
    with pytest.raises(TreeShapeError, match="a tree of 4 nodes needs 3 candidates beside its root, has 2"):
        growth.finish(torch.tensor([9]), 4)
