"""Each rule about rows by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

import numpy as np

from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import pack_site
from kvcanary.report.causes import rows
from kvcanary.report.finding import Cause
from rule_facts import A_FREE, a_reader, a_record, a_row, a_violation, expect_said, shown, silent_rules

WRONG_SLOT = "an entry of the table or index array names the wrong slot"
PAST = "the index array or its builder ran past the end of what it holds"
NO_INDEX = "an offset that does not fit 32 bits, or no index at all"
KEPT = "entries were kept by their number, not by the accepted path, or their move went wrong"
GIVEN_BACK = "the page was given back while the row still pointed at it"
LOAD = "a load failed, still runs or brought less, and its hit was counted"
OWN_GRANT = "the entry is of this grant, layer {} is not marked as stored"
TWO_ROWS = (a_violation(position=8, found_position=9), a_violation(position=9, found_position=10))
WINDOW = {"view": {"window": 8}, "until": 15}
A_SHARED = (PageEvent("granted", 1, "old"), PageEvent("published", 2, "old"), PageEvent("released", 5, "old"))
R8_AT_4 = a_violation(code="R8", position=4, until=5)
HALF = "entries {} to {} are, and {}, which is on the same page of the row, is not"
GONE = "the first entries of the row are gone, later ones lie there: a ring too short, or a window moved early"
SHARED_PAGE = (PageEvent("granted", 1, "you"), PageEvent("forked", 2, "me"), PageEvent("released", 4, "me"))
BY_EXTEND = a_record(site=pack_site("extend", 0))
ITS_OWN = {"record": a_record(position=6), "write_site": ("verify", 0), "write_step": 7, "last_write": "verify, step 7"}
A_DRAFT = {"write_site": ("draft", 0), "write_step": 7}
TWICE = [(place, a_record(site=pack_site("draft", 0), position=place)) for place in (9, 10)]


def grown(**reported):
    """A request whose tokens behind position 3 became known in step 3."""
    steps = np.array([1, 1, 1, 1, 3, 3, 3, 3])
    return a_reader(tokens=[0] * 8, steps=steps, **reported)


UNWRITTEN = {"reader": grown(), "is_own_place": True, "row": a_row(last_no_guess=(4, BY_EXTEND))}
SAID = [
    *(
        (rows.out_of_bounds, shown(a_violation(slot=slot)), Cause("bounds", text, "inferred", (f"slot {slot} of 64",)))
        for slot, text in ((70, PAST), (-(2**31), PAST), (2**31 - 1, PAST), (2**31, NO_INDEX), (-(2**31) - 1, NO_INDEX))
    ),
    (rows.padding_mark, shown(a_violation(slot=1)), None),
    (
        rows.padding_mark,
        shown(a_violation(slot=-1)),
        Cause("graphs", "-1 is a mark of padding: a padded row counts as live", "inferred", ("the slot is -1",)),
    ),
    (rows.empty_entry, shown(a_violation(slot=1)), None),
    (
        rows.empty_entry,
        shown(a_violation(slot=0)),
        Cause(
            "uninitialised",
            "a table entry was never filled, or was filled elsewhere",
            "inferred",
            ("it names slot 0, as an entry that nothing has filled",),
        ),
    ),
    (
        rows.empty_entry,
        shown(a_violation(slot=0), granted_slot=33),
        Cause(
            "uninitialised",
            "a table entry was never filled, or was filled elsewhere",
            "inferred",
            (
                "it names slot 0, as an entry that nothing has filled",
                "position 5 was granted slot 33, the row looks in 0",
            ),
        ),
    ),
    (rows.wrong_entry, shown(is_own_place=True), None),
    (rows.wrong_entry, shown(), Cause("addressing", WRONG_SLOT, "inferred")),
    (rows.wrong_entry, shown(a_violation(code="R2"), granted_slot=33), Cause("addressing", WRONG_SLOT, "inferred")),
    (
        rows.wrong_entry,
        shown(a_violation(code="R4"), granted_slot=33),
        Cause("addressing", WRONG_SLOT, "inferred", ("position 5 was granted slot 33, the row looks in 21",)),
    ),
    (rows.more_entries, shown(a_violation(code="R4")), None),
    (rows.more_entries, shown(a_violation(code="R10"), a_violation(code="R4")), None),
    (
        rows.more_entries,
        shown(a_violation(code="R4"), a_violation(code="R10"), granted_slot=33),
        Cause(
            "lengths",
            "the row counts entries that the request does not have",
            "inferred",
            ("the row's length is not the request's (R10)", "position 5 was granted slot 33, the row looks in 21"),
        ),
    ),
    (rows.kept_other_nodes, shown(a_violation(code="R4"), reader=a_reader(), record=a_record()), None),
    (rows.kept_other_nodes, shown(a_violation(code="R4"), record=a_record(), is_own_place=True), None),
    (
        rows.kept_other_nodes,
        shown(a_violation(code="R4"), reader=a_reader(uid=4), record=a_record(), is_own_place=True),
        None,
    ),
    (
        rows.kept_other_nodes,
        shown(
            a_violation(code="R4"), reader=a_reader(), record=a_record(site=pack_site("prefill", 0)), is_own_place=True
        ),
        None,
    ),
    *(
        (
            rows.kept_other_nodes,
            shown(a_violation(code=code), reader=a_reader(), is_own_place=own, record=record, different_record=other),
            Cause(
                "draft",
                KEPT,
                "derived",
                (
                    "the row looks in the slot that it was granted",
                    "draft[2], step 7, wrote what lies there",
                ),
            ),
        )
        for code, own, record, other in (
            ("R5", True, a_record(site=pack_site("draft", 2)), None),
            ("R6", False, None, a_record(site=pack_site("draft", 2))),
        )
    ),
    (rows.exchange, shown(*TWO_ROWS), None),
    (rows.exchange, shown(a_violation(position=5, found_position=13)), None),
    (
        rows.exchange,
        shown(a_violation(position=5, found_position=13), a_violation(position=12, found_position=4)),
        Cause(
            "addressing",
            "entries 1 and 3 of the row's page table are exchanged",
            "inferred",
            (
                "page 1 of the row holds the positions of page 3, and the other way round",
                "the records themselves are intact",
            ),
        ),
    ),
    (
        rows.wrong_entry,
        shown(a_violation(position=5, found_position=13), a_violation(position=12, found_position=4)),
        None,
    ),
    (rows.shifted_row, shown(TWO_ROWS[0]), None),
    (rows.shifted_row, shown(*TWO_ROWS, a_violation(position=10, found_position=10)), None),
    (rows.shifted_row, shown(TWO_ROWS[0], a_violation(position=9, found_position=10, row=(0, "you"))), None),
    (
        rows.shifted_row,
        shown(*TWO_ROWS, granted_slot=33),
        Cause(
            "lengths",
            "the row is shifted: a length or an offset is wrong by that much",
            "inferred",
            ("2 entries hold their position +1", "position 8 was granted slot 33, the row looks in 21"),
        ),
    ),
    (
        rows.shifted_row,
        shown(
            a_violation(position=9, found_position=10, **WINDOW), a_violation(position=8, found_position=9, **WINDOW)
        ),
        Cause("windows", GONE, "inferred", ("2 entries hold their position +1",)),
    ),
    (
        rows.shifted_row,
        shown(a_violation(position=8, found_position=6, **WINDOW), a_violation(position=9, found_position=7, **WINDOW)),
        Cause(
            "lengths",
            "the row is shifted: a length or an offset is wrong by that much",
            "inferred",
            ("2 entries hold their position -2",),
        ),
    ),
    (rows.tree_path, shown(), None),
    (rows.tree_path, shown(a_violation(site=("decode", 0)), write_site=("draft", 1)), None),
    (rows.tree_path, shown(write_site=("prefill", 0)), None),
    (
        rows.tree_path,
        shown(a_violation(site=("draft", 2)), write_site=("draft", 1), last_write="draft[1], step 7"),
        Cause(
            "draft",
            "a tree node attends a node that is not its ancestor, or a branch was rejected",
            "inferred",
            ("read by draft[2]", "written by draft[1], step 7"),
        ),
    ),
    (rows.foreign_token, shown(), None),
    (rows.foreign_token, shown(writer="me"), None),
    (rows.foreign_token, shown(a_violation(code="R4"), writer="you", own_position=3), None),
    *(
        (
            rows.foreign_token,
            shown(a_violation(code=code), writer="you", own_position=own),
            Cause("identity", "the slot holds a token of another sequence", "derived", ("the record names 'you'",)),
        )
        for code, own in (("R4", None), ("R5", 3))
    ),
    (
        rows.row_mixed_up,
        shown(),
        Cause("identity", "the row is complete, but of another prompt: a row or prefix mix-up", "inferred"),
    ),
    (
        rows.row_mixed_up,
        shown(
            a_violation(row_slots=(20, 21)),
            first_difference=1,
            reader=a_reader(),
            different_record=a_record(request=4),
            write_site=("verify", 0),
            last_write="verify, step 7",
        ),
        Cause(
            "identity",
            "the row is complete, but of another prompt, last written by verify, step 7: a row or prefix mix-up",
            "inferred",
            (
                "its tokens differ from position 1 on, of 2",
                "another request has written the entry of position 1",
            ),
        ),
    ),
    *(
        (
            rows.row_mixed_up,
            shown(a_violation(row_slots=(20, 21)), first_difference=at, reader=a_reader(), different_record=a_record()),
            Cause(family, text, "inferred", (f"its tokens differ from position {at} on, of 2",)),
        )
        for at, family, text in (
            (0, "identity", "the row is complete, but of another prompt: a row or prefix mix-up"),
            (1, "order", "the last token fed is not the one that was accepted"),
        )
    ),
    (rows.read_after_free, shown(events=A_FREE[:1]), None),
    (rows.read_after_free, shown(a_violation(code="W2"), events=A_FREE), None),
    (
        rows.read_after_free,
        shown(a_violation(code="R7"), events=(PageEvent("freed", 2, "older"), *A_FREE)),
        Cause("lifetime", GIVEN_BACK, "derived", ("freed by 'old' at step 4",)),
    ),
    *(
        (
            rule,
            shown(a_violation(code=code, request_id="old"), events=A_FREE, owner="new"),
            Cause(
                "lifetime",
                GIVEN_BACK,
                "derived",
                ("freed by 'old' at step 4", "the reader had it before", "granted to 'new' since"),
            ),
        )
        for rule, code in (
            (rows.read_after_free, "R7"),
            (rows.read_after_free, "W2"),
            (rows.read_after_free, "R8"),
        )
    ),
    (rows.read_after_free, shown(a_violation(code="R8"), events=A_FREE), None),
    (rows.read_after_free, shown(a_violation(code="R7"), events=A_SHARED), None),
    *(
        (
            rows.read_after_free,
            shown(a_violation(code="R7", request_id="old"), events=A_SHARED, is_shared=is_shared, owner=None),
            Cause(
                "lifetime",
                GIVEN_BACK,
                "derived",
                ("released by 'old' at step 5", "the reader had it before", *more),
            ),
        )
        for is_shared, more in ((False, ()), (True, ("held by a prefix cache, so that it lives on",)))
    ),
    (
        rows.foreign_page,
        shown(a_violation(code="R8"), events=A_SHARED, is_shared=True, granted_slot=9),
        Cause(
            "addressing",
            "the row points at a page of a prefix cache",
            "derived",
            ("the reader never had this page", "position 5 was granted slot 9, the row looks in 21"),
        ),
    ),
    (rows.read_after_free, shown(a_violation(code="R8"), events=(PageEvent("granted", 1, "me"),)), None),
    *(
        (
            rows.read_after_free,
            shown(a_violation(code=code), events=(*SHARED_PAGE, *events), owner=owner),
            Cause(
                "lifetime", GIVEN_BACK, "derived", ("released by 'me' at step 4", "the reader had it before", reported)
            ),
        )
        for code, events, owner, reported in (
            ("R7", (PageEvent("evicted", 6, None),), None, "evicted at step 6, after that"),
            ("R8", (PageEvent("taken back", 4, "you"),), "you", "private to 'you' since"),
            ("R8", (PageEvent("granted", 6, "you"),), "you", "granted to 'you' since"),
        )
    ),
    *(
        (rows.wrong_entry, shown(a_violation(code="R5"), **{"reader": a_reader(), "granted_slot": 33} | read), None)
        for read in (
            {"reader": None},
            {"reader": a_reader(committed_len=5)},
            {"granted_slot": None},
            {"is_own_place": True},
        )
    ),
    (
        rows.wrong_entry,
        shown(a_violation(code="R5"), reader=a_reader(), granted_slot=33),
        Cause("addressing", WRONG_SLOT, "inferred", ("position 5 was granted slot 33, the row looks in 21",)),
    ),
    (rows.foreign_token, shown(a_violation(code="R5"), writer="you", is_own_place=True, row=a_row(own=(5,))), None),
    (rows.foreign_token, shown(a_violation(code="R5"), writer="you", reader=a_reader(), granted_slot=33), None),
    *(
        (rows.short_write, shown(a_violation(code="R12", **violation), **UNWRITTEN | read), None)
        for violation, read in (
            ({}, {"row": a_row()}),
            ({}, {"reader": None}),
            ({}, {"is_own_place": False}),
            ({}, {"record": a_record(), "granted": 2}),
            ({}, {"record": a_record(site=pack_site("extend", 0)), "granted": 2}),
            ({}, {"reader": grown(committed_len=5)}),
            ({}, {"row": a_row(last_no_guess=(2, BY_EXTEND))}),  # of the step before
            ({}, {"row": a_row(last_no_guess=(4, a_record(site=pack_site("decode", 0))))}),
            ({"is_captured": True}, {"row": a_row(last_no_guess=(4, a_record(site=pack_site("prefill", 0))))}),
        )
    ),
    *(
        (
            rows.short_write,
            shown(
                a_violation(code="R12", is_captured=captured),
                **UNWRITTEN | {"row": a_row(last_no_guess=last), "record": lies, "granted": 2},
            ),
            Cause("lengths", "the extend wrote fewer entries of the row than were accepted", "derived", reported),
        )
        for captured, last, lies, reported in (
            (
                False,
                (4, BY_EXTEND),
                a_record(site=pack_site("draft", 1)),
                (
                    "positions 4 and 5 became final in one step",
                    "extend of step 7, which ran with hooks, wrote position 4",
                    "it wrote nothing behind that",
                ),
            ),
            (
                True,
                (2, a_record(site=pack_site("prefill", 0))),
                None,
                (
                    "positions 3 to 4 are final, and hold what draft forwards have guessed",
                    "no extend has written them again, nor this one",
                    "the forward is replayed: without its hooks it would be H1",
                ),
            ),
        )
    ),
    *(
        (rows.rewritten_by_reader, shown(a_violation(code=code, step=7), *more, **ITS_OWN | read), None)
        for code, more, read in (
            ("R12", (), {"record": None}),
            ("R12", (), {"write_step": 6}),
            ("R12", (), {"record": a_record(position=5)}),
            ("R4", (), {}),
            ("R4", (a_violation(code="R10"),), {"is_own_place": True}),
        )
    ),
    *(
        (
            rows.rewritten_by_reader,
            shown(a_violation(code=code, step=7), **ITS_OWN, is_own_place=own),
            Cause(
                "addressing",
                "the forward was told to write a slot that holds an earlier entry of its own row",
                "derived",
                (
                    "verify, step 7, which reads position 5 here, wrote position 6 here itself",
                    where,
                    "the record is of this grant",
                ),
            ),
        )
        for code, own, where in (
            ("R12", False, "the row reads it before"),
            ("R12", True, "the slot was granted for position 5"),
            ("R4", True, "the slot was granted for position 5"),
        )
    ),
    *(
        (
            rows.repeated_number,
            shown(a_violation(code="R10", site=site, step=7), **{**A_DRAFT, "row": a_row(guesses=own)} | read),
            None,
        )
        for site, own, read in (
            (("verify", 0), TWICE, {}),
            (("draft", 0), TWICE, {"write_step": 6}),
            (("draft", 0), TWICE[:1], {}),
            (("draft", 0), (*TWICE[:1], (10, a_record(site=pack_site("draft", 1), position=10))), {}),
            (("draft", 0), (*TWICE[:1], (10, a_record(site=pack_site("draft", 0), position=10, step=6))), {}),
        )
    ),
    (
        rows.repeated_number,
        shown(a_violation(code="R10", site=("draft", 0), step=7), **A_DRAFT, row=a_row(guesses=TWICE)),
        Cause(
            "hooks",
            "numbers of substeps repeat: several draft forwards of a step have one",
            "derived",
            ("draft[0] of step 7 has written positions 9, 10", "a draft forward writes one position"),
        ),
    ),
    (rows.never_granted, shown(granted=2), None),
    (rows.never_granted, shown(granted=0, owner="you"), None),
    (
        rows.never_granted,
        shown(granted=0),
        Cause(
            "uninitialised",
            "the table entry was never written",
            "derived",
            ("generation 0: nobody was ever granted this page",),
        ),
    ),
    (rows.neighbours_row, shown(a_violation(code="R8", run=4, until=8)), None),
    (rows.neighbours_row, shown(a_violation(code="R8", run=4, until=6), reader=a_reader()), None),
    (rows.neighbours_row, shown(a_violation(code="R8", position=7), reader=a_reader()), None),
    *(
        (
            rows.neighbours_row,
            shown(*incident, reader=reader, owner="you"),
            Cause(
                "identity",
                "the row of 'you' was read in the place of this one",
                "inferred",
                (f"{entries} entries lie on pages of others", "the first page is of 'you'"),
            ),
        )
        for entries, reader, incident in (
            (5, None, [a_violation(code="R8", run=5, until=9)]),
            (2, a_reader(), [a_violation(code="R8", run=2, until=7)]),
            (
                2,
                a_reader(),
                [a_violation(code="R8", position=6), a_violation(code="R8", position=7), a_violation(code="R5")],
            ),
        )
    ),
    (
        rows.neighbours_row,
        shown(a_violation(code="R8"), a_violation(code="R8", position=7, row=(0, "you")), reader=a_reader()),
        None,
    ),
    (rows.neighbours_row, shown(a_violation(code="R8", run=5, until=9), own_position=5, owner="you"), None),
    (rows.neighbours_prefix, shown(a_violation(code="R8")), None),
    (rows.neighbours_prefix, shown(a_violation(code="R8"), owner="you", own_position=5), None),
    (rows.neighbours_prefix, shown(a_violation(code="R8"), a_violation(code="R4"), owner="you"), None),
    (
        rows.neighbours_prefix,
        shown(a_violation(code="R8"), a_violation(code="R4", row=(0, "other")), owner="you"),
        Cause(
            "identity",
            "the row of 'you' was read, as far as it differs",
            "inferred",
            ("what lies there is of the same position of 'you'",),
        ),
    ),
    *(
        (
            rows.neighbours_prefix,
            shown(*incident, owner="you"),
            Cause(
                "identity",
                "the row of 'you' was read, as far as it differs",
                "inferred",
                ("what lies there is of the same position of 'you'", *more),
            ),
        )
        for more, incident in (
            ((HALF.format(4, 5, 6),), [R8_AT_4, a_violation(code="R5", position=6)]),
            (
                (HALF.format(4, 6, 7),),
                [R8_AT_4, a_violation(code="R8", position=6), a_violation(code="R5", position=7)],
            ),
            ((), [R8_AT_4]),
            ((), [R8_AT_4, a_violation(code="R5", position=7)]),
            ((), [R8_AT_4, a_violation(code="R5", position=6, row=(0, "other"))]),
            ((), [a_violation(code="R8", position=4, until=7), a_violation(code="R5", position=8)]),
            ((), [a_violation(code="R8", position=4), a_violation(code="R5", position=5)]),
            ((), [a_violation(code="R8", position=5, until=6), a_violation(code="R5", position=7)]),
        )
    ),
    (rows.place_of_two, shown(a_violation(code="R8")), None),
    (
        rows.place_of_two,
        shown(a_violation(code="R8"), own_position=0),
        Cause(
            "addressing",
            "two pages of the row lead to one place: the map, or its translation, is older than the grant",
            "derived",
            ("the page is 'me''s own, for others of its positions",),
        ),
    ),
    (
        rows.foreign_page,
        shown(owner="you"),
        Cause("addressing", "the row points at a page of 'you'", "derived", ("the reader never had this page",)),
    ),
    (
        rows.foreign_page,
        shown(owner="you", events=(PageEvent("granted", 1, "me"),)),
        Cause("addressing", "the row points at a page of 'you'", "derived"),
    ),
    (rows.missing_layer, shown(), None),
    (
        rows.missing_layer,
        shown(a_violation(layers=(1, 2))),
        Cause(
            "uninitialised",
            "a layer did not store its K and V for this entry",
            "derived",
            ("layer 1, 2 does not hold what this forward gave it",),
        ),
    ),
    (rows.other_entry, shown(), None),
    (rows.other_entry, shown(a_violation(row_number=0, found={"position": 4})), None),
    (
        rows.other_entry,
        shown(a_violation(row_number=0, found={"row": 2})),
        Cause(
            "identity",
            "rows were not reordered, or otherwise than the sequences",
            "inferred",
            ("it holds what row 2 should",),
        ),
    ),
    (
        rows.other_entry,
        shown(a_violation(row_number=0, found={"row": 0, "position": 4})),
        Cause(
            "windows",
            "the tensor is shifted against the positions that it is read as",
            "inferred",
            ("it holds 4 where position 5 should be",),
        ),
    ),
    (rows.missing_layer, shown(record=a_record(), granted=2), None),
    (rows.missing_layer, shown(record=a_record(layers=1), granted=3), None),
    *(
        (
            rows.missing_layer,
            shown(a_violation(layers=layers), record=a_record(layers=written), granted=2),
            Cause(
                "uninitialised",
                "a layer did not store its K and V for this entry",
                "derived",
                (OWN_GRANT.format(named),),
            ),
        )
        for layers, written, named in (
            ((), 0b011, "some"),
            ((2,), 0b111, "2"),
            ((0, 1, 2, 3, 4), 0, "0, 1, 2, 3"),
        )
    ),
    (rows.not_loaded, shown(events=A_FREE), None),
    (rows.not_loaded, shown(events=(PageEvent("set aside", 3, "me"),), record=a_record(), granted=2), None),
    *(
        (
            rows.not_loaded,
            shown(
                events=(PageEvent("set aside", 3, "me"), PageEvent("marked loading", 5, "me")), record=record, granted=2
            ),
            Cause(
                "transfer",
                LOAD,
                "derived",
                (
                    "the page was granted for a load",
                    "its last event: marked loading by 'me' at step 5",
                    "nobody has written the entry since",
                ),
            ),
        )
        for record in (None, a_record(generation=1), a_record(site=0))
    ),
    (rows.without_hooks, shown(record=a_record(site=0), is_own_place=True), None),
    (rows.without_hooks, shown(reader=a_reader(), is_own_place=True), None),
    (rows.without_hooks, shown(reader=a_reader(), record=a_record(site=0)), None),
    (rows.without_hooks, shown(reader=a_reader(committed_len=5), record=a_record(site=0), is_own_place=True), None),
    (rows.without_hooks, shown(reader=a_reader(), record=a_record(), granted=2, is_own_place=True), None),
    *(
        (
            rows.without_hooks,
            shown(reader=a_reader(committed_len=6), record=record, granted=2, is_own_place=True),
            Cause(
                "hooks",
                "a forward ran without the canary's hooks",
                "inferred",
                (
                    "position 5 is final, and in its own place",
                    "no forward has declared that it writes here since the page was granted",
                ),
            ),
        )
        for record in (a_record(site=0), a_record(generation=1))
    ),
    (rows.refused_load, shown(), None),
    (rows.refused_load, shown(reader=a_reader(pages=[5, -1])), None),
    (
        rows.refused_load,
        shown(reader=a_reader(pages=[5, 6, -1])),
        Cause(
            "transfer",
            "a load was refused or still runs, and its tokens were counted",
            "derived",
            ("1 pages of the row wait for a load, page 6 first",),
        ),
    ),
    (rows.old_record, shown(), None),
    (rows.old_record, shown(record=a_record()), None),
    (
        rows.old_record,
        shown(record=a_record(site=0, request=0)),
        Cause("uninitialised", "nobody has ever written this slot", "derived", ("the record is blank",)),
    ),
    (rows.old_record, shown(record=a_record(site=0)), None),
    (rows.past_the_end, shown(), None),
    (rows.past_the_end, shown(owner="you"), None),
    (
        rows.past_the_end,
        shown(owner="me"),
        Cause(
            "lengths",
            "the row reaches past what was written in the request's own pages",
            "inferred",
            ("the page is 'me''s own",),
        ),
    ),
    (rows.old_record, shown(), None),
    (rows.old_record, shown(record=a_record(), granted=2), None),
    *(
        (
            rows.old_record,
            shown(record=a_record(), granted=3, owner=owner),
            Cause("lifetime", text, "derived", ("the record is of grant 2, the page is at 3",)),
        )
        for owner, text in (
            (None, "stale: the page was freed, and the row still points at it"),
            ("me", "stale: the record is from before the page was granted again"),
        )
    ),
    (
        rows.contradiction,
        shown(a_violation(code="L1", site=("decode", 0), message="why")),
        Cause("lengths", "the arrays of this forward do not belong together", "derived", ("why",)),
    ),
    (
        rows.contradiction,
        shown(a_violation(code="L1", site=("event", 0), message="why"), events=A_FREE),
        Cause(
            "lifetime",
            "the engine's books of pages and requests are wrong, or an event before this one was not told",
            "inferred",
            ("the last event of page 5: freed by 'old' at step 4 (unknown place)",),
        ),
    ),
    (rows.no_page_to_name, shown(a_violation(code="L1", site=("event", 0), found={"error": "LifetimeError"})), None),
    (
        rows.no_page_to_name,
        shown(a_violation(code="L1", site=("event", 0), found={"page": 0})),
        Cause(
            "addressing",
            "a page was named that no request may have",
            "derived",
            ("page 0 is a null page, or the pool has none of this number",),
        ),
    ),
    *(
        (rule, shown(a_violation(code="L1", site=("event", 0), found=found)), None)
        for rule, found in (
            (rows.refused_event, None),
            (rows.refused_event, {"event": "published", "state": "FREE"}),
            (rows.refused_event, {"event": "evicted", "state": "WRITTEN"}),
            (rows.refused_event, None),
            (rows.refused_event, {"event": "loaded", "state": "LOAD_FAILED"}),
            (rows.refused_event, {"event": "freed", "state": "SHARED"}),
        )
    ),
    (
        rows.refused_event,
        shown(
            a_violation(code="L1", site=("event", 0), found={"event": "published", "state": "WRITTEN"}), events=A_FREE
        ),
        Cause(
            "uninitialised",
            "a page was published before all of it was final",
            "derived",
            (
                "page 5 is WRITTEN, not yet COMMITTED",
                "the last event of page 5: freed by 'old' at step 4 (unknown place)",
            ),
        ),
    ),
    (
        rows.refused_event,
        shown(a_violation(code="L1", site=("event", 0), found={"event": "marked loading", "state": "COMMITTED"})),
        Cause(
            "transfer",
            "a load was told into a page that holds entries",
            "derived",
            ("page 5 is COMMITTED: it holds entries already",),
        ),
    ),
    (rows.read_elsewhere, shown(a_violation(code="R8")), None),
    (
        rows.read_elsewhere,
        shown(a_violation(code="R8", misread=("draft", "the mask lets in nodes", ("query at position 7",)))),
        Cause("draft", "the mask lets in nodes", "derived", ("query at position 7",)),
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule is left out above, nor one that is silent wherever it is asked."""
    assert silent_rules(rows, SAID) == set()
