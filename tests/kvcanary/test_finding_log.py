"""A finding as data, and the log that groups findings: without an engine, every word and count."""

from __future__ import annotations

from dataclasses import fields

import pytest
from structlog.testing import capture_logs

from kvcanary.provenance.bytes_of import Provenance
from kvcanary.report.finding import FAMILIES, KEPT_IN_GROUP, Cause, Finding, FindingLog, log_finding

CAUSE = Cause("bits", "one flipped bit", "derived", ("this word alone",))
AS_DATA = {
    "code": "R9",
    "name": "content changed",
    "sentence": "bytes are not those that were written",
    "pool": "target",
    "page": 5,
    "slot": 21,
    "offset": 1,
    "position": 5,
    "layer": 1,
    "layers": [1, 2],
    "part": "V",
    "head": 0,
    "dim": 3,
    "byte": 1,
    "bit": 6,
    "site": ["draft", 2],
    "step": 9,
    "reader": "me",
    "writer": "me",
    "write_step": 7,
    "write_site": ["verify", 0],
    "undeclared": True,
    "owner": "me",
    "expected": {"bits": "0x3f"},
    "found": {"bits": "0x7f"},
    "bytes_of": [{"kind": "zero", "text": "zeros", "basis": "inferred", "slot": None, "layer": 1}],
    "last_good_step": 8,
    "first_bad_step": 9,
    "history": ["granted to 'me' at step 1"],
    "readers": ["me", "you"],
    "exposed_tokens": 2,
    "causes": [{"family": "bits", "text": "one flipped bit", "basis": "derived", "evidence": ["this word alone"]}],
    "evidence": ["R5 chain break"],
    "incident": 3,
    "action": "raised",
    "entry": None,
    "healed": "",
    "hardware": {"hostname": "node17", "pid": 311},
}


def a_finding(**changes: object) -> Finding:
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in AS_DATA.items()}
    made |= {"bytes_of": (Provenance("zero", "zeros", "inferred", None, 1),), "causes": (CAUSE,)}
    return Finding(**made | changes)


def test_a_finding_as_data_is_what_it_says():
    """Every field under its name; tuples are lists, as in JSON."""
    assert a_finding().to_dict() == AS_DATA
    assert list(AS_DATA) == [field.name for field in fields(Finding)]
    assert a_finding(write_site=None).to_dict()["write_site"] is None


def test_a_finding_is_told_as_one_event():
    """`kvcanary.finding`, an error, with the fields as keys, the rank where there are several workers, what to type."""
    with capture_logs() as events:
        log_finding(a_finding(layers=(1, 2, 3)))
        log_finding(a_finding(), rank=2)
    own = {"event": "kvcanary.finding", "log_level": "error", "dump": None, "next": "kvcanary codes R9", "cut": []}
    assert events == [own | AS_DATA | {"rank": None, "layers": [1, 2, 3]}, own | AS_DATA | {"rank": 2}]


def test_long_lists_are_left_to_the_dump():
    """Where one has them whole the event has two of each, says of which, and how to read the file."""
    causes = (Cause("bits", "one flipped bit", "derived", ("this", "that", "other")),)
    with capture_logs() as events:
        log_finding(a_finding(layers=(1, 2, 3), causes=causes), dump="/a b/x.kvdump")
    [event] = events
    assert (event["layers"], event["causes"][0]["evidence"]) == ([1, 2], ["this", "that"])
    assert event["readers"] == ["me", "you"]
    assert event["cut"] == ["layers", "causes"]
    assert (event["dump"], event["next"]) == ("/a b/x.kvdump", "kvcanary explain '/a b/x.kvdump'")


def test_a_cause_has_one_of_the_families():
    """The refusal lists them."""
    with pytest.raises(ValueError) as caught:
        Cause("weather", "rain", "inferred")
    assert str(caught.value) == f"family must be one of {', '.join(FAMILIES)}, got 'weather'"


def test_a_group_has_its_first_its_count_and_its_last_step():
    """By code and site; draft forwards of one step are sites of their own."""
    log = FindingLog()
    reported = [log.add(a_finding(incident=n, step=step)) for n, step in enumerate((4, 9, 6))]
    assert reported == [True, True, True]
    assert log.add(a_finding(site=("draft", 1)))
    assert log.add(a_finding(code="R5", site=("verify", 0)))
    assert list(log.groups) == [("R9", "draft[2]"), ("R9", "draft[1]"), ("R5", "verify")]
    group = log.groups["R9", "draft[2]"]
    assert (group.count, group.first.step, group.last.step, log.total) == (3, 4, 6, 5)
    assert group.to_dict() == a_finding(incident=0, step=4).to_dict() | {"count": 3, "last_step": 6}


def test_one_incident_is_told_once_whoever_sees_it():
    """Another site sees the same: counted there, told nowhere; another code of the incident is told."""
    log = FindingLog()
    assert log.add(a_finding())
    assert not log.add(a_finding(site=("sweep", 0)))
    assert log.add(a_finding(code="R5"))
    assert [group.count for group in log.groups.values()] == [1, 1, 1]
    assert [finding.code for finding in log.findings] == ["R9", "R5"]


def test_the_log_keeps_so_many_of_a_group_and_counts_all():
    """The last that is kept is the 64th; other groups have room."""
    log = FindingLog()
    reported = [log.add(a_finding(incident=number)) for number in range(KEPT_IN_GROUP + 2)]
    assert reported == [True] * KEPT_IN_GROUP + [False] * 2
    assert log.add(a_finding(incident=KEPT_IN_GROUP, code="R5"))
    assert (log.total, len(log.findings)) == (KEPT_IN_GROUP + 3, KEPT_IN_GROUP + 1)


def test_findings_stand_in_the_order_in_which_they_were_found():
    """By step, then by incident, whatever their groups."""
    log = FindingLog()
    for step, incident, code in ((5, 3, "R9"), (5, 2, "R5"), (4, 7, "R9")):
        log.add(a_finding(step=step, incident=incident, code=code))
    assert [(finding.step, finding.incident) for finding in log.findings] == [(4, 7), (5, 2), (5, 3)]
