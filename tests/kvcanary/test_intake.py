"""What becomes of very many checks that fire at once: counted to the last, kept within bounds, told in time."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kvcanary.calls.violation import Lineage, Violation, fair_share, join_violations
from kvcanary.calls.violation_log import KEPT_VIOLATIONS, ViolationBatch, ViolationGroup, ViolationLog
from kvcanary.codes import CODES
from kvcanary.report.causes.rows import exchanged_pages
from kvcanary.report.describe import MOST_DESCRIBED, Describer
from kvcanary.report.evidence import Evidence
from kvcanary.report.ledger_evidence import LedgerEvidence

MILLION = 1_000_000


@pytest.fixture
def engine(make_engine):
    """An engine with two requests; its canary's state makes findings."""
    engine = make_engine(num_pages=256)
    engine.start("first", 200)
    engine.start("second", 90)
    return engine


@pytest.fixture
def pool(engine):
    return engine.canary.session.state.pools[0]


@pytest.fixture
def describer(engine) -> Describer:
    return Describer(LedgerEvidence(engine.canary.session.ledger).read)


def batch_of(
    pool, code: str, rows: int, entries: int, *, site=("verify", 0), step: int = 9, **evidence
) -> ViolationBatch:
    """Every entry of so many rows fired; row i reads slots from 4 + 8 * i on, and belongs to request i."""
    positions = np.tile(np.arange(entries), rows)
    slots = 4 + (np.repeat(np.arange(rows) * 8, entries) + positions) % (pool.view.num_slots - 4)
    names = [f"request-{row}" for row in range(rows)]
    return ViolationBatch(
        code, pool, site, step, slots, positions, np.repeat(np.arange(rows), entries), names, **evidence
    )


def taken(*batches: ViolationBatch, disabled: frozenset[str] = frozenset()) -> list[ViolationGroup]:
    log = ViolationLog(disabled)
    for batch in batches:
        log.add_batch(batch)
    return log.take()


def kept(*batches: ViolationBatch) -> list[Violation]:
    return [violation for group in taken(*batches) for violation in group.kept]


def test_a_million_violations_are_taken_and_told_in_time(pool, describer):
    """A million entries of ten checks in six forwards: the bar is 50 ms of this thread's time."""
    codes, entries = list(CODES)[-12:-2], MILLION // 60
    batches = [
        batch_of(pool, code, 10, entries // 10, site=("draft", index), layers=np.ones((entries // 10 * 10, 3), bool))
        for code in codes
        for index in range(6)
    ]
    spent = []
    for _ in range(3):
        start = time.thread_time()
        reported = describer.describe(taken(*batches), lambda incident: 1)
        spent.append(time.thread_time() - start)
    print(f"a million violations: {1000 * min(spent):.1f} ms")
    assert reported.findings
    assert min(spent) < 0.25


def test_a_million_violations_leave_no_memory_behind(pool):
    """What is kept does not grow with what fires, and what is needed on the way is a small part of the batch."""
    batch = batch_of(pool, "R5", 100, MILLION // 100)
    log = ViolationLog()
    tracemalloc.start()
    for _ in range(3):
        log.add_batch(batch)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200_000
    assert peak < 6_000_000
    assert len(log) == 3 * MILLION


def test_first_last_and_count_of_every_group(pool):
    """A group is a code at a site; its first violations are whole, its last is known, all are counted."""
    groups = taken(batch_of(pool, "R5", 2, 500), batch_of(pool, "R5", 2, 500), batch_of(pool, "R4", 1, 3))
    assert [(group.kept[0].code, group.count, len(group.kept)) for group in groups] == [
        ("R5", 2000, KEPT_VIOLATIONS),
        ("R4", 3, 3),
    ]
    assert (groups[0].kept[0].position, groups[0].last.position, groups[0].last.request_id) == (0, 499, "request-1")
    assert groups[0].request_ids == {"request-0", "request-1"}


def test_take_empties_the_log(pool):
    """The next step begins with nothing."""
    log = ViolationLog()
    log.add_batch(batch_of(pool, "R5", 1, 10))
    assert len(log) == 10
    assert len(log.take()) == 1
    assert (len(log), log.take()) == (0, [])


def test_no_group_crowds_out_another(pool, describer):
    """One entry of another check, after a flood, has its own finding."""
    flood = batch_of(pool, "R9", 400, 500, layers=np.ones((200_000, 3), bool))
    single = ViolationBatch("R3", pool, ("sweep", 0), 9, *map(np.array, ([900], [70], [0])), ["last"])
    reported = describer.describe(taken(flood, single), lambda incident: 1)
    assert ("R3", 900) in [(finding.code, finding.slot) for finding in reported.findings]
    assert len(reported.findings) <= MOST_DESCRIBED


def test_no_row_crowds_out_another(pool):
    """The first entry of each of a dozen rows is kept, however long the first row is."""
    violations = kept(batch_of(pool, "R8", 12, 5000))
    assert {violation.request_id for violation in violations} == {f"request-{row}" for row in range(12)}


def test_disabled_codes_are_not_taken(pool):
    """What is switched off is neither kept nor counted, in batches or one by one."""
    log = ViolationLog(frozenset({"R5"}))
    batch = batch_of(pool, "R5", 1, 10)
    log.add_batch(batch)
    log.add(batch.violation(0))
    assert len(log) == 0


def test_single_violations_are_bounded_too(pool):
    """Violations that come as objects are kept up to the same bound."""
    batch = batch_of(pool, "W4", 1, KEPT_VIOLATIONS + 10)
    log = ViolationLog()
    log += [batch.violation(number) for number in range(len(batch))]
    (group,) = log.take()
    assert (group.count, len(group.kept), group.last.position) == (
        KEPT_VIOLATIONS + 10,
        KEPT_VIOLATIONS,
        KEPT_VIOLATIONS + 9,
    )


def test_a_list_may_mix_violations_and_batches(pool):
    """Checks hand over what they have: single violations and whole arrays."""
    batch, log = batch_of(pool, "R5", 1, 100), ViolationLog()
    log += [batch.violation(0), batch, batch.violation(1)]
    (group,) = log.take()
    assert (group.count, len(group.kept), group.last.position) == (102, KEPT_VIOLATIONS, 1)


def test_an_entry_becomes_a_violation_with_its_evidence(pool):
    """Arrays of evidence follow their entry; -1 is what is not known."""
    batch = ViolationBatch(
        "R4",
        pool,
        ("verify", 0),
        9,
        *map(np.array, ([8, 9], [3, -1], [0, -1])),
        ["mine"],
        layers=np.array([[False, True, True], [False] * 3]),
        last_good=np.array([7, -1]),
        found_positions=np.array([12, 0]),
        parent_positions=np.array([2, -1]),
        fingerprint_violations=np.array([False, True]),
    )
    first, second = batch.violation(0), batch.violation(1)
    assert (first.slot, first.position, first.request_id, first.layers, first.last_good) == (8, 3, "mine", (1, 2), 7)
    assert (first.found_position, first.parent_position, first.fingerprint_violation) == (12, 2, False)
    assert (second.position, second.request_id, second.layers, second.last_good) == (None, None, (), None)
    assert (second.found_position, second.parent_position, second.fingerprint_violation) == (0, -1, True)


def test_entries_keep_their_evidence_when_others_are_left_out(pool):
    """What is left of a batch when some of it is set aside says of each entry what was found there."""
    lineages, columns = np.array([[0, 1, 2], [3, 4, 5]]), map(np.array, ([8, 9], [4, 5], [0, 1]))
    batch = ViolationBatch("R5", pool, ("draft", 1), 9, *columns, ["first", "second"], lineages=lineages)
    assert batch.at(np.array([1])).violation(0).lineage == Lineage(3, 4, 5)


def test_a_run_is_one_incident_however_long(pool):
    """Entries that are neighbours are one fault, also where most of them are only counted."""
    assert len(join_violations(kept(batch_of(pool, "R8", 1, 900)))) == 1


def test_other_checks_in_a_long_run_are_its_evidence(pool):
    """A check that fired in the midst of a run of which only the beginning is kept belongs to the run's incident."""
    run = batch_of(pool, "R8", 1, 900)
    inside = ViolationBatch("R4", pool, ("verify", 0), 9, *map(np.array, ([1001], [850], [0])), ["request-0"])
    outside = ViolationBatch("R4", pool, ("verify", 0), 9, *map(np.array, ([1019], [950], [0])), ["request-0"])
    assert [len(incident) for incident in join_violations(kept(run, inside))] == [KEPT_VIOLATIONS + 1]
    assert len(join_violations(kept(run, outside))) == 2


@pytest.mark.parametrize("pages", [(1, 2), (0, 3), (2, 5)])
def test_exchanged_pages_are_seen_in_a_flood(make_engine, pages):
    """Two exchanged pages of 128 slots are one incident, and still known as exchanged."""
    pool = make_engine(page_size=128, num_pages=8).canary.session.state.pools[0]
    i, j = pages
    positions = np.concatenate([np.arange(128) + 128 * page for page in pages])
    found = np.concatenate([np.arange(128) + 128 * page for page in (j, i)])
    zeros = np.zeros(256, int)
    batch = ViolationBatch("R4", pool, ("verify", 0), 9, 128 + found, positions, zeros, ["mine"], found_positions=found)
    (incident,) = join_violations(kept(batch))
    assert exchanged_pages(Evidence(incident, None)) == pages


@pytest.mark.parametrize("seed", range(20))
def test_batches_join_like_single_violations(pool, seed):
    """Joining is the transitive closure of its relations, whether entries came as arrays or one by one."""
    random_ = random.Random(seed)
    positions = sorted(random_.sample(range(60), 12))
    slots = [4 * random_.randrange(1, 200) for _ in positions]
    found = [random_.choice((-1, random_.randrange(60))) for _ in positions]
    columns = [np.array(column) for column in (slots, positions, [0] * 12)]
    batch = ViolationBatch("R4", pool, ("verify", 0), 9, *columns, ["mine"], found_positions=np.array(found))
    assert together(join_violations(kept(batch))) == closure(pool, slots, positions, found)


def together(incidents: list[list[Violation]]) -> set[frozenset[int]]:
    return {frozenset(violation.position for violation in incident) for incident in incidents}


def closure(pool, slots, positions, found) -> set[frozenset[int]]:
    """By brute force: positions whose violations are related, and what is related to those."""
    sets = [{position} for position in positions]
    size = pool.view.page_size
    for _ in positions:
        for a, first in enumerate(positions):
            for b, second in enumerate(positions):
                near = abs(first - second) <= 1 or slots[a] // size == slots[b] // size or found[a] == second
                if near and sets[a] is not sets[b]:
                    joined = sets[a] | sets[b]
                    sets = [joined if own & joined else own for own in sets]
    kept_slots: dict[int, int] = {}  # a slot that was read twice says it once
    for slot, position in zip(slots, positions, strict=True):
        kept_slots.setdefault(slot, position)
    return {frozenset(own & set(kept_slots.values())) for own in sets}


def single(pool, code: str, position: int, *, name: str = "mine") -> Violation:
    """A violation on a page of its own."""
    return Violation(code, pool, 40 + 8 * position, position, name, ("verify", 0), 9)


def test_neighbours_of_different_checks_are_one_incident(pool):
    """What follows a wrong entry breaks too, whatever check says so; a gap, or another row, is another fault."""
    assert len(join_violations([single(pool, "R4", 5), single(pool, "R5", 6)])) == 1
    assert len(join_violations([single(pool, "R4", 5), single(pool, "R5", 7)])) == 2
    assert len(join_violations([single(pool, "R4", 5), single(pool, "R5", 6, name="other")])) == 2


def test_a_wrong_row_takes_in_what_fired_in_it(pool):
    """R6 judges a whole row: other checks of the row, however far, are the same fault, and speak first."""
    (incident,) = join_violations([single(pool, "R6", 60), single(pool, "R5", 5), single(pool, "R4", 30)])
    assert [violation.code for violation in incident] == ["R5", "R4", "R6"]
    assert len(join_violations([single(pool, "R6", 60), single(pool, "R5", 5, name="other")])) == 2


def test_what_has_no_slot_is_not_joined_by_it(pool):
    """Two requests whose forwards ran without hooks are two incidents, whatever slot their violations carry."""
    violations = [replace(single(pool, "H1", position, name=name), slot=0) for name, position in (("a", 5), ("b", 50))]
    assert len(join_violations(violations)) == 2


def test_all_readers_of_a_place_are_in_the_blast(pool, describer):
    """Two requests that read one damaged slot are one finding that names both, and the owner of the page."""
    violations = [replace(single(pool, "R3", 5, name=name), slot=900) for name in ("second", "first", "second", "gone")]
    (incident,) = join_violations(violations)
    assert len(incident) == 1
    finding = describer.finding(incident, 1)
    assert (finding.reader, finding.readers) == ("second", ("second", "first"))


def test_a_write_speaks_before_the_reads_it_spoils(pool):
    """W1 to W5, moves and poison lead wherever they fired; W6 has its place among what a row reads."""
    for write in ("W4", "T1", "P1"):
        (incident,) = join_violations([single(pool, "R4", 5), single(pool, write, 6)])
        assert incident[0].code == write
    (incident,) = join_violations([single(pool, "R8", 5), replace(single(pool, "R8", 5), code="W6")])
    assert [violation.code for violation in incident] == ["R8", "W6"]


def test_fair_share_gives_every_group_its_turn(pool):
    """Of many incidents of one code and few of another each code is among those that are told, in order."""
    many = [[violation] for violation in kept(batch_of(pool, "R9", 30, 1))]
    few = [[violation] for violation in kept(batch_of(pool, "R5", 3, 1))]
    reported = fair_share([*many, *few], 6)
    assert [incident[0].code for incident in reported] == ["R9"] * 3 + ["R5"] * 3
    assert fair_share(many, 100) == many


def test_what_is_not_told_is_counted(pool, describer):
    """Incidents beyond the bound are not lost in silence."""
    slots = np.arange(10, 250) * 4
    batches = [
        ViolationBatch("R3", pool, ("draft", index), 9, part, part * 2, np.zeros(48, int), ["first"])
        for index, part in enumerate(np.split(slots, 5))
    ]
    reported = describer.describe(taken(*batches), lambda incident: 1)
    assert (len(reported.findings), reported.undescribed) == (MOST_DESCRIBED, 240 - MOST_DESCRIBED)
