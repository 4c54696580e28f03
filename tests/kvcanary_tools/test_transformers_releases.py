"""The table of releases of transformers: as its record has it, and what the record must show."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from kvcanary.adapters.transformers import TESTED
from kvcanary_tools.bench import transformers_releases as bench

RELEASES = bench.read()["releases"]


def test_the_page_shows_the_record() -> None:
    """docs/transformers.md has the table that the command writes."""
    page = bench.PAGE.read_text(encoding="utf-8")
    assert "\n".join((bench.BEGIN, *bench.lines(), bench.END)) in page


def test_every_tested_release_is_in_the_record() -> None:
    """A release is called tested where its row is there."""
    assert tuple(".".join(release.split(".")[:2]) for release in RELEASES) == TESTED


@pytest.mark.parametrize("release", RELEASES)
def test_sound_runs_are_silent_and_a_flipped_bit_is_found_in_place(release: str) -> None:
    """In every release and run, but for the windows of 5.14, whose ring is off by one."""
    for name, run in RELEASES[release]["runs"].items():
        assert run["equal"], name
        assert run["entries"] > 900, name
        if release.startswith("5.14") and name in ("batch, sliding window", "batch, both"):
            assert (run["codes"], run["findings"], run["fault"]) == (["R4"], 1, "R4")
        else:
            assert (run["codes"], run["findings"], run["fault"], run["in_place"]) == ([], 0, "R9", True), name
    assert RELEASES[release]["runs"]["batch, shared prefixes"]["prefix_tokens"] > 0


def test_a_run_of_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself, for one dense run and one batch: what it measures is what the record holds."""
    monkeypatch.setattr(bench, "DENSE", {"greedy": bench.DENSE["greedy"]})
    monkeypatch.setattr(bench, "BATCHED", {"batch, full attention": bench.BATCHED["batch, full attention"]})
    for run in bench.measure().values():
        assert (run["findings"], run["equal"], run["fault"], run["in_place"]) == (0, True, "R9", True)
