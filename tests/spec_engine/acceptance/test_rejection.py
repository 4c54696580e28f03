"""Chain rejection sampling: which drafts stay, and what is drawn instead. Exactness: test_exactness.py."""

from __future__ import annotations

import math

import pytest
import torch

from spec_engine.acceptance.rejection import reject_chain

TARGET = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.5, 0.0, 0.5]]
DRAFT = [[0.8, 0.2, 0.0], [0.0, 0.4, 0.6]]


def verified(drafts, accept_coins, draw_coin=0.5, target=TARGET, draft=DRAFT):
    """(accepted nodes, tokens) of one chain of two drafts over three tokens."""
    coins = torch.tensor([[*accept_coins, 0.0]], dtype=torch.float64)
    chain = torch.tensor([[9, *drafts]])
    probs, draft_probs = torch.tensor([target]), torch.tensor([draft])
    [path] = reject_chain(chain, probs, draft_probs, coins, torch.full_like(coins, draw_coin)).to_lists()
    return path


def test_a_draft_stays_with_the_ratio_of_target_and_draft():
    """Draft 0 has p/q = 0.625: a coin below stays, one above does not; where p > q every coin stays."""
    assert verified([0, 2], [0.62, 0.99]) == ([0, 1, 2], [0, 2, 2])
    assert verified([0, 2], [0.63, 0.99])[0] == [0]


def test_nothing_stays_behind_a_rejected_draft():
    """The second draft would stay, but its place is another one now."""
    assert verified([0, 2], [0.9, 0.0])[0] == [0]


@pytest.mark.parametrize(("draw_coin", "token"), [(0.3, 1), (0.34, 2), (0.9, 2)])
def test_the_residual_is_what_the_draft_does_not_cover(draw_coin, token):
    """Target minus draft is 0, 0.1 and 0.2: the rejected token is never drawn."""
    assert verified([0, 2], [0.9, 0.0], draw_coin) == ([0], [token])


def test_behind_the_whole_chain_the_target_itself_is_drawn():
    """No draft stood at the last place."""
    assert verified([1, 2], [0.0, 0.0], 0.9) == ([0, 1, 2], [1, 2, 2])
    assert verified([1, 2], [0.0, 0.0], 0.1) == ([0, 1, 2], [1, 2, 0])


@pytest.mark.parametrize("q", [0.0, math.nan, math.inf, 1.5, -0.5])
def test_a_draft_whose_q_is_no_probability_is_rejected(q):
    """Such a ratio would say nothing; the step still emits a token of the target."""
    nodes, tokens = verified([0, 2], [0.0, 0.0], draft=[[q, 0.2, 0.0], DRAFT[1]])
    assert nodes == [0]
    assert tokens[0] in (0, 1, 2)


def test_a_draft_outside_of_the_vocabulary_is_rejected():
    """Its number is clamped to look up a probability, and is not taken for the token that it was clamped to."""
    assert verified([3, 2], [0.0, 0.0], draft=[[0.0, 0.0, 1.0], DRAFT[1]])[0] == [0]
    assert verified([-1, 2], [0.0, 0.0])[0] == [0]
