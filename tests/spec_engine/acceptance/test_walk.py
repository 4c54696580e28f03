"""The walk by equality: worked example, plain oracle, malformed trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_engine.acceptance.walk import match_chain, match_on_device, match_on_host

TOKENS = torch.tensor([[9, 10, 11, 20], [39, 40, 50, 60]])
PARENTS = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])


@pytest.fixture(params=[match_on_device, match_on_host], scope="module")
def match(request):
    """`match` both ways."""
    return request.param


def test_the_worked_example(match):
    """A accepts node 2, B two drafts; nodes are padded with the request's own root, not with that of request 0."""
    accepted = match(TOKENS, PARENTS, torch.tensor([[11, 77, 22, 78], [40, 50, 99, 60]]), 3)
    assert accepted.nodes.tolist() == [[0, 2, 0, 0], [0, 1, 2, 0]]
    assert accepted.lens.tolist() == [2, 3]
    assert accepted.bonus.tolist() == [22, 99]
    assert accepted.tokens.tolist() == [[11, 22, 11, 11], [40, 50, 99, 40]]
    assert accepted.is_live.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert accepted.to_lists() == [([0, 2], [11, 22]), ([0, 1, 2], [40, 50, 99])]


def test_a_walk_ends_after_num_steps(match):
    """A chain deeper than the draft had steps gives no path longer than nodes has columns."""
    accepted = match(TOKENS[1:], PARENTS[1:], torch.tensor([[40, 50, 60, 70]]), 2)
    assert (accepted.nodes.tolist(), accepted.lens.tolist(), accepted.bonus.tolist()) == ([[0, 1, 2]], [3], [60])


def test_without_drafts_the_bonus_alone_is_emitted(match):
    """A tree of its root only, as with zero draft steps."""
    accepted = match(torch.tensor([[9]]), torch.tensor([[-1]]), torch.tensor([[4]]), 0)
    assert accepted.to_lists() == [([0], [4])]


def test_of_twins_the_first_is_followed(match):
    """Two children with one token: the walk goes on below the first, and never to both."""
    parents, tokens = torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([[9, 5, 5, 6, 7]])
    assert match(tokens, parents, torch.tensor([[5, 6, 7, 8, 8]]), 2).to_lists() == [([0, 1, 3], [5, 6, 8])]


def walked(tokens: list[int], parents: list[int], chosen: list[int], num_steps: int) -> list[int]:
    """The walk in plain Python: at each node the first later child with the token that was chosen."""
    path = [0]
    while len(path) <= num_steps:
        children = [n for n in range(path[-1] + 1, len(tokens)) if parents[n] == path[-1]]
        matching = [n for n in children if tokens[n] == chosen[path[-1]]]
        if not matching:
            break
        path.append(matching[0])
    return path


@st.composite
def batches(draw):
    """Tokens of a tiny vocabulary, so that much matches, and parents that often make no tree."""
    bs, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    rows = [
        [draw(st.lists(values, min_size=num_nodes, max_size=num_nodes)) for _ in range(bs)]
        for values in (st.integers(0, 2), st.integers(-2, num_nodes + 1), st.integers(0, 2))
    ]
    return *rows, draw(st.integers(0, 4))


@settings(deadline=None, derandomize=True)
@given(batches())
def test_any_parents_give_the_walk_of_the_plain_oracle(match, batch):
    """Cycles, loops and parents out of range cost accepted tokens; they neither hang nor leave the tree."""
    tokens, parents, chosen, num_steps = batch
    accepted = match(torch.tensor(tokens), torch.tensor(parents), torch.tensor(chosen), num_steps)
    assert accepted.nodes.shape == (len(tokens), num_steps + 1)
    for own, row in zip(accepted.to_lists(), zip(tokens, parents, chosen, strict=True), strict=True):
        path = walked(*row, num_steps)
        assert own == (path, [row[2][node] for node in path])


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_chains_are_matched_alike(num_steps):
    """Whatever fits and does not, the way that knows of the shape accepts what the general one does."""
    torch.manual_seed(num_steps)
    tokens, chosen = torch.randint(2, (2, 64, num_steps + 1))
    parents = torch.arange(-1, num_steps).expand(64, -1)
    expected, own = match_on_device(tokens, parents, chosen, num_steps), match_chain(tokens, chosen)
    assert set(own.lens.tolist()) == set(range(1, num_steps + 2))
    for name in ("nodes", "lens", "predict"):
        assert getattr(own, name).equal(getattr(expected, name)), name
