"""The catalogue is measured by a list of published bugs: every one is brought back, or the page says why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcanary.faults.catalogue import faults
from kvcanary.faults.fault import READY, Fault
from kvcanary.faults.published import PUBLISHED, UNREACHED, reached, unreached

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
MAY_WAIT = {"K45", "K47", "K50", "K51", "K52"}


def table_lines(faults: Sequence[Fault]) -> Iterator[str]:
    """The catalogue by family as Markdown, then the bugs that nothing brings back."""
    known, total = reached(faults), sum(map(len, PUBLISHED.values()))
    yield "| family | faults ready | published bugs brought back |"
    yield "|---|---|---|"
    for family in sorted({fault.family for fault in faults}):
        ready = [fault for fault in faults if fault.family == family and fault.state == READY]
        bugs = {bug for fault in ready for bug in fault.bugs} & known.keys()
        yield f"| {family} | {len(ready)} | {len(bugs)} |"
    yield f"| all | {sum(fault.state == READY for fault in faults)} | {len(known)} of {total} |"
    yield ""
    yield "| not brought back | why |"
    yield "|---|---|"
    for bug, reason in unreached(faults).items():
        yield f"| {bug} | {reason} |"


def test_every_published_bug_is_brought_back_or_explained():
    """139 bugs, each once; at least 115 through a ready fault, the others with a reason and in nobody's story."""
    every = [bug for bugs in PUBLISHED.values() for bug in bugs]
    assert len(every) == len(set(every)) == 139
    known, others = reached(faults()), unreached(faults())
    assert len(known) >= 115
    assert known.keys() | others.keys() == set(every)
    assert not known.keys() & others.keys()
    assert not UNREACHED.keys() & known.keys()
    assert all(others.values())


def test_a_bug_is_brought_back_by_its_own_injection():
    """The fault that names a bug has the number under which the bug is listed."""
    numbers = {fault.name: fault.k for fault in faults()}
    listed = {bug: k for k, bugs in PUBLISHED.items() for bug in bugs}
    strange = [
        (bug, name) for bug, names in reached(faults()).items() for name in names if numbers[name] != listed[bug]
    ]
    assert strange == []


def test_few_faults_wait():
    """Pending is what needs more ranks, beams, shifts or defragmentation; 60 faults and more are ready."""
    assert {fault.k for fault in faults() if fault.state == "pending"} <= MAY_WAIT
    assert sum(fault.state == "ready" for fault in faults()) >= 60


def test_the_page_has_the_tables():
    """docs/faults.md shows what the catalogue holds now."""
    assert "\n".join(table_lines(faults())) in PAGE.read_text()


def test_a_difference_that_ids_do_not_say_is_told():
    """Other weights or images behind equal tokens: faults that stand for these bugs tell the canary of what differs."""
    unsaid = {"LMCache/LMCache#4086", "LMCache/LMCache#4783", "LMCache/LMCache#3301"}
    unsaid |= {"InternLM/lmdeploy#4917", "InternLM/lmdeploy#4918", "NVIDIA/TensorRT-LLM#13815"}
    telling = [fault.name for fault in faults() if unsaid & set(fault.bugs)]
    assert telling == ["identity.weights_behind_a_cache", "identity.other_image"]
    assert not UNREACHED.keys() & unsaid
