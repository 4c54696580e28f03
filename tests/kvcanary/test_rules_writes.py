"""Each rule about writes by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

from kvcanary.ledger.page_history import PageEvent
from kvcanary.report.causes import writes
from kvcanary.report.finding import Cause
from rule_facts import A_FREE, a_reader, a_record, a_row, a_violation, expect_said, shown, silent_rules

WRONG_SLOT = "an entry of the table or index array names the wrong slot"
STALE_POSITIONS = "a replayed batch kept positions of an earlier one"
CHUNK = {"code": "W5", "site": ("prefill", 0), "position": 24, "parent_position": 11}
SHARED = "the page was shared or published while it was still to be written"

SAID = [
    (
        writes.written_twice,
        shown(a_violation(layers=(2, 1))),
        Cause(
            "order", "the layer's store ran twice in this forward", "derived", ("layer 2 was marked as stored already",)
        ),
    ),
    *(
        (
            writes.written_twice,
            shown(a_violation(site=(kind, 0)), owner=owner),
            Cause(family, "two entries of this forward were given one slot", "derived"),
        )
        for kind, owner, family in (
            ("verify", None, "draft"),
            ("verify", "me", "draft"),
            ("verify", "you", "addressing"),
            ("prefill", "me", "addressing"),
        )
    ),
    (writes.tree_positions, shown(a_violation(site=("decode", 0))), None),
    (
        writes.tree_positions,
        shown(a_violation(position=None, is_captured=True)),
        Cause("draft", "positions of the tree are off, or of an earlier step", "inferred"),
    ),
    (
        writes.tree_positions,
        shown(a_violation(parent_position=7)),
        Cause(
            "draft",
            "positions of the tree are off, or of an earlier step",
            "inferred",
            ("position 5, the parent's is 7",),
        ),
    ),
    *(
        (
            writes.stale_positions,
            shown(a_violation(position=at, is_captured=True), reader=reader),
            Cause("graphs", STALE_POSITIONS, "inferred"),
        )
        for at, reader in ((5, None), (None, a_reader()), (8, a_reader()))
    ),
    (
        writes.stale_positions,
        shown(a_violation(position=7, is_captured=True), reader=a_reader()),
        Cause(
            "graphs",
            STALE_POSITIONS,
            "inferred",
            ("position 7 was final before this forward", "8 entries are final"),
        ),
    ),
    (writes.stale_positions, shown(a_violation(position=7), reader=a_reader()), None),
    *(
        (
            writes.miscounted_positions,
            shown(a_violation(**CHUNK | reported), reader=a_reader(), row=a_row(given_len=12)),
            None,
        )
        for reported in (
            {"is_captured": True},
            {"position": None},
            {"parent_position": None},
            {"site": ("verify", 0)},  # a node of a tree, whose parent is no final entry
            {"site": ("draft", 0), "position": 9, "parent_position": 7},
        )
    ),
    *(
        (
            writes.miscounted_positions,
            shown(
                a_violation(**CHUNK | {"position": at}), reader=a_reader(committed_len=9), row=a_row(given_len=given)
            ),
            Cause("lengths", text, "inferred", (f"its position is {at}, its parent's 11: {off:+d}", *more)),
        )
        for at, given, off, text, more in (
            (24, 12, 12, "the cached prefix was counted twice", ("the cached prefix is 12 entries",)),
            (21, 8, 9, "the committed length was counted twice", ("the committed length is 9 entries",)),
            (
                0,
                8,
                -12,
                "positions were counted without where the chunk begins",
                ("where the chunk begins is 12 entries",),
            ),
            (14, 8, 2, "positions are off by +2", ()),
            (8, 8, -4, "positions are those of an earlier forward", ("position 8 was final before this forward",)),
        )
    ),
    (
        writes.miscounted_positions,
        shown(a_violation(**CHUNK | {"site": ("verify", 0)}), a_violation(**CHUNK), reader=a_reader(committed_len=12)),
        Cause(
            "lengths",
            "the committed length was counted twice",
            "inferred",
            (
                "its position is 24, its parent's 11: +12",
                "what the row writes behind it is off as well",
                "the committed length is 12 entries",
            ),
        ),
    ),
    *(
        (writes.padding_of_a_live_row, shown(a_violation(code="W9"), row=a_row(owners_place=place), **read), None)
        for place, read in (
            (None, {"owner": "you", "record": a_record()}),
            (7, {"record": a_record()}),
            (7, {"owner": "you"}),
        )
    ),
    (
        writes.padding_of_a_live_row,
        shown(
            a_violation(code="W9", step=7),
            owner="you",
            record=a_record(),
            row=a_row(owners_place=7),
            write_site=("verify", 0),
            write_step=7,
            last_write="verify, step 7",
        ),
        Cause(
            "graphs",
            "a row of padding names a live request's row",
            "derived",
            ("the slot is 'you''s own, for position 7", "verify, step 7 wrote it as well, for 'you'"),
        ),
    ),
    (
        writes.padding_of_a_live_row,
        shown(
            a_violation(code="W9"), owner="you", record=a_record(), row=a_row(owners_place=7), write_site=("verify", 0)
        ),
        Cause(
            "graphs",
            "a live row was counted as padding, or padding kept the row of an earlier replay",
            "inferred",
            ("the slot is 'you''s own, for position 7", "nobody wrote it for 'you' in this forward"),
        ),
    ),
    (writes.over_its_own, shown(), None),
    (writes.over_its_own, shown(a_violation(position=None), own_position=4), None),
    (writes.over_its_own, shown(own_position=5), None),
    (
        writes.over_its_own,
        shown(own_position=4),
        Cause(
            "addressing",
            "the slot was computed from another coordinate than the position",
            "derived",
            ("the slot was granted for position 4, the entry stands at 5",),
        ),
    ),
    (writes.of_no_row, shown(), None),
    (writes.of_no_row, shown(reader=a_reader(), own_position=0), None),
    (
        writes.of_no_row,
        shown(reader=a_reader()),
        Cause("addressing", WRONG_SLOT, "derived", ("page 5 is in no place of the request's row",)),
    ),
    (writes.published_too_early, shown(events=A_FREE), Cause("lifetime", SHARED, "derived")),
    (
        writes.published_too_early,
        shown(events=(PageEvent("published", 7, "me"), *A_FREE)),
        Cause("lifetime", SHARED, "derived"),
    ),
    *(
        (
            writes.published_too_early,
            shown(events=(PageEvent("published", 3, "me"), PageEvent(kind, 8, "me"), *A_FREE)),
            Cause("lifetime", SHARED, "derived", (f"{kind} by 'me' at step 8, and written in step 9",)),
        )
        for kind in ("published", "forked")
    ),
    (writes.outdated, shown(), None),
    (writes.outdated, shown(a_violation(found={"hazard": "not waited for", "access": "a copy"})), None),
    *(
        (
            writes.outdated,
            shown(a_violation(found={"hazard": hazard, "access": "a copy"})),
            Cause(
                "lifetime",
                "the page was given back while work on it was planned or in flight",
                "derived",
                (f"{hazard}: a copy",),
            ),
        )
        for hazard in ("old grant", "freed in flight")
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule is left out above, nor one that is silent wherever it is asked."""
    assert silent_rules(writes, SAID) == set()
