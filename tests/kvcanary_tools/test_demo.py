"""`kvcanary demo`: clean where nothing is wrong, and each fault found and named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvcanary_tools.commands import demo
from kvcanary_tools.runs import demonstration
from kvcanary_tools.runs.demonstration import Damage, flip_bit, strike, swap_pages
from spec_engine.models.embedded import load_excerpts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens: what is shown matters here, not the speed."""
    monkeypatch.setattr(demo, "NUM_PROMPTS", 2)
    monkeypatch.setattr(demo, "NUM_TOKENS", 32)


def test_demo_passes(kvcanary_process) -> None:
    """As a user runs it: completions, figures, certificate, both reports and no event, exit code 0."""
    child = kvcanary_process("demo")
    assert child.returncode == 0, child.stdout + child.stderr
    for words in ("accepted length", "tokens/s with drafting", "findings: 0", "one bit flipped", "R9", "swapped", "R4"):
        assert words in child.stdout
    assert child.stdout.count("found and named; 0 tokens left after it") == 2
    assert child.stdout.endswith("The clean part was clean, both faults were found and named.\n")
    assert child.stderr == ""
    assert "kvcanary.stats" not in child.stdout


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
