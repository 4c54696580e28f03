"""Sampling through drafts keeps the target's joint distribution: chi-square over 50,000 draws of two tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from spec_engine.acceptance import rejection, tree_sampling
from spec_engine.acceptance.coins import ACCEPT, DRAW, coins
from spec_engine.acceptance.distribution import draw
from spec_engine.acceptance.rejection import reject_chain
from spec_engine.acceptance.tree_sampling import sample_tree
from spec_engine.acceptance.walk import Acceptance, match

VOCAB, NUM_DRAWS, NUM_STEPS = 8, 50_000, 2
_GENERATOR = torch.Generator().manual_seed(20)
LOGITS = torch.randn(VOCAB + 1, VOCAB, generator=_GENERATOR, dtype=torch.float64)
TARGET = torch.softmax(0.7 * LOGITS, -1)  # row x: what follows token x; the last row: what comes first
START = VOCAB
DRAFT = torch.softmax(0.5 * LOGITS + 0.4 * torch.randn(LOGITS.shape, generator=_GENERATOR, dtype=torch.float64), -1)


@cache
def shown(purpose: str) -> Tensor:
    """Coins of 50,000 requests with seeds of their own at positions 1 to 4."""
    return coins(range(NUM_DRAWS), torch.arange(1, 5).expand(NUM_DRAWS, -1), purpose)


def draft_tree(roots: Tensor, topk: int, num_steps: int) -> tuple[Tensor, Tensor]:
    """Tokens [bs, N] and parents [N]: below each node the draft's ``topk`` likeliest, all of them."""
    likely = DRAFT.topk(topk, -1).indices
    levels, parents, first = [roots[:, None]], [-1], 0
    for _ in range(num_steps):
        width = levels[-1].shape[1]
        parents += [first + node for node in range(width) for _ in range(topk)]
        levels.append(likely[levels[-1]].flatten(1))
        first += width
    return torch.cat(levels, 1), torch.tensor(parents)


def two_tokens(step) -> Tensor:
    """Joint counts [V, V]: a step at position 1, and where it emits one token only, another at position 2.

    ``step(roots [bs], which [bs], first column of coins) -> Acceptance``.
    """
    everyone = torch.arange(NUM_DRAWS)
    accepted = step(torch.full((NUM_DRAWS,), START), everyone, 0)
    pair = accepted.tokens[:, :2].clone()
    short = everyone[accepted.lens == 1]
    pair[short, 1] = step(pair[short, 0], short, 1).tokens[:, 0]
    return torch.bincount(pair[:, 0] * VOCAB + pair[:, 1], minlength=VOCAB**2)


def p_value(counts: Tensor) -> float:
    """Of Pearson's chi-square against the exact joint distribution."""
    expected = (TARGET[START, :, None] * TARGET[:VOCAB]).flatten() * NUM_DRAWS
    assert counts.sum() == NUM_DRAWS
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((VOCAB**2 - 1) / 2, dtype=torch.float64), statistic / 2).item()


def tree_step(topk: int):
    """Target-only tree sampling, in parts of a few thousand requests so that rows of probabilities stay small."""

    def step(roots: Tensor, which: Tensor, column: int) -> Acceptance:
        parts = zip(roots.split(5000), which.split(5000), strict=True)
        done = [_sampled(own, ids, column, topk) for own, ids in parts]
        return Acceptance(*(torch.cat([getattr(part, name) for part in done]) for name in ("nodes", "lens", "predict")))

    return step


def _sampled(roots: Tensor, which: Tensor, column: int, topk: int) -> Acceptance:
    tokens, parents = draft_tree(roots, topk, NUM_STEPS)
    window = slice(column, column + NUM_STEPS + 1)
    drawn = (shown(purpose)[which, window] for purpose in (ACCEPT, DRAW))
    return sample_tree(tokens, parents.expand_as(tokens), TARGET[tokens], *drawn)


def chain_step(roots: Tensor, which: Tensor, column: int) -> Acceptance:
    """Chain rejection sampling of drafts that the draft itself drew."""
    generator = torch.Generator().manual_seed(column)
    tokens = [roots]
    for _ in range(NUM_STEPS):
        tokens.append(draw(DRAFT[tokens[-1]], torch.rand(len(roots), generator=generator, dtype=torch.float64)))
    chain = torch.stack(tokens, 1)
    window = slice(column, column + NUM_STEPS + 1)
    drawn = (shown(purpose)[which, window] for purpose in (ACCEPT, DRAW))
    return reject_chain(chain, TARGET[chain], DRAFT[chain[:, :-1]], *drawn)


def match_step(roots: Tensor, which: Tensor, column: int) -> Acceptance:
    """Each node's own seeded draw, compared with its children."""
    tokens, parents = draft_tree(roots, 2, NUM_STEPS)
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    chosen = draw(TARGET[tokens], shown(DRAW)[which[:, None], column + depths])
    return match(tokens, parents.expand_as(tokens), chosen, NUM_STEPS)


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_tree_sampling_keeps_the_targets_distribution(topk):
    """At thresholds 1 the two tokens are distributed as the target's, for chains and for trees."""
    assert p_value(two_tokens(tree_step(topk))) > 1e-3


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_tree_sampling_without_its_residual_does_not(topk, monkeypatch):
    """The test has power: drawing the bonus from the target itself favours rejected drafts, and is found."""
    monkeypatch.setattr(tree_sampling, "residual", lambda probs, ids, tried: probs)
    assert p_value(two_tokens(tree_step(topk))) < 1e-6


def test_chain_rejection_keeps_the_targets_distribution():
    """Drafts drawn from another distribution q leave p as it is."""
    assert p_value(two_tokens(chain_step)) > 1e-3


def test_chain_rejection_without_its_residual_does_not(monkeypatch):
    """Drawing from p where max(0, p - q) is meant is found."""
    monkeypatch.setattr(rejection, "residual", lambda target, drafted: target)
    assert p_value(two_tokens(chain_step)) < 1e-6


def test_matching_seeded_draws_keeps_the_targets_distribution():
    """Comparing drafts with draws is exact, whatever was drafted."""
    assert p_value(two_tokens(match_step)) > 1e-3


def test_matched_output_does_not_depend_on_drafts():
    """Every request's two tokens are those of plain decoding with the same coins."""
    accepted = match_step(torch.full((NUM_DRAWS,), START), torch.arange(NUM_DRAWS), 0)
    first = draw(TARGET[START].expand(NUM_DRAWS, -1), shown(DRAW)[:, 0])
    second = draw(TARGET[first], shown(DRAW)[:, 1])
    assert torch.equal(accepted.tokens[:, 0], first)
    longer = accepted.lens > 1
    assert torch.equal(accepted.tokens[longer, 1], second[longer])
    assert longer.sum() > NUM_DRAWS / 10
