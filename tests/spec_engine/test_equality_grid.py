"""Drafting never changes a token: 1,440 configurations against plain greedy decoding, float64, a random 2-layer model.

P in {1, 4, 16, 64, 256, 512} with each distinct S mod P of {0, 1, P - 1} are 16 pairs. K in {1, 2, 4, 8} and T in
{1, 2, 3, 5} with each possible N of {2, T + 1, K + 1, all candidates} are 45 trees, a chain having T + 1 nodes only.
The host knows each verify, or lags one behind: 16 * 45 * 2 = 1,440. In each, accepted lengths go over 1 to T + 1,
prompts share prefixes and come in chunks, requests are retracted, resumed and cancelled. In trees of all candidates the
true continuation is never the likeliest, so that accepted nodes lie apart.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import NamedTuple

import pytest
import torch

from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.sizing import draft_alloc_len, pages_for, reserve_len
from spec_engine.mock import KnownDraft, KnownText, MockTokenizer, known_text, random_model

PAGE_SIZES, TOPKS, STEPS, SCHEDULES = (1, 4, 16, 64, 256, 512), (1, 2, 4, 8), (1, 2, 3, 5), ("sync", "overlap")
VOCAB, NEW_TOKENS, CANCELLED_AFTER = 97, 20, 5
IN_CI = 36
MOST_TOKENS = 4 * max(PAGE_SIZES)  # that a text has: three pages, and what may follow


class Case(NamedTuple):
    page_size: int
    remainder: int  # of the first request's committed length at its first draft
    topk: int
    num_steps: int
    num_nodes: int
    schedule: str

    @property
    def reserve(self) -> int:
        alloc_len = draft_alloc_len(self.page_size, self.topk, self.num_steps, self.num_nodes)
        return reserve_len(alloc_len, self.num_steps + 1, SCHEDULES.index(self.schedule))


def most_nodes(topk: int, num_steps: int) -> int:
    return topk + (num_steps - 1) * topk**2 + 1


def node_counts(topk: int, num_steps: int) -> list[int]:
    most = most_nodes(topk, num_steps)
    return [num_steps + 1] if topk == 1 else sorted({min(n, most) for n in (2, num_steps + 1, topk + 1, most)})


GRID = [
    Case(page_size, remainder, topk, num_steps, num_nodes, schedule)
    for page_size, topk, num_steps, schedule in itertools.product(PAGE_SIZES, TOPKS, STEPS, SCHEDULES)
    for remainder in sorted({0, 1 % page_size, page_size - 1})
    for num_nodes in node_counts(topk, num_steps)
]
CHOSEN = random.Random(14).sample(GRID, IN_CI)


def case_id(case: Case) -> str:
    return "P{}-r{}-K{}-T{}-N{}-{}".format(*case)


@cache
def model():
    return random_model(5, vocab_size=VOCAB, max_position_embeddings=MOST_TOKENS)


@cache
def text(shared: int, shared_len: int, seed: int, length: int) -> KnownText:
    """``shared_len`` tokens of one seed, the rest of another, and what follows; later positions need the lag's room."""
    generators = (torch.Generator().manual_seed(s) for s in (shared, seed))
    head, tail = (torch.randint(VOCAB, (MOST_TOKENS,), generator=generator) for generator in generators)
    prompt = [*head[:shared_len].tolist(), *tail[: length - shared_len].tolist()]
    return known_text(model(), prompt, NEW_TOKENS + 2 * max(STEPS) + 4)


def texts_of(case: Case) -> list[KnownText]:
    """Three that fill the pool, of which two need a new page after 4 tokens; then, when they have begun to draft, one
    that shares a page or more with the first, one to be cancelled, and the first again."""
    unit = max(case.page_size, 8)
    length = 2 * unit + case.remainder
    growing = unit + (-unit - case.reserve - 4) % case.page_size
    first, sharing = text(1, length, 1, length), text(1, unit + 3, 2, length)
    return [first, text(3, 0, 3, growing), text(4, 0, 4, growing), sharing, text(5, 0, 5, growing), first]


def forced_lens(texts: list[KnownText], case: Case) -> dict[tuple[int, int], int]:
    """By text and committed length what a verify is to emit: 1, 2, ... to T + 1 in turn, as far as N nodes reach."""
    lens = {}
    for number, known in enumerate(texts):
        committed, turn = len(known.prompt), number
        while committed < len(known.tokens):
            lens[number, committed] = min(1 + turn % (case.num_steps + 1), case.num_nodes)
            committed, turn = committed + lens[number, committed], turn + 1
    return lens


class Run:
    """One configuration under way: an engine whose pool is too small, its outputs, the lengths that it accepted."""

    def __init__(self, case: Case) -> None:
        self.texts = texts_of(case)
        self.forced = forced_lens(self.texts, case)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.accepted: set[int] = set()
        self.num_cached = 0
        self.engine = engine = self.make_engine(case)
        decode, acquire = engine.runner.decode, engine.memory.cache.acquire
        engine.runner.decode = lambda requests: self.judged(decode(requests))
        engine.memory.cache.acquire = lambda *known: self.counted(acquire(*known))

    def make_engine(self, case: Case) -> Engine:
        pages = sum(pages_for(len(known.prompt), case.reserve, case.page_size) for known in self.texts[:3])
        pages = max(pages, pages_for(len(self.texts[0].prompt) + NEW_TOKENS, case.reserve, case.page_size))
        config = EngineConfig(
            page_size=case.page_size,
            topk=case.topk,
            num_steps=case.num_steps,
            num_draft_tokens=case.num_nodes,
            schedule=case.schedule,
            dtype="float64",
            max_total_tokens=pages * case.page_size,
            max_running_requests=5,
            context_length=MOST_TOKENS,
            prefill_chunk_tokens=max(case.page_size, 8) + 5,
            new_token_ratio=0.0,
        )
        is_second = case.topk > 1 and case.num_nodes == most_nodes(case.topk, case.num_steps)
        draft = KnownDraft(model(), self.texts[:5], lambda *place: self.forced.get(place, 1), is_second=is_second)
        return Engine(config, model=model(), draft=draft, tokenizer=MockTokenizer())

    def submit(self, number: int) -> str:
        params = SamplingParams(max_new_tokens=NEW_TOKENS)
        request = self.engine.submit(self.texts[number].prompt, params)
        self.outputs[request] = []
        return request

    def step(self) -> None:
        for event in self.engine.step():
            self.outputs[event.request_id] += event.token_ids
            self.reasons[event.request_id] = event.finish_reason

    def until(self, request: str, count: int) -> None:
        """Step until a request has put out so many tokens."""
        while len(self.outputs[request]) < count:
            self.step()

    def judged(self, result):
        """Each verify emits what was asked for, no more and no less."""
        prompts = [known.prompt for known in self.texts[:5]]
        for part in result.parts:
            count = len(part.tokens)
            assert count == self.forced[prompts.index(part.request.prompt_ids), part.committed_len - count]
            self.accepted.add(count)
        return result

    def counted(self, num_cached: int) -> int:
        self.num_cached += num_cached
        return num_cached


@torch.inference_mode()
def check(case: Case) -> None:
    """Everything that one configuration promises."""
    run = Run(case)
    assert len(run.texts[0].prompt) % case.page_size == case.remainder
    names = [run.submit(number) for number in (0, 1, 2)]
    run.until(names[0], 1)
    names += [run.submit(number) for number in (3, 4, 5)]
    run.until(names[4], CANCELLED_AFTER)
    run.reasons[names[4]] = run.engine.cancel(names[4]).finish_reason
    while run.engine.has_work:
        run.step()
    for name, known in zip(names, run.texts, strict=True):
        count = len(run.outputs[name]) if name == names[4] else NEW_TOKENS
        assert run.outputs[name] == known.continuation[:count]
    assert [run.reasons[name] for name in names] == ["length"] * 4 + ["cancelled", "length"]
    assert run.accepted == set(range(1, min(case.num_steps + 1, case.num_nodes) + 1))
    assert run.engine.metrics.num_retractions > 0
    assert run.num_cached >= max(case.page_size, 8)
    run.engine.memory.cache.check_references([])


def test_there_are_1440_configurations() -> None:
    """The grid leaves none out, and the seeded part of it has every page size, width, depth and schedule."""
    assert len(GRID) == len(set(GRID)) == 1440
    assert len(set(CHOSEN)) == IN_CI
    for name, values in (("page_size", PAGE_SIZES), ("topk", TOPKS), ("num_steps", STEPS), ("schedule", SCHEDULES)):
        assert {getattr(case, name) for case in CHOSEN} == set(values)


@pytest.mark.parametrize("case", CHOSEN, ids=case_id)
def test_output_equals_plain_decoding(case: Case) -> None:
    """Tokens are those of dense greedy decoding, whatever is accepted, shared, chunked, retracted and cancelled."""
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(GRID) - set(CHOSEN)), ids=case_id)
def test_output_equals_plain_decoding_everywhere(case: Case) -> None:
    """The same for all others."""
    check(case)
