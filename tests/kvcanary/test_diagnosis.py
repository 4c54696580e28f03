"""Ranked causes: a family from the closed list, and the evidence that speaks for it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvcanary
from kvcanary import KVCorruptionError
from kvcanary.calls.violation import Violation
from kvcanary.codes import ARRIVED, CODES, MISREAD, UNWRITTEN
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import pack_site
from kvcanary.provenance.bytes_of import Provenance
from kvcanary.report.causes.ranking import MOST_CAUSES, RULES, rank_causes
from kvcanary.report.describe import Describer
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import FAMILIES, Cause, Finding
from kvcanary.report.ledger_evidence import LedgerEvidence
from kvcanary_kernels.record.layout import Record

LAYER = 1


@pytest.fixture
def engine(make_engine):
    """Two requests, one step into their drafting, all bytes compared in every forward."""
    engine = make_engine(content="full", num_pages=64)
    engine.start("first", 21)
    engine.start("second", 17)
    engine.step()
    return engine


def finding_of(engine) -> Finding:
    """The finding of the next step."""
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    return caught.value.findings[0]


def redirect(engine, change, *, kind: str = "verify") -> None:
    """Let `change` rewrite the slots of the first row that a forward of this kind reads."""

    def changed(read_kind, index, pool, plan):
        if read_kind != kind:
            return plan
        indices = plan.indices.clone()
        row = indices[: int(plan.indptr[1])]
        row[:] = change(row.clone())
        return replace(plan, indices=indices)

    engine.change_read = changed


def exchange(kv, slot, other):
    """Two slots, and their rows the other way round."""
    both = torch.tensor([slot, other])
    return both, kv[both.flip(0)]


def facts(engine, code: str, **read) -> Evidence:
    """Facts as if this check had fired at position 5 of `first`."""
    pool = engine.canary.session.state.pools[0]
    slot = engine.slot("first", 5)
    violation = Violation(code, pool, slot, 5, "first", ("verify", 0), 9, layers=read.pop("layers", ()))
    violation.last_good = read.pop("last_good", None)
    return Evidence([violation], engine.canary.session.ledger, **read)


def a_record(step: int, site: int = 4) -> Record:
    return Record(
        token=1, position=5, chain=0, request=0, generation=1, step=step, site=site, content_b=0, layers=7, seal=0
    )


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_cause(engine, code):
    """No finding is left without a cause, however little was read."""
    causes = rank_causes(facts(engine, code))
    assert 1 <= len(causes) <= MOST_CAUSES
    assert all(cause.family in FAMILIES for cause in causes)


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_finding(engine, code):
    """A finding can be made of a violation of any code, also without a slot."""
    state = engine.canary.session.state
    describer = Describer(LedgerEvidence(engine.canary.session.ledger).read)
    for slot in (-1, engine.slot("first", 5), 10**9):
        violation = Violation(
            code, state.pools[0], slot, 5, "first", ("verify", 0), 9, layers=(LAYER,), row_slots=(slot,) * 0
        )
        assert describer.finding([violation], 1).to_dict()["code"] == code


def test_rules_are_asked_for_codes_that_exist():
    """The table names no code that nobody knows."""
    assert {code for codes, _ in RULES for code in codes} <= {*CODES, UNWRITTEN, ARRIVED, MISREAD}


def test_more_evidence_goes_first(engine, monkeypatch):
    """Rank: number of lines that speak for a cause, then derived before inferred; without any, only if alone."""
    causes = [
        Cause("bits", "none", "derived"),
        Cause("order", "one guessed", "inferred", ("a",)),
        Cause("draft", "one known", "derived", ("a",)),
        Cause("graphs", "two", "inferred", ("a", "b")),
    ]
    rules = tuple((("R9",), lambda facts, cause=cause: cause) for cause in causes)
    monkeypatch.setattr("kvcanary.report.causes.ranking.RULES", rules)
    assert [cause.text for cause in rank_causes(facts(engine, "R9"))] == ["two", "one known", "one guessed"]
    monkeypatch.setattr("kvcanary.report.causes.ranking.RULES", rules[:2])
    assert [cause.text for cause in rank_causes(facts(engine, "R9"))] == ["one guessed"]
    monkeypatch.setattr("kvcanary.report.causes.ranking.RULES", rules[:1])
    assert [cause.text for cause in rank_causes(facts(engine, "R9"))] == ["none"]


def test_a_page_read_after_its_free_is_a_matter_of_lifetime(engine):
    """The row of a running request still names a page of one that has ended: who freed it, and when, is evidence."""
    page = engine.rows["second"].pages[1]
    engine.finish("second")
    engine.free_pages = [free for free in engine.free_pages if free != page]  # nobody gets it meanwhile

    def stale(row):
        row[4:8] = page * 4 + torch.arange(4)
        return row

    redirect(engine, stale)
    finding = finding_of(engine)
    (cause, *_) = finding.causes
    assert (finding.code, cause.family) == ("R7", "lifetime")
    assert cause.evidence[0] == "freed by 'second' at step 3"
    assert finding.owner is None


def test_a_page_granted_to_another_since_is_a_matter_of_lifetime(engine):
    """The reader had the page before: it was given back too early, and the evidence names the new owner."""
    events = (PageEvent("granted", 1, "first"), PageEvent("freed", 4, "first"), PageEvent("granted", 5, "second"))
    cause, *_ = rank_causes(facts(engine, "R8", events=events, owner="second"))
    assert cause.family == "lifetime"
    assert cause.evidence == ("freed by 'first' at step 4", "the reader had it before", "granted to 'second' since")


@pytest.mark.parametrize(
    ("start", "by", "family"), [(0, 1, "windows"), (0, 4, "windows"), (6, 1, "lengths"), (6, 4, "lengths")]
)
def test_a_shifted_row_is_told_from_a_shifted_window(engine, start, by, family):
    """Every entry off by one number: where the first ones are gone it is a ring or a window, else a length."""
    committed = engine.rows["first"].committed

    def shifted(row):
        row[start : committed - by] = row[start + by : committed].clone()
        return row

    redirect(engine, shifted)
    finding = finding_of(engine)
    assert (finding.code, finding.causes[0].family) == ("R4", family)
    assert f"position {by:+d}" in finding.causes[0].evidence[0]


@pytest.mark.parametrize(
    ("damage", "family", "words"),
    [
        (lambda kv, slot, other: kv[slot].zero_(), "order", "cleared after it was written"),
        (lambda kv, slot, other: kv[slot].copy_(kv[other]), "transfer", "a copy that nobody declared"),
        (lambda kv, slot, other: kv.index_copy_(0, *exchange(kv, slot, other)), "addressing", "each other's slots"),
        (lambda kv, slot, other: kv[slot, 0].zero_(), "order", "cleared after it was written"),
        (lambda kv, slot, other: kv[slot, 1].copy_(kv[other, 0]), "transfer", "another layout"),
        (lambda kv, slot, other: kv[slot].fill_(float("nan")), "bits", "values that no forward has stored"),
        (lambda kv, slot, other: kv[slot].add_(1), "bits", "an overwrite that nobody declared"),
        (lambda kv, slot, other: kv[slot, 0, 0, 0].neg_(), "bits", "one flipped bit"),
        (lambda kv, slot, other: kv[slot, 0, 0, 0].add_(1), "bits", "one 32-bit word was overwritten"),
    ],
    ids=[
        "zeroed",
        "row of another slot",
        "two rows exchanged",
        "K zeroed",
        "K as V",
        "NaN",
        "several words",
        "one bit",
        "one word",
    ],
)
def test_changed_bytes_are_explained_by_what_they_are(engine, damage, family, words):
    """Whose bytes lie there now decides the first cause."""
    damage(engine.pools["target"].kv[LAYER], engine.slot("first", 5), engine.slot("first", 9))
    cause, *_ = finding_of(engine).causes
    assert cause.family == family
    assert words in cause.text


def test_a_row_of_an_earlier_write_is_a_copy(engine):
    """Bytes of a slot that another forward wrote did not come from this one's store."""
    cause, *_ = rank_causes(
        facts(
            engine,
            "R9",
            layers=(LAYER,),
            provenance=(Provenance("slot", "the bytes of slot 9", "derived", 9, LAYER),),
            record=a_record(step=7),
            source=a_record(step=5),
        )
    )
    assert (cause.family, cause.text) == ("transfer", "the bytes of slot 9: a copy that nobody declared")


def test_bytes_that_were_never_right_were_never_stored(engine):
    """Poison where nothing was ever known good is a store that did not arrive."""
    poison = (Provenance("poison", "the poison of freed pages: nothing was stored since", "inferred"),)
    cause, *_ = rank_causes(facts(engine, "R9", layers=(LAYER,), provenance=poison, record=a_record(step=7)))
    assert cause.family == "uninitialised"
    assert rank_causes(facts(engine, "R9", layers=(LAYER,), provenance=poison, record=a_record(7), last_good=8)) == (
        Cause("bits", "several words changed: an overwrite that nobody declared", "derived"),
    )


@pytest.mark.parametrize(
    ("provenance", "first"),
    [
        ((), ("bits", ("one row changed to bytes that nobody has written here",))),
        (
            (Provenance("not_finite", "NaN or Inf in 3 elements of K", "inferred"),),
            ("bits", ("NaN or Inf in 3 elements of K",)),
        ),
        (
            (Provenance("zero_part", "K is all zero", "inferred"),),
            ("order", ("K is all zero, and the rest of the row is not",)),
        ),
    ],
    ids=["strange", "not finite", "cleared"],
)
def test_what_the_bytes_are_goes_before_who_had_the_page(engine, provenance, first):
    """A page soon granted again makes a late write of its former owner possible: a second cause, of one event."""
    events = (PageEvent("granted", 1, "old"), PageEvent("freed", 3, "old"), PageEvent("granted", 4, "first"))
    reported, late, *_ = rank_causes(
        facts(engine, "R9", layers=(LAYER,), events=events, owner="first", provenance=provenance)
    )
    assert (reported.family, reported.evidence) == first
    assert (late.family, late.evidence) == ("lifetime", ("the page was freed by 'old' at step 3, 6 steps before",))


def test_damage_behind_an_extend_is_not_its_store(engine):
    """Extend is judged a step later: only behind other forwards can nobody have come between write and look."""
    families = {}
    for kind in ("draft", "verify", "extend"):
        read = facts(engine, "R9", layers=(LAYER,), record=a_record(step=9, site=pack_site(kind, 0)))
        read.violation.site = (kind, 0)
        families[kind] = [cause.family for cause in rank_causes(read)]
    assert families == {"draft": ["uninitialised"], "verify": ["uninitialised"], "extend": ["bits"]}


def test_minus_one_is_a_mark_of_padding(engine):
    """Other engines mark padding with -1: a live row that reads it was padded."""
    redirect(engine, lambda row: torch.cat((row[:3], row.new_tensor([-1]), row[4:])))
    cause, *_ = finding_of(engine).causes
    assert (cause.family, cause.evidence) == ("graphs", ("the slot is -1",))


def test_slot_zero_is_an_entry_that_nothing_has_filled(engine):
    """A table begins with zeros: an entry that was never written names slot 0."""
    redirect(engine, lambda row: torch.cat((row[:3], row.new_tensor([0]), row[4:])))
    finding = finding_of(engine)
    assert (finding.code, finding.causes[0].family) == ("R2", "uninitialised")


@pytest.mark.parametrize(("number", "family"), [(0, "order"), (1, "draft")], ids=["target", "draft"])
def test_a_wrong_token_in_a_shifted_pool_may_be_the_unshifted_one(engine, number, family):
    """Only a pool whose entries hold the next token can have been fed the position's own."""
    pool = engine.canary.session.state.pools[number]
    violation = Violation("W6", pool, engine.slot("first", 5), 5, "first", ("extend", 0), 9)
    assert rank_causes(Evidence([violation], engine.canary.session.ledger))[0].family == family


def test_a_row_of_other_tokens_says_where_they_begin_to_differ(engine):
    """R6 names the first position whose token is not the request's, and how long the row is."""
    engine.canary.drain()
    state, ledger = engine.canary.session.state, engine.canary.session.ledger
    row = tuple(engine.slot("first", position) for position in range(12))
    violation = Violation("R6", state.pools[0], row[-1], 11, "first", ("verify", 0), 9, row_slots=row)
    ledger.requests["first"].tokens[7] += 1
    finding = Describer(LedgerEvidence(ledger).read).finding([violation], 1)
    assert finding.found["first_different_position"] == 7
    assert (finding.causes[0].family, finding.causes[0].evidence) == (
        "identity",
        ("its tokens differ from position 7 on, of 12",),
    )


def test_a_finding_has_no_token_unless_asked(engine):
    """Token ids are in a finding only for a describer that may show them."""
    state, ledger = engine.canary.session.state, engine.canary.session.ledger
    engine.canary.drain()
    violation = Violation("R4", state.pools[0], engine.slot("first", 5), 6, "first", ("verify", 0), 9, found_position=5)
    silent = Describer(LedgerEvidence(ledger).read).finding([violation], 1)
    assert "token" not in silent.expected | silent.found
    shown = Describer(LedgerEvidence(ledger).read, show_tokens=True).finding([violation], 1)
    tokens = engine.rows["first"].tokens
    assert (shown.expected["token"], shown.found["token"]) == (tokens[6], tokens[5])
    assert replace(shown, expected=silent.expected, found=silent.found) == silent


def test_history_has_the_caller_where_the_ledger_noted_it(engine, monkeypatch):
    """Grants and frees name the call site if the event has one."""
    state, ledger = engine.canary.session.state, engine.canary.session.ledger

    slot = engine.slot("first", 5)
    events = PageEvent("granted", 1, "old"), PageEvent("freed", 3, "old", ("/engine/allocator.py", 42))
    monkeypatch.setattr(ledger.history, "of", {slot // 4: events}.__getitem__)
    finding = Describer(LedgerEvidence(ledger).read).finding(
        [Violation("R3", state.pools[0], slot, 5, "first", ("verify", 0), 9)], 1
    )
    assert finding.history == ("granted to 'old' at step 1", "freed by 'old' at step 3 (allocator.py:42)")


@pytest.mark.parametrize("room", ["report", "provenance"])
def test_causes_know_nothing_of_the_faults(room):
    """What explains findings imports nothing of what makes them."""
    for path in (Path(kvcanary.__file__).parent / room).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not [name for name in imported if "faults" in name]


# the ranking


def test_causes_are_ranked_by_their_evidence(monkeypatch):
    """A rule is asked for its codes; more evidence first, then derived; at most three, and one where none fits."""

    class Asked:
        def __init__(self, code: str, is_unwritten: bool = False) -> None:
            kind = UNWRITTEN if is_unwritten else code
            self.violation = type("Violation", (), {"code": code, "kind": kind, "state": None})()

    causes = [
        (("R4",), Cause("bits", "one, guessed", "inferred", ("a",))),
        (("R4", "U1"), Cause("order", "one, known", "derived", ("a",))),
        (("R4",), Cause("draft", "two", "inferred", ("a", "b"))),
        (("R4",), None),
        (("R4",), Cause("graphs", "none", "derived")),
        (("R5",), Cause("graphs", "alone", "derived")),
        (("R4",), Cause("lengths", "one, guessed later", "inferred", ("a",))),
    ]
    monkeypatch.setattr(
        "kvcanary.report.causes.ranking.RULES",
        tuple((codes, lambda facts, cause=cause: cause) for codes, cause in causes),
    )
    assert [cause.text for cause in rank_causes(Asked("R4"))] == ["two", "one, known", "one, guessed"]
    assert [cause.text for cause in rank_causes(Asked("R5"))] == ["alone"]
    assert [cause.text for cause in rank_causes(Asked("R9", is_unwritten=True))] == ["one, known"]
    assert rank_causes(Asked("W3")) == (
        Cause("addressing", "the arrays of this forward were built wrong: write to shared page", "inferred"),
    )
    assert MOST_CAUSES == 3


def test_rules_that_always_fit_say_one_thing():
    """Fixed causes need no facts, are guesses, and are none but these."""
    fixed = {(codes, rule(None)) for codes, rule in RULES if getattr(rule, "__name__", "") == "rule"}
    assert {(codes, cause.family) for codes, cause in fixed} == {
        (("R10",), "lengths"),
        (("R11",), "order"),
        (("R13",), "draft"),
        (("R2",), "graphs"),
        (("R4", "R5"), "order"),
        (("T1",), "transfer"),
        (("W6",), "order"),
        (("W7",), "lifetime"),
        (("W8",), "bounds"),
        (("W9",), "graphs"),
        (("O1",), "order"),
        (("H1",), "hooks"),
        (("H2",), "hooks"),
    }
    assert {(cause.basis, cause.evidence) for _, cause in fixed} == {("inferred", ())}
    assert {cause.text for codes, cause in fixed if set(codes) & {"R2", "R4", "T1"}} == {
        "rows of padding count as live, or a live row was padded",
        "a later forward wrote the slot, or the entry before it, again",
        "the move copied other bytes than the plan says, or used its source after that",
    }
    assert all(len(cause.text) > 20 for _, cause in fixed)
    assert {code for codes, _ in fixed for code in codes} <= set(CODES)
