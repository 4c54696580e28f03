"""One report: whatever kind of pool a check fired in, one place builds the finding, names causes and answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvcanary
from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation import Violation
from kvcanary.codes import CODES
from kvcanary.pools.launch_site import pack_site
from kvcanary.report.causes.ranking import MOST_CAUSES
from kvcanary.report.describe import Describer
from kvcanary.report.finding import FAMILIES, Finding
from kvcanary.report.respond import Response
from kvcanary.report.watched_evidence import CacheView, WatchedEvidence, WatchedPool
from kvcanary_kernels.record.layout import COLUMNS, REQUEST_GENERATION, STEP_SITE, TOKEN_POSITION, make_keys

BUILT_IN = {
    "Finding": "report/describe.py",
    "KVCorruptionError": "report/respond.py",
    "Report": "report/respond.py",
}


def calls(tree: ast.AST) -> Iterator[str]:
    names = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    yield from (name.id if isinstance(name, ast.Name) else getattr(name, "attr", "") for name in names)


def makers(what: str) -> list[str]:
    """Files of kvcanary that call what has this name, as often as they do."""
    root = Path(kvcanary.__file__).parent
    files = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob("*.py"))]
    return [path.relative_to(root).as_posix() for path, tree in files for name in calls(tree) if name == what]


@pytest.mark.parametrize("what", BUILT_IN)
def test_one_place_builds_findings_and_one_answers(what: str) -> None:
    """A Finding is built in one place, and in one place the mode makes an error of findings."""
    assert makers(what) == [BUILT_IN[what]]


def test_causes_are_named_by_rules_alone() -> None:
    """No adapter has causes of its own: they are rules of the one table."""
    assert {Path(path).parent.as_posix() for path in makers("Cause")} == {"report/causes"}


def watched(code: str, kind: str, **reported) -> Violation:
    """As a check of a pool with records fires, or of a cache of tensors without slots."""
    view = CacheView("cache", 3, num_slots=64, page_size=4)
    records = torch.zeros(64, COLUMNS, dtype=torch.int64) if kind != "tensors" else None
    if kind == "written" and records is not None:
        records[:, TOKEN_POSITION], records[:, REQUEST_GENERATION] = 9 | 17 << 32, 1
        records[:, STEP_SITE] = 4 | pack_site("decode", 0) << 32
    row = {"row_number": 1} if kind == "tensors" else {}
    pool = WatchedPool.of(view, 0, records, make_keys(5, 3, 4))
    return Violation(
        code,
        pool,
        **{"slot": 5, "position": 5, "request_id": "me", "site": ("decode", 0), "step": 9, **row, **reported},
    )


def described(violation: Violation, **settings) -> Finding:
    return Describer(WatchedEvidence({1: "other"}).read, **settings).finding([violation], 1)


@pytest.mark.parametrize("kind", ["tensors", "blank", "written"])
@pytest.mark.parametrize("code", [code for code, one in CODES.items() if one.observed])
def test_what_nobody_knows_is_no_evidence(code: str, kind: str) -> None:
    """Of pools that are only watched every code has a finding with causes, and none that a grant would have to tell."""
    for reported in (
        {},
        {"layers": (1,)},
        {"position": None},
        {"site": ("draft", 1)},
        {"slot": -1},
        {"found": {"row": 1, "position": 4}},
    ):
        finding = described(watched(code, kind, **reported), show_tokens=True)
        assert 1 <= len(finding.causes) <= MOST_CAUSES
        assert {cause.family for cause in finding.causes} <= set(FAMILIES)
        assert (finding.owner, finding.bytes_of) == (None, ())
        assert not any("grant" in text for cause in finding.causes for text in cause.evidence)
        assert finding.history == (
            ("row 1 of the batch",) if kind == "tensors" else ("nobody tells this canary of grants and frees",)
        )


def test_less_is_concluded_where_less_is_known() -> None:
    """Pages may be shared and nobody searched for the bytes: another writer, or several words, prove nothing."""
    assert [cause.family for cause in described(watched("R4", "written")).causes] == ["addressing", "order"]
    [cause] = described(watched("R9", "written", layers=(1,))).causes
    assert (cause.text, cause.evidence) == ("several words changed: an overwrite that nobody declared", ())
    sides = {"expected": {"position": 5}, "found": {"position": 5}}
    finding = described(watched("R10", "written", **sides))
    assert {"expected": finding.expected, "found": finding.found} == sides


def test_the_record_names_the_last_writer() -> None:
    """Where records are, writer, step and site are theirs; a cache of tensors has none."""
    assert described(watched("R5", "written")).causes[0].text == "the slot holds a token of another sequence"
    found = [described(watched("R9", kind)) for kind in ("written", "blank", "tensors")]
    assert [(f.writer, f.write_step, f.write_site) for f in found] == [
        ("other", 4, ("decode", 0)),
        (None, None, None),
        (None, None, None),
    ]
    assert [(f.page, f.offset) for f in found] == [(1, 1), (1, 1), (1, 5)]


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_the_mode_answers_for_watched_pools(mode: str) -> None:
    """Each fault is told once, by code and place, and counted as often as it fires; what is disabled is neither."""
    response, coverage, reported = (
        Response(CanaryConfig(mode=mode, disable=frozenset({"R4"})), Describer(WatchedEvidence({}).read)),
        Coverage(),
        [],
    )
    response.announce = lambda report: reported.extend(report.findings)
    for step in (9, 10):
        violations = [watched(code, "tensors", step=step) for code in ("R9", "R4")]
        violations.append(watched("R9", "tensors", step=step, row_number=2, request_id="you"))
        if mode == "log":
            response.answer(violations, step, coverage)
            continue
        with pytest.raises(KVCorruptionError) as raised:
            response.answer(violations, step, coverage)
        assert {finding.action for finding in raised.value.findings} == {
            f"raised KVCorruptionError; no token of step {step} leaves the engine"
        }
    response.answer([watched("R4", "tensors")], 11, coverage)
    assert coverage.fired == {"R9": 4}
    assert [finding.incident for finding in reported] == ([1, 2] if mode == "log" else [])
    assert [(found.code, found.readers) for found in response.log.findings] == [("R9", ("me",)), ("R9", ("you",))]


def test_each_entry_of_a_row_is_an_incident_of_its_own() -> None:
    """Where rows have no slots: another position, or the same of another row, is another fault; again is not."""
    response, reported = Response(CanaryConfig(mode="log"), Describer(WatchedEvidence({}).read)), []
    response.announce = lambda report: reported.extend(report.findings)
    for step, place in enumerate([{}, {"position": 9}, {"request_id": "you", "row_number": 2}, {"position": 9}]):
        response.answer([watched("R9", "tensors", step=step, **place)], step, Coverage())
    assert [finding.incident for finding in reported] == [1, 2, 3]
