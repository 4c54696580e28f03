"""`kvcanary demo`: clean where nothing is wrong, and each fault found and named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from kvcanary_tools.commands import demo
from kvcanary_tools.pages import recording
from kvcanary_tools.pages.recording import Line
from kvcanary_tools.runs import demonstration
from kvcanary_tools.runs.demonstration import Damage, flip_bit, strike, swap_pages
from spec_engine.models.embedded import load_excerpts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens: what is shown matters here, not the speed."""
    monkeypatch.setattr(demo, "NUM_PROMPTS", 2)
    monkeypatch.setattr(demo, "NUM_TOKENS", 32)


@pytest.fixture(scope="module")
def demonstrated() -> subprocess.CompletedProcess[str]:
    """The demo as a user runs it."""
    return subprocess.run([sys.executable, "-m", "kvcanary_tools", "demo"], capture_output=True, text=True, timeout=120)


def test_demo_passes(demonstrated) -> None:
    """As a user runs it: completions, figures, certificate, both reports and no event, exit code 0."""
    child = demonstrated
    assert child.returncode == 0, child.stdout + child.stderr
    for words in ("accepted length", "tokens/s with drafting", "findings: 0", "one bit flipped", "R9", "swapped", "R4"):
        assert words in child.stdout
    assert child.stdout.count("found and named; 0 tokens left after it") == 2
    assert child.stdout.endswith("The clean part was clean, both faults were found and named.\n")
    assert child.stderr == ""
    assert "kvcanary.stats" not in child.stdout


def without_figures(lines: list[str]) -> list[str]:
    """What a run on another machine says too."""
    return [re.sub(r"0x[0-9a-f]+|[0-9][0-9,.]*", "#", line).rstrip() for line in lines]


def test_the_recording_is_of_this_demo(demonstrated) -> None:
    """The picture in the docs is small, loads nothing, and has every line of a run of today, but for its figures."""
    picture = recording.PICTURE.read_text(encoding="utf-8")
    assert len(picture) < 150_000
    assert "<script" not in picture
    assert [
        address for address in re.findall('https?://[^"]*', picture) if address != "http://www.w3.org/2000/svg"
    ] == []
    assert without_figures(recording.shown(picture)) == without_figures(demonstrated.stdout.splitlines())


def test_a_recording_plays_what_came() -> None:
    """Colours become classes, markup stays text, and long waits are shortened."""
    lines = [Line(0.0, "\x1b[32m<b>\x1b[0m & on"), Line(50.0, "\x1b[2mdim\x1b[0m"), Line(50.5, "end")]
    picture = recording.drawn(lines)
    assert '<tspan class="g">&lt;b&gt;</tspan> &amp; on</text>' in picture
    assert '<tspan class="d">dim</tspan></text>' in picture
    assert recording.shown(picture) == [recording.plain(line.text) for line in lines]
    shares = [float(share) for share in re.findall(r"([0-9.]+)%\{", picture)]
    assert shares == sorted(shares)
    assert 50 < shares[-2] < 60 < shares[-1] < 82  # of 1.7 seconds 1.2 were waited


@pytest.mark.usefixtures("small")
def test_demo_json_is_alone_on_stdout(kvcanary) -> None:
    """Figures, certificate and both reports as one object; the story goes to stderr."""
    result = kvcanary("demo", "--json")
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert run["passed"] is True
    assert run["clean"]["canary"]["findings"] == []
    assert run["clean"]["speedup"] > 0
    assert run["clean"]["accepted_length"] >= 1
    assert [fault["expected"] for fault in run["faults"].values()] == ["R9", "R4"]
    assert all(fault["caught"] for fault in run["faults"].values())
    assert "accepted length" in result.stderr


@pytest.mark.usefixtures("small")
def test_demo_fails_when_a_fault_is_missed(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that nobody finds is shown as such, and the exit code is 1: the demo can fail."""
    nothing = Damage(what="nothing at all", code="R9", slots=frozenset({1}))
    monkeypatch.setattr(demonstration, "flip_bit", lambda engine, request: nothing)
    result = kvcanary("demo")
    assert result.exit_code == 1
    assert "NOT FOUND: " in result.stdout
    assert result.stdout.endswith("This is not what should be.\n")


def test_strike_names_the_flipped_bit() -> None:
    """The report has the slot and the layer of the flip, and nothing left after it."""
    outcome = strike(load_excerpts()[1].prompt, 48, flip_bit)
    assert outcome.caught
    assert {finding.code for finding in outcome.findings} == {"R9"}
    assert {finding.slot for finding in outcome.findings} == set(outcome.damage.slots)


def test_strike_names_the_swapped_pages() -> None:
    """Pages in the wrong order are positions in the wrong place, each of them a slot of the two pages."""
    outcome = strike(load_excerpts()[1].prompt, 48, swap_pages)
    assert outcome.caught
    assert {finding.code for finding in outcome.findings} == {"R4"}
    assert {finding.slot for finding in outcome.findings} <= set(outcome.damage.slots)


def test_outcome_at_the_wrong_place_is_not_named() -> None:
    """A right code at another slot, or at another bit of the right slot, does not count."""
    outcome = strike(load_excerpts()[1].prompt, 48, flip_bit)
    elsewhere = replace(outcome.damage, slots=frozenset({1}))
    another_bit = replace(outcome.damage, place={**outcome.damage.place, "bit": 13})
    for damage in (elsewhere, another_bit):
        assert not replace(outcome, damage=damage).named
