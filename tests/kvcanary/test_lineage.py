"""Lineages: a draft's row that does not read what the engine says it descends from is a chain break."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fake_engine import FakeEngine
from kvcanary import KVCorruptionError, PlanError, WritePlan
from kvcanary.dumps.reading import read_dump
from kvcanary.replay.replayer import replay

UNSEEN = "lineages of draft rows, without the draft forward before"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def drafting(topk: int = 3, num_steps: int = 4, **settings: object) -> FakeEngine:
    """Two requests of odd lengths, two steps on."""
    engine = FakeEngine(topk=topk, num_steps=num_steps, num_nodes=6, **settings)
    engine.start("one", 13)
    engine.start("two", 6)
    for _ in range(2):
        engine.step()
    return engine


def run(engine: FakeEngine) -> None:
    for _ in range(20):
        engine.step()


def name_another_parent(engine: FakeEngine, index: int, row: int, branch: int) -> None:
    """From now on this row of draft[index] is said to descend from this branch, whatever it reads."""

    def change(kind: str, number: int, pool: str, plan: WritePlan) -> WritePlan:
        if (kind, number) != ("draft", index) or plan.lineage is None:
            return plan
        lineage = plan.lineage.clone()
        lineage[row] = branch
        return replace(plan, lineage=lineage)

    engine.change_write = change


@pytest.mark.parametrize(("topk", "num_steps"), [(2, 2), (2, 5), (3, 4), (6, 3)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_trees_that_read_their_ancestors_are_silent(topk: int, num_steps: int, page_size: int) -> None:
    """Whoever descends from whom, and every lineage is judged."""
    engine = drafting(topk, num_steps, page_size=page_size, num_pages=512 // page_size, mode="log")
    for _ in range(6):
        engine.step()
    assert engine.canary.findings == []
    assert UNSEEN not in engine.canary.certificate()["unchecked"]


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("content", ["write", "rolling", "full"])
def test_a_row_that_reads_another_branch_is_told(content: str, index: int) -> None:
    """In its step, at the slot and position in front of its own entry, with both branches and no layer."""
    engine, read = drafting(content=content), {}

    def note(kind: str, number: int, pool: str, plan):
        if (kind, number) == ("draft", index):
            read["slot"] = int(plan.indices[plan.indptr[5] - 2])  # of row 4, which is branch 1 of the second request
        return plan

    engine.change_read = note
    name_another_parent(engine, index, 4, 2)
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)  # until it does not descend from branch 2
    finding = caught.value.findings[0]
    assert (finding.code, finding.pool, finding.site, finding.step) == (
        "R5",
        "draft",
        ("draft", index),
        engine.step_number,
    )
    assert (finding.reader, finding.slot) == ("two", read["slot"])
    assert finding.position == engine.rows["two"].committed + index - 1
    assert finding.layers == ()
    other = finding.found["branch"][0]
    assert finding.expected == {"branch": f"2 of draft[{index - 1}]"}
    assert finding.found["branch"] == f"{other} of draft[{index - 1}]"
    assert finding.causes[0].family == "draft"
    assert ("own column" in finding.causes[0].text) == (other == "1")
    assert "entries of its ancestors (branch 2)" in finding.causes[0].text


def test_ancestors_further_up_are_covered() -> None:
    """A row that reads its parent's entry, and in front of that another one's: the records of both say so."""
    engine = drafting(topk=4, num_steps=4)

    def misread(kind: str, number: int, pool: str, plan):
        if (kind, number) != ("draft", 2):
            return plan
        indices, ends = plan.indices.clone(), plan.indptr[1:] - 3  # the first of two ancestors
        indices[ends] = indices[ends].view(-1, 4).roll(1, 1).flatten()
        return replace(plan, indices=indices)

    engine.change_read = misread
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    finding = caught.value.findings[0]
    assert (finding.code, finding.site, finding.causes[0].family) == ("R5", ("draft", 2), "draft")


@pytest.mark.parametrize("branch", [3, -1, 1 << 40])
def test_a_branch_that_is_none_is_a_chain_break(branch: int) -> None:
    """Not an error of its own, and no place in memory."""
    engine = drafting()
    name_another_parent(engine, 1, 0, branch)
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    finding = caught.value.findings[0]
    assert (finding.code, finding.expected["branch"]) == ("R5", f"{branch} of draft[0]")


def test_r5_can_be_switched_off() -> None:
    """And with it what lineages say."""
    engine = drafting(disable=frozenset({"R5"}))
    name_another_parent(engine, 1, 0, 7)
    engine.step()
    assert engine.canary.findings == []


def test_rows_of_another_batch_are_not_compared() -> None:
    """Their numbers are not those of the forward before; what is not judged is counted."""
    engine, draft = drafting(), FakeEngine._draft

    def apart(index: int, rows) -> None:
        for name in rows if index else ():
            draft(engine, index, {name: rows[name]})
        if not index:
            draft(engine, index, rows)

    engine._draft = apart
    name_another_parent(engine, 1, 0, 7)
    engine.step()
    assert engine.canary.findings == []
    assert engine.canary.certificate()["unchecked"][UNSEEN] == 2 * 3 * 2  # requests, branches, forwards


def test_plans_say_what_contradicts_itself() -> None:
    """A lineage beside parents, of another length, and of rows that write more than one entry."""
    values = ints(1, 2, 3)
    with pytest.raises(PlanError, match="parents and lineage must not be given together"):
        WritePlan(values, values, values, values, values)
    with pytest.raises(PlanError, match=r"lineage must be \[3\] int64, got \[2\] torch.int64"):
        WritePlan(values, values, values, lineage=values[:2])
    engine = drafting()
    engine.change_write = lambda kind, index, pool, plan: (
        replace(plan, parents=None, lineage=torch.zeros_like(plan.slots)) if kind == "verify" else plan
    )
    words = r"a lineage belongs to rows that write one entry each, got rows that write \[6, 6\]"
    with pytest.raises(PlanError, match=words):
        engine.step()


def broken_dump(folder: Path, **settings: object) -> Path:
    """Of an engine that a lineage has stopped."""
    engine = drafting(ring=6, dump_dir=str(folder), **settings)
    name_another_parent(engine, 2, 1, 7)
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    return Path(caught.value.report.dump)


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_a_replay_reaches_the_same_finding(content: str, tmp_path: Path) -> None:
    """The dump has the lineages, and both branches are still named where it keeps back all else."""
    dump = read_dump(broken_dump(tmp_path, content=content))
    assert dump.findings[0]["expected"] == {"branch": "7 of draft[1]"}
    outcome = replay(dump)
    found = [(finding["code"], finding["slot"], tuple(finding["site"])) for finding in dump.findings]
    assert [(finding.code, finding.slot, finding.site) for finding in outcome.findings] == found
    assert outcome.missing == []


def test_an_older_dump_is_read_and_replayed(tmp_path: Path) -> None:
    """Without lineages every row goes on from what it reads, as it did when that dump was written."""
    new, old = broken_dump(tmp_path), tmp_path / "old.kvdump"
    with zipfile.ZipFile(new) as parts, zipfile.ZipFile(old, "w") as written:
        for name in parts.namelist():
            member = parts.read(name)
            if name == "events.jsonl":
                events = list(map(json.loads, member.decode().splitlines()))
                assert any(event.get("has_lineage") for event in events)
                events = [{name: value for name, value in event.items() if name != "has_lineage"} for event in events]
                member = "\n".join(map(json.dumps, events)).encode()
            if name == "findings.jsonl":
                member = b""
            written.writestr(name, member)
    outcome = replay(read_dump(old))
    assert (outcome.findings, outcome.errors, outcome.missing) == ([], [], [])
