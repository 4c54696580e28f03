"""Target probabilities against a plain per-row oracle, and draws at their edges."""

from __future__ import annotations

import math

import pytest
import torch

from spec_engine import SamplingParams
from spec_engine.acceptance.distribution import draw, finite_probs, greedy_tokens, likeliest_tokens, target_probs
from spec_engine.acceptance.settings import SamplingBatch

VOCAB = 13
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.4},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.3},
    {"temperature": 0.5, "top_k": 1},
    {"temperature": 1.0, "top_k": 10_000, "top_p": 1.0},
]


def probs_of(logits: torch.Tensor, *cases: dict) -> torch.Tensor:
    params = [SamplingParams(**case) for case in cases]
    return target_probs(logits, SamplingBatch.of(params, logits.shape[-1], logits.device))


def oracle(logits: list[float], params: SamplingParams) -> list[float]:
    """The same by sorting one row in plain Python."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    mass = {token: math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    order = order[: params.top_k or len(order)]
    total, kept, before = sum(mass[token] for token in order), [], 0.0
    for token in order:
        if before / total < params.top_p and mass[token] >= params.min_p * mass[order[0]]:
            kept.append(token)
        before += mass[token]
    total = sum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(logits))]


def test_every_request_gets_its_own_truncation():
    """One batch of all settings at once equals the oracle row by row."""
    logits = torch.randn(len(CASES), 5, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = probs_of(logits, *CASES)
    for b, case in enumerate(CASES):
        for node in range(5):
            expected = torch.tensor(oracle(logits[b, node].tolist(), SamplingParams(**case)), dtype=torch.float64)
            torch.testing.assert_close(found[b, node], expected, rtol=1e-9, atol=1e-12)


def test_equal_logits_are_kept_from_the_lowest_token_on():
    """top-k keeps k tokens, not all that tie with the last of them."""
    assert probs_of(torch.zeros(1, 1, 6), {"temperature": 1.0, "top_k": 2})[0, 0].tolist() == [0.5, 0.5, 0, 0, 0, 0]


def test_top_p_of_one_keeps_tokens_that_rounding_hides():
    """A tail beyond the last digit of the sum before it stays, beside a request that truncates."""
    logits = torch.tensor([0.0, -40.0]).expand(2, 1, -1)
    open_end, cut = probs_of(logits, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5})
    assert open_end[0, 1] > 0
    assert cut[0, 1] == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_that_are_no_numbers_do_not_spread(case):
    """NaN and -inf get no mass, inf gets all of it, a dead row is uniform: every row adds to 1."""
    logits = torch.tensor([[[math.nan, 1.0, -math.inf], [math.inf, 3.0, 0.0], [-math.inf] * 3, [math.nan] * 3]])
    rows = probs_of(logits, case)[0]
    assert torch.allclose(rows.sum(-1), torch.ones(4, dtype=torch.float64))
    assert rows[0].tolist() == [0, 1, 0]
    assert rows[1].tolist() == [1, 0, 0]
    if case in (CASES[0], CASES[-1]):
        assert torch.allclose(rows[2:], torch.full((2, 3), 1 / 3, dtype=torch.float64))
    assert greedy_tokens(logits).tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_likeliest_tokens_come_with_their_probabilities(device, dtype):
    """As many as are asked for, the likeliest first, with what the softmax of the whole row says of them in float32."""
    logits = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).view(2, -1).to(device, dtype) / 500
    probs, tokens = likeliest_tokens(logits, 4)
    assert (probs.dtype, tokens.dtype) == (torch.float32, torch.int64)
    assert logits.gather(1, tokens).tolist() == logits.sort(dim=-1, descending=True).values[:, :4].tolist()
    assert torch.allclose(probs, torch.softmax(logits.float(), -1).gather(1, tokens), rtol=1e-5)


def test_a_tiny_temperature_is_greedy():
    """Dividing by next to nothing gives no NaN."""
    assert probs_of(torch.tensor([[[1.0, 5.0, 4.9]]]), {"temperature": 5e-324})[0, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(("coin", "token"), [(0.0, 1), (0.2, 1), (0.25, 3), (0.9999999, 3)])
def test_a_draw_skips_tokens_without_mass(coin, token):
    """Tokens share [0, 1) in ascending order; those without mass have no part of it, at its edges neither."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert draw(probs, torch.tensor(coin, dtype=torch.float64)).item() == token


def test_a_draw_that_rounding_leaves_without_a_token_takes_the_likeliest():
    """A coin beyond the sum is no index beyond the vocabulary; a row without mass gives a token of it."""
    probs = torch.tensor([[0.4, 0.6, 0.0], [0.0, 0.0, 0.0]])
    assert draw(probs, torch.tensor([1.0, 0.5])).tolist() == [1, 0]


def test_probabilities_that_are_none_count_as_zero():
    """NaN, infinite and negative entries are taken out."""
    probs = torch.tensor([math.nan, math.inf, -math.inf, -0.1, 0.3])
    torch.testing.assert_close(finite_probs(probs), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3]))
