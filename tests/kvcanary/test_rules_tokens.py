"""Each rule about tokens by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

import numpy as np

from kvcanary.report.causes import tokens
from kvcanary.report.finding import Cause
from rule_facts import a_reader, a_record, a_row, a_violation, expect_said, shown, silent_rules

AHEAD = {"view": {"token_offset": 1}}
FOUR = {position: position + 41 for position in range(4)}
KNOWN = np.arange(40, 60)  # the token of position p is 40 + p

SAID = [
    (tokens.view_offset, shown(row=a_row(fed=FOUR)), None),
    (tokens.view_offset, shown(row=a_row(fed={4: 1, 5: 2}, shift=1, together=([1, 2], [2, 1]))), None),
    *(
        (
            tokens.view_offset,
            shown(a_violation(code="W6", view={"token_offset": offset}), row=a_row(fed=FOUR, shift=shift)),
            Cause(
                "draft",
                f"the view of the target pool says token_offset {offset}, it should be {offset + shift}",
                "derived",
                (
                    f"each of 4 entries was fed the token 1 {where} its own",
                    "no row of the target pool begins with its own token",
                ),
            ),
        )
        for offset, shift, where in ((0, 1, "behind"), (1, -1, "before"))
    ),
    *(
        (
            tokens.view_offset,
            shown(
                a_violation(code="W6", view={"token_offset": offset}),
                row=a_row(fed=FOUR, shift=-1, was_pool_right=right),
            ),
            Cause(
                "draft",
                "the inputs of this forward were shifted by -1",
                "derived",
                ("each of 4 entries was fed the token 1 before", "other rows of the target pool are right"),
            ),
        )
        for offset, right in ((1, True), (0, True))
    ),
    *(
        (tokens.another_order, shown(row=a_row(together=reported, shift=shift, fed=FOUR)), None)
        for reported, shift in ((([1], [2]), 0), (([1, 2], [1, 2]), 0), (([1, 2], [1, 3]), 0), (([1, 2], [2, 1]), 1))
    ),
    *(
        (
            tokens.another_order,
            shown(a_violation(code="W6", site=(kind, 0)), row=a_row(together=(fed, [1, 2, 3]))),
            Cause(
                family,
                f"accepted tokens were fed {how}",
                "derived",
                (f"{kind} was fed the 3 tokens of its row {how}", "each of them is right"),
            ),
        )
        for kind, family, fed, how in (
            ("extend", "draft", [3, 2, 1], "in reverse"),
            ("prefill", "order", [2, 1, 3], "in another order"),
        )
    ),
    (tokens.no_token, shown(), None),
    (tokens.no_token, shown(a_violation(view={"vocab_size": None}), record=a_record(token=100)), None),
    (tokens.no_token, shown(record=a_record(token=100, site=0)), None),
    (tokens.no_token, shown(record=a_record(token=99)), None),
    (
        tokens.no_token,
        shown(record=a_record(token=100)),
        Cause(
            "uninitialised",
            "an input buffer was read before it was filled, or a mark of padding",
            "inferred",
            ("what was fed is no token id below 100",),
        ),
    ),
    (tokens.unshifted_token, shown(), None),
    (
        tokens.unshifted_token,
        shown(a_violation(view={"token_offset": 1})),
        Cause(
            "draft",
            "the pool was fed another token than the one that follows",
            "inferred",
            ("the target pool holds tokens 1 further",),
        ),
    ),
    (
        tokens.unshifted_token,
        shown(a_violation(**AHEAD), reader=a_reader(tokens=KNOWN), record=a_record(token=45)),
        Cause(
            "draft",
            "the pool was fed the token of the position itself",
            "inferred",
            ("the target pool holds tokens 1 further",),
        ),
    ),
    *(
        (tokens.older_token, shown(a_violation(code="W6", **violation), reader=reader, record=record), None)
        for violation, reader, record in (
            (AHEAD, a_reader(tokens=KNOWN), a_record(token=44)),
            ({}, None, a_record(token=44)),
            ({}, a_reader(tokens=KNOWN), None),
            ({"position": 0}, a_reader(tokens=KNOWN), a_record(token=44)),
            ({}, a_reader(tokens=KNOWN), a_record(token=46)),
        )
    ),
    (
        tokens.older_token,
        shown(a_violation(code="W6"), reader=a_reader(tokens=KNOWN), record=a_record(token=43)),
        Cause(
            "order",
            "an older token was fed, which is not the newest that was accepted",
            "inferred",
            ("it is the token of position 3, 2 before",),
        ),
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule about tokens is left out above."""
    assert silent_rules(tokens, SAID) == set()
