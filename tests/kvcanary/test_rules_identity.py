"""Each rule about identity by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

from types import SimpleNamespace

from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.spans import SPAN_IDS
from kvcanary.report.causes import identity
from kvcanary.report.finding import Cause
from kvcanary_kernels.record.layout import Identity
from rule_facts import a_reader, a_record, a_row, a_violation, expect_said, shown, silent_rules

ROOT = "the salt or the adapter differs: the same tokens of another tenant, adapter or version of the weights"
HEAD = a_reader(tokens=[7, 8, 9])
A_VIOLATION = {5: PageEvent("acquired", 8, "me"), 4: PageEvent("forked", 8, "me")}
NAMES = SimpleNamespace(states={}, name={4: "you"}.get)
THEIRS = a_record(request=4, position=1)
AT_END = {"code": "R6", "position": 1, "row_slots": (20, 21), "view": {"token_offset": 1}}
BY_PREFILL = {"write_site": ("prefill", 0), "last_write": "prefill, step 7", "record": a_record()}
CAT = SPAN_IDS.start + 5
BY = "written by 'you', prefill, step 7"
#: Under which it was written, and what is said where the row's own is ("s", "x", "2", "new").
REPLACED = (
    (
        Identity("s", "x", "2", "old"),
        "weights were replaced: what the ones before computed is read as if it were of now",
        ("what differs: weights", "weights old when 'you' wrote it, new of the row that reads it", BY),
    ),
    (
        Identity("s", "x", "", "new"),
        "the adapter was loaded anew with other weights: what the ones before computed is read",
        ("what differs: adapter version", "adapter version none when 'you' wrote it, 2 of the row that reads it", BY),
    ),
    (
        Identity("s", "", "", "new"),
        "the adapter differs: the same tokens under another one, or under none",
        ("what differs: adapter", "adapter none when 'you' wrote it, x of the row that reads it", BY),
    ),
    (
        Identity("t", "x", "2", "old"),
        "the salt differs: the same tokens of another tenant",
        ("what differs: salt, weights", "weights old when 'you' wrote it, new of the row that reads it", BY),
    ),
)


def other_root(reported: str, writer: str) -> Cause:
    return Cause(
        "identity",
        ROOT,
        "derived",
        (
            reported,
            f"the chain is not: {writer} wrote it under another root",
            "a root is role, salt, adapter and the versions of both weights",
        ),
    )


def other_prompt(position: int, how: str, provenance: str = "'you'") -> Cause:
    evidence = (
        f"page 6 of the row was {how} by 'me' at step 8",
        f"it holds what {provenance} has at position 1",
        f"the row's tokens differ from position {position} on",
    )
    return Cause("identity", "a prefix hit, or a fork, brought a page of another prompt", "derived", evidence)


SAID = [
    *(
        (identity.other_root, shown(a_violation(code="R5", position=position), reader=reader, record=record), None)
        for position, reader, record in (
            (0, None, a_record(token=7, position=0)),
            (0, HEAD, None),
            (0, HEAD, a_record(token=8, position=0)),
            (0, HEAD, a_record(token=7, position=1)),
            (1, HEAD, a_record(token=8, position=1)),  # what lies before it may differ
        )
    ),
    (
        identity.other_root,
        shown(a_violation(code="R5", position=0), reader=HEAD, record=a_record(token=7, position=0), writer="you"),
        other_root("token and position are those that the row expects", "'you'"),
    ),
    *(
        (
            identity.other_root,
            shown(a_violation(code="R6", position=1, row_slots=slots), reader=HEAD, record=a_record(), **read),
            None,
        )
        for slots, read in (((20, 21), {"first_difference": 1}), ((21,), {}))
    ),
    (
        identity.other_root,
        shown(a_violation(code="R6", position=1, row_slots=(20, 21)), reader=HEAD, record=a_record()),
        other_root("all 2 tokens and positions are the row's", "a request that ended long ago"),
    ),
    *(
        (
            identity.other_root,
            shown(
                a_violation(code="R5"),
                reader=a_reader(identity=Identity("s", "x", "2", "new")),
                record=a_record(),
                written_as=wrote,
                writer="you",
                last_write="prefill, step 7",
            ),
            Cause("identity", text, "derived", ("all tokens and positions are those that the row expects", *evidence)),
        )
        for wrote, text, evidence in REPLACED
    ),
    *(
        (
            identity.other_span,
            shown(
                a_violation(code="R6"),
                reader=a_reader(tokens=[7, own]),
                first_difference=1,
                different_record=None if lies is None else a_record(request=4, position=1, token=lies),
                ledger=NAMES,
            ),
            None,
        )
        for own, lies in ((9, 8), (CAT, None))
    ),
    *(
        (
            identity.other_span,
            shown(
                a_violation(code="R6"),
                reader=a_reader(tokens=[7, own]),
                first_difference=1,
                different_record=a_record(request=4, position=1, token=lies),
                ledger=NAMES,
            ),
            Cause(
                "identity",
                "an image, sound or embedding of another prompt: its placeholders are equal, its content is not",
                "derived",
                (
                    "the row differs from position 1 on, within a span",
                    "it holds what 'you' has at position 1",
                    says,
                    "what lies in front of it is the row's own",
                ),
            ),
        )
        for own, lies, says in (
            (CAT, CAT + 1, "span 0x000005 was admitted there, not span 0x000006"),
            (CAT, 9, "span 0x000005 was admitted there, not a token"),
            (9, CAT, "a token was admitted there, not span 0x000005"),
        )
    ),
    *(
        (
            identity.other_prompt,
            shown(
                a_violation(code="R4"),
                **{"reader": HEAD, "record": THEIRS, "is_own_place": True, "ledger": NAMES} | read,
            ),
            None,
        )
        for read in (
            {"row": a_row(given=A_VIOLATION), "is_own_place": False},
            {"row": a_row()},
            {"row": a_row(given=A_VIOLATION), "record": a_record(request=3)},
            {"row": a_row(given=A_VIOLATION, own=(5,))},
        )
    ),
    *(
        (
            identity.other_prompt,
            shown(
                a_violation(code=code, row_slots=(20, 21)),
                reader=a_reader(),
                record=None if code == "R6" else a_record(request=who, position=1),
                different_record=THEIRS,
                first_difference=5,
                is_own_place=True,
                ledger=NAMES,
                row=a_row(given=A_VIOLATION, own=own, before=THEIRS),
            ),
            other_prompt(at, how, provenance),
        )
        for code, who, own, at, how, provenance in (
            ("R4", 4, (), 5, "acquired", "'you'"),
            ("R4", 9, (), 5, "acquired", "a request that ended long ago"),
            ("R6", 4, (), 5, "acquired", "'you'"),
            ("R5", 4, (5,), 4, "forked", "'you'"),
        )
    ),
    *(
        (identity.other_predecessor, shown(*incident, is_own_place=own, row=a_row(own=right)), None)
        for incident, own, right in (
            ((a_violation(code="R5", position=0),), True, (0,)),
            ((a_violation(code="R5"),), False, (4, 5)),
            ((a_violation(code="R5"),), True, (5,)),
            ((a_violation(code="R5"),), True, (4,)),
            ((a_violation(code="R5"), a_violation(code="R8", position=4)), True, (4, 5)),
        )
    ),
    (
        identity.other_predecessor,
        shown(a_violation(code="R5"), is_own_place=True, row=a_row(own=(4, 5))),
        Cause(
            "addressing",
            "the entry before it names another slot than was granted",
            "derived",
            (
                "the entry of position 5 is the request's own, in its own place",
                "so is what was granted for position 4: the row looks elsewhere for it",
            ),
        ),
    ),
    *(
        (
            identity.rotated,
            shown(
                a_violation(**AT_END | violation),
                **BY_PREFILL | {"first_difference": 1, "row": a_row(first_of="you")} | read,
            ),
            None,
        )
        for violation, read in (
            ({"view": {}}, {}),
            ({}, {"first_difference": 0}),
            ({}, {"first_difference": None}),
            ({}, {"write_site": ("extend", 0)}),
            ({}, {"row": a_row()}),
        )
    ),
    (
        identity.rotated,
        shown(a_violation(**AT_END), first_difference=1, row=a_row(first_of="you"), **BY_PREFILL),
        Cause(
            "draft",
            "inputs were rotated over more than their own chunk: an end took the head of a prompt",
            "inferred",
            (
                "prefill, step 7 wrote the entry at a prompt's end",
                "its token is the first one of 'you', not the one that follows",
            ),
        ),
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule about identity is left out above."""
    assert silent_rules(identity, SAID) == set()
