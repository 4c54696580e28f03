"""Handovers and cards as bytes: they come back as they were, and whatever else comes is refused in a sentence."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from kvcanary import SealError
from kvcanary.transfers import Peer
from kvcanary.transfers.wire import digest_of
from spec_engine import SamplingParams
from spec_engine.disagg.card import EngineCard
from spec_engine.disagg.errors import HandoverError, HandshakeError
from spec_engine.disagg.handover import Handover
from spec_engine.disagg.links import make_link
from spec_engine.disagg.prefill_side import PrefillSide
from spec_engine.errors import ConfigError
from two_engines import HOST_PAGES, PAGE, PARAMS, PREFILL, make_engine, prompt

EVERY = SamplingParams(
    max_new_tokens=7,
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    seed=-9,
    ignore_eos=True,
    stop_token_ids=(4, 5),
    stop=("ende", "\n"),
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias={3: -1.5, 90: 2.0},
    logprobs=0,
)


@pytest.fixture(scope="module")
def side() -> PrefillSide:
    return PrefillSide(make_engine(), make_link("torch", "t"), PREFILL)


def sent(side: PrefillSide, params: SamplingParams = PARAMS, length: int = 30, **how: object) -> Handover:
    engine = side._engine
    name = engine.submit(prompt(0, length), params, hands_over=True, **how)
    while engine.has_work:
        engine.step()
    return side.hand_over(name)


@pytest.fixture(scope="module")
def handover(side: PrefillSide) -> Handover:
    return sent(side, EVERY, priority=-2, salt="tenant", adapter="lora-1")


def test_every_field_comes_back(handover: Handover):
    """The same bytes once more, and all that a client had asked for."""
    wire = handover.to_bytes()
    back = Handover.from_bytes(wire)
    assert back.to_bytes() == wire
    assert replace(back, seal=None) == replace(handover, seal=None)
    assert (back.params, back.priority, back.salt, back.adapter) == (EVERY, -2, "tenant", "lora-1")
    assert (back.tokens, back.length, len(back.places)) == (tuple(prompt(0)), 29, 8)
    assert {field.name for field in fields(EVERY) if getattr(EVERY, field.name) == field.default} == set()


def test_a_prompt_of_one_token_hands_nothing_over(side: PrefillSide):
    """There is nothing but the token that is forwarded again."""
    one = sent(side, length=1)
    assert (one.length, one.places, one.seal) == (0, (), None)
    assert Handover.from_bytes(one.to_bytes()) == one


def test_where_the_tier_is_full_of_leases_nothing_is_handed_over(side: PrefillSide):
    """Blocks that somebody may come for are evicted for nobody."""
    before = len(side.leases)
    while (last := sent(side)).places:
        assert len(side.leases) * 8 <= HOST_PAGES
    assert (last.length, last.seal) == (0, None)
    assert len(side.leases) == HOST_PAGES // 8 >= before
    side._clock = lambda: float("inf")
    side.tend()
    assert (len(side.leases), side._tier.num_free) == (0, HOST_PAGES)
    assert side.num_expired == HOST_PAGES // 8


def test_a_card_comes_back(side: PrefillSide):
    """With all that is compared, and the address."""
    back = EngineCard.from_bytes(side.card.to_bytes())
    assert back == side.card
    assert (back.page_size, back.num_pages) == (PAGE, HOST_PAGES)
    assert back.address
    side.card.expect(back)


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("transport", {"transport": "nixl"}, "nixl"),
        ("seed id", {"seed_id": "1" * 16}, "1" * 16),
        ("model", {"model": "other@2"}, "other@2"),
        ("layout", {"layouts": ()}, ""),
        ("row of a slot", {"rows": ("bfloat16 4x2x4x8",)}, "bfloat16 4x2x4x8"),
        ("order of a page", {"order": "head, slot"}, "head, slot"),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_both_values(side: PrefillSide, name, changes, found):
    """Before the first byte: what this one has, and what the other has."""
    with pytest.raises(HandshakeError, match=f"must have one {name}, got .* here and .* there") as caught:
        side.card.expect(replace(side.card, **changes))
    assert caught.value.found == found
    assert caught.value.expected != found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"places": (1, 2)}, "got 29 on 2 pages"),
        ({"length": 30}, "30 tokens must have K and V of fewer"),
        ({"places": (0, 1, 2, 3, 4, 5, 6, 7)}, "a handover names 0"),
        ({"places": (1, 2, 3, 4, 5, 6, 7, 25)}, "pages 1 to 24, a handover names 25"),
        ({"seal": None}, "with a seal exactly where its sender has a canary"),
        ({"length": 4, "places": (1,)}, "must be of its 1 pages"),
    ],
)
def test_what_no_sender_with_this_card_can_have_sent_is_refused(side: PrefillSide, handover, changes, sentence):
    """With what was said and what can be."""
    handover.check(side.card)
    with pytest.raises(HandoverError, match=sentence):
        replace(handover, **changes).check(side.card)


def test_bytes_that_are_none_are_refused(side: PrefillSide, handover: Handover):
    """Cut, changed, another message, or parameters that no request has: SealError, and nothing else."""
    wire, card = handover.to_bytes(), side.card.to_bytes()
    draw = random.Random(5)
    for own, read in ((wire, Handover.from_bytes), (card, EngineCard.from_bytes)):
        for _ in range(150):
            place = draw.randrange(len(own))
            changed = bytearray(own)
            changed[place] ^= 1 << draw.randrange(8)
            for bad in (bytes(changed), own[:place], own + b"x"):
                with pytest.raises(SealError):
                    read(bad)
    with pytest.raises(SealError, match="no handover"):
        Handover.from_bytes(card)
    with pytest.raises(SealError, match="no card"):
        EngineCard.from_bytes(wire)
    params = replace(PARAMS)
    object.__setattr__(params, "top_p", 2.0)
    with pytest.raises(SealError, match=r"no request has: top_p must lie in \(0, 1\], got 2.0"):
        Handover.from_bytes(replace(handover, params=params).to_bytes())


def test_hostile_bytes_with_a_right_digest_do_no_harm(side: PrefillSide, handover: Handover):
    """Whatever they say, it is a handover or a card like any other, or SealError."""
    draw, num_refused = random.Random(6), 0
    for own, read in ((handover.to_bytes(), Handover.from_bytes), (side.card.to_bytes(), EngineCard.from_bytes)):
        for _ in range(300):
            changed = bytearray(own[:-16])
            for _ in range(draw.choice((1, 1, 4))):
                changed[draw.randrange(32, min(len(changed), 1200))] = draw.choice((0, 1, 127, 255))
            try:
                read(bytes(changed) + digest_of(bytes(changed)))
            except SealError:
                num_refused += 1
    assert num_refused > 100


def test_an_engine_without_a_tier_cannot_take_part():
    """It says which setting is missing."""
    with pytest.raises(ConfigError, match="host_pages is 0"):
        PrefillSide(make_engine(host_pages=0), make_link("torch", "t"), Peer("p", 0, "u"))


def test_transports_that_are_not_there():
    """A name that nobody knows, with those that are."""
    with pytest.raises(ConfigError, match="nixl or torch, got 'tcp'"):
        make_link("tcp", "t")
