"""Evidence: what they say of a violation, and both sides of each check, with plain stand-ins for pool, ledger and
request.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kvcanary.calls.violation import NO_BRANCH, Lineage, Violation
from kvcanary.pools.launch_site import pack_site
from kvcanary.provenance.bytes_of import Provenance
from kvcanary.provenance.changed_word import ChangedWord
from kvcanary.report.evidence import Evidence, expected_and_found, tokens_of
from kvcanary_kernels.record.layout import (
    CHAIN,
    COLUMNS,
    TOKEN_POSITION,
    Record,
    chain_host,
    make_keys,
    read_record,
    seal_host,
    signed,
)

KEYS = make_keys(5, 3, 4)
PAGE_SIZE, NUM_SLOTS, ROOT, ALIEN = 4, 32, 77, 1 << 63 | 5
PAGES = [6, 2, 3]
TOKENS = list(range(100, 113))


def a_pool(**reported) -> SimpleNamespace:
    """A pool of 8 pages; the slot of token t at position p has chain 1000 + p."""
    view = {"num_slots": NUM_SLOTS, "page_size": PAGE_SIZE, "null_slots": 4, "num_layers": 3, "token_offset": 0}
    view |= {"slot_map": None} | reported
    records = torch.zeros(NUM_SLOTS, COLUMNS, dtype=torch.int64)
    for position in range(12):
        slot = PAGES[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        records[slot, TOKEN_POSITION] = TOKENS[position + view["token_offset"]] | position << 32
        records[slot, CHAIN] = 1000 + position
    return SimpleNamespace(view=SimpleNamespace(**view), records=records, pool_id=1, keys=KEYS, full_layers=0b111)


def a_ledger() -> SimpleNamespace:
    def slot(request, position: int) -> int:
        return request.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    return SimpleNamespace(slot=slot, truth=lambda request, pool_id, length: 10 * length + pool_id)


def a_reader(**reported) -> SimpleNamespace:
    roots = {1: ROOT}
    return SimpleNamespace(**{"uid": 3, "pages": PAGES, "tokens": TOKENS, "root": roots.__getitem__} | reported)


def a_record(**reported) -> Record:
    fields = {"token": 105, "position": 5, "chain": ALIEN, "request": 3, "generation": 2, "step": 7, "content_b": 11}
    return Record(**{"site": pack_site("draft", 1), "layers": 0b101, "seal": 13} | fields | reported)


def facts(code: str = "R4", violation: dict[str, object] | None = None, **read) -> Evidence:
    """A verify forward of step 9 found it at position 5 of `me`, slot 9, where that position was granted."""
    reported = {"pool": a_pool(), "slot": 9, "position": 5, "request_id": "me", "site": ("verify", 0), "step": 9}
    return Evidence([Violation(code, **reported | (violation or {}))], a_ledger(), **read)


def test_what_nobody_wrote_has_no_last_write():
    """Without a record, or with a blank one, nobody has written."""
    for read in ({}, {"record": a_record(site=0)}):
        reported = facts(**read)
        assert (reported.write_site, reported.write_step, reported.last_write) == (None, None, "nobody")


def test_the_last_write_is_the_records():
    """Kind, index and step of the record's site, and the words for it."""
    reported = facts(record=a_record())
    assert (reported.write_site, reported.write_step, reported.last_write) == (("draft", 1), 7, "draft[1], step 7")


@pytest.mark.parametrize(("last_good", "never"), [(None, True), (7, True), (8, False)])
def test_bytes_were_never_right_until_somebody_has_seen_them(last_good, never):
    """Known good in the step of their write says nothing; in a later one it does."""
    assert facts("R9", {"last_good": last_good}, record=a_record()).was_never_right is never


@pytest.mark.parametrize(
    ("kind", "site", "step", "first"),
    [
        ("draft", ("draft", 1), 7, True),
        ("draft", ("draft", 1), 8, False),
        ("draft", ("verify", 1), 7, False),
        ("extend", ("extend", 1), 7, False),
    ],
)
def test_the_first_look_is_that_of_the_writer(kind, site, step, first):
    """The forward that wrote the entry is the one that found it; an extend is looked at in the next step only."""
    found = facts("R9", {"site": site, "step": step}, record=a_record(site=pack_site(kind, 1)))
    assert found.is_first_read is first


def test_the_slot_of_a_position_is_the_one_that_was_granted():
    """By the pages of the row; none without a position, without a reader and behind the row."""
    assert facts(reader=a_reader()).granted_slot == 9
    assert facts(reader=a_reader()).is_own_place
    assert not facts(violation={"slot": 10}, reader=a_reader()).is_own_place
    assert facts(violation={"position": 11}, reader=a_reader()).granted_slot == 15
    assert facts(violation={"position": 0}, reader=a_reader()).granted_slot == 24
    for violation in ({"position": None}, {"position": 12}, {"position": -1}):
        assert facts(violation=violation, reader=a_reader()).granted_slot is None
    assert facts().granted_slot is None


def test_a_slot_of_a_map_is_the_mapped_one():
    """Behind a map the granted slot is that of the window group."""
    pool = a_pool(slot_map=NUM_SLOTS - 1 - torch.arange(NUM_SLOTS), device=torch.device("cpu"))
    assert facts(violation={"pool": pool}, reader=a_reader()).granted_slot == 22


def test_the_position_of_a_slot_is_its_place_in_the_row():
    """By the page's place and the offset in it; none without a reader or where the row has no such page."""
    assert facts(reader=a_reader()).own_position == 5
    assert facts(violation={"slot": 26}, reader=a_reader()).own_position == 2
    assert facts(violation={"slot": 99, "named": 14}, reader=a_reader()).own_position == 10
    assert facts(violation={"slot": 16}, reader=a_reader()).own_position is None
    assert facts().own_position is None


ROW = (24, 25, 26, 27, 8, 9)


def test_a_row_differs_first_where_a_token_is_not_the_requests():
    """Counted over the row that was read; a window hides what lies before it."""
    other = [*TOKENS[:3], 555, *TOKENS[4:]]
    reported = facts("R6", {"row_slots": ROW}, reader=a_reader(tokens=other))
    assert reported.first_difference == 3
    assert reported.different_record == read_record(reported.violation.pool.records, 27)
    assert facts("R6", {"row_slots": ROW[2:]}, reader=a_reader(tokens=other)).first_difference == 3
    assert facts("R6", {"row_slots": ROW[4:]}, reader=a_reader(tokens=other)).first_difference is None
    assert facts("R6", {"row_slots": ROW}, reader=a_reader()).different_record is None
    assert facts("R6", {"row_slots": ROW}).first_difference is None
    assert facts("R6", reader=a_reader()).first_difference is None


def test_a_row_of_a_shifted_pool_is_compared_with_shifted_tokens():
    """Slot of position p holds token p + 1."""
    pool = a_pool(token_offset=1)
    other = [*TOKENS[:3], 555, *TOKENS[4:]]
    assert facts("R6", {"row_slots": ROW, "pool": pool}, reader=a_reader()).first_difference is None
    assert facts("R6", {"row_slots": ROW, "pool": pool}, reader=a_reader(tokens=other)).first_difference == 2


def test_the_differing_entry_has_a_record_where_the_row_looks_in_its_own_place():
    """A row that looks elsewhere says nothing about what was written."""
    other = [*TOKENS[:3], 555, *TOKENS[4:]]
    elsewhere = (*ROW[:3], 12, *ROW[4:])
    reported = facts("R6", {"row_slots": elsewhere}, reader=a_reader(tokens=other))
    assert (reported.first_difference, reported.different_record) == (3, None)
    window = facts("R6", {"row_slots": ROW[2:]}, reader=a_reader(tokens=other))
    assert window.different_record == read_record(window.violation.pool.records, 27)


def test_the_best_answer_of_a_kind_is_the_first():
    """Answers stand best first."""
    answers = tuple(Provenance(kind, text, "inferred") for kind, text in (("zero", "a"), ("slot", "b"), ("slot", "c")))
    reported = facts(provenance=answers)
    assert reported.provenance_of("slot", "part") is answers[1]
    assert reported.provenance_of("slot", "zero") is answers[0]
    assert reported.provenance_of("part") is None


WORD = ChangedWord(1, "K", 0, 2, 1, 3, old=0x3F, new=0x7F, old_value=1.5, new_value=math.inf, size=2)
CHAIN_OF_105 = chain_host([105], 5, 1004, KEYS)[0]
CHAIN_AT_ROOT = chain_host([105], 5, ROOT, KEYS)[0]
SIDES = [
    ("R1", {"slot": 40}, {}, {"slot": "0 to 31"}, {"slot": 40}),
    ("W1", {"slot": -1, "named": 8}, {}, {"slot": "0 to 31"}, {"slot": -1, "slot_map_of": 8}),
    ("R2", {"slot": 2}, {"record": a_record()}, {"slot": "4 or more"}, {"slot": 2}),
    ("W4", {"layers": (0, 2)}, {}, {"writes_in_forward": 1}, {"writes_in_forward": 2, "layers": [0, 2]}),
    ("W5", {"parent_position": 7}, {}, {"position": 8}, {"position": 5}),
    ("W5", {}, {}, {"position": None}, {"position": 5}),
    ("R7", {}, {"record": a_record(), "granted": 4}, {"owner": "me"}, {"owner": None, "generation": 4}),
    *(
        (
            code,
            {},
            {"record": a_record(), "granted": 4, "is_shared": True, "reader": reader, "holders": holders},
            {"owner": "me", "page": page},
            {"owner": None, "generation": 4, "page": 2, "held_by": held_by},
        )
        for code, reader, page, holders, held_by in (
            ("R7", None, None, (), "a prefix cache"),
            ("R8", a_reader(), 2, ("a", "b", "c"), "'a' and 'b' and others"),
        )
    ),
    *(
        (
            code,
            {},
            {"record": a_record(), "owner": "you", "granted": 4},
            {"owner": "me"},
            {"owner": "you", "generation": 4},
        )
        for code in ("R8", "W2", "W3", "W7")
    ),
    (
        "R3",
        {},
        {"record": a_record()},
        {"seal": f"0x{seal_host(a_record(), 9, 1, KEYS):016x}"},
        {"seal": "0x000000000000000d"},
    ),
    (
        "R3",
        {"fingerprint_violation": True},
        {"record": a_record()},
        {"lane_b": "0x000000000000000b", "lane_a": "agrees"},
        {"lane_b": "0x000000000000000b", "lane_a": "differs"},
    ),
    ("R4", {}, {"record": a_record(position=3)}, {"position": 5}, {"position": 3, "chain": "0x8000000000000005"}),
    ("R5", {}, {"record": a_record()}, {"chain": None}, {"chain": "0x8000000000000005"}),
    *(
        (
            "R5",
            {"lineage": Lineage(1, 0, found), "site": ("draft", 2)},
            {"record": a_record(), "reader": a_reader()},
            {"branch": "0 of draft[1]"},
            {"branch": f"{provenance} of draft[1]", "chain": "0x8000000000000005"},
        )
        for found, provenance in ((2, "2"), (NO_BRANCH, "none"))
    ),
    (
        "R5",
        {},
        {"record": a_record(), "reader": a_reader()},
        {"chain": f"0x{CHAIN_OF_105:016x}"},
        {"chain": "0x8000000000000005"},
    ),
    (
        "R5",
        {"position": 0},
        {"record": a_record(), "reader": a_reader()},
        {"chain": f"0x{CHAIN_AT_ROOT:016x}"},
        {"chain": "0x8000000000000005"},
    ),
    (
        "R5",
        {"position": None},
        {"record": a_record(), "reader": a_reader()},
        {"chain": None},
        {"chain": "0x8000000000000005"},
    ),
    (
        "R5",
        {},
        {"record": a_record(chain=CHAIN_OF_105), "reader": a_reader()},
        {"chain": None},
        {"chain": f"0x{CHAIN_OF_105:016x}"},
    ),
    (
        "R5",
        {},
        {"record": a_record(), "reader": a_reader(pages=[6, 0, 3])},
        {"chain": None},
        {"chain": "0x8000000000000005"},
    ),
    ("R6", {}, {"record": a_record()}, {}, {"chain": "0x8000000000000005"}),
    (
        "R6",
        {"row_slots": ROW},
        {"record": a_record(), "reader": a_reader(tokens=[0] * 12)},
        {"chain": f"0x{61:016x}"},
        {"chain": "0x8000000000000005", "first_different_position": 0},
    ),
    ("R11", {}, {"record": a_record()}, {"written_by_step": 9}, {"written_in_step": 7}),
    (
        "R12",
        {},
        {"record": a_record(), "granted": 4},
        {"generation": 4, "layers": 3},
        {"generation": 2, "layers": 2, "missing": [1]},
    ),
    (  # by the time of the report all layers have stored
        "R12",
        {},
        {"record": a_record(layers=0b111), "granted": 2},
        {"last_write": "before verify, step 9"},
        {"generation": 2, "layers": 3, "missing": [], "last_write": "draft[1], step 7"},
    ),
    ("R9", {"layers": (2, 0)}, {"record": a_record()}, {"layers": "as written"}, {"layers_changed": [2, 0]}),
    *(
        (
            code,
            {},
            {"record": a_record(), "word": WORD},
            {"bits": "0x003f", "value": 1.5},
            {"bits": "0x007f", "value": "inf"},
        )
        for code in ("R9", "T1")
    ),
    ("P1", {"layers": (1,)}, {"record": a_record()}, {"layers": "poison"}, {"layers_changed": [1]}),
    (
        "R9",
        {"is_unwritten": True, "layers": (1,)},
        {"record": a_record()},
        {"elements": "finite"},
        {"layers_not_finite": [1]},
    ),
    ("R4", {"expected": {"a": 1}, "found": {"b": 2}}, {"record": a_record()}, {"a": 1}, {"b": 2}),
    ("R4", {"expected": {"a": 1}}, {}, {"a": 1}, {}),
    ("R4", {}, {}, {}, {}),
    ("R10", {}, {"record": a_record()}, {}, {}),
]


@pytest.mark.parametrize(("code", "violation", "read", "expected", "found"), SIDES)
def test_both_sides_of_a_check(code, violation, read, expected, found):
    """What the check wanted and what lay there, as its code says or as the violation told."""
    assert expected_and_found(facts(code, violation, **read)) == (expected, found)


def test_a_number_that_json_lacks_is_told_in_words():
    """No value stays no value."""
    word = ChangedWord(1, "K", 0, 2, 1, 3, old=0x3F, new=0x7F, old_value=None, new_value=-2.0, size=4)
    expected, found = expected_and_found(facts("R9", record=a_record(), word=word))
    assert (expected, found) == ({"bits": "0x0000003f", "value": None}, {"bits": "0x0000007f", "value": -2.0})


def test_the_tokens_of_a_place_are_the_requests_and_the_records():
    """Shifted as the pool is; none where nobody has written, nobody reads, or the token is not known."""
    shifted = {"pool": a_pool(token_offset=1)}
    assert tokens_of(facts(record=a_record(token=9), reader=a_reader())) == ({"token": 105}, {"token": 9})
    assert tokens_of(facts(violation=shifted, record=a_record(), reader=a_reader())) == ({"token": 106}, {"token": 105})
    assert tokens_of(facts(violation={"position": 12}, reader=a_reader())) == ({"token": 112}, {})
    assert tokens_of(facts(violation={"position": 13}, reader=a_reader())) == ({}, {})
    assert tokens_of(facts(violation={"position": None}, record=a_record(site=0), reader=a_reader())) == ({}, {})
    assert tokens_of(facts(record=a_record())) == ({}, {"token": 105})


def test_a_chain_in_the_table_is_unsigned():
    """The records' signed words are read as the unsigned values that reports print."""
    reported = facts("R5", record=a_record(), reader=a_reader())
    reported.violation.pool.records[8, CHAIN] = signed(ALIEN)
    expected, _ = expected_and_found(reported)
    assert expected == {"chain": f"0x{chain_host([105], 5, ALIEN, KEYS)[0]:016x}"}
