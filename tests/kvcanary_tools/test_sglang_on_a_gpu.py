"""The benchmark inside SGLang on a GPU, as far as it needs neither: its record, its page, what it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from kvcanary.adapters.hosted.probing import IN_A_GRAPH
from kvcanary_tools.bench.sglang.gpu import graphs, reader, run
from kvcanary_tools.bench.sglang.misreading import OF_GRAPHS

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tools/kvcanary_tools/bench/results/gpu_sglang.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_record() -> None:
    """docs/sglang.md has its table, line by line."""
    assert "\n".join(run.lines(RECORD)) in (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", run.CASES)
def test_sound_runs_are_silent_and_equal(kind: str) -> None:
    """Every pool was watched to the end, no draft step was left out; the median of the ratios is the goal's."""
    for own in RECORD[kind]["runs"]:
        assert own["pools"].keys() == ({"target"} if kind == "dense" else {"target", "draft"})
        assert all(pool["armed"] and pool["slots_checked"] > 4_000_000 for pool in own["pools"].values())
        assert all(pool["unchecked"] == {} for pool in own["pools"].values())
        assert own["equal_tokens"]
        assert own["findings"] == []
    assert median(own["ratio"] for own in RECORD[kind]["runs"]) >= 0.98


@pytest.mark.parametrize("own", RECORD["tree"]["harmed"], ids=lambda own: own["fault"])
def test_a_fault_within_sglangs_graph_of_draft_steps_is_named_with_its_step(own: dict[str, Any]) -> None:
    """Its first finding is the step's, its entry is one too far."""
    of, step = graphs.FAULTS[own["fault"]]
    first, what = own["first"], ("position", "slot")[of]
    assert (first["code"], first["pool"], first["site"]) == ("W5", "draft", ["draft", step])
    assert first["found"][what] == first["expected"][what] + 1


def test_attention_was_asked_within_graphs() -> None:
    """Silent as it is; what a replay alone reads otherwise is named so, and SGLang's own tokens are as before."""
    record = json.loads((ROOT / f"tools/kvcanary_tools/bench/results/{reader.NAME}.json").read_text(encoding="utf-8"))
    sound, *harmed = record["answers"][1:]  # behind the one that compiles
    assert [own["misreading"] for own in (sound, *harmed)] == [*OF_GRAPHS]
    assert (sound["finding"], record["equal_tokens_behind_it"]) == (None, True)
    assert all(own["reader_probes"] == 2 and own["seconds"] < 0.1 for own in (sound, *harmed))
    for own in harmed:
        assert (own["finding"]["code"], own["finding"]["site"]) == ("R8", ["decode", 0])
        assert own["finding"]["causes"]["evidence"][-1] == IN_A_GRAPH


def test_every_request_has_a_prompt_of_its_own(tmp_path: Path) -> None:
    """Of ids that the model has; and its settings lead to the folders that were written."""
    case = run.Case(eagle=True, requests=5, prompt=9, vocab=500)
    asked = run.prompts(case)
    assert len({tuple(prompt) for prompt in asked}) == 5
    assert all(3 <= token < 500 for prompt in asked for token in prompt)
    run.save_model(case, tmp_path)
    told = run.settings(case, tmp_path)
    for name in ("model_path", "speculative_draft_model_path"):
        assert json.loads((Path(told[name]) / "config.json").read_text())["vocab_size"] == 500


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="measures a CUDA device, and there is none here"):
        run.main([])
    with pytest.raises(SystemExit, match="asks attention on a CUDA device, and there is none here"):
        reader.main([])


@pytest.mark.parametrize("arguments", [["chain"], ["dense", "eagle"]])
def test_what_is_not_measured_is_a_sentence(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=f"must be one of dense, eagle, tree, got '{' '.join(arguments)}'"):
        run.main(arguments)
