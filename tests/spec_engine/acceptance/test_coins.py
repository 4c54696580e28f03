"""Seeded coins."""

from unittest import mock

import torch

from spec_engine.acceptance import coins as coins_module
from spec_engine.acceptance.coins import ACCEPT, DRAW, coins


def test_a_coin_depends_on_seed_position_and_purpose_alone():
    """Neither its place in the batch nor its neighbours change a coin; each of the three does."""
    batch = coins([1, 2], torch.tensor([[5, 6, 5], [7, 5, 6]]), DRAW)
    alone = coins([2], torch.tensor([[6]]), DRAW)
    assert batch[1, 2] == alone.item()
    assert batch[0, 0] == batch[0, 2]
    other = coins([2], torch.tensor([[6]]), ACCEPT)
    assert len({batch[0, 1].item(), batch[1, 2].item(), batch[1, 1].item(), other.item()}) == 4


def test_coins_stay_the_same_over_versions():
    """Outputs can be reproduced later: the first coins of seed 0, as `b2sum -l 64` gives them."""
    expected = [0.743702233131717, 0.8075084979422765]
    assert coins([0], torch.tensor([[0, 1]]), DRAW).tolist() == [expected]


def test_coins_are_spread_evenly():
    """The mean and the variance of 20,000 coins are those of the uniform distribution, within five deviations."""
    shown = coins([11], torch.arange(20_000)[None], ACCEPT)
    assert abs(shown.mean() - 0.5) < 5 * (1 / 12 / 20_000) ** 0.5
    assert abs(shown.var() - 1 / 12) < 0.003


def test_the_highest_coin_is_below_one_in_float32():
    """A coin that rounds to 1 would lie beyond every token."""
    digest = mock.Mock(return_value=mock.Mock(digest=lambda: b"\xff" * 8))
    with mock.patch.object(coins_module.hashlib, "blake2b", digest):
        [[coin]] = coins([0], torch.tensor([[0]]), DRAW).tolist()
    assert torch.tensor(coin, dtype=torch.float32) < 1
