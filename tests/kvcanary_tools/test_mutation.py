"""The record of the mutants: enough of them killed in little time, and every survivor explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcanary_tools.mutation import report, running
from kvcanary_tools.mutation.__main__ import LEAST_KILLED, command
from kvcanary_tools.mutation.areas import AREAS, digest, file_of, references
from kvcanary_tools.mutation.running import Outcome
from kvcanary_tools.mutation.subset import LEFT_OUT, MOST_SECONDS, TESTS

#: Than the record: the next whole run takes them in.
NEWER = {
    f"kvcanary_kernels/{name}.py"
    for name in (
        *("judge/admit", "watch/advance", "watch/begin", "watch/grant", "watch/states", "content/reads"),
        *("watch/state_rows", "watch/drafted_states", "engine/copies", "engine/delta"),
    )
}
#: Since the record: the next whole run has no mutants of them.
GONE = {"kvcanary_kernels/content/finish.py"}
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / report.EXPLANATIONS.parent
COUNTS = ("sample", "killed")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((FOLDER / "mutants.json").read_text(encoding="utf-8"))


def source_of(file: str) -> Path:
    return ROOT / ("kernels" if file.startswith("kvcanary_kernels") else "") / file


def test_enough_mutants_were_killed(record):
    """Nine of ten in a sample of 400, by tests of at most three seconds."""
    meta = record["meta"]
    assert (meta["sample"], LEAST_KILLED, MOST_SECONDS) == (400, 0.9, 3.0)
    assert meta["killed"] >= LEAST_KILLED * meta["sample"]
    assert 0 < meta["subset_seconds"] <= MOST_SECONDS


def test_counts_agree(record):
    """Whole, areas and single mutants say the same, and each mutant is one of its area."""
    statuses = {name: Outcome(name, status, "", "") for name, status in record["mutants"].items()}
    killed = {name for name, outcome in statuses.items() if outcome.killed}
    assert (len(statuses), len(killed)) == tuple(record["meta"][name] for name in COUNTS)
    for row in record["areas"]:
        own = {name for name in statuses if file_of(name) in row["files"]}
        assert (len(own), len(own & killed)) == tuple(row[name] for name in COUNTS)
        assert len(own) <= row["mutants"]
    assert {survivor["name"] for survivor in record["survivors"]} == statuses.keys() - killed


def test_every_survivor_is_explained(record):
    """By a sentence of the file of explanations, which explains no other."""
    explained = report.explanations(ROOT)
    assert {survivor["change"]: survivor["why"] for survivor in record["survivors"]} == explained
    assert all(len(why.split()) >= 5 and why.endswith(".") for why in explained.values())


def test_what_is_mutated_exists(record):
    """Five areas, files that are there, of which NEWER are no part of the record yet, and tests that are there."""
    wanted = {area: tuple(file for file in files if file not in NEWER) for area, files in AREAS.items()}
    assert {row["area"]: tuple(file for file in row["files"] if file not in GONE) for row in record["areas"]} == wanted
    assert list(AREAS) == ["findings", "ledger", "record", "diagnosis", "references"]
    assert [file for files in AREAS.values() for file in files if not source_of(file).is_file()] == []
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []
    for name in LEFT_OUT:
        file, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")


def test_every_reference_is_mutated():
    """No module of the kernels with a torch reference is left out."""
    package = ROOT / "kernels"
    found = {
        path.relative_to(package).as_posix()
        for path in (package / "kvcanary_kernels").rglob("*.py")
        if references(path.read_text(encoding="utf-8"))
    }
    assert found == set(AREAS["references"])


def test_references_are_what_an_operation_uses():
    """The helpers of an operation with a reference, and theirs; no kernel, and nothing that only others use."""
    source = (
        "def op(): kernel(); check(1)\nop_torch = partial(op, launches=False)\ndef check(n): size(n)\n"
        "def size(n): ...\ndef other(): ...\n@jit\ndef kernel(): other()\n"
    )
    assert references(source) == {"op", "check", "size"}


def test_a_tree_holds_all_packages_side_by_side(tmp_path):
    """With the tests, what they read, and mutmut's settings behind the project's own."""
    running.make_tree(ROOT, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "kvcanary", "kvcanary_kernels", "tests", "docs", "pyproject.toml",
    }  # fmt: skip
    project = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert project.startswith((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert '[tool.mutmut]\nsource_paths = ["kvcanary", "kvcanary_kernels"]\n' in project
    before = digest(tmp_path)
    (tmp_path / "kvcanary/report/finding.py").write_text("", encoding="utf-8")
    assert digest(tmp_path) != before


def test_a_report_tells_survivors_by_what_they_change():
    """Killed are all but those that lived or met no test; a change has no number, and one line."""
    names = ["kvcanary.report.finding.x_tell__mutmut_1", "kvcanary.ledger.ledger.xǁLedgerǁfree__mutmut_20"]
    lived = Outcome(names[1], "survived", "free(\n1)", "free(2)")
    outcomes = [lived, Outcome(names[0], "timeout", "a", "b")]
    mutants = dict.fromkeys(AREAS, 5)
    reported = report.as_dict(outcomes, mutants, {}, {"seed": 3})
    assert reported["survivors"] == [
        {"name": names[1], "change": "kvcanary.ledger.ledger.Ledger.free: free( 1) -> free(2)", "why": None}
    ]
    assert reported["meta"] == {"seed": 3, "sample": 2, "killed": 1, "statuses": {"survived": 1, "timeout": 1}}
    assert report.killed_before(reported) == [Outcome(names[0], "timeout", "", "")]
    assert [(row["sample"], row["killed"]) for row in reported["areas"]] == [(1, 1), (1, 0), (0, 0), (0, 0), (0, 0)]


@pytest.fixture
def mutated(monkeypatch):
    """The command without mutmut: four mutants, of which the second lives until a test is added."""
    names = [f"kvcanary.report.finding.x_tell__mutmut_{number}" for number in range(4)]
    asked: list[list[str]] = []

    def run(tree, wanted, workers):
        asked.append(list(wanted))
        return [
            Outcome(name, "survived" if name == names[1] and len(asked) == 1 else "killed", "a", "b") for name in wanted
        ]

    monkeypatch.setattr(report, "versions", dict)
    monkeypatch.setattr(running, "subset_seconds", lambda tree: 1.0)
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr("kvcanary_tools.mutation.areas.sample", lambda *_: (names, dict.fromkeys(AREAS, 4)))
    return asked


def test_the_command_fails_for_a_survivor_and_takes_only_those_again(mutated, tmp_path):
    """Exit 1 while one is left; then only that one is run, and the whole is told."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    done = CliRunner().invoke(command, ["--root", str(ROOT), "--json", str(first)])
    assert (done.exit_code, "kvcanary.report.finding.tell: a -> b\n  NOT EXPLAINED" in done.stdout) == (1, True)
    done = CliRunner().invoke(command, ["--root", str(ROOT), "--again", str(first), "--json", str(second)])
    assert (done.exit_code, done.stdout) == (0, "4 of 4 mutants killed (100.0%) in 1.00 s of tests\n")
    assert [len(names) for names in mutated] == [4, 1]
    assert json.loads(second.read_text(encoding="utf-8"))["meta"]["killed"] == 4


def test_an_earlier_report_must_be_of_the_same_mutants(mutated, tmp_path):
    """Other sources number their mutants anew."""
    first = tmp_path / "first.json"
    CliRunner().invoke(command, ["--root", str(ROOT), "--json", str(first)])
    reported = json.loads(first.read_text(encoding="utf-8"))
    reported["meta"]["sources"] = "other"
    first.write_text(json.dumps(reported), encoding="utf-8")
    done = CliRunner().invoke(command, ["--root", str(ROOT), "--again", str(first)])
    assert done.exit_code == 2
    assert "first.json must be of this sample of these sources: run all of it" in done.stderr


def test_the_page_has_the_figure(record):
    """Killed of the sample, as the record says."""
    meta = record["meta"]
    assert f"| {meta['killed']} of {meta['sample']} |" in (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
