"""Under schedule "overlap" a plain step is launched before the host has collected the one before it."""

from __future__ import annotations

from array import array
from itertools import chain, product

import pytest
import torch

from kvcanary.native.layout import ROWS
from kvcanary.native.request_lengths import spread_rows
from kvcanary_kernels.record.layout import MASK_32, STEP_SITE
from spec_engine import SamplingParams
from spec_engine.acceptance.walk import NO_TOKEN
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.hooks import STEP, TRUTH, UNCOLLECTED, Rows
from spec_engine.models.embedded import load_excerpts

PROMPTS = [excerpt.prompt[: 30 + 9 * number] for number, excerpt in enumerate(load_excerpts()[20:23])]
SETTINGS = {"draft": "none", "page_size": 4, "graphs": "on", "graph_buckets": [1, 3]}


@pytest.mark.parametrize(
    ("mode", "schedule", "sampling", "ahead"),
    [
        ("off", "overlap", {}, True),
        ("off", "sync", {}, False),
        ("raise", "overlap", {}, False),
        ("off", "overlap", {"logprobs": 1}, False),
    ],
)
def test_a_prefill_goes_ahead_of_its_first_token(make, monkeypatch, mode, schedule, sampling, ahead) -> None:
    """Its result names no token until it has landed, and the next step takes it from the device."""
    engine, found = make(mode, draft="none", page_size=4, schedule=schedule, prefill_chunk_tokens=16), []
    send = engine.results.send
    monkeypatch.setattr(engine.results, "send", lambda result, sums: found.append(result) or send(result, sums))
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, **sampling)
    outputs = [output.token_ids for output in engine.generate(PROMPTS, params)]
    first = [part.tokens for result in found if not result.is_decode for part in result.parts if part.tokens]
    assert first == [[NO_TOKEN] if ahead else [tokens[0]] for tokens in outputs]
    plain = make("off", draft="none", page_size=4)
    assert outputs == [output.token_ids for output in plain.generate(PROMPTS, params)]


@pytest.mark.parametrize("mode", ["off", "raise"])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_nobody_waits_for_a_plain_step(make, outcome, waits, ignore_eos: bool, mode: str) -> None:
    """Requests come, end and go over buckets and a size that has none; each gets what it gets without graphs."""
    prompts = [excerpt.prompt[: 40 + 7 * number] for number, excerpt in enumerate(load_excerpts()[20:26])]
    sampling = {"max_new_tokens": 9, "ignore_eos": ignore_eos}
    plain, _ = outcome(make("off", draft="none", page_size=4), prompts, **sampling)
    assert outcome(make(mode, schedule="overlap", **SETTINGS), prompts, **sampling)[0] == plain
    assert waits == []


@pytest.mark.parametrize(
    ("mode", "schedule", "sampling"),
    [("raise", "sync", {}), ("off", "sync", {}), ("off", "overlap", {"temperature": 0.7, "seed": 2})],
)
def test_where_the_next_step_needs_the_token_the_host_waits(make, outcome, waits, mode, schedule, sampling) -> None:
    """A host that is not to be behind, with a canary too, and what is drawn behind the program."""
    plain, _ = outcome(make(mode, draft="none", page_size=4), **sampling)
    assert outcome(make(mode, schedule=schedule, **SETTINGS), **sampling)[0] == plain
    assert bool(waits) is not bool(sampling)


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS | {"draft": "eagle", "topk": 2}], ids=["plain", "drafted"])
def test_the_number_of_a_step_comes_with_its_rows(make, settings: dict[str, object]) -> None:
    """Records carry the steps in which they were written, and the registry has nothing to launch for that."""
    engine = make("raise", schedule="overlap", **settings)
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40, ignore_eos=True))
    while engine.canary.step < 9:
        engine.step()
    registry, target = engine.canary.registry, engine.canary.session.state.pools[0]
    engine.canary.drain()
    pages = torch.tensor(engine.running[0].pages)
    slots = (pages[:, None] * 4 + torch.arange(4)).flatten()[: engine.running[0].committed_len]
    steps = (target.records[slots, STEP_SITE] & MASK_32).tolist()
    assert steps == sorted(steps)
    assert {1, 2, 7, 8} <= set(steps) <= set(range(1, 10))
    assert (int(registry.step), registry.turn) == (0, 9)


def test_a_feed_says_what_was_set() -> None:
    """Zeros behind a shorter section; a section that is not set again stays."""
    feed = Feed({"rows": 3, "live": 1}, torch.device("cpu"))
    for rows, live in (([4, 5, 6], [3]), ([7], None), ([8, 9], [2])):
        feed.set(rows=rows, **({} if live is None else {"live": live}))
        feed.send()
        assert feed["rows"].tolist() == rows + [0] * (3 - len(rows))
        assert feed["live"].tolist() == (live or [3])


def test_a_feed_says_rows_of_several_sections_at_once() -> None:
    """What the canary knows of rows, as often as a request has some; the sections around them stay."""
    for width, truth in product((1, 2), (None, object())):
        names = [f"own_{part}" for part in (*TRUTH, UNCOLLECTED)[: 4 + (truth is not None)]]
        feed = Feed({"before": 1, **dict.fromkeys(names, 6), STEP: 1, "behind": 2}, torch.device("cpu"))
        feed.set(before=[9], behind=[8, 7])
        rows = Rows(feed, "target", "own", "live", width, truth)
        for count in (3, 1, 0, 2):
            known = [[10 * part + number for number in range(count)] for part in range(ROWS.size)]
            reported, place = array("q", [*chain.from_iterable(known), 5]), rows.places[feed.turn]
            spread_rows(count, reported.buffer_info()[0], place, 7 + count)
            feed.send()
            for name, own in zip(names, known, strict=False):
                spread = [number for number in own for _ in range(width)]
                assert feed[name].tolist() == spread + [0] * (6 - len(spread))
            assert [feed[name].tolist() for name in ("before", STEP, "behind")] == [[9], [7 + count], [8, 7]]


@pytest.mark.gpu
def test_what_is_set_reaches_no_copy_that_is_on_its_way() -> None:
    """The device is busy while the host prepares the next step: each copy brings what was set before it was sent."""
    feed, seen = Feed({"rows": 4}, torch.device("cuda")), []
    for number in range(6):
        torch.cuda._sleep(20_000_000)
        feed.set(rows=[number] * 4)
        feed.send()
        seen.append(feed["rows"].clone())
    feed.set(rows=[99] * 4)
    assert torch.stack(seen)[:, 0].tolist() == list(range(6))
