"""Two ranks of a real SGLang share a model: what they do alike, and what one of them does otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary_tools.bench.sglang.cpu import RANKS

from .playing import expect_sound, is_installed

pytestmark = is_installed


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_do_alike_are_silent(scene, name: str) -> None:
    """Two processes share a model: each has the tokens that both have without a canary, and judged as much."""
    acts = scene(name)
    mine, theirs = ([act for act in acts if (act["rank"], act["fault"]) == (rank, "")] for rank in (0, 1))
    for act, bare in mine, theirs:
        expect_sound(act, bare, 500)
        assert {"X1"} <= set(act["reports"]["target"]["classes"])
    assert mine[0]["outputs"] == theirs[0]["outputs"]


GOES_ON, ENDS = (None, None), ("KVCorruptionError", 0)  # what a step raises, and how many of its tokens left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "level", "reader", "ends"),
    [
        ("two ranks", "another_token", "tokens", "a", GOES_ON),
        ("two ranks", "fewer_slots", "pages", None, GOES_ON),
        ("two ranks", "forgotten_prefixes", "rows", "a again 0", ENDS),
        ("two ranks, topk 2", "one_too_long", "lengths", "a", ENDS),
    ],
)
def test_what_one_rank_does_otherwise_is_found_by_both(
    scene, name: str, fault: str, level: str, reader: str | None, ends: tuple[Any, Any]
) -> None:
    """X1 in the step of the blow; in mode raise no token of it leaves."""
    acts = [act for act in scene(name) if act["fault"] == fault]
    assert [act["rank"] for act in acts] == [0, 1]
    assert all(acts[1]["touched"].values())
    for act in acts:
        found = act["findings"][0]
        assert (found["code"], found["found"]["level"], found["reader"]) == ("X1", level, reader)
        assert found["causes"][0]["family"] == "ranks"
        assert (act.get("raised"), act.get("left")) == ends


@pytest.mark.slow
def test_what_ranks_hold_alike_is_compared(scene) -> None:
    """Latent rows are whole in both: one computes others by a weight that lost a bit, and both say where (X2)."""
    acts = scene("two ranks, latent")
    assert all("X2" in act["reports"]["target"]["classes"] for act in acts if act["mode"] != "off")
    mine, theirs = (act for act in acts if act["fault"] == "other_weight")
    for act in mine, theirs:
        found = act["findings"][0]
        assert (found["code"], found["layers"], found["site"]) == (
            "X2",
            [theirs["touched"]["layer"]],
            ["agreement", 0],
        )
        assert None not in (found["reader"], found["position"])
    assert mine["findings"][0]["slot"] == theirs["findings"][0]["slot"]
    assert {own["code"] for act in (mine, theirs) for own in act["findings"]} == {"X2"}


@pytest.mark.slow
def test_a_bit_in_one_rank_is_that_ranks_own(scene) -> None:
    """Its own canary finds it, and the other one is silent: both have decided alike."""
    mine, theirs = (act for act in scene("two ranks") if act["fault"] == "bit")
    found, touched = theirs["findings"][0], theirs["touched"]
    assert (found["code"], found["slot"], found["bit"]) == ("R9", touched["slot"], touched["bit"])
    assert mine["findings"] == []
