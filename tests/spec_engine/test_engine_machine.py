"""Any order of submitting, stepping and cancelling: pages add up, the canary is silent, outputs are the plain ones."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.sizing import draft_alloc_len, pages_for, reserve_len
from spec_engine.mock import KnownDraft, KnownText, MockTokenizer, known_text, random_model

VOCAB, MOST_NEW = 97, 12
PROMPT_LENS = (2, 9, 16, 17, 31, 40, 48, 57)
LEAST_SLOT_CHECKS = 10**7


class Shape(NamedTuple):
    page_size: int
    topk: int
    num_steps: int
    num_nodes: int
    is_second: bool  # whether accepted paths leave the first branch
    is_split: bool = False  # whether the device has room for one of the longest requests alone


PLAIN = Shape(4, 1, 0, 1, False)
SHAPES = [
    PLAIN,
    Shape(1, 1, 3, 4, False),
    Shape(1, 2, 3, 11, True),
    Shape(4, 1, 5, 6, False),
    Shape(4, 2, 2, 7, True),
    Shape(4, 4, 3, 6, False),
    Shape(16, 2, 3, 11, True),
    Shape(16, 4, 1, 5, True),
]
SPLIT_SHAPES = [Shape(8, 1, 3, 4, False, True), PLAIN._replace(is_split=True)]


@cache
def model():
    return random_model(6, vocab_size=VOCAB)


@cache
def texts() -> list[KnownText]:
    """Prompts of two families: those of one share all but the last tokens, whatever their length."""
    known = []
    for number, length in enumerate(PROMPT_LENS):
        head, tail = (
            torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(s)) for s in (number % 2, number)
        )
        prompt = [*head[: length - 2].tolist(), *tail[:2].tolist()]
        known.append(known_text(model(), prompt, MOST_NEW + 24))
    return known


def make_engine(shape: Shape, schedule: str, room: int, **settings: object) -> Engine:
    """A pool that holds the longest request and ``room`` eighths more; admission counts with prompts alone."""
    page_size, topk, num_steps, num_nodes, is_second, is_split = shape
    reserve, draft = 1, None
    settings |= {"draft": "none"}
    if num_steps:
        lag = int(schedule == "overlap")
        reserve = reserve_len(draft_alloc_len(page_size, topk, num_steps, num_nodes), num_steps + 1, lag)
        draft = KnownDraft(model(), texts(), lambda *place: 1 + hash(place) % (num_steps + 1), is_second=is_second)
        settings |= {"draft": "auto", "topk": topk, "num_steps": num_steps, "num_draft_tokens": num_nodes}
    longest = pages_for(max(PROMPT_LENS) + MOST_NEW, reserve, page_size)
    pages = longest * (8 + room) // 8 + 1
    if is_split:
        settings |= {"max_device_tokens": longest * page_size, "device_turn": 2}
    config = EngineConfig(
        page_size=page_size,
        schedule=schedule,
        dtype="float64",
        max_total_tokens=pages * page_size,
        max_running_requests=4,
        context_length=96,
        prefill_chunk_tokens=35,
        new_token_ratio=0.0,
        canary=CanaryConfig(mode="raise", content="full", seed=1),
        **settings,
    )
    return Engine(config, model=model(), draft=draft, tokenizer=MockTokenizer())


class Traffic(RuleBasedStateMachine):
    """An engine and what became of its requests: (number of the text, tokens asked for), outputs and last words."""

    slots_checked = num_retractions = num_sharing = num_swaps = num_ahead = 0  # of all runs

    @initialize(shape=st.sampled_from(SHAPES), schedule=st.sampled_from(["sync", "overlap"]), room=st.integers(0, 5))
    def begin(self, shape: Shape, schedule: str, room: int) -> None:
        self.engine = make_engine(shape, schedule, room)
        self.asked: dict[str, tuple[int, int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    @rule(
        numbers=st.lists(st.integers(0, len(PROMPT_LENS) - 1), min_size=1, max_size=2),
        count=st.integers(1, MOST_NEW),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "other"]),
    )
    def submit(self, numbers: list[int], count: int, priority: int, salt: str) -> None:
        for number in numbers:
            params = SamplingParams(max_new_tokens=count)
            name = self.engine.submit(texts()[number].prompt, params, priority=priority, salt=salt)
            self.asked[name], self.outputs[name] = (number, count), []

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.collected(self.engine.step())

    @precondition(lambda self: len(self.reasons) < len(self.asked))
    @rule(data=st.data())
    def cancel(self, data) -> None:
        name = data.draw(st.sampled_from([name for name in self.asked if name not in self.reasons]))
        self.collected([self.engine.cancel(name)])
        assert self.engine.cancel(name) is None

    @invariant()
    def pages_add_up(self) -> None:
        self.engine.memory.check_accounting(self.engine.running)
        self.engine.memory.cache.check_references(self.engine.running)
        Traffic.num_sharing += sum(request.num_shared > 0 for request in self.engine.running)
        Traffic.num_ahead += sum(landing.result.drafted is not None for landing in self.engine._pending)

    def collected(self, events) -> None:
        for event in events:
            assert event.request_id not in self.reasons
            self.outputs[event.request_id] += event.token_ids
            if event.finished:
                self.reasons[event.request_id] = event.finish_reason

    def teardown(self) -> None:
        while self.engine.has_work:
            self.collected(self.engine.step())
            self.pages_add_up()
        for name, (number, count) in self.asked.items():
            got = self.outputs[name]
            assert got == texts()[number].continuation[: len(got)]
            assert self.reasons[name] == "length" if len(got) == count else "cancelled"
        certificate = self.engine.canary.certificate()
        assert (certificate["findings"], certificate["disabled"]) == ([], [])
        Traffic.slots_checked += certificate["slots_checked"]
        Traffic.num_retractions += self.engine.metrics.num_retractions
        Traffic.num_swaps += 0 if self.engine.split is None else self.engine.split.num_swapped_in


class AheadTraffic(Traffic):
    """The same in captured steps, each launched before the host has collected the last one."""

    @initialize(shape=st.sampled_from(SHAPES), room=st.integers(0, 5))
    def begin(self, shape: Shape, room: int) -> None:
        super().begin(shape, "overlap", room)
        self.engine = make_engine(shape, "overlap", room, graphs="on", graph_buckets=[2, 4])

    def teardown(self) -> None:
        super().teardown()
        assert "truth not known to the host" not in self.engine.canary.certificate()["unchecked"]


class SplitTraffic(Traffic):
    """The same where not all that run have room on the device."""

    @initialize(
        shape=st.sampled_from(SPLIT_SHAPES), schedule=st.sampled_from(["sync", "overlap"]), room=st.integers(5, 9)
    )
    def begin(self, shape: Shape, schedule: str, room: int) -> None:
        super().begin(shape, schedule, room)


def run(examples: int, machine: type[Traffic] = Traffic) -> None:
    """So many random histories of 40 actions, the same ones every time."""
    Traffic.slots_checked = Traffic.num_retractions = Traffic.num_sharing = Traffic.num_swaps = Traffic.num_ahead = 0
    options = settings(max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=options)


def test_any_order_of_actions_is_clean() -> None:
    """Pages add up after each action and at idle, no finding, outputs are those of plain decoding."""
    run(25)
    assert Traffic.num_retractions > 0
    assert Traffic.num_sharing > 0


def test_any_order_of_actions_is_clean_where_pages_come_and_go() -> None:
    """The device has room for one of the longest requests, up to four are under way."""
    run(12, SplitTraffic)
    assert Traffic.num_swaps > 100


def test_any_order_of_actions_is_clean_ahead_of_the_host() -> None:
    """Requests end, are cancelled and retracted with steps of theirs in flight."""
    run(5, AheadTraffic)
    assert Traffic.num_ahead > 20


@pytest.mark.slow
def test_any_order_of_actions_is_clean_for_long() -> None:
    """The same 2,000 times, and silence over 10 million slot checks."""
    run(2000)
    assert Traffic.slots_checked >= LEAST_SLOT_CHECKS
    run(200, SplitTraffic)
    run(200, AheadTraffic)
