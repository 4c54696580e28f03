"""The measurement of what the canary costs inside transformers: a small one of it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from kvcanary_tools.bench import transformers_cost as bench


def test_every_way_is_timed_in_every_pass() -> None:
    """Tokens are equal in all of them, or it would raise; ratios are against the same pass."""
    model = bench.make_model(bench.SHAPE | {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 97})
    seconds = bench.measure(model, bench.make_prompt(97, 2, 8), passes=1, new_tokens=3)
    assert {way: len(times) for way, times in seconds.items()} == dict.fromkeys(("off", *bench.CONTENTS), 1)


def test_ratios_are_medians_of_pairs() -> None:
    """A slow pass counts for both sides."""
    assert bench.ratios({"off": [1.0, 2.0, 4.0], "write": [1.5, 2.0, 8.0]}) == {"write": 1.5}
