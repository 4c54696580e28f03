"""The commands that read dumps: what they say, their exit codes, and their sentences for files that are none."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.errors import DumpError
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.dumps.bisecting import first_bad
from kvcanary_tools.dumps.diffing import diff
from kvcanary_tools.dumps.explaining import explain
from kvcanary_tools.dumps.story import story_of
from kvcanary_tools.dumps.timelines import timeline

BIT = 9


def run(folder: Path, name: str, seed: int = 0, flip: bool = True) -> Path:
    """A dump of a toy engine; with a flipped bit the one of its finding."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full", dump_dir=str(folder / name)), seed=seed)
        engine.start("mine", 13)
        engine.start("theirs", 9)
        for _ in range(3):
            engine.draft()
        if not flip:
            return engine.canary.dump(folder / f"{name}.kvdump")
        slot = int(engine.rows["mine"].slots[6])
        engine.pools["target"].kv.view(torch.int32)[1, slot, 1, 0, 2] ^= 1 << BIT
        with pytest.raises(KVCorruptionError) as caught:
            engine.draft()
        return Path(caught.value.report.dump)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def bad(folder: Path) -> str:
    return str(run(folder, "bad"))


@pytest.fixture(scope="module")
def clean(folder: Path) -> str:
    return str(run(folder, "clean", flip=False))


def test_inspect_tells_what_is_in_a_dump(kvcanary, bad, clean):
    """Steps, pools, pages, requests and findings, as a table and as JSON."""
    shown = kvcanary("inspect", bad)
    assert shown.exit_code == 0
    assert "because of a finding, steps 0 to 6" in shown.stdout
    assert re.search(r"^R9 +content changed +target", shown.stdout, re.M)
    reported = json.loads(kvcanary("inspect", bad, "--json").stdout)
    assert {request["request_id"] for request in reported["requests"]} == {"mine", "theirs"}
    assert reported["events"]["begin_step"] == 6
    assert reported["tokens"] == "replaced"
    assert "no finding" in kvcanary("inspect", clean).stdout


def test_explain_tells_the_story(kvcanary, bad, clean):
    """From the page's birth to the finding, in order; the ranked cause with its evidence; what to do next."""
    shown = kvcanary("explain", bad)
    assert shown.exit_code == 1
    reported = json.loads(kvcanary("explain", bad, "--json").stdout)
    kinds = [line["kind"] for line in reported["story"]]
    assert kinds[0] == "born"
    assert kinds[-1] == "found"
    assert {"wrote", "read"} <= set(kinds)
    steps = [line["step"] for line in reported["story"]]
    assert steps == sorted(steps)
    assert reported["causes"][0]["family"] == "bits"
    assert f"1. one flipped bit: bit {BIT} of one element" in shown.stdout
    assert f"kvcanary replay {bad}" in shown.stdout
    nothing = kvcanary("explain", clean)
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "--finding must be in 1 to 1, got 4" in kvcanary("explain", bad, "--finding", "4").stderr


@pytest.mark.parametrize(("call", "words"), [("forward", "compare the padding"), ("launch", "without graphs")])
def test_nobody_is_told_to_run_without_graphs_where_there_are_none(bad, call, words):
    """What to do about padding depends on whether anything was replayed."""
    dump = read_dump(Path(bad))
    dump.events.append({"call": call})
    dump.findings[0]["causes"][0]["family"] = "graphs"
    dump.findings[0]["pool"] = "of no story"
    assert words in explain(dump, 0)["next"][0]


def test_a_story_tells_a_step_in_its_order(tmp_path):
    """A page is granted, written, committed, freed and held back, all in one step; then it has its next owner."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full"))
        engine.start("first", 13)
        [page, *_] = engine.rows["first"].pages
        engine.finish("first")
        while page not in [owned for row in engine.rows.values() for owned in row.pages]:
            engine.start(f"more {len(engine.rows)}", 13)
        dump = read_dump(engine.canary.dump(tmp_path / "all.kvdump"))
    reported = [line.text.split(" ") for line in story_of(dump, "target", page * engine.shape.page_size)]
    verbs = [words[2] for words in reported]
    expected = ["granted", "written", "committed", "freed", "quarantined", "left", "granted", "written"]
    assert [verb for verb in verbs if verb in expected] == expected


def test_a_story_does_not_say_that_a_page_was_copied_before_it_was(tmp_path):
    """`on_copy` puts a page in the place of another; that its bytes are there is said by a move alone."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full"))
        engine.start("first", 13)
        pages = engine.rows["first"].pages
        engine.canary.admit("child", [1] * 13)
        engine.canary.on_fork("first", "child", pages[:2])
        [copy] = engine.pages.take(1, engine.num_steps)
        engine.canary.on_copy("child", pages[1], copy)
        dump = read_dump(engine.canary.dump(tmp_path / "all.kvdump"))
    reported = [line.text.split(" (")[0] for line in story_of(dump, "target", copy * engine.shape.page_size)]
    taken = f"page {copy} takes the place of page {pages[1]} in the row of 'child'; its bytes follow by a move"
    assert reported == [f"page {copy} granted as a copy to 'child'", taken]


def test_a_story_knows_grants_of_several(tmp_path):
    """Who of them has the page from now on, once; the timeline counts all of their pages, and shows each request."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full"))
        for name in ("first", "second"):
            engine.canary.admit(name, [1, 2, 3])
        engine.canary.on_alloc_all(["first", "second"], [[1, 2], [3]])
        dump = read_dump(engine.canary.dump(tmp_path / "all.kvdump"))
    dump.history.clear()
    reported = [story_of(dump, "target", page * engine.shape.page_size) for page in (2, 3)]
    assert [[line.text for line in story] for story in reported] == [
        ["page 2 granted to 'first'"],
        ["page 3 granted to 'second'"],
    ]
    events = timeline(dump)["traceEvents"]
    assert [event["args"]["pages"] for event in events if event["ph"] == "C"][-1] == 3
    shown = [event["args"]["request"] for event in events if event["name"] == "on_alloc_all"]
    assert shown == ["first", "second"]


def test_replay_reaches_the_finding(kvcanary, bad, clean):
    """Code 1 where the finding is reached, 0 before its step and for a clean run."""
    shown = kvcanary("replay", bad)
    assert shown.exit_code == 1
    assert "reached R9 content changed: target pool" in shown.stdout
    assert json.loads(kvcanary("replay", bad, "--json").stdout)["same"] is True
    assert kvcanary("replay", bad, "--until", "5").exit_code == 0
    assert kvcanary("replay", bad, "--check", "w4").exit_code == 0
    assert "nothing was found" in kvcanary("replay", clean).stdout
    assert "--check must be a code of the canary, got 'R99'" in kvcanary("replay", bad, "--check", "R99").stderr


def test_replay_says_what_it_did_not_reach(kvcanary, bad, monkeypatch):
    """Code 3 and the finding, where the events do not lead there."""
    from kvcanary.replay.damage import Damager

    monkeypatch.setattr(Damager, "bring_about", lambda self, event: None)
    shown = kvcanary("replay", bad)
    assert shown.exit_code == 3
    assert "NOT reached R9 content changed, slot" in shown.stdout


def test_why_slot_tells_who_put_it_there(kvcanary, bad):
    """Page, owner, rows, the last declared write, and the story; slots and pools that are none are a sentence."""
    slot = str(json.loads(kvcanary("inspect", bad, "--json").stdout)["findings"][0]["slot"])
    reported = json.loads(kvcanary("why-slot", bad, slot, "--json").stdout)
    assert (reported["owner"], reported["rows"]) == ("mine", ["mine"])
    assert reported["written"]["position"] == 6
    assert reported["written"]["request"] == "mine"
    shown = kvcanary("why-slot", bad, slot, "--pool", "target")
    assert "private to 'mine'" in shown.stdout
    assert "written   by 'mine', position 6, prefill, step 1" in shown.stdout
    assert kvcanary("why-slot", bad, "99999999").exit_code == 2
    assert "--pool must be one of target, draft" in kvcanary("why-slot", bad, slot, "--pool", "x").stderr


def test_until_lies_among_the_steps(kvcanary, bad):
    """A step that the dump does not have is wrong usage, in a sentence that says which it has."""
    last = json.loads(kvcanary("inspect", bad, "--json").stdout)["step"]
    for until in (-1, last + 1):
        refused = kvcanary("replay", bad, "--until", str(until))
        assert refused.exit_code == 2
        assert f"--until must lie in [0, {last}], the steps of this dump, got {until}" in refused.stderr
    assert kvcanary("replay", bad, "--until", str(last)).exit_code == 1


def test_timeline_is_a_trace(kvcanary, bad, tmp_path):
    """Every step, forward and finding is an event of a Chrome trace, within its step."""
    path = tmp_path / "trace.json"
    assert kvcanary("timeline", bad, "-o", str(path)).exit_code == 0
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    assert [event["name"] for event in events if event["ph"] == "i"] == ["R9 content changed"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {"step 4", "prefill", "draft[0]", "verify", "extend", "commit_all"} <= {event["name"] for event in spans}
    assert all(event["ts"] % 1000 + event["dur"] <= 1000.001 for event in spans)
    assert kvcanary("timeline", bad, "-o", str(tmp_path / "no" / "such")).exit_code == 2


def test_report_is_one_page_that_loads_nothing(kvcanary, bad, tmp_path):
    """Findings, a map with one cell a page, the draft tree and the steps; no address, no script but our own."""
    path = tmp_path / "report.html"
    assert kvcanary("report", bad, "-o", str(path)).exit_code == 0
    page = path.read_text()
    reported = json.loads(kvcanary("inspect", bad, "--json").stdout)
    assert page.count('title="page ') == sum(reported["pages"].values())
    assert page.count(' hit"') == 1
    trees = page.partition('class="card">\n<h2>Draft tree')[2].partition("</section>")[0]
    assert trees.count("<circle") - trees.count('"ring"') == trees.count("<title>node ") > 4
    roots = trees.count("<svg")
    assert trees.count("<path") == trees.count("<title>node ") - roots  # all other nodes hang on one
    assert "kvcanary why-slot" in page
    assert "One flipped bit" in page
    assert "width=device-width" in page
    assert "prefers-color-scheme: dark" in page
    for word in ("http://", "https://", "src=", "url(", "@import"):
        assert word not in page
    assert only_our_script(page)


def only_our_script(page: str) -> bool:
    """One script is in the page, and it is the only one that the page's policy lets run."""
    [script] = re.findall("<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    return (
        page.count("<script") == 1
        and f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" == policy[1]
    )


def test_the_report_shows_both_sides_the_lane_and_the_commands(kvcanary, bad, tmp_path):
    """Lanes of the page, the certificate in sentences, codes with their meaning, commands with a button each."""
    path = tmp_path / "report.html"
    assert kvcanary("report", bad, "-o", str(path)).exit_code == 0
    page = path.read_text()
    assert 'class="mark found"' in page
    assert re.search("Every live byte was read again (within|in every step)", page)
    assert '<a class="code" href="#code-R9"' in page
    assert 'id="code-R9"' in page
    assert page.count('class="copy"') == page.count('class="command"') == 2
    assert f"kvcanary replay {bad}</code>" in page


def test_what_a_page_has_nothing_for_is_left_out(kvcanary, clean, tmp_path):
    """A clean dump: no panel of findings, and the verdict of the certificate first."""
    path = tmp_path / "report.html"
    assert kvcanary("report", clean, "-o", str(path)).exit_code == 0
    page = path.read_text()
    assert "No findings." in page
    for panel in ("<article", "Expected and found", "Likely cause", "<h3>Next"):
        assert panel not in page


def test_names_in_a_page_are_text(folder, tmp_path):
    """A request may be called anything: it is text in the page, no markup."""
    from kvcanary.dumps.reading import read_dump
    from kvcanary_tools.dumps.pages import page_of

    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full"))
        engine.start("<script>alert(1)</script>", 9)
        engine.draft()
        page = page_of(read_dump(engine.canary.dump(tmp_path / "named.kvdump")))
    assert only_our_script(page)
    assert "&lt;script&gt;" in page


def test_diff_finds_where_recordings_part(kvcanary, folder, clean):
    """Two dumps of equal runs are the same though their ids differ; with another prompt they part at its admission."""
    again, other = run(folder, "again", flip=False), run(folder, "other", seed=1, flip=False)
    same = kvcanary("diff", clean, str(again))
    assert same.exit_code == 0, same.stdout
    parted = kvcanary("diff", clean, str(other), "--json")
    assert parted.exit_code == 1
    reported = json.loads(parted.stdout)
    assert reported["same"] is False
    assert reported["step"] >= 1
    assert reported["fields"]


def test_diff_runs_two_commands(kvcanary, tmp_path):
    """Each writes its dump where it says {dump}; what is no such command, or fails, is a sentence."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, torch\n"
        "from kvcanary import CanaryConfig\n"
        "from kvcanary_tools.bench.toy.engine import ToyEngine\n"
        "with torch.inference_mode():\n"
        "    engine = ToyEngine(CanaryConfig())\n"
        "    engine.start('mine', int(sys.argv[1]))\n"
        "    engine.canary.dump(sys.argv[2])\n"
    )
    lines = [f"{sys.executable} {script} {length} {{dump}}" for length in (7, 9)]
    parted = kvcanary("diff", "--cmd", lines[0], "--cmd", lines[1])
    assert (parted.exit_code, parted.stderr) == (1, "")
    assert re.match("they differ first at step [01], in token_ids\n", parted.stdout)
    for arguments, words in (
        (["--cmd", lines[0]], "diff compares two runs, got 1"),
        (["--cmd", "true", "--cmd", lines[0]], "--cmd needs {dump} in the command, got 'true'"),
        (["--cmd", "test x = {dump} -o", "--cmd", lines[0]], "the command ended in code 2, 0 is good and 1 is bad"),
        (["--cmd", "echo {dump}", "--cmd", lines[0]], "cannot be read: No such file"),
    ):
        refused = kvcanary("diff", *arguments)
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_diff_of_runs_that_go_on_compares_what_both_have(clean, folder):
    """The steps behind the end of the shorter one are left out; recordings without a common step are refused."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full"))
        engine.start("mine", 13)
        engine.start("theirs", 9)
        for _ in range(5):
            engine.draft()
        longer = read_dump(engine.canary.dump(folder / "longer.kvdump"))
    shorter = read_dump(clean)
    assert diff(shorter, longer)["same"] is False
    assert diff(shorter, longer, up_to_both=True)["same"] is True
    longer.manifest["first_step"] = shorter.manifest["step"]
    with pytest.raises(DumpError, match="share no step"):
        diff(shorter, longer, up_to_both=True)


def test_bisect_finds_the_first_bad_step(kvcanary, bad, clean, tmp_path):
    """Of a dump by replaying it, of a command by running it; every code but 0 and 1 is a sentence."""
    assert kvcanary("bisect", clean).exit_code == 0
    shown = kvcanary("bisect", bad)
    assert shown.exit_code == 1
    assert "step 6 is the first bad one: R9 content changed" in shown.stdout
    script = tmp_path / "try.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]) >= 11)")
    reported = kvcanary("bisect", "--cmd", f"{sys.executable} {script} {{step}}", "--high", "40", "--json")
    assert json.loads(reported.stdout)["first_bad_step"] == 11
    script.write_text("import sys; sys.exit(7)")
    failed = kvcanary("bisect", "--cmd", f"{sys.executable} {script} {{step}}", "--high", "40")
    assert failed.exit_code == 2
    assert "ended in code 7" in failed.stderr
    assert kvcanary("bisect").exit_code == 2


@pytest.mark.parametrize("bad_step", [1, 2, 7, 16])
def test_first_bad_asks_few(bad_step):
    """Halving: five questions for sixteen steps."""
    asked: list[int] = []

    def is_bad(step: int) -> bool:
        asked.append(step)
        return step >= bad_step

    assert first_bad(is_bad, 1, 16) == bad_step
    assert len(asked) <= 5


def test_certify_reads_the_certificate(kvcanary, bad, clean):
    """What was checked until the dump, code 1 where something was found."""
    assert kvcanary("certify", clean).exit_code == 0
    shown = kvcanary("certify", bad)
    assert shown.exit_code == 1
    assert "findings: 1" in shown.stdout
    assert json.loads(kvcanary("certify", clean, "--json").stdout)["forwards"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "DUMP"),
        ("explain", "DUMP"),
        ("replay", "DUMP"),
        ("why-slot", "DUMP", "3"),
        ("timeline", "DUMP", "-o", "out"),
        ("report", "DUMP", "-o", "out"),
        ("diff", "DUMP", "DUMP"),
        ("bisect", "DUMP"),
        ("certify", "DUMP"),
    ],
)
def test_what_is_no_dump_is_one_sentence(kvcanary, tmp_path, arguments):
    """Every command: code 2, a sentence and a hint, no traceback, nothing on stdout."""
    path = tmp_path / "no.kvdump"
    path.write_bytes(b"PK\x03\x04 something else")
    result = kvcanary(*[str(path) if word == "DUMP" else word for word in arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvcanary: {path} is damaged or no dump of kvcanary")
    assert "hint: a dump is what --kv-canary-dump DIR writes" in result.stderr
    assert "Traceback" not in result.stderr
