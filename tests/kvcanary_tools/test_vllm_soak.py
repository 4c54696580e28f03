"""The soak's bookkeeping: which findings a flip explains, when a run is a success, and what the page says of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm import releases
from kvcanary_tools.bench.vllm.page import PAGE, read
from kvcanary_tools.bench.vllm.soak.flips import Flip
from kvcanary_tools.bench.vllm.soak.run import is_success

FOUND = {"code": "R9", "page": 7, "layers": (1,), "position": 40, "reader": "a", "bit": 6, "step": 12}


def flip(until: int | None = None) -> Flip:
    return Flip(10, "a", 7, range(32, 64), 1, element=5, bit=6, readers={"a", "b"}, until=until)


@pytest.mark.parametrize(
    ("changed", "is_caused"),
    [
        ({}, True),
        ({"reader": "b"}, True),
        ({"bit": None}, True),
        ({"step": 10}, True),
        ({"code": "R4"}, False),
        ({"page": 8}, False),
        ({"layers": (0,)}, False),
        ({"layers": (0, 1)}, False),
        ({"position": 64}, False),
        ({"reader": "c"}, False),
        ({"bit": 5}, False),
        ({"step": 9}, False),
    ],
)
def test_a_flip_explains_only_what_it_did(changed, is_caused) -> None:
    """R9 of the struck block, layer and bit, for whoever holds the block, from the step of the flip on."""
    assert flip().caused(SimpleNamespace(**FOUND | changed)) is is_caused


def test_a_flip_explains_nothing_after_it_was_put_back() -> None:
    """What the same place gives in a later step is another fault."""
    assert flip(until=12).caused(SimpleNamespace(**FOUND))
    assert not flip(until=11).caused(SimpleNamespace(**FOUND))


def record(**changed) -> dict:
    clean = {"seconds": 600.4, "requests": 1200, "preemptions": 30, "forwards": 4000, "slots_checked": 56789}
    clean |= {"aborts": {"running": 4, "waiting": 5}, "findings": 0}
    asked = {"minutes": 10, "flips": 2, "flip_seconds": 60.0}
    flips = [{"found": {"code": "R9"}, "steps_until_found": own} for own in (3, 47)]
    own = {"asked": asked, "clean": clean, "flips": flips, "flips_struck": 2, "flips_found": 2, "ended_by": "itself"}
    own |= {"all": {"findings": 0, "untold_incidents": 0}, "machine": {"vllm": "0.32.0"}, "engine": {"blocks": 34}}
    return own | changed


@pytest.mark.parametrize(
    "changed",
    [
        {"ended_by": "SIGTERM"},
        {"clean": {"seconds": 599.0}},
        {"all": {"findings": 1, "untold_incidents": 0}},
        {"all": {"findings": 0, "untold_incidents": 1}},
        {"flips_found": 1},
        {"flips_struck": 1, "flips_found": 1},
    ],
)
def test_a_run_that_is_not_whole_or_not_silent_is_no_success(changed) -> None:
    """Cut short, a finding that no flip caused, a flip that was missed or never struck."""
    assert is_success(record())
    assert not is_success(record(**changed))


def test_the_page_says_what_was_run() -> None:
    """Minutes, requests, findings and flips are those of the record, and a failure is said."""
    text = " ".join(releases.soaked(record(success=True)))
    for said in ("A soak of 10 minutes", "1,200 requests", "9 aborts", "0 findings", "2 of 2 found", "within 47 steps"):
        assert said in text
    assert "no success" not in text
    assert "no success; it was ended by SIGTERM" in " ".join(releases.soaked(record(success=False, ended_by="SIGTERM")))


def test_the_page_quotes_the_record() -> None:
    """The paragraph of docs/vllm.md is that of the record; without one there is none."""
    lines = releases.soak_lines()
    assert "\n".join((releases.SOAK_BEGIN, *lines, releases.SOAK_END)) in PAGE.read_text(encoding="utf-8")
    kept = (RESULTS / f"{releases.SOAK}.json").exists()
    assert bool(lines) is kept
    assert not kept or (read(releases.SOAK)["success"] and is_success(read(releases.SOAK)))
