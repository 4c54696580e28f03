"""The measurement inside vLLM: what of it needs no vLLM."""

from __future__ import annotations

import json

from kvcanary_tools.bench import vllm_plugin as bench


def test_prompts_share_prefixes_and_are_the_same_each_time() -> None:
    """Equal order in every run; as many beginnings as prefixes; longer than one chunk together."""
    prompts = bench.make_prompts()
    assert prompts == bench.make_prompts()
    assert len(prompts) == bench.REQUESTS
    assert len({tuple(prompt[: bench.PREFIX_TOKENS]) for prompt in prompts}) == bench.PREFIXES
    assert all(bench.PREFIX_TOKENS < len(prompt) < 800 for prompt in prompts)
    needed = sum(len(prompt) + bench.OUTPUT_TOKENS - bench.PREFIX_TOKENS for prompt in prompts)
    assert needed > 16 * bench.BLOCKS  # some are preempted


def test_agreement_counts_tokens_and_names_the_first_difference() -> None:
    """Shorter answers count as different; a place for each request that differs."""
    found = bench.agreement([[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 9], [6, 7]])
    assert found == {"share": 5 / 7, "first_different": {1: 1}}
    assert bench.agreement([], []) == {"share": 0.0, "first_different": {}}


def test_the_middle_of_an_odd_and_an_even_number() -> None:
    """The median of three runs, and of two."""
    assert (bench.median([3.0, 1.0, 2.0]), bench.median([4.0, 1.0])) == (2.0, 2.5)


def test_a_part_that_breaks_is_written_down() -> None:
    """An error in one fault is a result, and the others go on."""
    rig = object.__new__(bench.Bench)

    def breaks() -> dict[str, object]:
        raise RuntimeError("no such block")

    assert json.dumps(rig.attempt(breaks)) == '{"raised": "RuntimeError", "message": "no such block"}'
    assert rig.attempt(lambda: {"found": []}) == {"found": []}
