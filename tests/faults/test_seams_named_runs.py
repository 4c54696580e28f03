"""The runs that published bugs were reported with: clean with the canary on, and stopped with the fix undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from kvcanary import CanaryConfig
from kvcanary.faults.catalogue import find
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import EMBEDDED_MODEL, load_excerpts
from spec_engine.models.tokenizer import Tokenizer

NUM_OUTPUTS = 12
PARAMS = SamplingParams(max_new_tokens=NUM_OUTPUTS, ignore_eos=True)


@cache
def corpus() -> list[int]:
    """Tokens of some hundred lines of code."""
    return Tokenizer.from_folder(EMBEDDED_MODEL).encode("".join(excerpt.prompt for excerpt in load_excerpts()))


def two_prompts(engine: Engine) -> None:
    """A long and a shorter prompt side by side, neither a whole number of pages."""
    engine.generate([corpus()[:300], corpus()[400:671]], PARAMS)


def three_turns(engine: Engine) -> None:
    """Each turn continues the last one's prompt and answer; what was cached of it is not computed again."""
    history = corpus()[:530]
    for question in (corpus()[700:740], corpus()[740:780], []):
        [output] = engine.generate([history], PARAMS)
        history = [*history, *output.token_ids, *question]
    assert engine.metrics.prefill_tokens == 530 + (582 - 512) + (634 - 512)


def to_the_end(engine: Engine) -> None:
    """Prompt and output fill the context, so that the drafts of the last steps lie in the reserve behind it."""
    [output] = engine.generate([corpus()[: engine.scheduler.context_length - NUM_OUTPUTS]], PARAMS)
    assert output.prompt_len + len(output.token_ids) == engine.scheduler.context_length


@dataclass(frozen=True)
class Run:
    settings: dict
    traffic: Callable[[Engine], None]
    faults: tuple[str, ...]


BUFFER, WIDTH, SCATTER = "bounds.kv_indices_without_topk", "bounds.row_width", "bounds.page_table_scatter"
EAGLE3_P64_K8 = {
    "draft": "eagle3",
    "page_size": 64,
    "topk": 8,
    "schedule": "overlap",
    "context_length": 320,
    "graphs": "on",
}
EAGLE_P4_K8 = {"draft": "eagle", "page_size": 4, "topk": 8, "schedule": "sync", "context_length": 320, "graphs": "on"}
P512_TURNS = {"page_size": 512, "topk": 4, "max_total_tokens": 8192, "context_length": 1024}
P256_END = {"page_size": 256, "topk": 4, "context_length": 768}
RUNS = {
    "EAGLE-3, P 64, K 8, overlap": Run(EAGLE3_P64_K8, two_prompts, (BUFFER, WIDTH)),
    "EAGLE, P 4, K 8, sync": Run(EAGLE_P4_K8, two_prompts, (BUFFER, WIDTH)),
    "EAGLE, P 4, K 8, sync, page tables": Run(
        EAGLE_P4_K8 | {"attention_backend": "paged", "graphs": "off"}, two_prompts, (SCATTER,)
    ),
    "P 512, multi-turn, prefix cache": Run(P512_TURNS, three_turns, (WIDTH,)),
    "P 256, long prompt to the row's end": Run(P256_END, to_the_end, (WIDTH,)),
}


def perform(run: Run) -> Engine:
    common = {"dtype": "float32", "max_total_tokens": 6144, "max_running_requests": 2}
    engine = Engine(EngineConfig(**(common | run.settings), canary=CanaryConfig(mode="raise")))
    run.traffic(engine)
    return engine


@pytest.mark.parametrize("name", RUNS)
def test_named_run_is_clean(name):
    """With all fixes in place it completes under mode raise, without a finding."""
    certificate = perform(RUNS[name]).canary.certificate()
    assert certificate["findings"] == []
    assert certificate["slots_checked"] > 1000


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, run in RUNS.items() for fault in run.faults])
def test_named_run_ends_typed_with_the_fix_undone(kv_fault, name, fault):
    """The same run with one fix undone stops with the error of the fault's entry."""
    kv_fault(fault, lambda: perform(RUNS[name]), code=find(fault).expected)
