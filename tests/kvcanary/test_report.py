"""The report: one screen with everything that a reader asks first, in colour only on a terminal, and as data."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest

from kvcanary import KVCorruptionError, Report
from kvcanary.provenance.bytes_of import Provenance
from kvcanary.report.finding import Cause
from kvcanary.report.render import SHOWN_FINDINGS, SHOWN_HEADLINES, wants_colour

ESCAPE = "\x1b["


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def error(make_engine) -> KVCorruptionError:
    """What a flipped bit in the target pool raises: layer 1, V, head 1, dim 3, bit 9, position 5 of `first`."""
    engine = make_engine(content="full", mode="raise")
    engine.start("first", 13)
    engine.step()
    engine.pools["target"].bits(1, engine.slot("first", 5), "V", 1)[3] ^= 1 << 9
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    return caught.value


def labelled(text: str) -> dict[str, str]:
    """The lines of a report by their labels."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    return {line[:9].strip(): line[10:] for line in lines}


def test_the_first_line_names_code_and_place(error):
    """Class and place come first, down to the bit."""
    finding = error.findings[0]
    assert str(error).splitlines()[0] == (
        f"kvcanary: ERROR: content changed (R9): target pool, slot {finding.slot} "
        f"(page {finding.page}, offset {finding.offset}), layer 1, V, head 1, dim 3, bit 9"
    )
    assert finding.slot == finding.page * 4 + finding.offset


def test_the_text_answers_what_a_reader_asks(error):
    """Meaning, expected, found, reader, writer, owner, launch, blast, cause and action each have a line."""
    finding, lines = error.findings[0], labelled(str(error))
    assert lines["meaning"] == finding.sentence
    assert lines["expected"] == f"bits {finding.expected['bits']}, value {finding.expected['value']}"
    assert lines["found"] == f"bits {finding.found['bits']}, value {finding.found['value']}"
    assert lines["reader"] == "'first', position 5"
    assert lines["writer"] == "undeclared write; the last declared one is 'first', prefill, step 1"
    assert re.fullmatch(r"granted to 'first' at step 1 \(fake_engine.py:\d+\)", lines["owner"])
    good = finding.last_good_step
    assert lines["launch"] == f"{finding.site[0]}, step 3; last good at step {good}, first bad at step 3"
    assert lines["blast"].startswith("'first'; ")
    assert lines["cause"].startswith("1. one flipped bit: bit 9 of one element")
    assert lines["action"] == "raised KVCorruptionError; no token of step 3 leaves the engine"


def test_the_last_line_has_the_counters(error):
    """How much was checked until then closes the report."""
    counters = error.report.counters
    assert counters.keys() == {"forwards", "slots checked", "bytes re-read", "not judged"}
    assert counters["forwards"] > 0
    counted = ", ".join(f"{value} {name}" for name, value in counters.items())
    assert str(error).splitlines()[-1] == f"kvcanary: 1 finding, {counted}"


def test_causes_say_what_they_rest_on(error):
    """A cause is derived from what was read, or inferred, and the text says which."""
    text = str(error)
    for rank, cause in enumerate(error.findings[0].causes, 1):
        assert cause.basis in ("derived", "inferred")
        assert f"{rank}. {cause.text} ({cause.family}, {cause.basis})" in text
        assert all(f"\n               {line}\n" in text for line in cause.evidence)
    assert error.findings[0].causes[0].family == "bits"


def test_a_finding_without_a_word_names_the_layers(error):
    """Several layers are listed, a few by number; no part, head or bit is printed."""
    finding = replace(error.findings[0], layers=(0, 1, 2, 3, 4, 5), layer=0, part=None, head=None, dim=None, bit=None)
    head = Report((finding,), "none", {}).text().splitlines()[0]
    assert head.endswith("layers 0, 1, 2, 3 and 2 more")


def test_a_word_without_a_bit_names_the_byte(error):
    """Where more than one bit changed the headline ends with the byte."""
    finding = replace(error.findings[0], bit=None)
    assert Report((finding,), "none", {}).text().splitlines()[0].endswith("head 1, dim 3, byte 1")


def test_a_slot_that_nobody_wrote_has_no_writer(error):
    """Without a declared write the writer's line says so."""
    finding = replace(error.findings[0], code="R12", writer=None, write_step=None, write_site=None)
    assert labelled(Report((finding,), "none", {}).text())["writer"] == "nobody has declared a write of this slot"


def test_a_page_that_was_never_granted_says_so(error):
    """Without grants the owner's line says so."""
    finding = replace(error.findings[0], history=())
    assert labelled(Report((finding,), "none", {}).text())["owner"] == "the page was never granted"


def test_the_owner_line_shows_the_last_events(error):
    """Of a long history the last three events are on the screen."""
    finding = replace(error.findings[0], history=("one", "two", "three", "four"))
    assert labelled(Report((finding,), "none", {}).text())["owner"] == "two; three; four"


def test_evidence_is_listed_below_the_finding(error):
    """Other checks of the same fault are lines of the same finding."""
    finding = replace(error.findings[0], evidence=("R5 chain break: here", "R6 wrong row: there"))
    text = Report((finding,), "none", {}).text()
    assert "  evidence  R5 chain break: here\n            R6 wrong row: there\n" in text


def test_many_findings_are_one_line_each_after_the_first_few(error):
    """The screen stays one screen: later findings have their headline only, and all are counted."""
    findings = tuple(replace(error.findings[0], slot=slot) for slot in range(SHOWN_FINDINGS + 3))
    text = Report(findings, "none", {"forwards": 1}).text()
    assert text.count("kvcanary: ERROR: ") == SHOWN_FINDINGS + 3
    assert "more findings" not in text
    assert text.count("  meaning") == SHOWN_FINDINGS
    assert text.endswith(f"kvcanary: {SHOWN_FINDINGS + 3} findings, 1 forwards")


def test_a_flood_is_still_one_screen(error):
    """Sixty findings with everything that can be said of them fit one screen, and the rest is counted."""
    long = replace(
        error.findings[0],
        causes=(Cause("bits", "one", "derived", ("a", "b")),) * 3,
        evidence=("one",) * 7,
        bytes_of=(Provenance("zero", "all zero", "inferred"),) * 3,
        history=("granted",) * 8,
    )
    lines = Report((long,) * 60, "none", {"forwards": 1}).text().splitlines()
    assert len(lines) <= 64
    assert f"kvcanary: and {60 - SHOWN_FINDINGS - SHOWN_HEADLINES} more findings" in lines


def test_padding_writes_as_padding(error):
    """A write of padding is nobody's, and no request's that ended."""
    finding = replace(error.findings[0], code="W9", undeclared=False, writer=None)
    reported = labelled(Report((finding,), "none", {}).text())["writer"]
    assert reported == "padding, prefill, step 1"
    other = replace(finding, code="R5")
    reported = labelled(Report((other,), "none", {}).text())["writer"]
    assert reported == "a request that ended long ago, prefill, step 1"


def test_whose_bytes_these_are_has_a_line(error):
    """The best answer is on the screen, with what it rests on; all are in the data."""
    answers = (
        Provenance("part", "V is K of slot 9 stored as V", "inferred", 9, 1),
        Provenance("zero", "all zero", "inferred"),
    )
    finding = replace(error.findings[0], bytes_of=answers)
    assert labelled(Report((finding,), "none", {}).text())["bytes"] == "V is K of slot 9 stored as V (inferred)"
    assert [answer["kind"] for answer in finding.to_dict()["bytes_of"]] == ["part", "zero"]


@pytest.mark.parametrize("code", ["H1", "H2"])
def test_what_has_no_slot_names_none(error, code):
    """A finding about the canary itself names no slot, no writer and no owner."""
    finding = replace(error.findings[0], code=code, slot=-1, page=-1, offset=0, layer=None, layers=(), part=None)
    finding = replace(finding, writer=None, write_site=None, write_step=None)
    text = Report((finding,), "none", {}).text()
    assert "slot" not in text.splitlines()[0]
    assert not labelled(text).keys() & {"writer", "owner"}


def test_text_has_no_escape_codes_unless_asked(error):
    """The error's words are plain; colour marks the headline only."""
    plain, coloured = error.report.text(), error.report.text(colour=True)
    assert ESCAPE not in plain
    assert coloured.splitlines()[0] == f"\x1b[1m\x1b[31m{plain.splitlines()[0]}\x1b[0m"
    assert coloured.splitlines()[1:] == plain.splitlines()[1:]


def test_print_has_no_colour_where_there_is_no_terminal(error, monkeypatch):
    """A file or a pipe gets plain text, with a newline at its end."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    error.report.print(stream)
    assert stream.getvalue() == f"{error}\n"
    assert ESCAPE not in stream.getvalue()


def test_print_has_colour_on_a_terminal(error, monkeypatch):
    """A terminal gets the headline in colour."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    error.report.print(stream)
    assert stream.getvalue() == error.report.text(colour=True) + "\n"


def test_print_obeys_no_color(error, monkeypatch):
    """NO_COLOR keeps a terminal plain."""
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    error.report.print(stream)
    assert stream.getvalue() == f"{error}\n"


@pytest.mark.parametrize(
    ("stream", "environ", "colour"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (io.StringIO(), {}, False),
    ],
    ids=["terminal", "empty NO_COLOR", "NO_COLOR", "no terminal"],
)
def test_wants_colour(stream, environ, colour):
    """Colour is for terminals, unless NO_COLOR is set and not empty."""
    assert wants_colour(stream, environ) is colour


def test_to_dict_is_the_same_as_json(error):
    """Findings, action, counters, the path of the dump and the rank, in plain JSON."""
    data = error.report.to_dict()
    assert list(data) == ["findings", "action", "counters", "dump", "rank"]
    assert data["findings"] == [error.findings[0].to_dict()]
    assert data["action"] == error.report.action
    assert json.loads(json.dumps(data)) == data
