"""Sampling: greedy, truncated, seeded, and true to the distribution."""

import pytest
import torch

from spec_engine import ConfigError, SamplingParams
from spec_engine.sampling import sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def draws(count: int, **settings) -> torch.Tensor:
    """Tokens drawn at positions 0 to count - 1 from LOGITS."""
    params = SamplingParams(temperature=1.0, **settings)
    return sample(LOGITS.expand(1, count, -1), (params,), torch.arange(count)[None])[0]


def test_temperature_zero_is_argmax():
    """Greedy takes the likeliest token of every node."""
    logits = torch.randn(3, 4, 11)
    positions = torch.zeros(3, 4, dtype=torch.int64)
    assert torch.equal(sample(logits, (SamplingParams(),) * 3, positions), logits.argmax(-1))


def test_draws_follow_the_distribution():
    """Chi-square over 4,000 positions stays below the 0.999 quantile for four degrees of freedom."""
    count = 4000
    observed = torch.bincount(draws(count, seed=7), minlength=5)
    expected = torch.softmax(LOGITS, -1) * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 18.47


def test_top_k_and_top_p_cut_the_tail():
    """Nothing outside the kept set is drawn, and everything inside is."""
    assert set(draws(500, top_k=2).tolist()) == {0, 1}
    assert set(draws(500, top_p=0.5).tolist()) == {0}
    assert set(draws(500, top_p=0.85).tolist()) == {0, 1, 2}


def test_a_coin_depends_on_seed_and_position_alone():
    """The same position draws the same token whatever else is in the batch; another seed draws otherwise."""
    assert torch.equal(draws(50, seed=1)[10:], draws(50, seed=1)[10:])
    params = SamplingParams(temperature=1.0, seed=1)
    alone = sample(LOGITS.expand(1, 1, -1), (params,), torch.tensor([[17]]))
    assert alone.item() == draws(50, seed=1)[17].item()
    assert not torch.equal(draws(50, seed=1), draws(50, seed=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite and not negative, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_k": -2}, "top_k must be 0 .all tokens. or positive, got -2"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(settings, words):
    """Each message names the setting, the rule and the value."""
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**settings)
