"""The table of vLLM's releases: that of the records, which agree with what the adapter says it was tried with."""

from __future__ import annotations

import pytest

from kvcanary.adapters.vllm.compatibility import NEEDED, TESTED
from kvcanary_tools.bench.vllm import releases
from kvcanary_tools.bench.vllm.page import PAGE, is_found, read


def test_the_page_quotes_the_records() -> None:
    """The table of docs/vllm.md is that of the records as they are, with a line for each release looked at."""
    lines = list(releases.lines())
    assert "\n".join((releases.BEGIN, *lines, releases.END)) in PAGE.read_text(encoding="utf-8")
    assert len(lines) == 2 + len(read(releases.NAMES)["releases"]) + len(read(releases.KEPT["v2"]))


def test_the_names_were_looked_up_as_they_are_now() -> None:
    """The record of `make drift` is of as many names as the adapter has, and of every tested release, none gone."""
    record = read(releases.NAMES)
    assert record["names"] == len(NEEDED)
    assert set(TESTED) <= set(releases.by_minor(record["releases"]))
    assert all(release["gone"] == {} for release in record["releases"].values())


def test_tested_releases_are_those_that_ran() -> None:
    """On a CPU, or on the GPU whose record there is."""
    ran = {minor for minor, own in releases.by_minor(read(releases.KEPT["v1"])).items() if "error" not in own}
    on_gpu = ".".join(read(releases.ON_GPU)["vllm"].split(".")[:2])
    assert set(TESTED) == ran | {on_gpu}


@pytest.mark.parametrize(
    ("name", "version"), [(own, version) for own in releases.KEPT.values() for version in read(own)]
)
def test_every_run_was_silent_until_it_was_struck(name: str, version: str) -> None:
    """Equal tokens and no finding; then each fault found, and no token of a wrong step."""
    record = read(name)[version]
    if "error" in record:
        assert releases.row(record)[0].startswith("did not start")
        return
    clean = record["clean"]
    assert (clean["findings"], clean["equal_tokens"], record["plugged_in"]) == (0, True, True)
    assert min(clean[name] for name in ("prefix_hits", "preemptions", "chunks")) >= 1
    assert [name for name in releases.HARMS if not is_found(record["faults"][name])] == []
    assert (record["raise"]["code"], record["raise"]["left"]) == ("R9", 0)


def test_what_did_not_run_is_said() -> None:
    """A release without a build for CPUs, one that did not start, and a fault that was missed are no empty cells."""
    assert releases.row(None)[0] == "no build of it for CPUs"
    assert releases.row({"error": "ImportError: x"})[0] == "did not start: `ImportError: x`"
    clean = {"forwards": 3, "slots_checked": 1234, "findings": 1, "equal_tokens": False}
    faults = {name: {"found": []} for name in releases.HARMS} | {"flip": {"found": [{"reader": "a", "writer": None}]}}
    record = {"clean": clean, "faults": faults, "raise": {"code": "R9", "left": 2}}
    assert releases.row(record) == ["3; 1,234", "1", "other ones", "1 of 6; raise: tokens left"]
    assert releases.said({"gone": {"runner V1": ["x is gone"]}}) == "1 gone"
