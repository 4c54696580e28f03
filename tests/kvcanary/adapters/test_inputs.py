"""What a watched engine feeds a forward, and entries that it moves before they have records."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvcanary.adapters.observed import moves
from kvcanary.adapters.observed.inputs import (
    KEPT_OTHERWISE,
    TOO_MANY,
    UNKNOWN,
    Entries,
    judge_fed,
    judge_kept,
    tell_lost,
    tell_outgrown,
    tell_unfed,
)
from kvcanary.adapters.observed.memory import TokenRing
from kvcanary.adapters.observed.report import _sides, report_step
from kvcanary.report.causes.watched import LAST_ENTRY
from kvcanary.report.finding import Finding

from .row_engine import BLOCK, ROWS, RowEngine


def told(engine: RowEngine) -> list[Finding]:
    """Findings of all steps so far; each step is told of once."""
    for step in engine.canary.steps:
        if not step.is_reported:
            step.is_reported = True
            report_step(engine.canary, step)
    return engine.canary.log.findings


def running(rows: int = 2, device: str = "cpu") -> RowEngine:
    """Rows of nine entries each."""
    engine = RowEngine(device)
    for number in range(rows):
        engine.begin(number, [])
    engine.step({number: [(7 * number + n) % 50 for n in range(9)] for number in range(rows)})
    return engine


def feed(engine: RowEngine, found: list[int], expected: list[int]) -> None:
    """Two entries of row 0 and one of row 1."""
    entries = Entries(["r0", "r1"], np.array([0, 0, 1]), torch.tensor([9, 10, 9]), torch.tensor([14, 15, 80]))
    total = int(engine.canary.memory.total)
    judge_fed(engine.canary, "W6", "token", torch.tensor(found), torch.tensor(expected), entries, ("prefill", 0))
    assert int(engine.canary.memory.total) - total == sum(
        a != b for a, b in zip(found, expected, strict=True) if b != UNKNOWN
    )
    engine.step({0: [1], 1: [2]})


def test_what_nobody_knows_is_not_judged() -> None:
    """Entries of which nobody knows what they should be, and right ones, are silent."""
    engine = running()
    feed(engine, [3, 4, 5], [3, UNKNOWN, 5])
    assert told(engine) == []


def keeping(device: str, kept: dict[int, list[int]]) -> RowEngine:
    """Rows that begin, of which an engine keeps these tokens."""
    engine = RowEngine(device, keeps=3)
    for row, tokens in kept.items():
        engine.begin(row, [])
        engine.known[0][row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return engine


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_an_engine_keeps_of_prompts_is_judged_by_row(device: str) -> None:
    """Whatever comes behind what it has room for, and rows of which nobody knows the tokens."""
    engine = keeping(device, {0: [5, 6, 7], 1: [8, 9, 9], 4: [1]})
    judge_kept(engine.canary, engine.known[0], [(0, "r0", [5, 6, 7, 1, 2]), (1, "r1", None), (4, "r4", [])])
    engine.canary.flush(engine.forward_of([], 0, [0]))
    assert not engine.canary.memory.total
    for row in 0, 1, 4:
        engine.canary.admit([(row, f"r{row}", [], 0, "")])
    judge_kept(engine.canary, engine.known[0], [(0, "r0", [5, 6, 7]), (1, "r1", [8, 7, 7]), (4, "r4", [1, 2])])
    engine.known[1][[0, 1, 4]] = torch.tensor([3, 3, 1], device=device)
    engine.step({0: [5, 6, 7], 1: [8, 9, 9], 4: [1]})  # in which all is as it is kept
    assert int(engine.canary.memory.total) == 2
    [finding] = told(engine)
    assert (finding.code, finding.writer, finding.position) == ("W6", "r1", 1)
    assert (finding.expected, finding.found) == ({"token": 7}, {"token": 9})
    assert (KEPT_OTHERWISE in finding.evidence, finding.readers) == (True, ("r1", "r4"))


def test_more_prompts_than_there_is_room_for_are_counted() -> None:
    """Those of steps that are over make room; of one step so many are compared."""
    engine = keeping("cpu", {row: [row, 0, 0] for row in range(ROWS)})
    room = len(engine.canary.launches.prompts(3).tokens) // 3
    for turn in range(3):
        rows = [row % ROWS for row in range(room + 2)]
        for row in rows:
            engine.canary.admit([(row, f"r{row}", [], 0, "")])
        judge_kept(engine.canary, engine.known[0], [(row, f"r{row}", [row, 0, 0]) for row in rows])
        assert engine.canary.coverage.unchecked[TOO_MANY] == 2 * turn + 2
        engine.canary.flush(engine.forward_of([], 0, [0]))
        engine.canary.wrote()
    assert not engine.canary.memory.total


def test_tokens_stay_until_their_step_is_over() -> None:
    """Whatever their sizes, none lies where a step that is not over reads; what is over makes room, in any turn."""
    draw, memory = random.Random(4), RowEngine("cpu").canary.memory
    ring, held, over = TokenRing(memory, 50), dict[int, tuple[int, list[int]]](), 0
    refused = 0
    for step in range(1, 400):
        tokens = [step * 100 + n for n in range(draw.randrange(1, 30))]
        first = ring.put(tokens, step, lambda own: own <= over)  # noqa: B023
        refused += first is None
        if first is not None:
            held[step] = first, tokens
        for own, (where, wanted) in held.items():
            assert own <= over or ring.tokens[where : where + len(wanted)].tolist() == wanted
        over = max(over, step - draw.randrange(4))
    assert 20 < refused < 300
    assert ring.put([0] * 51, 400, lambda own: True) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [5, 10_000])
def test_what_is_uploaded_waits_for_nothing(device: str, size: int) -> None:
    """However much it is, it arrives behind what runs, which the host does not wait for."""
    memory, busy = running(device=device).canary.memory, torch.cuda.Event() if device == "cuda" else None
    for turn in range(2):  # memory that the host pins waits, the first time
        if busy is not None:
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # about 50 ms
            busy.record()
        there = memory.upload(torch.arange(size) + turn)
        assert busy is None or turn == 0 or not busy.query()
        assert torch.equal(there.cpu(), torch.arange(size) + turn)


def test_a_wrong_token_is_told_though_its_row_leads_elsewhere_meanwhile() -> None:
    """The table that is kept of the row is of a later forward, or of nothing."""
    engine = running()
    group = engine.canary.groups[0]
    for slot in -1, len(group.records), 0:
        assert _sides(group, slot, 4, [1, 2]) == ({"position": 4}, {})


def test_what_one_forward_is_fed_wrong_is_one_incident() -> None:
    """All rows of the forward, and the same requests again in later ones; the first entry of a row speaks."""
    engine = running()
    feed(engine, [3, 4, 5], [3, 9, 8])
    [finding] = told(engine)
    assert (finding.code, finding.writer, finding.site) == ("W6", "r1", ("prefill", 0))
    assert (finding.position, finding.slot, finding.expected, finding.found) == (9, 80, {"token": 8}, {"token": 5})
    assert LAST_ENTRY in finding.evidence
    assert set(finding.readers) == {"r0", "r1"}
    feed(engine, [3, 4, 5], [2, 4, 8])
    assert len(told(engine)) == 1
    assert engine.canary.coverage.fired["W6"] > 1


def test_an_entry_in_the_middle_is_not_called_the_last() -> None:
    """The first of two wrong entries of a row is told, without the note."""
    engine = running()
    feed(engine, [3, 4, 5], [2, 9, 5])
    [finding] = told(engine)
    assert (finding.position, finding.writer) == (9, "r0")
    assert LAST_ENTRY not in finding.evidence


def shift(engine: RowEngine, layers: int, block: int = 4) -> None:
    """Entries of row 0 are moved, in some of the layers; a pair of padding says nothing."""
    source = torch.tensor([int(engine.table[0, 1]) * BLOCK, int(engine.table[0, 1]) * BLOCK + 1, 0])
    target = torch.tensor([int(engine.table[0, block]) * BLOCK, int(engine.table[0, block]) * BLOCK + 1, 1])
    engine.kv[0][0, :, 0] = 7  # what lies in slots of padding is nobody's

    def move() -> None:
        for kv in engine.kv[:layers]:
            rows = kv.transpose(1, 2).view(-1, *kv.transpose(1, 2).shape[2:])
            rows[target[:2]] = rows[source[:2]]

    group = engine.canary.groups[0]
    moves.moved(engine.canary, group, source, target, move, lambda entry, slot: f"r{entry}")
    engine.step({0: [1], 1: [2]})


def test_entries_that_move_are_what_lay_there() -> None:
    """A whole move is silent; one of a layer less is T1 with that layer and the request, and told once for it."""
    engine = running()
    shift(engine, 2)
    assert told(engine) == []
    engine.kv[1][int(engine.table[0, 4])] = 0
    shift(engine, 1)
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.layers) == ("T1", "r0", (1,))
    assert finding.readers == ("r0", "r1")
    shift(engine, 1, block=5)
    assert len(told(engine)) == 1
    assert engine.canary.coverage.fired["T1"] > 1


def test_a_copy_that_should_be_there_is_looked_for() -> None:
    """Slots that should be copies of others: silent where they are, or are not judged; else T1 with the request."""
    engine = running()
    group, size = engine.canary.groups[0], BLOCK
    source, target = (torch.arange(2) + int(engine.table[0, n]) * size for n in (1, 4))
    judged = torch.tensor([True, False])

    def look() -> list[Finding]:
        moves.expect_equal(engine.canary, group, target, source, judged, "a copy", lambda entry, slot: "r0")
        engine.step({0: [1], 1: [2]})
        return told(engine)

    for kv in engine.kv:
        kv[int(engine.table[0, 4]), :, 0] = kv[int(engine.table[0, 1]), :, 0]
    assert look() == []
    engine.kv[0][int(engine.table[0, 4]), 0, 0, 3] += 1
    [finding] = look()
    assert (finding.code, finding.reader, finding.slot, finding.layers) == ("T1", "r0", int(target[0]), (0,))
    assert len(look()) == 1


def test_a_row_that_is_given_more_than_its_line_holds_is_told() -> None:
    """R10 of that request with the slot that went elsewhere, its cause, and once however long it goes on."""
    engine = running()
    for length in (65, 66):
        tell_outgrown(engine.canary, [("r1", length, 17)], 64)
        engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position, finding.site) == ("R10", "r1", 64, ("grant", 0))
    assert finding.slot == 17
    assert (finding.expected, finding.found) == ({"row_width": 64}, {"length": 65})
    assert finding.causes[0].family == "bounds"


def test_a_row_that_computes_nothing_is_told() -> None:
    """R10 of that request at its end, in the prefill, and what it means."""
    engine = running()
    tell_unfed(engine.canary, [])
    tell_unfed(engine.canary, [("r1", 9)])
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position, finding.site) == ("R10", "r1", 9, ("prefill", 0))
    assert (finding.expected, finding.found) == ({"fewest_new": 1}, {"new": 0})
    assert finding.causes[0].text.startswith("the hit of a prefix cache was counted to the prompt's end")


def test_a_token_that_a_request_did_not_get_is_told() -> None:
    """R10 of that request at the first token that it lacks, once however long it goes on."""
    engine = running()
    for wanted in 10, 11:
        tell_lost(engine.canary, [("r1", 9, wanted)])
        engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position, finding.site) == ("R10", "r1", 9, ("decode", 0))
    assert (finding.expected, finding.found) == ({"tokens": 10}, {"tokens": 9})
    assert finding.causes[0].text == "a token that was sampled did not come into its request's answer"


def test_a_grant_speaks_before_what_it_has_damaged() -> None:
    """The row behind reads the slots of the row that outgrew its line, in the same step: the grant comes first."""
    engine = running()
    engine.table[0, 0] = engine.table[1, 5]
    tell_outgrown(engine.canary, [("r1", 65, 17)], 64)
    engine.step({0: [1], 1: [2]})
    assert [(finding.code, finding.reader) for finding in told(engine)] == [("R10", "r1"), ("R12", "r0")]


def test_a_forward_that_never_ran_has_the_count_of_now() -> None:
    """It was read, and then its engine gave up: who asks for its counter is told what was found so far."""
    engine = running()
    feed(engine, [3, 4, 5], [3, 9, 8])
    engine.canary.read(engine.forward_of([0], 1, [11]))
    assert engine.canary.count_at(engine.canary.step) == int(engine.canary.memory.total)
    assert engine.canary.sums_at(engine.canary.step) == []
