"""What becomes of a fault: logged once and counted, or raised before anything leaves; and the same as data."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvcanary import CanaryConfig, Finding, KVCanaryError, KVCorruptionError, Report
from kvcanary.codes import CODES, FED, SPEAK_FIRST
from kvcanary.report.certificate import active_classes, inactive_classes
from kvcanary.report.finding import FAMILIES, KEPT_IN_GROUP, Cause, FindingLog, log_finding


def flip(engine, name: str, position: int, *, pool: str = "target", layer: int = 1, bit: int = 9) -> int:
    """Flip one bit of a committed V row; gives its slot."""
    slot = engine.slot(name, position)
    engine.pools[pool].bits(layer, slot, "V")[3] ^= 1 << bit
    return slot


def running(make_engine, **settings: object):
    """An engine with two requests, two steps into their drafting."""
    engine = make_engine(**{"content": "full", **settings})
    engine.start("first", 13)
    engine.start("second", 9)
    engine.step()
    engine.step()
    return engine


def caught_finding(make_engine) -> Finding:
    engine = running(make_engine)
    flip(engine, "first", 5)
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    return caught.value.findings[0]


def test_raise_carries_findings_and_report_and_nothing_leaves(make_engine):
    """The error has the findings and the report, and no token of the step is emitted."""
    engine = running(make_engine)
    slot, emitted = flip(engine, "first", 5), engine.tokens_emitted
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    error = caught.value
    assert [(f.code, f.slot, f.position, f.reader) for f in error.findings] == [("R9", slot, 5, "first")]
    assert isinstance(error.report, Report)
    assert error.report.findings == tuple(error.findings)
    assert str(error) == error.report.text()
    assert error.report.action == f"raised KVCorruptionError; no token of step {engine.step_number} leaves the engine"
    assert engine.tokens_emitted == emitted


def test_corruption_is_a_runtime_error_of_the_package():
    """Callers may catch RuntimeError or the base of the package."""
    assert issubclass(KVCorruptionError, RuntimeError)
    assert issubclass(KVCorruptionError, KVCanaryError)


def test_raise_keeps_the_finding_for_the_certificate(make_engine):
    """What was raised is also in the findings and in the certificate."""
    engine = running(make_engine)
    flip(engine, "first", 5)
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert engine.canary.findings == caught.value.findings
    assert [group["code"] for group in engine.canary.certificate()["findings"]] == ["R9"]


def test_log_goes_on_and_groups_the_same_fault(make_engine):
    """One damaged byte read in five steps is one group with count, first step and last step; tokens go on."""
    engine = running(make_engine, mode="log")
    slot, emitted = flip(engine, "first", 5), engine.tokens_emitted
    first = engine.step_number + 1
    for _ in range(5):
        engine.step()
    groups = engine.canary.certificate()["findings"]
    assert [(g["code"], g["slot"], g["count"], g["step"], g["last_step"]) for g in groups] == [
        ("R9", slot, 5, first, first + 4)
    ]
    assert engine.tokens_emitted > emitted
    assert [finding.step for finding in engine.canary.findings] == [first]


def test_log_tells_a_fault_once(make_engine):
    """A fault that is read again and again is one event with the fields of the finding."""
    engine = running(make_engine, mode="log")
    slot = flip(engine, "first", 5)
    with capture_logs() as events:
        for _ in range(3):
            engine.step()
    assert [(e["event"], e["log_level"], e["code"], e["slot"]) for e in events] == [
        ("kvcanary.finding", "error", "R9", slot)
    ]
    assert events[0]["action"] == "logged; the engine goes on"


def test_log_tells_two_faults_apart(make_engine):
    """Damage to two requests is two findings of one group, with two incident numbers."""
    engine = running(make_engine, mode="log")
    slots = {flip(engine, "first", 5), flip(engine, "second", 2)}
    engine.step()
    assert {finding.slot for finding in engine.canary.findings} == slots
    assert len({finding.incident for finding in engine.canary.findings}) == 2
    assert [group["count"] for group in engine.canary.certificate()["findings"]] == [2]


def test_log_finds_without_changing_the_tokens(make_engine):
    """With and without a fault the same tokens leave: log mode only tells."""
    rows = []
    for damaged in (False, True):
        engine = running(make_engine, mode="log")
        if damaged:
            flip(engine, "first", 5)
        engine.step()
        rows.append(engine.rows["first"].tokens)
        assert bool(engine.canary.findings) is damaged
    assert rows[0] == rows[1]


def test_a_disabled_code_is_neither_raised_nor_kept(make_engine):
    """With R9 disabled a flipped bit is nobody's business, and the certificate says that it was not looked for."""
    engine = running(make_engine, disable={"R9"})
    flip(engine, "first", 5)
    engine.step()
    engine.finish("first")
    assert engine.canary.findings == []
    assert engine.canary.certificate()["inactive_classes"]["R9"] == "disabled"


def test_release_finds_what_no_step_has_read(make_engine):
    """Damage after the last step of a request is found by its last re-read."""
    engine = running(make_engine, content="rolling")
    slot = flip(engine, "first", 5)
    with pytest.raises(KVCorruptionError) as caught:
        engine.finish("first")
    assert [(f.slot, f.site[0]) for f in caught.value.findings] == [(slot, "release")]


def test_rolling_names_the_exposed_tokens(make_engine):
    """A finding of the last re-read says since when the byte was good, and how many tokens left in between."""
    engine = running(make_engine, content="rolling")
    flip(engine, "first", 5)
    before = len(engine.rows["first"].tokens)
    engine.step("first")
    after = len(engine.rows["first"].tokens)
    with pytest.raises(KVCorruptionError) as caught:
        engine.finish("first")
    finding = caught.value.findings[0]
    assert finding.last_good_step < engine.step_number
    assert finding.exposed_tokens >= after - before > 0
    assert finding.readers == ("first",)


def test_to_dict_has_every_field_and_survives_json(make_engine):
    """The keys are the fields of a finding, and the values plain JSON."""
    finding = caught_finding(make_engine)
    data = finding.to_dict()
    assert list(data) == [field.name for field in fields(Finding)]
    assert json.loads(json.dumps(data)) == data
    assert data["causes"][0].keys() == {"family", "text", "basis", "evidence"}


def test_to_dict_keys_are_stable(make_engine):
    """Readers of the JSON rely on these names."""
    stable = (
        "code name pool page slot offset position layer part head dim byte bit step reader writer undeclared owner "
        "expected found bytes_of last_good_step first_bad_step readers exposed_tokens causes evidence action"
    )
    data = caught_finding(make_engine).to_dict()
    assert data.keys() >= set(stable.split())
    assert (data["code"], data["pool"], data["position"], data["reader"]) == ("R9", "target", 5, "first")


def test_a_finding_says_what_its_code_means(make_engine):
    """Name and sentence are those of the table of codes."""
    finding = caught_finding(make_engine)
    assert (finding.name, finding.sentence) == (CODES["R9"].name, CODES["R9"].sentence)


def test_log_keeps_only_the_first_of_very_many(make_engine):
    """A flood of incidents is counted to the last and kept up to a bound."""
    finding = caught_finding(make_engine)
    log = FindingLog()
    reported = [log.add(_like(finding, incident=number, step=number)) for number in range(KEPT_IN_GROUP + 10)]
    assert reported == [True] * KEPT_IN_GROUP + [False] * 10
    (group,) = log.groups.values()
    assert (group.count, log.total, len(log.findings)) == (KEPT_IN_GROUP + 10, KEPT_IN_GROUP + 10, KEPT_IN_GROUP)
    assert group.to_dict()["last_step"] == KEPT_IN_GROUP + 9


def test_log_groups_by_code_and_site(make_engine):
    """Two draft forwards are two sites, two verify forwards are one."""
    finding = caught_finding(make_engine)
    log = FindingLog()
    for site in (("draft", 0), ("draft", 1), ("verify", 0), ("verify", 0)):
        log.add(_like(finding, site=site))
    assert {key: group.count for key, group in log.groups.items()} == {
        ("R9", "draft[0]"): 1,
        ("R9", "draft[1]"): 1,
        ("R9", "verify"): 2,
    }


def _like(finding: Finding, **changes: object) -> Finding:
    return Finding(**{field.name: getattr(finding, field.name) for field in fields(Finding)} | changes)


def test_event_and_report_json_have_the_keys_of_a_finding(make_engine):
    """One dict: the fields of Finding, the event `kvcanary.finding`, and the finding in the report's JSON."""
    finding = caught_finding(make_engine)
    with capture_logs() as events:
        log_finding(finding)
    (event,) = events
    assert (event.pop("event"), event.pop("log_level")) == ("kvcanary.finding", "error")
    assert [event.pop(name) for name in ("rank", "dump", "cut")] == [None, None, []]
    assert event.pop("next") == "kvcanary codes R9"
    assert event == finding.to_dict() == Report((finding,), "", {}).to_dict()["findings"][0]
    assert list(event) == [field.name for field in fields(Finding)]


def test_a_cause_of_no_family_is_refused():
    """The list of families is closed."""
    with pytest.raises(ValueError, match=r"family must be one of bounds, addressing, .*, got 'weather'"):
        Cause("weather", "rain", "inferred")


def test_the_families_are_those_of_the_catalogue_of_faults():
    """The fourteen families of faults, what a model computes, and the canary's own hooks, each once."""
    known = "bounds addressing lengths draft windows graphs lifetime order identity transfer scales uninitialised "
    assert " ".join(FAMILIES) == known + "numerics ranks bits hooks"


def test_the_order_in_which_codes_speak_is_the_documented_one():
    """docs/checks.md has every code with its name and sentence, in the order in which they speak."""
    text = (Path(__file__).parents[2] / "docs" / "checks.md").read_text(encoding="utf-8")
    reported = re.findall(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert reported == [(code.code, code.name, code.sentence) for code in CODES.values()]


def test_reads_speak_in_the_order_of_the_design():
    """What a row reads: bounds and records first, then grants, tokens, positions, chains, bytes, and last the truth."""
    reads = [code for code in CODES if code not in SPEAK_FIRST and not code.startswith("H")]
    assert reads == ["R1", "R2", "R3", "R12", "R7", "R8", "W6", "R4", "R5", "R10", "R11", "R9", "R13", "R6"]
    assert {f"W{number}" for number in range(1, 10)} - SPEAK_FIRST == {"W6"}


def test_no_code_is_missing():
    """R1 to R13, W1 to W9, L1, X1, X2, N1, P1, T1, O1, H1 and H2."""
    singles = ["L1", "X1", "X2", "N1", "P1", "T1", "O1", "H1", "H2"]
    numbered = [*(f"R{n}" for n in range(1, 14)), *(f"W{n}" for n in range(1, 10)), *singles]
    assert sorted(CODES) == sorted(numbered)


def test_what_nothing_feeds_is_inactive_and_says_so():
    """A code that can not fire is not claimed; one that is fed is, unless it is disabled or nobody compares bytes."""
    config = CanaryConfig(content="write", disable={"R13"})
    fed = {"R1", "R9", "R13"}
    assert active_classes(config, fed) == ["R1"]
    inactive = inactive_classes(config, fed)
    assert (inactive.pop("R13"), inactive.pop("R9")) == ("disabled", "content is not compared")
    assert inactive.pop("H2") == "an error at once, in every mode"
    assert inactive == {code: "not fed" for code in CODES if code not in fed | {"H2"}}
    assert inactive_classes(CanaryConfig())["L1"] == "an error at once, in mode raise"
    assert active_classes(CanaryConfig(mode="log")) == [code for code in CODES if code in FED]
    assert active_classes(CanaryConfig()) == [code for code in CODES if code in FED - {"L1"}]


def test_every_code_can_be_disabled():
    """`disable` takes every code, and then nothing is active."""
    assert active_classes(CanaryConfig(disable=frozenset(CODES)), frozenset(CODES)) == []
