"""Chains by constants, against the general path."""

import pytest
import torch

from kvcanary.invariants import ChainConstantsError, TreeShapeError
from spec_engine.drafting import chain as chain_module
from spec_engine.drafting.chain import ChainConstants, ChainGrowth, build_chain_tree, new_growth
from spec_engine.drafting.tree import TreeGrowth

ROOTS = torch.tensor([5, 6, 7])


def grow(growth, num_steps, bs=3):
    """The same drafts, with the same probabilities, whatever grows them."""
    generator = torch.Generator().manual_seed(num_steps)
    for step in range(num_steps):
        probs, tokens = torch.rand(bs, 1, 1, generator=generator), torch.randint(90, (bs, 1, 1), generator=generator)
        growth.add(probs, tokens)
        if step < num_steps - 1:
            survivors, parents = growth.survive()
            assert survivors.tolist() == tokens[:, 0].tolist()
            assert parents is None or parents.tolist() == [[0]] * bs
    return growth.finish(ROOTS[:bs], num_steps + 1)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("max_bs", [3, 8])
def test_constants_give_the_tree_of_the_general_path(num_steps, max_bs):
    """Three requests, one to four steps: equal in every array, also where the constants hold more requests."""
    growth = new_growth(1, 3, ChainConstants(max_bs, num_steps, num_steps + 1))
    assert isinstance(growth, ChainGrowth)
    chains, general = grow(growth, num_steps), grow(TreeGrowth(1), num_steps)
    for name in ("tokens", "parents", "depths", "mask"):
        found, expected = getattr(chains, name), getattr(general, name)
        assert torch.equal(found, expected)
        assert (found.dtype, found.is_contiguous()) == (expected.dtype, True)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_constants_are_dense_64_bit_and_have_no_parents_below_two_steps(num_steps):
    """Selection 0..T-1 and parents -1..T-2, for each of the largest batch; with one step the width is 0."""
    constants = ChainConstants(3, num_steps, num_steps + 1)
    assert constants.selected.tolist() == [list(range(num_steps))] * 3
    assert constants.parent_list.tolist() == [list(range(-1, num_steps - 1)) if num_steps > 1 else []] * 3
    for array in (constants.selected, constants.parent_list):
        assert array.dtype == torch.int64
        assert array.is_contiguous()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_batch_above_the_constants_takes_the_general_path(num_steps):
    """Constants of two requests leave three to the general path, whose first two trees are theirs."""
    constants = ChainConstants(2, num_steps, num_steps + 1)
    growth = new_growth(1, 3, constants)
    assert isinstance(growth, TreeGrowth)
    general = grow(growth, num_steps)
    drafts = list(general.tokens[:2, 1:].split(1, 1))
    assert torch.equal(build_chain_tree(ROOTS[:2], drafts, num_steps + 1, constants).mask, general.mask[:2])
    with pytest.raises(ChainConstantsError, match=f"at most 2 requests, got {num_steps} drafts of 3 requests"):
        grow(ChainGrowth(constants), num_steps)


def test_wide_trees_and_missing_constants_take_the_general_path():
    """Constants stand for chains only."""
    assert isinstance(new_growth(2, 1, ChainConstants(3, 2, 3)), TreeGrowth)
    assert isinstance(new_growth(1, 1), TreeGrowth)


def test_no_steps_make_a_root_alone():
    """With T = 0 the verify has one node: no drafts, no parents, its mask sees itself."""
    tree = build_chain_tree(ROOTS, [], 1, ChainConstants(4, 0, 1))
    assert tree.tokens.tolist() == [[5], [6], [7]]
    assert tree.parents.tolist() == [[-1]] * 3
    assert tree.depths.tolist() == [[0]] * 3
    assert tree.mask.tolist() == [[[True]]] * 3


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_constants_of_another_step_count_are_refused(num_steps):
    """After a switch of T the old constants make no tree, whether drafts or nodes tell."""
    stale = ChainConstants(3, 3, 4)
    with pytest.raises(ChainConstantsError, match=r"those of 3 steps .* rebuild them whenever num_steps changes"):
        grow(ChainGrowth(stale), num_steps)
    drafts = [torch.zeros(3, 1).long()] * 3
    with pytest.raises(ChainConstantsError, match=f"for trees of {num_steps + 1} nodes"):
        build_chain_tree(ROOTS, drafts, num_steps + 1, stale)
    with pytest.raises(ChainConstantsError, match="got 2 drafts of 3 requests for trees of 4 nodes"):
        build_chain_tree(ROOTS, drafts[:2], 4, stale)


@pytest.mark.parametrize(("num_steps", "nodes"), [(3, 3), (3, 5), (0, 2), (-1, 0)])
def test_a_chain_has_one_node_more_than_steps(num_steps, nodes):
    """With topk 1 every draft is kept, so another number of nodes is a mistake."""
    with pytest.raises(TreeShapeError, match=rf"num_steps \+ 1 = {num_steps + 1}, got {nodes}"):
        ChainConstants(3, num_steps, nodes)


def test_constants_of_32_bits_are_refused(monkeypatch):
    """A kernel that steps by 8 bytes would read every other parent and then beside them."""
    monkeypatch.setattr(chain_module, "INDEX_DTYPE", torch.int32)
    with pytest.raises(TreeShapeError, match=r"must be contiguous int64 .* got contiguous int32"):
        ChainConstants(3, 3, 4)
