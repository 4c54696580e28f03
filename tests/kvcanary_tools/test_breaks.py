"""Lines of the engine broken one at a time: every break still strikes, and ends as its entry says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcanary_tools.breaks import table
from kvcanary_tools.breaks.broken import Break, BreakError, Edit, edited
from kvcanary_tools.breaks.catalogue import BREAKS
from kvcanary_tools.breaks.running import Row
from kvcanary_tools.breaks.verdict import complaints, is_cause_right

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tools" / "kvcanary_tools" / "breaks" / "results" / "breaks.json"
PAGE = ROOT / "docs" / "breaks.md"
IN_CI = 2
LEAST_RIGHT = 0.95


def run(*arguments: str) -> dict:
    """What the command writes; its complaints on stderr where it has some."""
    command = [sys.executable, "-m", "kvcanary_tools.breaks", *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3000)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def rows_of(reported: dict) -> list[Row]:
    return [Row(**row) for row in reported["rows"]]


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
def test_each_edit_changes_one_line(broken: Break) -> None:
    """What a break replaces stands in the engine's source once, and what it becomes can be compiled."""
    for edit in broken.edits:
        spec = importlib.util.find_spec(edit.module)
        source = Path(spec.origin).read_text(encoding="utf-8")
        own = [one for one in broken.edits if one.module == edit.module]
        compile(edited(source, own), spec.origin, "exec")


def test_a_line_that_is_not_there_is_named() -> None:
    """BreakError where the engine's source has changed: else a break that changes nothing passes."""
    with pytest.raises(BreakError, match="must have this line once, it has it 0 times: x = 1"):
        edited("y = 1", [Edit("spec_engine.core", "x = 1", "x = 2")])


def test_a_sample_ends_as_its_entries_say() -> None:
    """Typed errors without a canary where the host can see it, findings with one, and no wrong token before them."""
    reported = run("--sample", str(IN_CI), "--seed", "4")
    assert reported["complaints"] == []
    wrong = [(row.name, row.canary, row.cause, row.says) for row in rows_of(reported) if is_cause_right(row) is False]
    assert len(wrong) <= (1 - LEAST_RIGHT) * reported["summary"]["findings"], wrong


@pytest.mark.slow
def test_all_end_as_their_entries_say() -> None:
    """The same of all breaks, with the right cause first in at least 95 of 100 findings."""
    reported = run("--workers", "2")
    assert reported["complaints"] == []
    summary = reported["summary"]
    assert summary["findings with the right cause first"] >= LEAST_RIGHT * summary["findings"]


def test_the_record_is_of_all_breaks_and_the_page_shows_it() -> None:
    """docs/breaks.md is the record's table; nothing in the record is otherwise than its entry says."""
    reported = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = rows_of(reported)
    assert {row.name for row in rows} == BREAKS.keys()
    assert [text for name in BREAKS for text in complaints([row for row in rows if row.name == name])] == []
    assert reported["summary"] == table.summary(rows)
    assert "\n".join(table.lines(rows)) in PAGE.read_text(encoding="utf-8")


def row(name: str, **more) -> Row:
    given = {"case": "", "canary": "full", "ends": "", "typed": True, "step": 3, "wrong": 0, "accepted_len": 2.0}
    given |= {"unbroken_len": 2.0, "cause": "", "says": "", "message": ""}
    return Row(name, **given | more)


def test_silence_is_a_complaint_where_harm_is_done() -> None:
    """Wrong tokens, or fewer accepted, without a word; a run that the break has not touched may be silent."""
    (silent,) = complaints([row("compaction_undeclared", wrong=2), row("compaction_undeclared", ends="R9")])
    assert "nothing was said, 2 wrong tokens left" in silent
    (fewer,) = complaints([row("compaction_undeclared", accepted_len=1.5), row("compaction_undeclared", ends="R9")])
    assert "1.5 accepted of 2.0" in fewer
    assert complaints([row("compaction_undeclared"), row("compaction_undeclared", ends="R9")]) == []


def test_another_end_than_the_entry_says_is_a_complaint() -> None:
    """An error without a type of ours, another code, wrong tokens before the finding, a break that never strikes."""
    (untyped,) = complaints([row("compaction_undeclared", ends="R9", typed=False, message="index 19")])
    assert "must have a type of ours" in untyped
    (other,) = complaints([row("compaction_undeclared", ends="W9")])
    assert "ended in W9 and not in" in other
    (leaked,) = complaints([row("compaction_one_layer_less", ends="T1", wrong=4)])
    assert "4 wrong tokens left before T1" in leaked
    (unmade,) = complaints([row("compaction_undeclared")])
    assert "the break was never made" in unmade
