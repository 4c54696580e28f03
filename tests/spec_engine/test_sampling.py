"""Sampling: greedy, truncated, seeded, and true to the distribution; bad settings are refused."""

import math

import pytest
import torch

from spec_engine import ConfigError, SamplingParams
from spec_engine.acceptance.distribution import choose
from spec_engine.acceptance.settings import SamplingBatch

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def sample(logits: torch.Tensor, params: tuple[SamplingParams, ...], positions: torch.Tensor) -> torch.Tensor:
    return choose(logits, SamplingBatch.of(params, logits.shape[-1], logits.device), positions)


def draws(count: int, **settings) -> torch.Tensor:
    """Tokens drawn at positions 0 to count - 1 from LOGITS."""
    params = SamplingParams(temperature=1.0, **settings)
    return sample(LOGITS.expand(1, count, -1), (params,), torch.arange(count)[None])[0]


def test_temperature_zero_is_argmax():
    """Greedy takes the likeliest token of every node."""
    logits = torch.randn(3, 4, 11)
    positions = torch.zeros(3, 4, dtype=torch.int64)
    assert torch.equal(sample(logits, (SamplingParams(),) * 3, positions), logits.argmax(-1))


def test_a_greedy_request_beside_a_sampled_one_is_argmax():
    """In a mixed batch each request is sampled by its own parameters."""
    logits = LOGITS.expand(2, 40, -1)
    params = (SamplingParams(), SamplingParams(temperature=1.0, seed=3))
    greedy, drawn = sample(logits, params, torch.arange(40).expand(2, -1))
    assert greedy.tolist() == [0] * 40
    assert torch.equal(drawn, draws(40, seed=3))
    assert len(set(drawn.tolist())) > 1


def test_draws_follow_the_distribution():
    """Chi-square over 4,000 positions stays below the 0.999 quantile for four degrees of freedom."""
    count = 4000
    observed = torch.bincount(draws(count, seed=7), minlength=5)
    expected = torch.softmax(LOGITS, -1) * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 18.47


def test_top_k_top_p_and_min_p_cut_the_tail():
    """Nothing outside the kept set is drawn, and everything inside is."""
    assert set(draws(500, top_k=2).tolist()) == {0, 1}
    assert set(draws(500, top_p=0.5).tolist()) == {0}
    assert set(draws(500, top_p=0.85).tolist()) == {0, 1, 2}
    assert set(draws(500, min_p=0.3).tolist()) == {0, 1}


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
        ({"temperature": math.nan}, "temperature must be finite and not negative, got nan"),
        ({"top_k": -2}, "top_k must be at least 0 (all tokens), got -2"),
        ({"top_p": 0.0}, "top_p must lie in (0, 1], got 0.0"),
        ({"min_p": 1.5}, "min_p must lie in [0, 1], got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0, got 0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be finite, got inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be finite, got nan"),
        ({"logit_bias": {3: math.nan}}, "logit_bias must map token ids to finite numbers or -inf, got 3: nan"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must map token ids to finite numbers or -inf, got 'a': 1.0"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"stop": ("\n", "")}, "stop must hold strings of at least one character, got ''"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must hold token ids, got 'a'"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must hold token ids, got -1"),
        ({"logprobs": -1}, "logprobs must be at least 0 (the chosen token alone), got -1"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(settings, words):
    """Each message names the setting, the rule and the value."""
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**settings)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"logit_bias": {97: 1.0}}, "logit_bias names token 97, the vocabulary has tokens 0 to 96"),
        ({"stop_token_ids": (97,)}, "stop_token_ids names token 97, the vocabulary has tokens 0 to 96"),
        ({"logprobs": 98}, "logprobs must be at most the vocabulary's 97 tokens, got 98"),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_refused(settings, words):
    """What only the model's vocabulary can tell is refused once it is known."""
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**settings).check_vocabulary(97)
    assert str(caught.value) == words


def test_settings_are_copied_and_a_lone_stop_string_is_one():
    """Later changes to what the caller passed change nothing, and "ab" is not the strings "a" and "b"."""
    bias, ids = {1: 2.0}, [5]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids, stop="ab")
    bias[1], ids[0] = 9.0, 6
    assert (params.logit_bias, params.stop_token_ids, params.stop) == ({1: 2.0}, (5,), ("ab",))
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop_token_ids=[5], stop=["ab"]))
    params.check_vocabulary(97)
