"""A sliding-window pool behind a slot map: exactly its entries are judged, and each group by its own translation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import Finding, HookOrderError, PlanError, PoolView, ReadPlan, WritePlan
from kvcanary.captured.buffers import StaticBuffers
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.records.state import CanaryState
from kvcanary_kernels.record.layout import REQUEST_GENERATION
from toy_findings import found

pytestmark = pytest.mark.usefixtures("early_slices")
NOT_POISONED = "freed pages behind a slot map, not poisoned"


def with_entry(plan: ReadPlan, place: int, slot: int) -> ReadPlan:
    indices = plan.indices.clone()
    indices[place] = slot
    return replace(plan, indices=indices)


def in_sliding(findings: list[Finding]) -> Finding:
    """The only finding, which is of the sliding pool."""
    (finding,) = findings
    assert finding.pool == "sliding"
    return finding


@pytest.fixture(params=[True, False], ids=["tight", "whole"])
def tight(request: pytest.FixtureRequest) -> bool:
    """Whether rows begin where their window does, or at position 0."""
    return request.param


@pytest.fixture
def engine(make_sliding, tight):
    """Two requests whose first pages have left the window."""
    engine = make_sliding(tight)
    engine.start("first", 17)
    engine.start("second", 14)
    engine.decode()
    return engine


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_right_traffic_has_no_finding(make_sliding, tight, content, tells):
    """Chunks, decoding, trees, compaction, and pages that leave the window and serve another request."""
    engine = make_sliding(tight, tells, content=content, budget=1 << 30)
    for turn in range(6):
        engine.start(f"r{turn}", 9 + turn)
        for _ in range(3):
            engine.decode()
            engine.draft(f"r{turn}")
        if turn % 2:
            engine.finish(f"r{turn - 1}")
    assert engine.canary.findings == []


def test_live_bytes_of_a_window_are_those_that_it_shows(engine):
    """What has left the window is nobody's: the pool counts what the next token sees besides itself."""
    rows = sum(2 * 32 * length + 2 * 32 * 5 for length in engine.committed.values())
    assert engine.canary.certificate()["live_bytes"] == rows


def test_exactly_the_entries_of_the_window_are_judged(engine):
    """A decode row of the sliding pool counts its window, its own entry included, whatever else its array names."""
    before = engine.canary.certificate()["slots_checked"]
    length = engine.committed["first"]
    engine.decode("first")
    assert engine.canary.certificate()["slots_checked"] - before == (length + 1) + 6


def test_the_first_entry_of_a_window_continues_its_real_predecessor(make_sliding, tight):
    """The window of a row that differs before it alone: within it all is consistent, its first entry gives it away."""
    engine = make_sliding(tight, disable={"R8"})
    tokens = list(range(1, 18))
    engine.start("first", tokens)
    engine.start("second", [99, *tokens[1:]])
    theirs = torch.tensor([engine.slot("second", position) for position in range(12, 17)])
    engine.change_read = lambda plan: replace(plan, indices=torch.cat((plan.indices[:-6], theirs, plan.indices[-1:])))
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.position) == ("R5", 12)
    assert not any("R4" in line for line in finding.evidence)


@pytest.mark.parametrize(("shift", "code"), [(0, None), (1, "R10")])
def test_a_row_that_begins_behind_its_window_is_too_short(make_sliding, shift, code):
    """The first position that attention must see is not there."""
    engine = make_sliding()
    engine.start("only", 13)
    engine.change_read = lambda plan: replace(
        plan,
        starts=plan.starts + shift,
        indices=plan.indices[shift:],
        indptr=torch.tensor([0, len(plan.indices) - shift]),
    )
    if code is None:
        engine.decode()
        return
    finding = in_sliding(found(engine.decode))
    assert (finding.code, finding.expected, finding.found) == (code, {"first_position": 8}, {"first_position": 9})


@pytest.mark.parametrize(("entry", "code"), [(0, "R2"), (-1, "R2"), (1000, "R1"), (-9, "R1")])
def test_an_entry_of_the_map_that_leads_nowhere_is_found(engine, entry, code):
    """Inside the window every full slot has a slot of the pool; the full slot is named."""
    full = engine.slot("first", engine.committed["first"] - 3)
    engine.slot_map[full] = entry
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.position) == (code, engine.committed["first"] - 3)
    assert (finding.page, finding.found["slot_map_of"]) == (full // 4, full)


def test_what_lies_before_the_window_is_nobody_s_business(make_sliding):
    """A stale entry of the map, or an id that is none, before the window is neither judged nor an access."""
    engine = make_sliding(tight=False)
    engine.start("only", 17)
    engine.slot_map[engine.slot("only", 1)] = 1000
    engine.change_read = lambda plan: with_entry(plan, 2, 1 << 40)
    engine.decode()
    assert engine.canary.findings == []


def test_a_full_slot_outside_the_group_is_out_of_range(engine):
    """It is refused before the map is asked."""
    engine.change_read = lambda plan: with_entry(plan, -2, 1 << 40)
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.found) == ("R1", {"slot": -1, "slot_map_of": 1 << 40})


def test_one_slot_behind_two_full_slots_is_foreign(engine):
    """Two requests reach the same slot of the pool: it can hold the tokens of one of them only."""
    places = [engine.slot(name, engine.committed[name] - 2) for name in ("first", "second")]
    engine.slot_map[places[0]] = engine.slot_map[places[1]]
    findings = found(engine.decode)
    assert {finding.pool for finding in findings} == {"sliding"}
    codes = {finding.code for finding in findings} | {line[:2] for finding in findings for line in finding.evidence}
    assert "R8" in codes


def test_a_map_that_changed_under_a_judged_row_is_found(engine):
    """Rows that were right a step ago are translated and judged again: an entry now leads to a neighbour's slot."""
    mine, theirs = (engine.slot(name, engine.committed[name] - 2) for name in ("first", "second"))
    engine.slot_map[mine] = engine.slot_map[theirs]
    finding = in_sliding(found(engine.decode, "first"))
    assert finding.code in ("R4", "R5", "R12")
    assert finding.position == engine.committed["first"] - 2


def test_the_grant_of_the_full_page_governs_the_record(engine):
    """A full page that was freed and granted to another request makes what its map leads to stale, whoever wrote it."""
    position = engine.committed["first"] - 1
    page = engine.slot("first", position) // 4
    engine.canary.session.ledger.generations[page] += 1
    engine.canary.session.state.generations[page] += 1
    findings = found(engine.decode, "first")
    assert {(finding.code, finding.page) for finding in findings} == {("R12", page)}
    assert any(
        "sliding" in str(finding.pool) or "sliding" in line for finding in findings for line in (*finding.evidence, "")
    )


def test_a_full_page_of_another_request_is_foreign_behind_the_map(engine):
    """The owner of what a full slot leads to is the owner of its full page."""
    theirs = engine.slot("second", engine.committed["second"] - 2)
    engine.change_read = lambda plan: with_entry(plan, -3, theirs)
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.owner, finding.page) == ("R8", "second", theirs // 4)


@pytest.mark.parametrize(("entry", "code"), [(0, "R2"), (-1, "R2"), (1000, "W1")])
def test_a_write_through_a_map_that_leads_nowhere_is_refused(engine, entry, code):
    """Nothing outside the pool is written, and the neighbour keeps its record."""

    def break_map(plan):
        engine.slot_map[plan.slots[0]] = entry
        return plan

    engine.change_write = break_map
    position = engine.committed["first"]
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.position) == (code, position)


def test_a_write_to_another_request_s_full_page_is_refused(engine):
    """Whose page it is, is asked of the full group."""
    theirs = engine.slot("second", engine.committed["second"] - 1)
    engine.change_write = lambda plan: replace(plan, slots=torch.tensor([theirs]))
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.owner, finding.page) == ("W2", "second", theirs // 4)


@pytest.mark.parametrize("ago", [2, 5])
def test_a_flipped_bit_in_the_window_is_found_at_its_slot(engine, ago):
    """Content is read where the map leads; the finding names the pool's slot and the full page's owner."""
    full = engine.slot("first", engine.committed["first"] - ago)
    own = int(engine.slot_map[full])
    engine.kv["sliding"].view(torch.int32)[0, own, 1, 0, 2] ^= 1 << 9
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.slot, finding.page, finding.owner) == ("R9", own, full // 4, "first")
    assert (finding.part, finding.dim, finding.bit) == ("V", 2, 9)


@pytest.mark.parametrize("look", ["sweep", "release"])
def test_the_canary_s_own_looks_read_through_the_map(make_sliding, look):
    """The rolling check and the last re-read find a flip inside the window, and leave what has left it alone."""
    engine = make_sliding(content="rolling", budget=1 << 30)
    engine.start("only", 17)
    engine.decode()
    full = engine.slot("only", engine.committed["only"] - 2)
    own = int(engine.slot_map[full])
    engine.kv["sliding"].view(torch.int32)[0, own, 0, 0, 1] ^= 4
    engine.begin()
    finding = in_sliding(
        found(lambda: engine.canary.collect(engine.canary.end_step()))
        if look == "sweep"
        else found(engine.finish, "only")
    )
    assert (finding.code, finding.slot, finding.site[0]) == ("R9", own, look)


def test_a_hybrid_pool_is_two_groups_each_with_its_own_translation(engine):
    """The same full slot is another slot of either pool: each pool's record and bytes are its own."""
    position = engine.committed["first"] - 2
    full = engine.slot("first", position)
    own = int(engine.slot_map[full])
    assert own != full
    state = engine.canary.session.state
    for name, slot in (("target", full), ("sliding", own)):
        token = int(state.by_name[name].records[slot, 0]) & 0xFFFFFFFF
        assert token == engine.tokens["first"][position]
    engine.kv["target"].view(torch.int32)[1, full, 0, 0, 0] ^= 1
    (finding,) = found(engine.decode, "first")
    assert (finding.code, finding.pool, finding.slot) == ("R9", "target", full)


def test_a_damaged_record_behind_the_map_is_found(engine):
    """The canary's own memory is guarded in every group."""
    own = int(engine.slot_map[engine.slot("first", engine.committed["first"] - 2)])
    engine.canary.session.state.by_name["sliding"].records[own, 1] ^= 1 << 40
    finding = in_sliding(found(engine.decode, "first"))
    assert (finding.code, finding.slot) == ("R3", own)


def test_a_move_that_lost_a_row_behind_the_map_is_found(engine):
    """Compaction names full slots; both ends are translated, and what arrived is read again."""
    start = engine.committed["first"]
    move = engine._move

    def broken(pool, name, source, destination):
        kept = engine.kv["sliding"].clone()
        move_bytes = engine.kv["sliding"]
        if pool == "sliding":
            src, dst = (engine.slot_map[[engine.slot(name, p) for p in places]] for places in (source, destination))
            move_bytes[:, dst[:1]] = kept[:, src[:1]]  # the second row does not arrive
            full = [torch.tensor([engine.slot(name, p) for p in places]) for places in (source, destination)]
            engine.canary.on_move(pool, *full)
        else:
            move(pool, name, source, destination)

    engine._move = broken
    engine.draft("first")
    engine.begin()
    findings = found(lambda: engine.canary.collect(engine.canary.end_step()))
    finding = in_sliding(findings)
    assert (finding.code, finding.position) == ("T1", start + 2)


def test_pools_behind_a_map_are_not_poisoned_and_the_certificate_says_so(engine):
    """Their free slots are told to nobody: filling them would destroy another request's bytes."""
    engine.finish("second")
    for _ in range(40):
        engine.begin()
        engine.canary.collect(engine.canary.end_step())
    engine.decode("first")
    assert engine.canary.certificate()["unchecked"][NOT_POISONED] > 0


def free_own_page(engine) -> int:
    """One that has been poisoned since its request ended."""
    engine.finish("second")
    for _ in range(40):
        engine.begin()
        engine.canary.collect(engine.canary.end_step())
    return engine.free["sliding"][-1]


def test_what_a_pool_behind_a_map_gives_back_is_poisoned(make_sliding, tight):
    """An engine that tells of its own pages: every byte of a free one is the pattern, and nothing is left to count."""
    engine = make_sliding(tight, tells=True)
    engine.start("first", 17)
    engine.start("second", 14)
    page = free_own_page(engine)
    rows = engine.kv["sliding"][:, page * 4 : (page + 1) * 4]
    assert torch.isfinite(rows).all()
    assert (rows.view(torch.int32) != 0).all()
    assert NOT_POISONED not in engine.canary.certificate()["unchecked"]


def test_a_write_into_a_free_page_of_the_pool_is_found_when_it_is_granted(make_sliding):
    """P1 names the pool's slot, and the full page that leads there now."""
    engine = make_sliding(tells=True)
    engine.start("first", 17)
    engine.start("second", 14)
    page = free_own_page(engine)
    engine.kv["sliding"].view(torch.int32)[1, page * 4 + 2, 0, 0, 1] ^= 2
    engine.free["sliding"] = [page]
    engine.tokens["third"], engine.pages["third"], engine.committed["third"] = [5], [], 0
    engine.begin()
    engine.canary.admit("third", [5])
    engine._reserve("third", 1)
    finding = in_sliding(found(lambda: engine.canary.collect(engine.canary.end_step())))
    assert (finding.code, finding.slot, finding.page) == ("P1", page * 4 + 2, engine.pages["third"][0])


def test_nan_poison_of_the_pool_is_gone_before_somebody_reads_it(make_sliding):
    """A granted page of the sliding pool has no NaN left in the part that is not written yet."""
    engine = make_sliding(tells=True, poison="nan")
    engine.start("first", 17)
    engine.start("second", 14)
    page = free_own_page(engine)
    rows = engine.kv["sliding"][:, page * 4 : (page + 1) * 4]
    assert rows.isnan().all()
    engine.free["sliding"] = [page]
    engine._reserve("first", 21)
    assert (rows == 0).all()


def test_records_of_an_own_page_begin_anew_with_its_grant(make_sliding):
    """What they said was of another full page, which may have had the generation of the one that leads there now."""
    engine = make_sliding(tells=True)
    engine.start("first", 17)
    engine.start("second", 14)
    engine.finish("second")
    page = engine.free["sliding"][-1]
    records = engine.canary.session.state.by_name["sliding"].expected[page * 4 : (page + 1) * 4]
    assert (records[:2, REQUEST_GENERATION] >> 32 > 0).all()
    engine.free["sliding"] = [page]
    engine._reserve("first", 21)
    assert (records[:, REQUEST_GENERATION] >> 32 == 0).all()


@pytest.mark.parametrize("content", ["full", "rolling"])
def test_what_leaves_a_window_gets_its_last_look(make_sliding, tight, content):
    """An entry that no window shows any more, on a page that others keep: nothing reads it until the page leaves."""
    engine = make_sliding(tight, tells=True, content=content)
    engine.start("only", 17)
    full = engine.slot("only", 12)
    own = int(engine.slot_map[full])
    for _ in range(2):
        engine.decode()
    engine.kv["sliding"].view(torch.int32)[0, own, 1, 0, 2] ^= 1 << 9
    engine.begin()
    engine.canary.collect(engine.canary.end_step())
    finding = in_sliding(found(lambda: [engine.decode() for _ in range(4)]))
    assert (finding.code, finding.position, finding.slot, finding.site[0]) == ("R9", 12, own, "release")
    assert (finding.part, finding.dim, finding.bit) == ("V", 2, 9)


def test_what_a_request_leaves_behind_its_window_is_looked_at_when_it_ends(make_sliding):
    """The last re-read of a request is at its window; what its pages hold besides follows when they are given back."""
    engine = make_sliding(tells=True)
    engine.start("only", 19)
    own = int(engine.slot_map[engine.slot("only", 12)])
    engine.kv["sliding"].view(torch.int32)[1, own, 0, 0, 0] ^= 1
    finding = in_sliding(found(engine.finish, "only"))
    assert (finding.code, finding.position, finding.slot) == ("R9", 12, own)


def test_a_group_that_is_none_is_refused(engine):
    """Pages are told of by the group of their view."""
    with pytest.raises(PlanError, match="group must be one behind a slot map, sliding, got 'target'"):
        engine.canary.on_map("target", [1], [1])


def test_a_static_substep_of_a_partial_pool_is_refused(make_sliding):
    """Substeps of graphs do not read through a map yet, and say so before anything runs."""
    manager = make_sliding().canary
    buffers = StaticBuffers.allocate(1, 1, 8)
    with pytest.raises(PlanError, match="must have neither slot_map nor window in a captured substep"):
        SubstepRegistry(manager.session.state).add("sliding", "decode", 0, buffers)


def test_the_groups_of_one_forward_may_be_open_at_once(engine):
    """Layers of both groups take turns; another forward, or a second substep of a group, waits for both."""
    canary = engine.canary
    engine.begin()
    engine._reserve("first", engine.committed["first"] + 1)
    slot, tokens = engine.slot("first", engine.committed["first"]), engine.tokens["first"][-1:]
    opened, length = [], engine.committed["first"]
    for pool in ("target", "sliding"):
        slots = torch.tensor([engine.slot("first", position) for position in range(length + 1)])
        ends, one = torch.tensor([0, length + 1]), torch.tensor([length])
        opened.append(canary.forward("decode", 0, pool))
        opened[-1].open(
            ReadPlan(ends, slots, ("first",), 1, one, 1), WritePlan(torch.tensor([slot]), torch.tensor(tokens), one)
        )
    for other in (("decode", 0, "sliding"), ("decode", 1, "sliding"), ("draft", 0, "target")):
        with pytest.raises(HookOrderError, match=r"must wait for close\(\) of decode of the sliding pool"):
            canary.forward(*other)
    for layer in range(2):
        for substep, pool in zip(opened, ("target", "sliding"), strict=True):
            where = int(engine.slot_map[slot]) if pool == "sliding" else slot
            k, v = torch.randn(2, 1, 1, 4)
            substep.store(layer, k, v)
            engine.kv[pool][layer, where] = torch.cat((k, v))
    opened[0].close()
    with pytest.raises(HookOrderError, match=r"must wait for close\(\) of decode of the sliding pool"):
        canary.collect(canary.end_step())
    opened[1].close()
    canary.collect(canary.end_step())
    assert canary.findings == []


def test_pools_of_one_role_have_one_chain():
    """What a chain begins with is the role, which is the name where none is stated."""
    own = {"group": "own", "slot_map": torch.zeros(16, dtype=torch.int64), "role": "target"}
    kv = {name: [[torch.zeros(16, 1, 4)] for _ in range(2)] for name in ("target", "near", "draft")}
    views = [PoolView(name, *kv[name], 4, **(own if name == "near" else {})) for name in kv]
    roots = [pool.root for pool in CanaryState(views, seed=7).pools]
    assert roots[0] == roots[1] != roots[2]


def test_starts_are_positions_of_rows(make_sliding):
    """A row that begins behind its own entries, or before position 0, contradicts itself."""
    engine = make_sliding()
    engine.start("only", 9)
    engine.change_read = lambda plan: replace(plan, starts=plan.starts - 20)
    with pytest.raises(PlanError, match="starts must not be negative, got -1"):
        engine.decode()
