"""Target-only tree sampling: golden vector, thresholds, both coins, malformed trees. Exactness: test_exactness.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_engine import ConfigError, SamplingParams
from spec_engine.acceptance.distribution import target_probs
from spec_engine.acceptance.settings import SamplingBatch
from spec_engine.acceptance.thresholds import Thresholds
from spec_engine.acceptance.tree_sampling import sample_tree
from spec_engine.acceptance.walk import NO_TOKEN

# The golden vector of sgl-project/sglang's test of its tree sampling kernel, as published.
GOLDEN_TOKENS = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]])
GOLDEN_NEXT_TOKEN = [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]
GOLDEN_NEXT_SIBLING = [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]
GOLDEN_LIKELY = [(0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12)]

ROOT_AND_TWO = torch.tensor([[-1, 0, 0]])


def parents_of(next_token: list[int], next_sibling: list[int]) -> list[int]:
    parents = [-1] * len(next_token)
    for parent, child in enumerate(next_token):
        while child >= 0:
            parents[child], child = parent, next_sibling[child]
    return parents


def golden_probs() -> torch.Tensor:
    logits = torch.ones(2, 6, 20)
    for request, node, token in GOLDEN_LIKELY:
        logits[request, node, token] = 10
    logits[..., 18] = torch.where(logits.amax(-1) < 10, 10.0, logits[..., 18])
    settings = SamplingBatch.of([SamplingParams(temperature=0.01)] * 2, 20, logits.device)
    return target_probs(logits, settings)


@pytest.mark.parametrize("threshold", [1.0, 0.0])
def test_the_golden_vector(threshold):
    """Whatever the coins show; at thresholds 0 too, since a draft without mass is never accepted."""
    parents = [parents_of(*links) for links in zip(GOLDEN_NEXT_TOKEN, GOLDEN_NEXT_SIBLING, strict=True)]
    coins = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    accepted = sample_tree(
        GOLDEN_TOKENS, torch.tensor(parents), golden_probs(), *coins, Thresholds(threshold, threshold)
    )
    assert accepted.predict.tolist() == [[3, -1, -1, 4, 5, 18], [11, -1, -1, -1, 12, 18]]
    assert accepted.nodes.tolist() == [[0, 3, 4, 5], [0, 4, 5, 0]]
    assert accepted.lens.tolist() == [4, 3]


def one_step(coin: float, draw_coin: float = 0.5, thresholds: Thresholds | None = None, probs=(0.2, 0.3, 0.5)):
    """A root with drafts 0 and 1 over a vocabulary of three; returns (accepted nodes, tokens)."""
    table = torch.tensor(probs, dtype=torch.float64).expand(1, 3, -1)
    coins = (torch.tensor([[value, 0.999]], dtype=torch.float64) for value in (coin, draw_coin))
    [path] = sample_tree(torch.tensor([[2, 0, 1]]), ROOT_AND_TWO, table, *coins, thresholds or Thresholds()).to_lists()
    return path


def test_children_share_the_coin_in_their_order():
    """Coins below 0.2 take draft 0, below 0.5 draft 1, others reject both and draw what is left."""
    assert one_step(0.19)[0] == [0, 1]
    assert one_step(0.21)[0] == [0, 2]
    assert one_step(0.49)[0] == [0, 2]
    assert one_step(0.51) == ([0], [2])


@pytest.mark.parametrize("draw_coin", [0.0, 0.3, 0.99])
def test_a_rejected_draft_is_not_drawn(draw_coin):
    """The residual holds no token that was tried."""
    assert one_step(0.9, draw_coin) == ([0], [2])


def test_tried_tokens_with_all_of_the_mass_do_not_leave_an_empty_residual():
    """Where rounding rejects children that make up everything, the target itself is drawn from."""
    assert one_step(0.9999999, 0.6, probs=(0.25, 0.25, 0.0)) == ([0], [1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_probability_that_is_none_counts_as_zero(value):
    """Its draft is passed over, and the one beside it keeps its own share."""
    assert one_step(0.29, probs=(value, 0.3, 0.7))[0] == [0, 2]
    assert one_step(0.31, probs=(value, 0.3, 0.7)) == ([0], [2])


def run_chain(tokens, parents, accept_coins, draw_coin, row=(0.2, 0.3, 0.5)):
    """One request; the same distribution after every node."""
    coins = torch.tensor([accept_coins], dtype=torch.float64)
    probs = torch.tensor(row, dtype=torch.float64).expand(1, len(tokens), -1)
    trees = torch.tensor([tokens]), torch.tensor([parents])
    return sample_tree(*trees, probs, coins, torch.full_like(coins, draw_coin))


def test_a_token_that_siblings_share_has_its_mass_once():
    """A twin widens nobody's share: behind 0 and 0 again, draft 1 has [0.2, 0.5)."""
    accepted = run_chain([2, 0, 0, 1], [-1, 0, 0, 0], [0.3, 0.0], 0.5)
    assert accepted.nodes.tolist() == [[0, 3]]


def test_a_path_shorter_than_the_draft_keeps_its_tokens():
    """Padding writes no token: not over the root's either."""
    accepted = run_chain([2, 0, 1, 1, 1], [-1, 0, 1, 2, 3], [0.0, 0.9, 0.0, 0.0, 0.0], 0.9)
    assert accepted.to_lists() == [([0, 1], [0, 2])]
    assert accepted.predict.tolist() == [[0, 2, -1, -1, -1]]


def test_a_child_that_was_not_tried_may_be_drawn():
    """After the last level the target is drawn from as it is, also where the tree goes deeper."""
    assert run_chain([2, 0, 1], [-1, 0, 1], [0.0, 0.0], 0.3).to_lists() == [([0, 1], [0, 1])]


def test_lower_thresholds_accept_more():
    """threshold_single takes a likely draft at once; threshold_acc widens every share."""
    assert one_step(0.9, thresholds=Thresholds(single=0.3))[0] == [0, 2]
    assert one_step(0.9, thresholds=Thresholds(single=0.31))[0] == [0]
    assert one_step(0.9, thresholds=Thresholds(acc=0.5))[0] == [0, 2]
    assert one_step(0.9, thresholds=Thresholds(acc=0.0))[0] == [0, 1]


@pytest.mark.parametrize("name", ["single", "acc"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_thresholds_outside_of_their_range_are_refused(name, value):
    """Each names itself, its range and its value."""
    with pytest.raises(ConfigError, match=rf"threshold_{name} must lie in \[0, 1\], got {value}"):
        Thresholds(**{name: value})


@st.composite
def hostile_batches(draw):
    """Parents that make no tree, tokens outside of the vocabulary, probabilities that are none."""
    num_nodes, num_steps = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    values = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, math.inf, -math.inf, -1.0]))
    parents = draw(st.lists(st.integers(-2, num_nodes + 1), min_size=num_nodes, max_size=num_nodes))
    tokens = draw(st.lists(st.integers(-2, 6), min_size=num_nodes, max_size=num_nodes))
    probs = draw(st.lists(values, min_size=num_nodes * 4, max_size=num_nodes * 4))
    coins = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=num_steps + 1, max_size=num_steps + 1))
    return (
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor(probs, dtype=torch.float64).view(1, num_nodes, 4),
        torch.tensor([coins], dtype=torch.float64),
    )


@settings(deadline=None, derandomize=True)
@given(hostile_batches())
def test_hostile_input_neither_hangs_nor_leaves_the_tree(batch):
    """Accepted nodes are a path of nodes with mass, every emitted token lies in the vocabulary."""
    tokens, parents, probs, coins = batch
    accepted = sample_tree(tokens, parents, probs, coins, coins)
    [(nodes, emitted)] = accepted.to_lists()
    assert 1 <= len(nodes) <= coins.shape[1]
    assert nodes[0] == 0
    for before, node, token in zip(nodes, nodes[1:], emitted, strict=False):
        assert parents[0, node] == before < node
        assert tokens[0, node] == token
        assert 0 < probs[0, before, token] < math.inf
    assert all(0 <= token < 4 for token in emitted)
    unvisited = [node for node in range(tokens.shape[1]) if node not in nodes]
    assert all(accepted.predict[0, node] == NO_TOKEN for node in unvisited)
