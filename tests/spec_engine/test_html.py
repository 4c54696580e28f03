"""What pages are made of: bits side by side, lanes, a certificate in sentences; and templates that escape."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary import CanaryConfig
from kvcanary_tools.bench.toy.engine import ToyEngine
from spec_engine.html.bits import compared
from spec_engine.html.incident import history_lines
from spec_engine.html.lanes import lanes
from spec_engine.html.sentences import sentences, size
from spec_engine.html.templates import environment, linked

LINES = [
    {"step": 1, "kind": "born", "text": "page 3 granted to 'a' (memory.py:8)"},
    {"step": 1, "kind": "wrote", "text": "slot 12 written by 'a', prefill"},
    {"step": 4, "kind": "page", "text": "page 3 freed by 'a'"},
    {"step": 6, "kind": "born", "text": "page 3 granted to 'b'"},
    {"step": 10, "kind": "found", "text": "R9 content changed"},
]


def test_bits_that_differ_are_marked() -> None:
    """Eight at a time, the highest first; the value beside them, as short as it may be."""
    both = compared({"bits": "0xbe95e69b", "value": -0.2927750051021576}, {"bits": "0xbeb5e69b", "value": -0.355275})
    assert both["differs"] == [21]
    assert [(octet["high"], octet["low"]) for octet in both["octets"]] == [(31, 24), (23, 16), (15, 8), (7, 0)]
    assert "".join(str(bit["expected"]) for octet in both["octets"] for bit in octet["bits"]) == f"{0xBE95E69B:032b}"
    assert both["rows"] == [{"name": "value", "expected": "-0.292775005", "found": "-0.355275", "differs": True}]


@pytest.mark.parametrize(("digits", "width"), [("0x1", 8), ("0x00ff", 16), ("0xbfc3dbfb6e9dd132", 64)])
def test_bits_of_any_width(digits: str, width: int) -> None:
    """Whole bytes, as many as the digits say."""
    assert sum(len(octet["bits"]) for octet in compared({"bits": digits}, {"bits": digits})["octets"]) == width


def test_sides_without_bits_are_a_table() -> None:
    """What one side lacks is None; what is withheld is left out, and said to be."""
    both = compared({"position": 0}, {"position": 4, "chain": "withheld"})
    assert both["octets"] == []
    assert both["withheld"]
    assert [(row["name"], row["expected"], row["found"]) for row in both["rows"]] == [("position", 0, 4)]
    near = compared({"value": 1.0}, {"value": 1.0 + 2**-40})["rows"][0]
    assert near["expected"] != near["found"]


def test_lanes_say_who_had_the_page_and_since_when_nobody_knows() -> None:
    """Spans of two owners, the first ended by the free; the doubt from last good to found."""
    drawn = lanes(LINES, last_good=8)
    assert drawn is not None
    assert [(owner["name"], owner["start"], owner["end"]) for owner in drawn["owners"]] == [("a", 1, 4), ("b", 6, None)]
    assert drawn["doubt"] == {"x": 75.0, "width": 20.0}
    assert {name: [mark["x"] for mark in marks] for name, marks in drawn["rows"].items()} == {
        "written": [5.0],
        "found": [95.0],
    }
    assert drawn["ticks"][0] == {"step": 1, "x": 5.0}
    assert lanes([]) is None
    assert lanes(LINES, last_good=None)["doubt"] is None  # type: ignore[index]


def test_the_history_of_a_finding_has_steps() -> None:
    """Both forms in which findings tell of a page, the write, and the finding last."""
    finding = {
        "history": ["granted to 'a' at step 2 (m.py:8)", "step 3: block 2 given up by 'a'", "nobody told anything"],
        "write_step": 2, "write_site": ["prefill", 0], "writer": "a", "slot": 5,
        "code": "R9", "name": "n", "sentence": "s", "step": 9,
    }  # fmt: skip
    lines = history_lines(finding)
    assert [(line["step"], line["kind"]) for line in lines] == [(2, "born"), (2, "wrote"), (3, "page"), (9, "found")]
    assert lines[0]["text"] == "granted to 'a' (m.py:8)"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"bytes_checked": 2_000_000, "max_unread_steps": 73},
            "Every live byte was read again within 73 steps (2 MB in",
        ),
        ({"bytes_checked": 10, "max_unread_steps": 0}, "Every live byte was read again in every step (10 B in all)."),
        ({"bytes_checked": 0}, "No stored byte was read again."),
        ({"freed_unread_bytes": 1500}, "1.5 kB were freed before a last check."),
        ({"unchecked": {"too late": 2}}, "Not checked, 2 times: too late."),
        (
            {"inactive_classes": {"W9": "not fed", "O1": "not fed"}},
            "W9, O1: inactive, this engine gives no data for it.",
        ),
    ],
)
def test_a_certificate_is_sentences(changes: dict[str, Any], text: str) -> None:
    """Each counter that has something to say says it, of a real certificate with these counters."""
    certificate = ToyEngine(CanaryConfig()).canary.certificate() | changes
    assert any(line.text.startswith(text) for line in sentences(certificate, 0))
    assert sentences(certificate, 0)[0] == ("good", "No findings.")
    assert sentences(certificate, 2)[0] == ("bad", "2 findings.")


def test_sizes_are_short() -> None:
    """Three digits, and a unit of a thousand."""
    assert [size(count) for count in (0, 999, 23_600_000, 5e15)] == ["0 B", "999 B", "23.6 MB", "5,000 TB"]


def test_templates_escape_every_value() -> None:
    """Whatever a name says is text."""
    made = environment().from_string('{% import "parts.html.j2" as parts %}{{ parts.lane_rows(lanes, "x") }}')
    drawn = lanes([{"step": 1, "kind": "born", "text": "granted to '<script>x</script>'"}, *LINES[1:2]])
    text = made.render(lanes=drawn)
    assert "&lt;script&gt;" in text
    assert "<script" not in text


def test_codes_become_links_to_their_meaning() -> None:
    """Only those that the page explains; the rest of the text is escaped."""
    assert linked("R5 and R10 <b>", ["R5"]) == '<a href="#code-R5">R5</a> and R10 &lt;b&gt;'
