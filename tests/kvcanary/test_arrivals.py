"""Bytes that came back wrong: what the transfer did to them, in one finding, one sentence, and with its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError
from kvcanary.transfers.recent_snapshots import MOST_SNAPSHOTS, RecentSnapshots, SentSnapshot, SnapshotFingerprints
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyShape
from toy_tier import TOKENS, Tier

LONG = list(range(200, 218))  # four full pages


@pytest.fixture
def make_tier() -> Iterator[Callable[..., Tier]]:
    """The pages of a request that are away, by settings of CanaryConfig."""
    with torch.inference_mode():

        def make(tokens: list[int] = TOKENS, shape: ToyShape | None = None, **settings: object) -> Tier:
            config = CanaryConfig(**{"content": "full", "seed": 7, **settings})
            return Tier(ToyEngine(config, shape), tokens=tokens)

        yield make


def reported(tier: Tier) -> Finding:
    """The one finding of the transfer; nothing in its report speaks of a move."""
    with pytest.raises(KVCorruptionError) as caught:
        tier.engine.canary.collect(tier.engine.canary.end_step())
    (finding,) = caught.value.findings
    text = caught.value.report.text() + json.dumps(caught.value.report.to_dict())
    assert "move" not in text
    assert (finding.code, finding.causes[0].family) == ("T1", "transfer")
    assert finding.causes[0].text.startswith(f"{finding.found['verdict']}: ")
    assert not any(line.startswith("T1") for line in finding.evidence)
    return finding


def said(tier: Tier) -> str:
    tier.bring_back()
    return reported(tier).causes[0].text


# one word


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_one_word_is_named_as_in_r9(make_tier, pool):
    """Part, head, dim, bit, and the bits and numbers that were there and that are."""
    tier = make_tier()
    kept = tier.bytes[pool]
    old = float(kept[0, 5, 1, 0, 2])
    kept.view(torch.int32)[0, 5, 1, 0, 2] ^= 1 << 20
    tier.bring_back()
    finding = reported(tier)
    assert (finding.pool, finding.position, finding.layers) == (pool, 5, (0,))
    assert (finding.part, finding.head, finding.dim, finding.byte, finding.bit) == ("V", 0, 2, 2, 20)
    assert (finding.expected["value"], finding.found["value"]) == (old, float(kept[0, 5, 1, 0, 2]))
    assert int(finding.expected["bits"], 16) ^ int(finding.found["bits"], 16) == 1 << 20
    assert "one word: one bit, bit 20, of V, head 0, dim 2, on page 1 of snapshot 1 changed" in finding.causes[0].text


def test_a_word_of_several_bits_is_one_word(make_tier):
    """The bit is left out."""
    tier = make_tier()
    tier.bytes["target"].view(torch.int32)[1, 2, 0, 1, 3] ^= 0x500
    tier.bring_back()
    finding = reported(tier)
    assert (finding.part, finding.head, finding.dim, finding.bit) == ("K", 1, 3, None)
    assert finding.causes[0].text.startswith("one word: one word of K, head 1, dim 3, on page 0 of snapshot 1 changed")


def test_words_far_apart_are_one_finding(make_tier):
    """One transfer is one finding, with the number of its slots, pages, pools and layers."""
    tier = make_tier(LONG)
    tier.bytes["target"].view(torch.int32)[:, 1, 0, 0, 2] ^= 1  # a word in each layer
    tier.bytes["draft"].view(torch.int32)[0, 14, 0, 1, 1] ^= 1 << 9
    tier.bring_back()
    finding = reported(tier)
    assert finding.causes[0].text.startswith("one word: one word of K differs in each wrong layer of 2 slots")
    numbers = {key: finding.found[key] for key in ("slots_wrong", "pages_wrong", "pools_wrong", "layers_wrong")}
    assert numbers == {
        "slots_wrong": "2 of 32",
        "pages_wrong": "2 of 4",
        "pools_wrong": ["target", "draft"],
        "layers_wrong": [0, 1],
    }


def test_a_word_that_one_fingerprint_alone_explains_is_none(make_tier):
    """The other lane says otherwise: more than one word changed, or the fingerprint is not that of these bytes."""
    tier = make_tier()
    tier.bytes["target"].view(torch.int32)[0, 5, 1, 0, 2] ^= 1 << 20
    tier.snapshot.contents[0].fingerprint_b[5] += 2
    assert said(tier).startswith("unknown: ")


# misrouted


def rolled(pages: int) -> Callable[[Tier], None]:
    def roll(tier: Tier) -> None:
        tier.bytes = {name: kept.roll(4 * pages, 1) for name, kept in tier.bytes.items()}

    return roll


def exchanged(tier: Tier) -> None:
    order = [*range(4, 8), *range(4), *range(8, 16)]
    tier.bytes = {name: kept[:, order] for name, kept in tier.bytes.items()}


def one_twice(tier: Tier) -> None:
    tier.bytes["target"][:, 8:12] = tier.bytes["target"][:, :4]


def one_slot_further(tier: Tier) -> None:
    tier.bytes = {name: kept.roll(1, 1) for name, kept in tier.bytes.items()}


def v_of_other_pages(tier: Tier) -> None:
    kept = tier.bytes["target"]
    kept[:, :, 1] = kept[:, :, 1].roll(4, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (rolled(1), "each of 4 pages came back with the bytes of the page 1 before it in snapshot 1"),
        (rolled(-1), "each of 4 pages came back with the bytes of the page 1 behind it in snapshot 1"),
        (exchanged, "pages 0 and 1 of snapshot 1 changed places"),
        (
            one_twice,
            "page 2 of snapshot 1 came back with the bytes of page 0 of the same snapshot; in the target pool only",
        ),
        (
            one_slot_further,
            "page 0 of snapshot 1, slot 0 came back with the bytes of page 3 of the same snapshot, slot 3",
        ),
        (v_of_other_pages, "V alone: that of page 0 lies in page 1; in the target pool only"),
    ],
    ids=["before", "behind", "exchanged", "twice", "slots", "part"],
)
def test_bytes_of_another_page_are_misrouted(make_tier, change, sentence):
    """The bytes are those of page n of the same snapshot; which, and where it lay, is said."""
    tier = make_tier(LONG)
    change(tier)
    assert said(tier) == f"misrouted: {sentence}"


def test_a_misrouted_page_has_its_way(make_tier):
    """From which page each left and in which step, and into which it came back and when."""
    tier = make_tier(LONG)
    one_twice(tier)
    row = tier.bring_back()
    finding = reported(tier)
    first, third = tier.pages[0], tier.pages[2]
    assert finding.expected == {
        "parcel": 1,
        "page_of_parcel": 2,
        "left_from_page": third,
        "left_in_step": 2,
    }
    assert (
        finding.found.items()
        >= {
            "came_back_by": "restore",
            "into_page": row.pages[2],
            "bytes_of_parcel": 1,
            "bytes_of_page": 0,
            "came_back_in_step": 3,
            "slots_wrong": "4 of 16",
        }.items()
    )
    assert finding.causes[0].evidence == (
        "4 slots, on 1 of 4 pages that came back",
        f"page 2 of snapshot 1 holds page 0 of the same snapshot, which left from page {first} in step 2",
        f"page 2 of snapshot 1 left from page {third} in step 2, and came back by restore into page {row.pages[2]} "
        "in step 3",
    )


def test_pages_are_numbered_as_they_left(make_tier):
    """Where the first pages of a snapshot need not come back, the others keep their numbers, and these are known."""
    tier = make_tier(LONG)
    whole = {name: kept.clone() for name, kept in tier.bytes.items()}
    tier.snapshot, tier.num_pages, tier.length = tier.snapshot.behind(2), 2, 8
    tier.tokens = LONG[8:]
    tier.bytes = {name: kept[:, :8] for name, kept in whole.items()}
    tier.bring_back()
    text = reported(tier).causes[0].text
    assert text == "misrouted: each of 2 pages came back with the bytes of the page 2 behind it in snapshot 1"


# short


def zeros_behind(tier: Tier) -> None:
    for kept in tier.bytes.values():
        kept[:, 8:] = 0


def one_layer_of_zeros(tier: Tier) -> None:
    tier.bytes["target"][1] = 0


def only_the_target(tier: Tier) -> None:
    del tier.bytes["draft"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (zeros_behind, "nothing arrived behind offset 8: 2 of 4 pages hold zeros"),
        (one_layer_of_zeros, "nothing arrived: 4 of 4 pages hold zeros; in layer 1 of the target pool's 2 only"),
        (only_the_target, "nothing arrived: 4 of 4 pages hold zeros; in the draft pool only"),
    ],
    ids=["tail", "layer", "pool"],
)
def test_what_did_not_arrive_is_short(make_tier, change, sentence):
    """How many pages, behind which offset, and of which pool and layers, where that is not all."""
    tier = make_tier(LONG)
    change(tier)
    assert said(tier) == f"short: {sentence}"


def former_pages(tier: Tier) -> list[int]:
    """Free pages that a request had, in which its bytes or the poison lie."""
    engine = tier.engine
    engine.start("former", list(range(300, 310)))
    pages = engine.rows["former"].pages[:2]
    engine.finish("former")
    for _ in range(3):
        engine.begin()
        engine.canary.collect(engine.canary.end_step())
    return list(pages)


@pytest.mark.parametrize(
    ("poison", "lies"), [("finite", "the poison of freed pages"), ("off", "what lay there before")]
)
def test_what_lay_there_is_known(make_tier, poison, lies):
    """Pages that an earlier request had hold their poison, or its bytes."""
    tier = make_tier(poison=poison)
    pages = former_pages(tier)
    tier.bytes = {}
    tier.bring_back(pages=pages)
    assert reported(tier).causes[0].text == f"short: nothing arrived: 2 of 2 pages hold {lies}"


def test_own_bytes_that_never_left_are_no_misrouted_ones(make_tier):
    """Nothing arrived in the snapshot's own pages, granted in another order: each holds what it held before."""
    tier = make_tier(poison="off")
    tier.bytes = {}
    tier.bring_back(pages=tier.pages[::-1])
    assert reported(tier).causes[0].text == "short: nothing arrived: 2 of 2 pages hold what lay there before"


# stale


def test_bytes_of_an_earlier_snapshot_are_stale(make_tier):
    """Which snapshot, which of its pages, and when it left."""
    tier = make_tier()
    later = Tier(tier.engine, "later", list(range(300, 310)))
    later.bytes = tier.bytes
    assert said(later) == (
        "stale: page 0 of snapshot 2 came back with the bytes of page 0 of snapshot 1, an earlier one, which "
        "left in step 2"
    )


def test_bytes_of_a_later_snapshot_are_misrouted(make_tier):
    """They can not be old."""
    tier = make_tier()
    later = Tier(tier.engine, "later", list(range(300, 310)))
    tier.bytes = later.bytes
    text = "misrouted: page 0 of snapshot 1 came back with the bytes of page 0 of snapshot 2"
    assert said(tier) == f"{text}, and 1 more page with those of others"


@pytest.mark.parametrize(("poison", "verdict"), [("finite", "stale"), ("off", "short")])
def test_poison_tells_old_bytes_that_came_from_those_that_stayed(make_tier, poison, verdict):
    """The earlier snapshot's bytes in the pages that it left: they came back where the pages had been poisoned."""
    tier = make_tier(poison=poison)
    later = Tier(tier.engine, "later", list(range(300, 310)))
    for _ in range(3):
        tier.engine.begin()
        tier.engine.canary.collect(tier.engine.canary.end_step())
    later.bytes = tier.bytes
    later.bring_back(pages=tier.pages)
    assert reported(later).found["verdict"] == verdict


def test_few_snapshots_are_remembered():
    """Not more than so many, nor more bytes of fingerprints; the others are counted."""
    recent = RecentSnapshots()
    current = np.ones(8, np.bool_)
    for step in range(MOST_SNAPSHOTS + 3):
        sent = recent.number(step, (1, 2))
        recent.remember(SentSnapshot(sent, {0: SnapshotFingerprints(torch.zeros(2, 8, dtype=torch.int64), current)}))
    assert (len(recent.last), recent.num_forgotten) == (MOST_SNAPSHOTS, 3)
    assert [sent_snapshot.sent.number for sent_snapshot in recent.last][:2] == [MOST_SNAPSHOTS + 3, MOST_SNAPSHOTS + 2]
    big = SnapshotFingerprints(torch.zeros(1, 1 << 21, dtype=torch.int64), current)  # all bytes that there are
    recent.remember(SentSnapshot(recent.number(9, (1,)), {0: big}))
    assert (len(recent.last), recent.num_forgotten) == (1, MOST_SNAPSHOTS + 3)


def test_a_forgotten_snapshot_is_not_guessed(make_tier, monkeypatch):
    """Bytes of one that is not remembered any more are unknown, and the finding says how many were compared."""
    monkeypatch.setattr("kvcanary.transfers.recent_snapshots.MOST_SNAPSHOTS", 1)
    tier = make_tier()
    later = Tier(tier.engine, "later", list(range(300, 310)))
    later.bytes = {name: kept + 1 for name, kept in tier.bytes.items()}
    later.bring_back()
    cause = reported(later).causes[0]
    assert cause.text == "unknown: the bytes that came back are those of nothing that is known"
    assert (
        "compared with zeros, poison, what lay there before and 1 snapshots, 1 older ones are forgotten"
        in cause.evidence
    )


# other layout


def k_for_v(tier: Tier) -> None:
    tier.bytes["target"] = tier.bytes["target"].flip(2)


def heads_turned(tier: Tier) -> None:
    tier.bytes["target"] = tier.bytes["target"][:, :, :, [2, 0, 3, 1]]


def heads_of_v(tier: Tier) -> None:
    tier.bytes["target"][:, :, 1] = tier.bytes["target"][:, :, 1][:, :, [1, 0, 2, 3]]


def layers_turned(tier: Tier) -> None:
    tier.bytes["target"] = tier.bytes["target"].flip(0)


def hnd_for_nhd(tier: Tier) -> None:
    kept = tier.bytes["target"]
    pages = kept.unflatten(1, (-1, 4)).permute(0, 1, 3, 4, 2, 5)  # layers, pages, parts, heads, slots, dim
    layers, pages_, parts, heads, slots, dim = pages.shape
    lies = pages.reshape(layers, pages_, parts, slots, heads, dim).permute(0, 1, 3, 2, 4, 5)
    tier.bytes["target"] = lies.flatten(1, 2)


def nhd_for_hnd(tier: Tier) -> None:
    pages = tier.bytes["target"].unflatten(1, (-1, 4)).permute(0, 1, 3, 2, 4, 5)  # layers, pages, parts, slots, ...
    layers, pages_, parts, slots, heads, dim = pages.shape
    lies = pages.reshape(layers, pages_, parts, heads, slots, dim).permute(0, 1, 4, 2, 3, 5)
    tier.bytes["target"] = lies.flatten(1, 2)


def tokens_before_layers(tier: Tier) -> None:
    kept = tier.bytes["target"]
    tier.bytes["target"] = kept.transpose(0, 1).reshape(kept.shape)


def pages_before_parts(tier: Tier) -> None:
    pages = tier.bytes["target"].unflatten(1, (-1, 4)).transpose(2, 3)  # layers, pages, parts, slots, ...
    turned = pages.transpose(1, 2).reshape(pages.shape)
    tier.bytes["target"] = turned.transpose(2, 3).flatten(1, 2)


def no_v(tier: Tier) -> None:
    tier.bytes["target"][:, :, 1] = 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (k_for_v, "K and V are exchanged"),
        (heads_turned, "heads of K and V are in another order: 2, 0, 3, 1"),
        (heads_of_v, "heads of V are in another order: 1, 0, 2, 3"),
        (layers_turned, "layer 0 holds layer 1 of the same slots"),
        (hnd_for_nhd, "heads and slots of page 0 are exchanged: HND was read as NHD, or NHD as HND"),
        (nhd_for_hnd, "heads and slots of page 0 are exchanged: HND was read as NHD, or NHD as HND"),
        (
            tokens_before_layers,
            "layers and slots are in another order: layer 1, slot 0 of the transfer holds layer 0, slot 8",
        ),
        (
            pages_before_parts,
            "K and V lie along another axis: K of page 0 is in the K of page 0, its V in the K of page 2",
        ),
        (no_v, "V is all zero: a part is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_another_layout_is_undone_to_name_it(make_tier, change, sentence):
    """Parts, heads, layers, slots or pages in another order: named only where undoing it gives what left."""
    tier = make_tier(LONG, ToyShape(heads=4, head_dim=8))
    change(tier)
    tier.bring_back()
    causes = reported(tier).causes
    assert [cause.text for cause in causes] == [f"other layout: {sentence}; in the target pool only"]


def test_many_heads_in_another_order(make_tier):
    """Of more heads than all orders can be tried of: rotations, exchanges and strides."""
    shape = ToyShape(heads=8, head_dim=4)
    for order in ([1, 2, 3, 4, 5, 6, 7, 0], [0, 6, 2, 3, 4, 5, 1, 7], [0, 2, 4, 6, 1, 3, 5, 7]):
        tier = make_tier(shape=shape)
        tier.bytes["draft"] = tier.bytes["draft"][:, :, :, order]
        assert said(tier).startswith(f"other layout: heads of K and V are in another order: {str(order)[1:-1]}")


# none of them


def test_bytes_of_nobody_are_not_guessed(make_tier):
    """What no snapshot, no layout and no word explains is unknown."""
    tier = make_tier()
    tier.bytes["target"] = torch.randn_like(tier.bytes["target"])
    assert said(tier).startswith("unknown: ")


def test_where_the_right_bytes_went_says_nothing_of_what_lies_here(make_tier):
    """A page of noise whose own bytes lie in the next page has no other layout."""
    tier = make_tier(LONG)
    kept = tier.bytes["target"]
    kept[:, 4:8] = kept[:, :4].clone()
    kept[:, :4] = torch.randn_like(kept[:, :4])
    tier.bring_back()
    assert [cause.text.split(":")[0] for cause in reported(tier).causes] == ["misrouted", "unknown"]


def test_the_kind_of_most_slots_leads(make_tier):
    """Others that happened besides are causes of their own, behind it."""
    tier = make_tier(LONG)
    for kept in tier.bytes.values():
        kept[:, 4:] = kept[:, :-4].clone()
        kept[:, 1] = 0
    tier.bring_back()
    causes = reported(tier).causes
    assert [cause.text.split(":")[0] for cause in causes] == ["misrouted", "short"]
    assert causes[1].evidence == ("2 slots, on 1 of 4 pages that came back",)


def test_a_load_is_called_one(make_tier):
    """The words are those of the event: `on_load_end` is a load."""
    tier = make_tier()
    engine = tier.engine
    engine.begin()
    engine.admit("back", TOKENS)
    pages = engine.pages.take(2, engine.num_steps)
    engine.canary.on_alloc("back", pages, for_load=True)
    engine.canary.on_load_begin("back", pages)
    engine.canary.on_load_end("back", pages, 8, tier.snapshot)
    finding = reported(tier)
    assert finding.found["came_back_by"] == "load"
    assert finding.causes[0].evidence[-1].endswith(f"came back by load into page {pages[0]} in step 3")


def test_many_wrong_slots_leave_out_no_page(make_tier):
    """Few violations are kept whole: one of each page is, and the kind that leads speaks first."""
    tier = make_tier(list(range(4 * 20 + 1)), mode="log")
    for kept in tier.bytes.values():
        kept[:, 4:] = kept[:, :-4].clone()
        kept[:, :4] = 0
    row = tier.bring_back()
    groups = tier.engine.canary.session.checks.violations.groups
    kept_pages = {violation.page for violation in groups["T1", ("load", 0)].kept[:40]}
    assert kept_pages == set(row.pages)
    tier.engine.canary.collect(tier.engine.canary.end_step())
    finding = tier.engine.canary.findings[0]
    assert (finding.found["verdict"], finding.position, finding.found["bytes_of_page"]) == ("misrouted", 4, 0)
