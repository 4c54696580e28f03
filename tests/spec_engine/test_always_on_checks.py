"""The always-on checks in the engine itself, with the canary off: one structure is broken, its error comes out."""

from __future__ import annotations

import heapq
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcanary import invariants
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine import assembly as assembly_module
from spec_engine.drafting import drafter as drafter_module
from spec_engine.memory import sizes
from spec_engine.step import runner as runner_module
from spec_engine.step.runner import StepResult
from spec_engine.step.verify import Accepted

PAGE_SIZE = 4


def make_engine(folder, **settings) -> Engine:
    """Small pages, so that requests grow every few steps; no canary."""
    settings = {"page_size": PAGE_SIZE, "topk": 2, "num_steps": 3, "max_total_tokens": 1024} | settings
    return Engine(EngineConfig(model=str(folder), prefill_chunk_tokens=16, **settings))


@pytest.fixture
def engine(toy_model) -> Engine:
    """Two requests of 9 and 12 tokens, prefilled and two steps into their drafting."""
    engine = make_engine(toy_model)
    for length in (9, 12):
        engine.submit(list(range(1, 1 + length)), SamplingParams(max_new_tokens=40, ignore_eos=True))
    while (
        any(not request.output_ids for request in engine.scheduler.waiting or engine.running)
        or engine.scheduler.waiting
    ):
        engine.step()
    engine.step()
    engine.step()
    assert engine.canary is None
    return engine


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def error_of(engine: Engine) -> invariants.InvariantError:
    """What the engine raises on its way to the end."""
    with pytest.raises(invariants.InvariantError) as caught:
        finish(engine)
    return caught.value


def lose_a_page(engine: Engine) -> None:
    heapq.heappop(engine.allocator._free)


def free_a_page_twice(engine: Engine) -> None:
    heapq.heapreplace(engine.allocator._free, engine.running[0].pages[0])


def forget_a_page(engine: Engine) -> None:
    engine.running[0].pages.pop()


def give_a_page_to_two(engine: Engine) -> None:
    engine.running[0].pages.append(engine.running[1].pages[0])


def share_a_row(engine: Engine) -> None:
    engine.running[1].row = engine.running[0].row


def use_the_padding_row(engine: Engine) -> None:
    engine.running[0].row = 0


def move_the_length(engine: Engine) -> None:
    engine.running[0].committed_len += 1


def move_the_relay(engine: Engine) -> None:
    engine.relay.lens[engine.running[0].row] += 1


def exchange_the_proposals(engine: Engine) -> None:
    published = engine.drafter._published
    first, second = (request.row for request in engine.running)
    published[first], published[second] = published[second], published[first]


def consume_twice(engine: Engine) -> None:
    engine.drafter.publish = lambda *a: None


def underestimate_at_admission(engine: Engine) -> None:
    engine.scheduler.most_pages = lambda request: 2


def shrink_the_reserve(engine: Engine) -> None:
    engine.scheduler.reserve = 0


def estimate_with_another_reserve(engine: Engine) -> None:
    estimate = engine.scheduler.decode_estimate
    engine.scheduler.decode_estimate = lambda requests: estimate(requests) + len(requests)


def lose_a_running_request(engine: Engine) -> None:
    finish_request = engine._finish
    engine._finish = lambda request: (finish_request(request), engine.scheduler.finish(request))


def release_a_row_twice(engine: Engine) -> None:
    release = engine.request_table.release
    engine.request_table.release = lambda row: (release(row), release(row))


def change_the_forward(engine: Engine, **change: Callable) -> None:
    build = engine.runner.verify_forward

    def changed(batch, tree):
        forward = build(batch, tree)
        return replace(forward, **{name: make(getattr(forward, name)) for name, make in change.items()})

    engine.runner.verify_forward = changed


def drop_a_read_index(engine: Engine) -> None:
    change_the_forward(engine, kv_indices=lambda indices: indices[:-1])


def write_one_slot_less(engine: Engine) -> None:
    change_the_forward(engine, slots=lambda slots: slots[1:])


def break_the_tree(engine: Engine, node: int = 3, parent: int = 5) -> None:
    draft = engine.drafter.draft

    def broken(*step):
        tree = draft(*step)
        tree.parents[1, node] = parent
        return tree

    engine.drafter.draft = broken
    engine.runner.verify_forward = lambda batch, tree, build=engine.runner.verify_forward: build(
        batch, replace(tree, parents=OK)
    )


def launch_nothing(engine: Engine) -> None:
    engine.runner.decode = lambda requests: StepResult(True, (), frozenset())


OK = torch.tensor([[-1, 0, 0, 0, 0, 0, 0, 0]] * 2)  # what the forward is given, so that only `to_host` sees the tree


@pytest.mark.parametrize(
    ("break_it", "error", "words"),
    [
        (lose_a_page, invariants.PageLeakError, " in all: 1 leaked"),
        (free_a_page_twice, invariants.PageAliasError, "page 1 handed out with [1], but it is one of "),
        (forget_a_page, invariants.RowGapError, "pages of 4 slots appended at column "),
        (give_a_page_to_two, invariants.EstimateError, "req-0 owns "),
        (share_a_row, invariants.RowOwnershipError, "2 requests of a batch need 2 rows of their own, got req-0 row "),
        (use_the_padding_row, invariants.NullPageError, "req-0 uses row 0"),
        (move_the_length, invariants.CommitError, "req-0: committed length goes from "),
        (move_the_relay, invariants.RelayError, "but the proposals of row 1 are those of req-0 at length "),
        (exchange_the_proposals, invariants.RelayError, "but the proposals of row 1 are those of req-1 at length "),
        (consume_twice, invariants.RelayError, "but the proposals of row 1 are nobody's"),
        (underestimate_at_admission, invariants.EstimateError, "it was admitted for 2 of 4 slots at most"),
        (shrink_the_reserve, invariants.EstimateError, " + reserve 0 slots at page_size 4 need "),
        (
            estimate_with_another_reserve,
            invariants.EstimateMismatchError,
            "a decode step of 2 requests was estimated at ",
        ),
        (lose_a_running_request, invariants.NotRunningError, "finished, but it is none of the 1 running requests"),
        (release_a_row_twice, invariants.RowOwnershipError, "of 1 to 8 used, but no request holds it"),
        (drop_a_read_index, invariants.IndexLengthError, "verify[0] of pool 'target': kv_indices has "),
        (write_one_slot_less, invariants.IndexLengthError, "verify[0] of pool 'target': slots has 15 entries"),
        (
            launch_nothing,
            invariants.StalledError,
            "no token has left, no request has ended and nothing new was computed for 257 steps, ",
        ),
        (break_the_tree, invariants.TreeShapeError, "req-1: node 3 of 8 has parent 5, must lie in [0, 3)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_structure_is_a_typed_error_with_the_canary_off(engine, break_it, error, words):
    """The error of the rule that was broken comes before the engine goes on with the damage."""
    break_it(engine)
    caught = error_of(engine)
    assert type(caught) is error
    assert words in str(caught)


def test_an_engine_that_nobody_breaks_runs_to_its_end(engine):
    """The clean twin of them all."""
    finish(engine)
    assert engine.memory.num_available == engine.allocator.num_pages


def test_an_accepted_path_longer_than_the_draft_is_refused(engine, monkeypatch):
    """A step commits at most every drafted token and the bonus."""
    path = Accepted(list(range(5)), [1, 2, 3, 4, 5])
    monkeypatch.setattr(runner_module, "to_host", lambda tree, accepted, requests: [path, path])
    monkeypatch.setattr(engine.runner, "compact", lambda *a: None)
    error = error_of(engine)
    assert type(error) is invariants.CommitError
    assert "with 5 tokens accepted, a step commits what is accepted, 1 to 4 tokens" in str(error)


def test_branches_that_overlap_are_refused(engine, monkeypatch):
    """The stride between branches is checked against their length before any slot is looked up."""
    monkeypatch.setattr(drafter_module, "branch_stride", lambda tail, num_steps, page_size: num_steps - 1)
    error = error_of(engine)
    assert type(error) is invariants.BranchLayoutError
    assert "req-0: 2 branches of 3 slots from " in str(error)


def test_a_verify_window_beyond_what_is_owned_is_refused(toy_model, monkeypatch):
    """An allocation that counts the branches and forgets the tree is found before the target writes there."""
    monkeypatch.setattr(sizes, "draft_alloc_len", lambda page_size, topk, num_steps, nodes: num_steps)
    engine = make_engine(toy_model, page_size=1, topk=1)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4))
    error = error_of(engine)
    assert type(error) is invariants.BranchLayoutError
    assert str(error) == "req-0: verify window [3, 7) of 4 nodes ends beyond the 6 slots that are allocated"


def test_a_row_narrower_than_what_is_owned_is_refused(toy_model):
    """The slots that a request owns must fit into its row, also where no page is added."""
    engine = make_engine(toy_model, page_size=64)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=20, ignore_eos=True))
    engine.step()
    engine.step()
    engine.request_table.table = engine.request_table.table[:, :200].contiguous()
    error = error_of(engine)
    assert type(error) is invariants.LengthOrderError
    assert "<= allocated 320 <= row width 200 is broken" in str(error)


def test_tokens_that_were_not_accepted_are_refused(engine):
    """Output that grows by more than what was committed leaves more than the bonus token pending."""
    collect = engine._emit
    engine._emit = lambda request, length, part: collect(request, length, replace(part, tokens=[*part.tokens, 5]))
    error = error_of(engine)
    assert type(error) is invariants.CommitError
    assert str(error).endswith(" = 2 tokens pending, must be exactly 1")


def test_a_stale_chunk_is_refused(toy_model, monkeypatch):
    """A chunk that does not begin where the committed prefix ends would be written over it, or leave a hole."""
    engine = make_engine(toy_model)
    engine.submit(list(range(1, 40)), SamplingParams(max_new_tokens=4))
    build = engine.scheduler.next_chunks
    monkeypatch.setattr(
        engine.scheduler, "next_chunks", lambda running: [replace(chunk, start=0) for chunk in build(running)]
    )
    error = error_of(engine)
    assert type(error) is invariants.ChunkError
    assert str(error) == (
        "req-0: chunk [0, 32) must begin at the committed length 16 and end within the prompt of 39 tokens"
    )


def test_a_chunk_that_feeds_the_draft_another_token_is_refused(toy_model, monkeypatch):
    """The entry at a chunk's end is the next prompt token, not the one that the target sampled there."""
    engine = make_engine(toy_model)
    engine.submit(list(range(1, 40)), SamplingParams(max_new_tokens=4))
    build = engine.runner.following
    monkeypatch.setattr(engine.runner, "following", lambda chunk, sampled: [*build(chunk, sampled)[:-1], 96])
    error = error_of(engine)
    assert type(error) is invariants.ChunkError
    assert str(error) == "req-0: draft position 15 is fed token 96, the prompt has 17 there"


def test_a_reserve_below_one_step_is_refused_at_start(toy_model, monkeypatch):
    """An engine whose reserve does not hold a drafting step does not start."""
    monkeypatch.setattr(sizes, "reserve_len", lambda alloc_len, max_accept, lag, ahead: alloc_len - 1)
    with pytest.raises(invariants.ReserveError, match="size it by the longest draft"):
        make_engine(toy_model)


def test_a_pool_without_the_null_page_is_refused_at_start(toy_model, monkeypatch):
    """A pool that is one page short would lose the allocator's last page."""
    build = assembly_module.POOLS["auto"]
    short = lambda *a, num_pages, **kw: build(*a, num_pages=num_pages - 1, **kw)  # noqa: E731
    monkeypatch.setitem(assembly_module.POOLS, "auto", short)
    with pytest.raises(invariants.PoolSizeError, match="pool 'target' has 1024 slots, 256 pages and the null page"):
        make_engine(toy_model)


def test_parts_with_different_page_sizes_are_refused_at_start(toy_model, monkeypatch):
    """Scheduler, request table and pools must count the same pages."""
    build = assembly_module.RequestTable
    monkeypatch.setattr(assembly_module, "RequestTable", lambda n, width, size, device: build(n, width, 2, device))
    with pytest.raises(invariants.PageSizeError, match="scheduler 2, request table 2, pool 'target' 4"):
        make_engine(toy_model)


def test_more_requests_than_rows_are_refused(toy_model, monkeypatch):
    """A scheduler that admits beyond the request table is stopped before it takes another request's row."""
    engine = make_engine(toy_model, max_running_requests=1)
    monkeypatch.setattr(engine.scheduler, "max_running", 2)
    for _ in range(2):
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert type(error_of(engine)) is invariants.RowsExhaustedError


def test_checks_of_the_engine_are_on_without_asserts(toy_model):
    """`python -O` keeps them: an engine that loses a page stops with the sentence that says so."""
    script = (
        "import runpy, sys\nassert False, 'this interpreter keeps asserts'\n"
        f"test = runpy.run_path({__file__!r})\nengine = test['make_engine'](sys.argv[1])\n"
        "engine.submit([1, 2, 3], test['SamplingParams'](max_new_tokens=8))\ntest['lose_a_page'](engine)\n"
        "try:\n    engine.step()\nexcept test['invariants'].PageLeakError as error:\n    print(error)"
    )
    command = [sys.executable, "-O", "-c", script, str(toy_model)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout == (
        "254 pages free + 0 quarantined + 1 owned by requests + 0 evictable + 0 protected in the prefix tree = 255 "
        "!= 256 in all: 1 leaked\n"
    )
