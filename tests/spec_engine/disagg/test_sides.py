"""Both sides in one process: damage before and behind a handover, and what each mode makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from spec_engine import Engine
from spec_engine.disagg.decode_side import Arrival, DecodeSide
from spec_engine.disagg.handover import Handover
from spec_engine.disagg.link import until_over
from spec_engine.disagg.links import make_link
from spec_engine.disagg.prefill_side import PrefillSide
from spec_engine.request import TokenEvent
from two_engines import DECODE, PAGE, PARAMS, PREFILL, make_engine, prompt


@pytest.fixture(scope="module")
def sender() -> Iterator[tuple[Engine, PrefillSide]]:
    engine, link = make_engine(schedule="overlap"), make_link("torch", "a")
    yield engine, PrefillSide(engine, link, PREFILL)
    link.close()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return list(make_engine().generate([prompt(0)], PARAMS)[0].token_ids)


def run(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def send(sender: tuple[Engine, PrefillSide]) -> Handover:
    engine, side = sender
    name = engine.submit(prompt(0), PARAMS, hands_over=True)
    assert [event.finish_reason for event in run(engine)] == ["handed_over"]
    return side.hand_over(name)


def receive(sender: tuple[Engine, PrefillSide], handover: Handover, **settings) -> tuple[Engine, DecodeSide, Arrival]:
    engine, link = make_engine(**settings), make_link("torch", "b")
    side = DecodeSide(engine, link, DECODE)
    side.meet(sender[1].card)
    arrival = side.begin(handover)
    until_over(arrival.transfer, 10)
    return engine, side, arrival


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_either_schedule_goes_on_where_the_other_has_ended(sender, expected, schedule):
    """The sender ran a step ahead; tokens are those of one engine, and nothing is found on either side."""
    engine, side, arrival = receive(sender, send(sender), schedule=schedule)
    side.submit(arrival)
    assert tokens_of(run(engine)) == expected
    assert engine.metrics.prefill_tokens == 1
    assert not engine.canary.findings
    assert not sender[0].canary.findings


def test_mode_heal_computes_a_damaged_prompt_again(sender, expected):
    """Found before the first token, and the tokens are those of a clean run."""
    engine, side, arrival = receive(sender, send(sender), mode="heal")
    first = arrival.places[2] * PAGE
    engine.memory.tier.parts[0][first, 1, 0, 0, :1].view(torch.int64).bitwise_xor_(1 << 9)
    side.submit(arrival)
    assert tokens_of(run(engine)) == expected
    assert engine.canary.findings[0].code == "T1"
    assert engine.metrics.num_heals == 1
    assert engine.metrics.prefill_tokens == 1 + len(prompt(0))
    assert engine.memory.tier.num_free == engine.memory.tier.num_pages


def test_right_bytes_of_another_request_are_named(sender):
    """The seal fits the bytes, and neither fits the tokens: R6, before the first token."""
    engine, side, arrival = receive(sender, replace(send(sender), tokens=tuple(prompt(1))))
    side.submit(arrival)
    events = run(engine)
    assert (tokens_of(events), events[-1].finish_reason) == ([], "kv_corruption")
    assert "R6" in {finding.code for finding in engine.canary.findings}


def test_what_is_damaged_before_it_leaves_is_not_handed_over(monkeypatch):
    """It ends as any damaged request does, and nothing of it is kept."""
    engine, link = make_engine(), make_link("torch", "c")
    PrefillSide(engine, link, PREFILL)
    before = engine.memory.hand_over

    def hand_over(request):
        block = before(request)
        engine.pools["target"].kv[1, request.pages[1] * PAGE, 0, 0, :1].view(torch.int64).bitwise_xor_(1 << 9)
        return block

    monkeypatch.setattr(engine.memory, "hand_over", hand_over)
    name = engine.submit(prompt(0), PARAMS, hands_over=True)
    events = run(engine)
    assert [(event.token_ids, event.finish_reason) for event in events] == [((), "kv_corruption")]
    assert engine.memory.tier.num_free == engine.memory.tier.num_pages
    with pytest.raises(KeyError):
        engine.take_handed_over(name)


def test_a_canary_that_is_off_hands_over_without_a_seal(expected):
    """Bytes travel all the same, and nobody compares them."""
    engine, link = make_engine(mode="off"), make_link("torch", "d")
    sender = engine, PrefillSide(engine, link, PREFILL)
    handover = Handover.from_bytes(send(sender).to_bytes())
    assert handover.seal is None
    receiver, side, arrival = receive(sender, handover, mode="off")
    side.submit(arrival)
    assert tokens_of(run(receiver)) == expected
    assert receiver.metrics.prefill_tokens == 1
