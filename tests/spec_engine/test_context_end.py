"""A request may fill the model's whole context, although the drafts of its last steps lie past the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_engine import Engine, EngineConfig, SamplingParams

CONTEXT = 512  # max_position_embeddings of the toy model
PROMPT = [token % 97 for token in range(0, 7 * (CONTEXT - 9), 7)]


def output(folder: Path, **settings) -> tuple[int, ...]:
    engine = Engine(EngineConfig(model=str(folder), dtype="float64", max_total_tokens=4096, **settings))
    return engine.generate([PROMPT], SamplingParams(max_new_tokens=9, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("draft", ["eagle", "eagle3"])
@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (16, 3)])
def test_drafts_may_lie_past_the_end_of_the_context(toy_model: Path, draft: str, page_size: int, topk: int) -> None:
    """Prompt and output together fill all 512 positions, and drafting changes none of the tokens."""
    plain = output(toy_model, draft="none")
    assert len(PROMPT) + len(plain) == CONTEXT
    assert output(toy_model, draft=draft, page_size=page_size, topk=topk, num_steps=5) == plain
