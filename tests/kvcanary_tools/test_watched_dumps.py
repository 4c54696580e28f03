"""The commands that read dumps, on the one that a finding inside a real vLLM has left."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvcanary.dumps.container import VERSION
from kvcanary.dumps.watched_reading import WatchedDump, read_any
from kvcanary.errors import DumpError

ROOT = Path(__file__).parents[2]
DUMP = ROOT / "tests" / "data" / "watched" / "step10-R9.kvdump"
SLOT = 82


def members() -> dict[str, bytes]:
    with zipfile.ZipFile(DUMP) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, parts: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return path


def test_the_page_shows_what_the_command_prints(kvcanary, monkeypatch) -> None:
    """docs/adapters.md has the output of `kvcanary explain` of this dump, line by line."""
    monkeypatch.chdir(DUMP.parent)
    shown = kvcanary("explain", DUMP.name)
    assert shown.exit_code == 1
    assert f"```\n$ kvcanary explain {DUMP.name}\n{shown.stdout}```" in (ROOT / "docs" / "adapters.md").read_text()


def test_explain_answers_what_people_ask(kvcanary) -> None:
    """Who had the block before, who wrote the slot, whose bytes they are, what was done about it; the row marked."""
    facts = json.loads(kvcanary("explain", str(DUMP), "--json").stdout)
    answers = " | ".join(facts["answers"])
    assert re.search(r"before that block 2 was granted to 'first-\w+' for positions 32 to 63, in step 1", answers)
    assert re.search(r"last written as position 18 of 'late-\w+', prefill, step 4", answers)
    assert re.search(r"its bytes are those of position 6 of 'beside-\w+', written in step 1", answers)
    assert [entry["position"] for entry in facts["row"] if entry["marked"]] == [18]
    assert facts["environment"]["version"] == "0.32.0"
    assert facts["causes"][0]["family"] == "transfer"


def test_why_slot_tells_of_any_slot(kvcanary) -> None:
    """What was read around the finding, and of other slots the story of their block; none outside of the pool."""
    shown = kvcanary("why-slot", str(DUMP), str(SLOT))
    assert shown.exit_code == 0
    assert re.search(r"^  bytes of  position 6 of 'beside-\w+'", shown.stdout, re.M)
    other = json.loads(kvcanary("why-slot", str(DUMP), "40", "--json").stdout)
    assert (other["read"], other["block"]) == (False, 1)
    assert [line["kind"] for line in other["story"]][:2] == ["born", "wrote"]
    assert kvcanary("why-slot", str(DUMP), "100000").exit_code == 2


@pytest.mark.parametrize(
    ("command", "word"), [(("replay",), "replayed"), (("bisect",), "bisected"), (("diff", str(DUMP)), "compared")]
)
def test_who_needs_every_event_says_so(kvcanary, command: tuple[str, ...], word: str) -> None:
    """One sentence, a hint, and the code of wrong usage."""
    shown = kvcanary(*command, str(DUMP))
    assert shown.exit_code == 2
    sentence, empty, hint = shown.stderr.splitlines()
    assert sentence.startswith(f"kvcanary: {DUMP} cannot be {word}: its pool was only watched")
    assert (empty, hint.startswith("hint: kvcanary explain ")) == ("", True)


def test_the_page_has_the_row_and_the_steps(kvcanary, tmp_path) -> None:
    """`report`: the story, the row with the wrong entry marked, the timeline; no map of pages, which nobody knows."""
    page = tmp_path / "report.html"
    assert kvcanary("report", str(DUMP), "-o", str(page)).exit_code == 0
    text = page.read_text()
    assert re.search(
        r'<tr class="bad"><td class="n">18</td><td class="n">82</td><td class="n">2</td><td class="n">18</td>', text
    )
    assert "Its bytes are those of position 6 of &#39;beside-" in text
    assert '<span class="when">step 10</span><span class="site"' in text
    assert 'class="map"' not in text
    fired, _, others = text.partition("Codes that did not fire")
    assert 'id="code-R9"' in fired
    assert others.index('id="code-R8"') < others.index('id="code-R11"')  # of the checks that the certificate names


def test_the_trace_has_steps_requests_and_grants(kvcanary, tmp_path) -> None:
    """`timeline`: a span a forward and a row, marks for what happened to blocks, and for the finding."""
    trace = tmp_path / "trace.json"
    assert kvcanary("timeline", str(DUMP), "-o", str(trace)).exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == 10
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "granted", "granted", "ended", "granted", "R9 content changed",
    ]  # fmt: skip


def test_inspect_and_certify_read_it(kvcanary) -> None:
    """What is in it; and what was checked until the finding."""
    summary = json.loads(kvcanary("inspect", str(DUMP), "--json").stdout)
    assert (summary["kind"], summary["steps"], summary["replayable"]) == ("watched", 10, False)
    assert "it cannot be replayed" in kvcanary("inspect", str(DUMP)).stdout
    shown = kvcanary("certify", str(DUMP))
    assert shown.exit_code == 1
    assert "mode raise, content full" in shown.stdout


@pytest.mark.parametrize(("window", "sees"), [(0, "all"), (12, "12"), (-64, "chunks of 64")])
def test_inspect_says_what_attention_sees(kvcanary, tmp_path, window: int, sees: str) -> None:
    """Everything, a window, or the chunk of its token."""
    groups = [{**group, "window": window} for group in json.loads(members()["manifest.json"])["groups"]]
    path = packed(tmp_path / "own.kvdump", manifest(groups=groups))
    assert re.search(rf"\d  +{sees}$", kvcanary("inspect", str(path)).stdout, re.MULTILINE)


def changed(what: str, line: int, **values: Any) -> dict[str, bytes]:
    """The members, with other values in one JSON line of one of them."""
    parts = members()
    lines = parts[what].splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **values}).encode()
    return parts | {what: b"\n".join(lines)}


def manifest(**values: Any) -> dict[str, bytes]:
    parts = members()
    return parts | {"manifest.json": json.dumps({**json.loads(parts["manifest.json"]), **values}).encode()}


BROKEN = {
    "a slot that is a text": changed("history.jsonl", 0, slot="x"),
    "a row that is too short": changed("events.jsonl", 0, rows=[["a", 1]]),
    "an event that nobody knows": changed("events.jsonl", 0, events=[["vanished", "a"]]),
    "tokens outside": changed("requests.jsonl", 0, tokens=[0, 1 << 40]),
    "a finding without a code": changed("findings.jsonl", 0, code="R99"),
    "a cause that is none": changed("findings.jsonl", 0, causes=[{"family": 3}]),
    "groups that are none": manifest(groups=7),
    "a block size of zero": manifest(groups=[{"number": 0, "block_size": 0, "window": 0, "num_slots": 4, "pools": []}]),
    "no environment": manifest(environment=None),
    "a newer version": manifest(version=VERSION + 1),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_damaged_gives_one_sentence(kvcanary, tmp_path, what: str) -> None:
    """No traceback, code 2, whatever a file says of itself."""
    path = packed(tmp_path / "broken.kvdump", BROKEN[what])
    with pytest.raises(DumpError):
        read_any(path)
    shown = kvcanary("explain", str(path))
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 3)


def test_names_are_text_in_the_page(kvcanary, tmp_path) -> None:
    """Markup in a request's name stays text."""
    parts = changed("findings.jsonl", 0, reader="<script>x</script>", sentence="<b>y</b>")
    path = packed(tmp_path / "evil.kvdump", parts)
    assert isinstance(read_any(path), WatchedDump)
    page = tmp_path / "page.html"
    assert kvcanary("report", str(path), "-o", str(page)).exit_code == 0
    assert "<b>y</b>" not in page.read_text()


OF_A_DRAFT = DUMP.parent / "step4-W5-draft.kvdump"


def test_a_dump_of_sglang_names_substep_branch_row_and_page(kvcanary, tmp_path) -> None:
    """A slot of a real SGLang's second draft step: who, which branch, which row and page, and what lies there."""
    facts = json.loads(kvcanary("explain", str(OF_A_DRAFT), "--json").stdout)
    finding = facts["finding"]
    assert (finding["code"], finding["pool"], finding["site"], finding["writer"]) == ("W5", "draft", ["draft", 1], "b")
    assert (finding["position"], finding["slot"], finding["page"], finding["expected"]) == (8, 66, 16, {"slot": 92})
    assert finding["evidence"] == ["branch 0 of its row", "row 3 of the table, page 16 of the pool"]
    assert (facts["environment"]["engine"], facts["environment"]["role"]) == ("sglang", "draft")
    shown = kvcanary("explain", str(OF_A_DRAFT)).stdout
    assert "step 4, draft[1]; written by 'b'" in shown
    assert re.search(r"^ +8 +92 +92 +0  position 8 of 'b'", shown, re.M)
    assert "position 10 of 'a'" in kvcanary("why-slot", str(OF_A_DRAFT), "66").stdout
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert kvcanary("report", str(OF_A_DRAFT), "-o", str(page)).exit_code == 0
    assert "branch 0 of its row" in page.read_text()
    assert kvcanary("timeline", str(OF_A_DRAFT), "-o", str(trace)).exit_code == 0
    marks = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "i"]
    assert marks == ["W5 write position"]
