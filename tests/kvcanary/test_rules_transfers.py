"""What O1 says of a copy that nobody waited for: the resource, who used it, for whom, and who should have waited."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError
from kvcanary.calls.violation import Violation
from kvcanary.report.causes import transfers
from kvcanary.report.render import Report
from kvcanary.transfers.async_ops import HOST
from kvcanary.transfers.async_tracker import AsyncTracker
from kvcanary_tools.bench.toy.engine import ToyEngine
from rule_facts import a_violation, shown


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    """With a request of two pages."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig())
        engine.start("mine", 8)
        yield engine


def reported(engine: ToyEngine) -> tuple[Finding, Report]:
    with pytest.raises(KVCorruptionError) as caught:
        engine.canary.collect(engine.canary.end_step())
    (finding,) = caught.value.findings
    assert finding.code == "O1"
    return finding, caught.value.report


def test_a_forward_that_reads_a_page_too_early(engine):
    """The page and its request, the forward, and the copy with its stream and sequence; in text and data."""
    page, async_tracker = engine.rows["mine"].pages[1], engine.canary.async_tracker
    async_tracker.issue("restore", "host tier", writes=[page])
    async_tracker.use("draft[1]", "main", [page])
    finding, report = reported(engine)
    copy = "'restore' (stream host tier, sequence 1)"
    assert finding.expected == {"behind": copy, "which": f"fills page {page}", "waiting": "stream main"}
    assert finding.found == {
        "resource": f"page {page}",
        "reader": "'draft[1]' on stream main",
        "used_to": "read",
        "access": f"'draft[1]' on stream main touches page {page} without waiting for {copy}",
        "hazard": "not waited for",
    }
    assert (finding.reader, finding.slot) == ("mine", page * 4)
    cause = finding.causes[0]
    assert (cause.family, cause.basis) == ("order", "derived")
    assert cause.text == f"'draft[1]' on stream main reads page {page} before {copy} is done, which fills page {page}"
    assert cause.evidence == (f"stream main has not waited for the event of {copy}, nor for one behind it",)
    assert cause.text in report.text()
    assert report.to_dict()["findings"][0]["found"] == finding.found


def test_a_host_that_reads_a_buffer_too_early(engine):
    """The buffer by its name, in the first line too, whose tokens it holds, and that the host should have waited."""
    async_tracker = engine.canary.async_tracker
    async_tracker.issue("results", "copies", writes=["results 0"])
    async_tracker.use("results", HOST, ["results 0"], requests=["mine", "theirs"])
    finding, report = reported(engine)
    assert finding.found["resource"] == "host buffer 'results 0'"
    assert finding.found["reader"] == "'results' on the host"
    assert finding.expected["waiting"] == "the host"
    assert (finding.reader, finding.owner) == ("mine", None)
    lines = report.text().splitlines()
    assert lines[0] == "kvcanary: ERROR: unordered access (O1): host buffer 'results 0'"
    assert not any(line.strip().startswith(("writer", "owner")) for line in lines)


def test_a_write_over_what_is_still_read(engine):
    """A place of the host tier is filled while the copy from it may still run."""
    async_tracker = engine.canary.async_tracker
    async_tracker.issue("restore", "host tier", reads=["host page 3"])
    async_tracker.issue("offload", "other", writes=["host page 3"])
    finding, _ = reported(engine)
    assert finding.expected["which"] == "reads host buffer 'host page 3'"
    assert finding.causes[0].text.startswith("'offload' on stream other writes host buffer 'host page 3' before")


def test_a_shared_page_has_the_reader_that_is_named(engine):
    """A page that has no single owner: the request for which it is read."""
    engine.share("mine")
    page, async_tracker = engine.rows["mine"].pages[0], engine.canary.async_tracker
    async_tracker.issue("restore", "host tier", writes=[page])
    async_tracker.use("prefill", "main", [page], requests=["mine"])
    finding, _ = reported(engine)
    assert (finding.owner, finding.reader) == (None, "mine")


def test_behind_a_slot_map_the_place_is_the_pool_s_own():
    """The page is the full one, the slot where the map leads."""
    violations: list[Violation] = []
    slot_map = torch.zeros(16, dtype=torch.int64)
    slot_map[8:12] = torch.arange(4, 8)
    view = SimpleNamespace(page_size=4, slot_map=slot_map, num_slots=12, device=torch.device("cpu"))
    ledger = SimpleNamespace(generations=[0] * 4, owner_of=lambda page: None, pages=SimpleNamespace(numbers=list))
    tracker = AsyncTracker(ledger, SimpleNamespace(view=view), violations.extend)
    tracker.issue("swap in", "split pool", writes=[2])
    tracker.use("decode", "main", [2])
    assert [(violation.page, violation.slot, violation.named) for violation in violations] == [(2, 4, 8)]


def test_a_buffer_that_was_taken_again(engine):
    """Which generation was meant, and which it is; a buffer is no page that was given back."""
    async_tracker = engine.canary.async_tracker
    async_tracker.take("fill", HOST, "results 0", 1)
    async_tracker.issue("copy", "copies", writes={"results 0": 1})
    async_tracker.renew("results 0", 2)
    async_tracker.use("results", "copies", {"results 0": 1}, requests=["mine"])
    finding, _ = reported(engine)
    assert (finding.expected["generation"], finding.found["generation"]) == (1, 2)
    cause = finding.causes[0]
    assert (cause.family, cause.basis) == ("order", "derived")
    assert cause.text == (
        "'results' on stream copies is meant for what host buffer 'results 0' held before it was taken again"
    )


def test_who_waits_is_not_told(engine):
    """The same work in order is silent."""
    page, async_tracker = engine.rows["mine"].pages[1], engine.canary.async_tracker
    copy = async_tracker.issue("restore", "host tier", writes=[page])
    async_tracker.waits("main", copy)
    async_tracker.use("draft[1]", "main", [page])
    engine.canary.collect(engine.canary.end_step())
    assert engine.canary.findings == []


@pytest.mark.parametrize("rule", [transfers.unordered, transfers.taken_again], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("found", [None, {"hazard": "freed in flight"}])
def test_rules_of_order_are_silent_elsewhere(rule, found):
    """A page that was freed in flight is a matter of its lifetime."""
    assert rule(shown(a_violation(code="O1", page=-1, expected=None, found=found))) is None
