"""Each rule about moves and loads by itself: what it is shown, and the one cause that it names; or none."""

from __future__ import annotations

from kvcanary.pools.launch_site import pack_site
from kvcanary.report.causes import moves
from kvcanary.report.finding import Cause
from rule_facts import a_reader, a_record, a_row, a_violation, expect_said, shown, silent_rules

OWN = {"is_own_place": True, "reader": a_reader()}
MOVED_HERE = OWN | {"own_position": 5, "holds_its_own": False}
NODE = a_record(site=pack_site("verify", 0))
MOVED, LOADED = (a_record(site=pack_site(kind, 0)) for kind in ("move", "load"))
A_HOLE = {"code": "R12", "site": ("draft", 0), "position": 5, "slot": 21}
BRANCH = {"own_position": 13, "granted_slot": 9, "reader": a_reader(pages=[5, 6, 7, 8], final_len=lambda pool: 6)}
STARTS = [(6, a_record(position=6)), (14, a_record(position=6))]
ITS_OWN = "it is the request's own entry of this position, and not what is final there now"
ANOTHER_PAGE = "the bytes of another page came back"
STALE = "stale: an earlier copy of the page came back"
A_NODE = a_record(site=pack_site("load", 0), position=6)
LOADED_9 = a_record(site=pack_site("load", 0), position=9)

SAID = [
    *(
        (
            moves.undeclared_move,
            shown(a_violation(code=code), **{**OWN, "own_position": 5, "record": NODE, "holds_its_own": False} | read),
            None,
        )
        for code, read in (
            ("R9", {"is_own_place": False}),
            ("R9", {"reader": None}),
            ("R9", {"reader": a_reader(uid=4)}),
            ("R9", {"reader": a_reader(committed_len=5)}),
            ("R9", {"holds_its_own": True}),
            ("R9", {"record": a_record(site=pack_site("decode", 0))}),
            ("R9", {"row": a_row(own=(5,))}),
            ("R4", {"own_position": None}),
            ("R6", {"different_record": a_record(site=pack_site("draft", 0))}),
            ("R6", {}),
        )
    ),
    *(
        (
            moves.undeclared_move,
            shown(a_violation(code=code), **OWN, holds_its_own=False, **place),
            Cause(
                "transfer",
                "accepted entries were moved, and the canary was not told",
                "derived",
                (
                    "the record is of a node that verify wrote in step 7, and that was not accepted",
                    "the bytes are not that node's",
                    "no move into this slot was declared since",
                ),
            ),
        )
        for code, place in (
            ("R9", {"record": NODE, "own_position": 5}),
            ("R4", {"record": a_record(site=pack_site("verify", 0), position=4), "own_position": 5}),
            ("R5", {"record": NODE, "own_position": 5}),
            ("R6", {"different_record": NODE, "first_difference": 5}),
        )
    ),
    *(
        (moves.moved_from_elsewhere, shown(a_violation(code=code), **OWN | read), None)
        for code, read in (
            ("R4", {"record": NODE, "row": a_row(other="you")}),
            ("R4", {"record": MOVED, "is_own_place": False}),
            ("R5", {"record": MOVED}),  # whose it is, nobody knows
            ("R5", {"record": MOVED, "row": a_row(own=(4, 5), before=MOVED, other="you")}),
            ("R5", {"record": MOVED, "reader": a_reader()}),
        )
    ),
    (
        moves.moved_from_elsewhere,
        shown(a_violation(code="R4"), **OWN, record=a_record(site=pack_site("move", 0), position=9)),
        Cause(
            "transfer",
            "the move took its source from another place",
            "derived",
            (
                "a declared move of step 7 brought what lies there",
                "it was written for position 9, and lies at 5",
                "the row looks in the slot that it was granted",
            ),
        ),
    ),
    *(
        (
            moves.moved_from_elsewhere,
            shown(a_violation(code=code), **OWN, **read, row=a_row(other="you", **row)),
            Cause(
                "transfer",
                "the move took its source from another request's row",
                "derived",
                (
                    "a declared move of step 7 brought what lies there",
                    "it continues the row of 'you'",
                    "the row looks in the slot that it was granted",
                ),
            ),
        )
        for code, read, row in (
            ("R4", {"record": MOVED}, {}),
            ("R5", {"record": NODE}, {"own": (5,), "before": MOVED}),
            ("R6", {"different_record": MOVED, "first_difference": 5}, {}),
        )
    ),
    *(
        (moves.stale_copy, shown(a_violation(code=code), **OWN | read), None)
        for code, read in (
            ("R5", {"record": MOVED}),
            ("R5", {"record": LOADED, "reader": None}),
            ("R12", {"record": a_record(), "granted": 2, "row": a_row(page=(LOADED,))}),
            ("R12", {"is_own_place": False, "granted": 2, "row": a_row(page=(LOADED,))}),
            ("R12", {"granted": 2, "row": a_row(page=(None, NODE))}),
            ("R12", {"granted": 3, "row": a_row(page=(LOADED,))}),
        )
    ),
    *(
        (
            moves.stale_copy,
            shown(
                a_violation(code="R5"), is_own_place=True, reader=a_reader(**reader), record=record, row=a_row(**row)
            ),
            Cause(
                family,
                text,
                "derived",
                (
                    "a load of step 7 brought what lies there, as it was when it left",
                    reported,
                    "no forward has written it since",
                ),
            ),
        )
        for reader, record, row, family, text, reported in (
            ({}, LOADED, {}, "transfer", STALE, ITS_OWN),
            ({}, LOADED, {"prompt": (5,)}, "identity", "a load brought the tokens of another prompt", ITS_OWN),
            ({}, LOADED, {"other": "you"}, "transfer", ANOTHER_PAGE, "it continues the row of 'you'"),
            ({"uid": 4}, LOADED, {}, "transfer", ANOTHER_PAGE, "it is of another request"),
            ({}, LOADED_9, {}, "transfer", ANOTHER_PAGE, "it was written for position 9, and lies at 5"),
            ({}, A_NODE, {"prompt": (6,)}, "transfer", ANOTHER_PAGE, "it was written for position 6, and lies at 5"),
            ({}, A_NODE, {}, "transfer", STALE, "it was written for position 6, and lies at 5"),
        )
    ),
    *(
        (
            moves.stale_copy,
            shown(
                a_violation(code="R12"), **OWN, record=record, granted=2, row=a_row(page=(LOADED, NODE, None, LOADED))
            ),
            Cause(
                "transfer",
                "stale: the copy that came back was made before this entry was",
                "derived",
                (
                    "2 entries of the page came back by a load in step 7, and not this one",
                    "the row looks in the slot that it was granted",
                    "no forward has written it since",
                ),
            ),
        )
        for record in (None, a_record(generation=1))
    ),
    *(
        (moves.never_copied, shown(a_violation(code="R12"), **OWN | {"granted": 2} | read), None)
        for read in (
            {},
            {"row": a_row(copied_from=3), "is_own_place": False},
            {"row": a_row(copied_from=3), "record": a_record()},
        )
    ),
    *(
        (
            moves.never_copied,
            shown(a_violation(code="R12"), **OWN, granted=2, row=a_row(copied_from=3, page=page)),
            Cause(
                "transfer",
                f"{text}: no move of these bytes was declared",
                "derived",
                (
                    "page 5 took the place of page 3 in the row of 'me' (on_copy)",
                    reported,
                    "position 5 lies there, and nothing has written it since",
                ),
            ),
        )
        for page, text, reported in (
            ((), "page 3 was copied to 5 by name only", "no move into page 5 was declared since (on_move)"),
            (
                (MOVED, NODE, None, a_record(site=pack_site("move", 0), generation=1)),
                "page 3 was copied in part",
                "1 of its slots came by a declared move, this one did not",
            ),
        )
    ),
    *(
        (
            moves.forgotten_tail,
            shown(a_violation(**A_HOLE | violation), **BRANCH | {"row": a_row(guesses=STARTS)} | read),
            None,
        )
        for violation, read in (
            ({"site": ("verify", 0)}, {}),
            ({"position": 3}, {}),
            ({"position": 6}, {}),
            ({"position": None}, {}),
            ({}, {"reader": None}),
            ({}, {"own_position": None}),
            ({}, {"own_position": 5}),
            ({}, {"own_position": 14}),
            ({}, {"row": a_row(guesses=STARTS[:1])}),
        )
    ),
    *(
        (
            moves.forgotten_tail,
            shown(a_violation(**A_HOLE), **BRANCH, row=a_row(guesses=STARTS), record=record, last_write="move, step 6"),
            Cause(
                "transfer",
                "the prefix tail was not copied for branch 1, or too late: offset 1 of 2",
                "derived",
                (
                    "the row reads position 5 in a page of branch 1, before the branch's own first entry",
                    "slot 9 holds that entry, and no move of this step brought it to slot 21",
                    there,
                ),
            ),
        )
        for record, there in (
            (None, "nobody has written there"),
            (a_record(site=0), "nobody has written there"),
            (MOVED, "what lies there: move, step 6"),
        )
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule about moves is left out above."""
    assert silent_rules(moves, SAID) == set()
