"""Each rule about writes by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

from kvcanary import rules_writes as writes
from kvcanary.findings import Cause
from kvcanary.history import PageEvent
from rule_facts import A_FREE, a_hit, a_reader, a_record, expect_said, shown, silent_rules

WRONG_SLOT = "an entry of the table or index array names the wrong slot"
STALE_POSITIONS = "a replayed batch kept positions of an earlier one"
SHARED = "the page was shared or published while it was still to be written"

SAID = [
    (writes.stored_twice, shown(), None),
    (
        writes.stored_twice,
        shown(a_hit(layers=(2, 1))),
        Cause(
            "order", "the layer's store ran twice in this forward", "derived", ("layer 2 was marked as stored already",)
        ),
    ),
    (writes.shared_slot, shown(a_hit(layers=(2,))), None),
    *(
        (
            writes.shared_slot,
            shown(a_hit(site=(kind, 0)), owner=owner),
            Cause(family, "two entries of this forward were given one slot", "derived"),
        )
        for kind, owner, family in (
            ("verify", None, "draft"),
            ("verify", "me", "draft"),
            ("verify", "you", "addressing"),
            ("prefill", "me", "addressing"),
        )
    ),
    (writes.tree_positions, shown(a_hit(site=("decode", 0))), None),
    (
        writes.tree_positions,
        shown(a_hit(parent_position=7)),
        Cause(
            "draft",
            "positions of the tree are off, or of an earlier step",
            "inferred",
            ("position 5, the parent's is 7",),
        ),
    ),
    *(
        (writes.stale_positions, shown(a_hit(position=at), reader=reader), Cause("graphs", STALE_POSITIONS, "inferred"))
        for at, reader in ((5, None), (None, a_reader()), (8, a_reader()))
    ),
    (
        writes.stale_positions,
        shown(a_hit(position=7), reader=a_reader()),
        Cause(
            "graphs",
            STALE_POSITIONS,
            "inferred",
            ("position 7 was final before this forward", "8 entries are final"),
        ),
    ),
    (writes.over_its_own, shown(), None),
    (writes.over_its_own, shown(a_hit(position=None), own_position=4), None),
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
    (writes.no_token, shown(), None),
    (writes.no_token, shown(a_hit(view={"vocab_size": None}), record=a_record(token=100)), None),
    (writes.no_token, shown(record=a_record(token=100, site=0)), None),
    (writes.no_token, shown(record=a_record(token=99)), None),
    (
        writes.no_token,
        shown(record=a_record(token=100)),
        Cause(
            "uninitialised",
            "an input buffer was read before it was filled, or a mark of padding",
            "inferred",
            ("what was fed is no token id below 100",),
        ),
    ),
    (writes.unshifted_token, shown(), None),
    (
        writes.unshifted_token,
        shown(a_hit(view={"token_offset": 1})),
        Cause(
            "draft",
            "the pool was fed the token of the position itself",
            "inferred",
            ("the target pool holds tokens 1 further",),
        ),
    ),
    (writes.outdated, shown(), None),
    (writes.outdated, shown(a_hit(found={"hazard": "not waited for", "access": "a copy"})), None),
    *(
        (
            writes.outdated,
            shown(a_hit(found={"hazard": hazard, "access": "a copy"})),
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
