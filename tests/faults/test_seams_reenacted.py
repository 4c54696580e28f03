"""Each published bug, brought back: the faulty run ends as its entry says, the same traffic without it is clean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from kvcanary import CanaryConfig, PlanError, faults
from kvcanary.faults.catalogue import find
from kvcanary.invariants import InvariantError, LengthOrderError, PageLeakError, TreeShapeError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.drafting.chain import ChainConstants
from spec_engine.models.embedded import EMBEDDED_MODEL, load_excerpts
from spec_engine.models.tokenizer import Tokenizer

ON = CanaryConfig(mode="raise")
COMMON = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 2, "num_steps": 3}

# By fault: settings under which it matters, lengths of the prompts, and settings under which it changes nothing.
CASES = {
    "bounds.kv_indices_without_topk": (
        {"page_size": 1, "topk": 4, "context_length": 128, "graphs": "on"},
        (110, 100),
        {"page_size": 1, "topk": 1, "context_length": 128, "graphs": "on"},
    ),
    "bounds.row_width": (
        {"page_size": 16, "topk": 4, "context_length": 128},
        (110, 20),
        {"page_size": 1, "topk": 1, "context_length": 128},
    ),
    "bounds.page_table_scatter": (
        {"page_size": 4, "topk": 4, "attention_backend": "paged"},
        (30, 21),
        {"page_size": 4, "topk": 4, "attention_backend": "torch"},
    ),
    "draft.parents_dtype": ({"page_size": 4, "topk": 1}, (30, 21), {"page_size": 4, "topk": 2}),
}
# By fault: the check that finds it, where it is called, and who stops the run when that check is switched off: torch, a
# kernel's wrapper, the canary, which refuses a plan that contradicts itself, or nobody.
CHECKS = {
    "bounds.kv_indices_without_topk": ("spec_engine.graphs.forward.check_index_buffer", ValueError),
    "bounds.row_width": ("spec_engine.memory.request_table.check_row_fits", RuntimeError),
    "bounds.page_table_scatter": ("spec_engine.step.hooks.check_index_lengths", PlanError),
    "draft.parents_dtype": ("spec_engine.drafting.tree.check_tree_array", None),
}


@cache
def corpus() -> list[int]:
    """Tokens of some hundred lines of code."""
    return Tokenizer.from_folder(EMBEDDED_MODEL).encode("".join(excerpt.prompt for excerpt in load_excerpts()))


def run(settings: dict, lens: Sequence[int], count: int = 8, canary: CanaryConfig = ON) -> Engine:
    """An engine that has completed prompts of these lengths."""
    engine = Engine(EngineConfig(**(COMMON | settings), canary=canary))
    engine.generate([corpus()[:length] for length in lens], SamplingParams(max_new_tokens=count, ignore_eos=True))
    return engine


@pytest.mark.parametrize("name", CASES)
def test_faulty_ends_in_the_typed_error(kv_fault, name):
    """The run stops with the error of the entry, before a forward reads or writes by the wrong value."""
    settings, lens, _ = CASES[name]
    error = kv_fault(name, lambda: run(settings, lens), code=find(name).expected)
    assert isinstance(error, InvariantError)


@pytest.mark.parametrize("name", CASES)
def test_clean_twin_is_silent(name):
    """The same traffic without the fault completes, and the canary has nothing to say."""
    settings, lens, _ = CASES[name]
    certificate = run(settings, lens).canary.certificate()
    assert certificate["findings"] == []
    assert certificate["slots_checked"] > 0


@pytest.mark.parametrize("name", CASES)
def test_quiet_twin_is_silent(name):
    """Armed where it does not apply it changes no value, and nobody complains."""
    _, lens, settings = CASES[name]
    with faults.arm(name) as armed:
        assert run(settings, lens).canary.certificate()["findings"] == []
    assert armed.num_strikes == 0


@pytest.mark.parametrize("name", CASES)
def test_without_its_check_it_is_not_found_by_it(monkeypatch, name):
    """Switched off, somebody else stops the run, later, or nobody does: the typed error is the check's own."""
    check, instead = CHECKS[name]
    settings, lens, _ = CASES[name]
    monkeypatch.setattr(check, lambda *args: None)
    with faults.arm(name) as armed:
        if instead is None:
            assert run(settings, lens).metrics.tokens_emitted
        else:
            with pytest.raises(instead) as caught:
                run(settings, lens)
            assert type(caught.value).__name__ != find(name).expected
    assert armed.num_strikes


def test_chain_constants_of_narrow_integers_are_refused():
    """Constants for topk 1 take the same dtype, and are refused when they are made."""
    with faults.arm("draft.parents_dtype"), pytest.raises(TreeShapeError, match="contiguous int32"):
        ChainConstants(max_bs=2, num_steps=3, num_draft_tokens=4)
    assert ChainConstants(max_bs=2, num_steps=3, num_draft_tokens=4).parent_list.tolist() == [[-1, 0, 1]] * 2


def append_cut_short(table, row, start, pages):
    """A slice of a row that is too narrow takes what fits, and says nothing."""
    table._filled[row] = start + len(pages) * table.page_size
    slots = table._slots_of(pages)[: table.width - start]
    table.table[row, start : start + len(slots)] = torch.from_numpy(slots)


@pytest.fixture
def cut_rows(monkeypatch):
    """The request table as it was published: rows are cut short in silence."""
    monkeypatch.setattr("spec_engine.memory.request_table.RequestTable.append_pages", append_cut_short)
    return monkeypatch


def test_rows_cut_short_are_seen_by_their_lengths(cut_rows):
    """Where no write overflows, the allocated length is still beyond the row (sgl-project/sglang#26972)."""
    settings, lens, _ = CASES["bounds.row_width"]
    with faults.arm("bounds.row_width"), pytest.raises(LengthOrderError, match=r"allocated \d+ <= row width"):
        run(settings, lens)


def test_what_the_row_checks_keep_away(cut_rows):
    """With both checks off branches are gathered out of range, and slots freed by the row leak."""
    cut_rows.setattr("spec_engine.memory.kv_memory.check_lengths", lambda *args: None)
    settings, lens, _ = CASES["bounds.row_width"]
    with faults.arm("bounds.row_width"):
        engine = Engine(EngineConfig(**(COMMON | settings)))
        engine.submit(corpus()[: lens[0]], SamplingParams(max_new_tokens=8))
        engine.step()
        with pytest.raises(IndexError, match="out of bounds"):
            engine.step()
    [request] = engine.running
    columns = engine.request_table.table[request.row, : len(request.pages) * 16 : 16]
    assert len(columns) < len(request.pages)
    request.pages = (columns // 16).tolist()
    del request.generations[len(columns) :]
    engine.cancel(request.request_id)
    with pytest.raises(PageLeakError, match=r"\d+ leaked"):
        engine.memory.check_accounting([])


PRESSED = {"page_size": 16, "topk": 2, "max_total_tokens": 448, "max_running_requests": 4, "new_token_ratio": 0.1}
ROOMY = PRESSED | {"max_total_tokens": 2048}


def outputs_and_retractions(settings: dict) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of four requests of 20 prompt tokens and 48 outputs, and how often one gave up its pages."""
    engine = Engine(EngineConfig(**(COMMON | settings)))
    prompts = [corpus()[start : start + 20] for start in range(0, 80, 20)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=48, ignore_eos=True))
    return [output.token_ids for output in outputs], engine.metrics.num_retractions


def test_the_worst_case_estimate_retracts_needlessly():
    """28 pages for four requests: 1 retraction by the tight estimate, 14 by the worst case, and the same tokens."""
    tokens, tight = outputs_and_retractions(PRESSED)
    with faults.arm("lengths.worst_case_estimate") as armed:
        worst_tokens, worst = outputs_and_retractions(PRESSED)
    assert armed.num_strikes
    assert (tight, worst) == (1, 14)
    assert worst_tokens == tokens


def test_without_pressure_the_worst_case_estimate_is_quiet():
    """Where the pool is large the estimate is wrong, and nobody is retracted for it."""
    with faults.arm("lengths.worst_case_estimate") as armed:
        assert outputs_and_retractions(ROOMY)[1] == 0
    assert armed.num_strikes
