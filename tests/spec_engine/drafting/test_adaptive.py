"""Adaptive numbers of steps: what is chosen after what was accepted."""

import pytest

from spec_engine.config import ConfigError
from spec_engine.drafting.adaptive import DEFAULT_CANDIDATES, AdaptiveConfig, AdaptivePolicy, largest


def policy(num_steps=3, **settings):
    return AdaptivePolicy(AdaptiveConfig(**settings), topk=1, num_steps=num_steps)


def run(policy, bs, batches, rate):
    """T of each batch when the target accepts ``rate(T)`` drafts of every request."""
    chosen = []
    for _ in range(batches):
        num_steps = policy.choose(bs)
        policy.observe(num_steps, [rate(num_steps)] * bs)
        chosen.append(num_steps)
    return chosen


def everything(num_steps):
    return num_steps


def nothing(num_steps):
    return 0


def test_full_acceptance_raises_the_steps_one_candidate_a_decision():
    """Ten batches of warm-up, then up whenever the average of a multiple of five batches has come close to T."""
    assert run(policy(1), 1, 60, everything) == [1] * 10 + [3] * 10 + [5] * 10 + [7] * 30


def test_no_acceptance_drops_to_the_lowest_candidate_at_once():
    """The first decision falls as far as the average says."""
    assert run(policy(7), 1, 13, nothing) == [7] * 10 + [1] * 3


def test_steps_follow_a_target_that_changes_its_mind():
    """What was learned is unlearned: from 7 down to 1 and up again."""
    adaptive = policy(7)
    run(adaptive, 1, 20, everything)
    assert run(adaptive, 1, 60, nothing)[-1] == 1
    assert run(adaptive, 1, 60, everything)[-1] == 7


def test_the_average_moves_by_alpha():
    """The first batch sets it, later ones weigh a fifth; requests of one batch are averaged first."""
    adaptive = policy(3)
    adaptive.observe(3, [3, 1])
    assert adaptive.metrics.ema == 2
    adaptive.observe(3, [3])
    assert adaptive.metrics.ema == pytest.approx(2.2)


@pytest.mark.parametrize(
    ("accepted", "expected"), [(0.2, 1), (0.25, 1), (0.3, 3), (2.5, 3), (2.6, 5)], ids=lambda value: str(value)
)
def test_hysteresis_leaves_a_band_in_which_steps_stay(accepted, expected):
    """From 3 steps: at most 0.25 accepted falls to 1, above 2.5 rises to 5, between them nothing moves."""
    adaptive = policy(3)
    assert run(adaptive, 1, 11, lambda num_steps: accepted)[-1] == expected


def test_no_steps_are_left_to_try_again_after_a_while():
    """Without drafts nothing is learned: after 50 batches one step is tried, and kept where it pays."""
    adaptive = policy(1)
    assert run(adaptive, 8, 60, nothing) == [1] * 10 + [0] * 50
    assert run(adaptive, 8, 10, nothing) == [1] * 5 + [0] * 5
    run(adaptive, 8, 45, nothing)
    assert run(adaptive, 8, 12, everything) == [1] * 5 + [3] * 7


def test_batches_without_drafts_leave_the_average_alone():
    """Nothing drafted is nothing accepted, which says nothing about the draft."""
    adaptive = policy(1)
    run(adaptive, 8, 10, lambda num_steps: 0.2)
    assert run(adaptive, 8, 20, nothing) == [0] * 20
    assert adaptive.metrics.ema == pytest.approx(0.2)


def test_batch_sizes_have_candidates_of_their_own():
    """A burst of requests gets fewer steps, and what small batches have learned is still known after it."""
    adaptive = policy(3)
    assert run(adaptive, 1, 21, everything)[-1] == 7
    assert [adaptive.choose(bs) for bs in (7, 8, 31, 32, 63, 64, 500, 1)] == [7, 3, 3, 1, 1, 0, 0, 7]


def test_results_of_before_a_switch_teach_nothing():
    """With a host that lags, a batch of the old T arrives after the switch and is left out of the average."""
    adaptive = policy(1)
    run(adaptive, 1, 10, everything)
    assert adaptive.choose(1) == 3
    before = adaptive.metrics.ema
    adaptive.observe(1, [0])
    adaptive.observe(3, [])
    assert adaptive.metrics.ema == before
    adaptive.observe(3, [3])
    assert adaptive.metrics.ema == pytest.approx(1.4)


def test_metrics_count_batches_and_switches():
    """Every batch counts under its T, and every change from one batch to the next is a switch."""
    adaptive = policy(1)
    run(adaptive, 1, 20, everything)
    adaptive.choose(64)
    assert adaptive.metrics.batches == {1: 10, 3: 10, 0: 1}
    assert adaptive.metrics.switches == 2
    assert adaptive.metrics.ema == pytest.approx(3 - 2 * 0.8**10)


def test_largest_sizes_everything_for_any_batch():
    """The most steps of any batch size, whatever size it belongs to."""
    assert largest(DEFAULT_CANDIDATES) == 7
    assert largest({1: (1,), 4: (0, 9)}) == 9


def test_a_start_between_candidates_takes_the_lower_one():
    """And the lowest of all where there is no lower one."""
    assert policy(4).choose(1) == 3
    assert policy(4, candidates={1: (5, 7)}).choose(1) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": {}}, "candidates must begin at batch size 1"),
        ({"candidates": {2: (1,)}}, "candidates must begin at batch size 1"),
        ({"candidates": {0: (1,), 1: (1,)}}, "candidates must begin at batch size 1"),
        ({"candidates": {1: ()}}, "batch size 1 must be ascending"),
        ({"candidates": {1: (1,), 8: (3, 1)}}, "batch size 8 must be ascending"),
        ({"candidates": {1: (1, 1)}}, "batch size 1 must be ascending"),
        ({"candidates": {1: (-1, 1)}}, "batch size 1 must be ascending"),
        ({"candidates": {1: (0,)}}, "a number of steps above 0"),
        ({"alpha": 0}, r"alpha must lie in \(0, 1\], got 0"),
        ({"interval": 0}, "interval must be at least 1 batches, got 0"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"down_hysteresis": 0.5}, "down_hysteresis 0.5 must not exceed up_hysteresis 0.0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    """One sentence each, with the value."""
    with pytest.raises(ConfigError, match=message):
        AdaptiveConfig(**settings)


def test_trees_are_refused():
    """Only chains adapt."""
    with pytest.raises(ConfigError, match="adaptive num_steps needs topk 1, got 4"):
        AdaptivePolicy(AdaptiveConfig(), topk=4, num_steps=3)
