"""Rules for caches that are only watched."""

from __future__ import annotations

from types import SimpleNamespace

from kvcanary.report.causes import watched
from kvcanary.report.finding import Cause
from rule_facts import a_record, a_violation, expect_said, shown, silent_rules


def watching(*incident: SimpleNamespace, **read: object) -> SimpleNamespace:
    """What a rule sees where nobody tells of pages."""
    facts = shown(*incident, **read)
    facts.declared = None
    return facts


ASTRAY = {"record": a_record(position=35), "writer": "other", "write_step": 9, "last_write": "decode, step 9"}
OWN = {"record": a_record(), "writer": "me", "last_write": "prefill, step 2"}
GIVEN_BACK = a_violation(code="R7", notes=("group 0", "the slot was given back, and is free"))


def fed(code: str, kind: str, expected: dict, found: dict, **reported: object) -> SimpleNamespace:
    """What a forward was fed, where nobody tells of pages."""
    return watching(a_violation(code=code, site=(kind, 0), expected=expected, found=found, **reported))


TOO_FAR = fed("W5", "draft", {"position": 5}, {"position": 6})
OF_A_DRAFT = {"view": {"token_offset": 1}}
AT_TEN = {"code": "W5", "site": ("decode", 0), "row_number": 0, "position": 10, "expected": {"position": 10}}
AT_TEN |= {"found": {"position": 15}}
SAID = [
    (watched.draft_positions, shown(a_violation(expected={"position": 5}, found={"position": 6})), None),
    (watched.draft_positions, fed("W5", "decode", {"position": 5}, {"position": 6}), None),
    (watched.draft_positions, fed("W5", "draft", {"token": 5}, {"token": 6}), None),
    (
        watched.draft_positions,
        TOO_FAR,
        Cause(
            "draft",
            "the draft's positions are 1 too far",
            "derived",
            ("it was fed position 6, its branch goes on at 5",),
        ),
    ),
    (
        watched.draft_positions,
        fed("W5", "draft", {"position": 5}, {"position": 3}),
        Cause(
            "draft",
            "the draft's positions are 2 too early",
            "derived",
            ("it was fed position 3, its branch goes on at 5",),
        ),
    ),
    (
        watched.draft_positions,
        fed("W5", "draft", {"slot": 21}, {"slot": 40}),
        Cause(
            "draft",
            "a draft step stores where another entry belongs",
            "derived",
            ("it stores into slot 40, its branch has slot 21 there",),
        ),
    ),
    (watched.stored_elsewhere, fed("W5", "draft", {"slot": 21}, {"slot": 40}), None),
    (watched.stored_elsewhere, fed("W5", "verify", {"position": 5}, {"position": 6}), None),
    (watched.stored_elsewhere, shown(a_violation(expected={"slot": 5}, found={"slot": 6})), None),
    (
        watched.stored_elsewhere,
        fed("W2", "verify", {"slot": 21}, {"slot": 40}, position=7, request_id="me", notes=("group 0", "it is free")),
        Cause(
            "addressing",
            "the forward stores an entry where its row has another one",
            "derived",
            ("position 7 was stored into slot 40, the row of 'me' has slot 21 for it", "it is free"),
        ),
    ),
    (watched.outgrown_row, fed("R10", "decode", {"length": 5}, {"length": 6}), None),
    (
        watched.outgrown_row,
        fed("R10", "grant", {"row_width": 72}, {"length": 80}),
        Cause(
            "bounds",
            "more entries are reserved than a row of the table has room for",
            "derived",
            ("80 entries were reserved, a row of the table has 72", "the next row's first entries follow"),
        ),
    ),
    *(
        (watched.cache_positions, told(a_violation(**AT_TEN | own)), None)
        for told, own in (
            (watching, {"expected": {"token": 10}}),
            (watching, {"row_number": None}),
            (shown, {}),
        )
    ),
    *(
        (
            watched.cache_positions,
            watching(a_violation(**AT_TEN | {"found": {"position": found}})),
            Cause("lengths", text, "derived", (f"it was fed position {found}, the row goes on at 10: {off}", *more)),
        )
        for found, off, text, more in (
            (15, "+5", "positions are off by +5", ()),
            (9, "-1", "positions are off by -1", ()),
            (20, "+10", "the cached length was counted twice", ("the cache has 10 entries before it",)),
        )
    ),
    (watched.other_weights, watching(a_violation(code="R6", expected={"row": 1}, found={"row": 2})), None),
    (
        watched.other_weights,
        watching(a_violation(code="R6", expected={"weights": 2}, found={"weights": 1})),
        Cause(
            "identity",
            "weights were replaced: what the ones before computed is read as if it were of now",
            "derived",
            (
                "state 1 of the model's parameters wrote the cache, state 2 reads it",
                "no token and no byte of it is another",
            ),
        ),
    ),
    (watched.unshifted_chunk_end, fed("W6", "prefill", {"token": 5}, {"token": 6}), None),
    (watched.unshifted_chunk_end, fed("W6", "extend", {"token": 5}, {"token": 6}, **OF_A_DRAFT), None),
    (
        watched.unshifted_chunk_end,
        fed("W6", "prefill", {"token": 5}, {"token": 6}, **OF_A_DRAFT),
        Cause(
            "draft",
            "the draft's tokens are not the prompt's, one place on",
            "derived",
            ("the draft was fed token 6, the prompt goes on with 5",),
        ),
    ),
    (
        watched.unshifted_chunk_end,
        fed("W6", "prefill", {"token": 5}, {"token": 6}, notes=(watched.LAST_ENTRY,), **OF_A_DRAFT),
        Cause(
            "draft",
            "the token behind the chunk is not the prompt's next one",
            "derived",
            ("the draft was fed token 6, the prompt goes on with 5", watched.LAST_ENTRY),
        ),
    ),
    (watched.unfed_row, fed("R10", "grant", {"row_width": 72}, {"length": 80}), None),
    (
        watched.unfed_row,
        fed("R10", "prefill", {"fewest_new": 1}, {"new": 0}, request_id="me"),
        Cause(
            "lengths",
            "the hit of a prefix cache was counted to the prompt's end: its last token must be computed",
            "derived",
            ("the forward computes nothing of 'me' and samples its next token",),
        ),
    ),
    (watched.lost_token, fed("R10", "prefill", {"fewest_new": 1}, {"new": 0}), None),
    (
        watched.lost_token,
        fed("R10", "decode", {"tokens": 9}, {"tokens": 8}, request_id="me"),
        Cause(
            "order",
            "a token that was sampled did not come into its request's answer",
            "derived",
            ("'me' has 8 tokens, its row has those of 9",),
        ),
    ),
    (watched.sampled_early, fed("W6", "prefill", {"token": 5}, {"token": 6}), None),
    (watched.sampled_early, fed("W6", "prefill", {"position": 5}, {"position": 6}), None),
    (
        watched.sampled_early,
        fed("W6", "prefill", {"token": None}, {"token": 6}, position=60),
        Cause(
            "order",
            "what was sampled in the middle of a prompt counts as its answer",
            "derived",
            ("nothing has been sampled for position 60, and the row was fed token 6 there",),
        ),
    ),
    (watched.accepted_otherwise, fed("W6", "decode", {"token": 5}, {"token": 6}), None),
    (
        watched.accepted_otherwise,
        fed("W6", "verify", {"token": 5}, {"token": 6}, notes=(watched.FIRST_ENTRY,)),
        None,
    ),
    (
        watched.accepted_otherwise,
        fed("W6", "verify", {"token": 5}, {"token": 6}),
        Cause(
            "draft",
            "the accepted length, or the path that was accepted, is wrong",
            "derived",
            ("the entry was computed from token 6, the target chose 5 before it",),
        ),
    ),
    (watched.freed_under_its_reader, shown(GIVEN_BACK, **OWN), None),
    (watched.freed_under_its_reader, watching(GIVEN_BACK), None),
    (
        watched.freed_under_its_reader,
        watching(a_violation(code="R12", notes=("group 0", f"{watched.GRANTED_ANEW}, to 'r'"))),
        Cause(
            "lifetime",
            "the slot was given back while the row still reads it",
            "derived",
            (f"{watched.GRANTED_ANEW}, to 'r'",),
        ),
    ),
    (watched.freed_under_its_reader, watching(GIVEN_BACK, **OWN | {"writer": "other"}), None),
    (watched.freed_under_its_reader, watching(a_violation(code="R12"), **OWN), None),
    (
        watched.freed_under_its_reader,
        watching(GIVEN_BACK, **OWN),
        Cause(
            "lifetime",
            "the slot was given back while the row still reads it",
            "derived",
            ("the entry there is the row's own, prefill, step 2", "the slot was given back, and is free"),
        ),
    ),
    (
        watched.freed_under_its_reader,
        watching(a_violation(code="R8"), **OWN | {"writer": "other"}),
        Cause(
            "lifetime",
            "the slot was given back too early, and another request has it",
            "inferred",
            ("'other' has stored there since, prefill, step 2",),
        ),
    ),
    (watched.stored_astray, shown(**ASTRAY), None),
    (watched.stored_astray, watching(), None),
    (watched.stored_astray, watching(**ASTRAY | {"write_step": 8}), None),
    (watched.stored_astray, watching(a_violation(position=35), **ASTRAY), None),
    (
        watched.stored_astray,
        watching(**ASTRAY),
        Cause(
            "addressing",
            "another row's entry was stored into this slot",
            "derived",
            ("decode, step 9 was to store position 35 of 'other' there",),
        ),
    ),
    (watched.taken_back, watching(a_violation(code="W6", notes=("group 0",))), None),
    (
        watched.taken_back,
        watching(a_violation(code="W6", notes=("group 0", f"{watched.TAKEN_BACK} from entry 9 to 4 before step 7"))),
        Cause(
            "lengths",
            "the row was taken back, and the model runner went on behind it",
            "derived",
            (f"{watched.TAKEN_BACK} from entry 9 to 4 before step 7",),
        ),
    ),
    (watched.load_failed, watching(a_violation(code="R12", notes=("group 0",))), None),
    (
        watched.load_failed,
        watching(a_violation(code="R12", notes=("group 0", f"{watched.LOAD_FAILED}, A said in step 3: block 2"))),
        Cause(
            "transfer",
            "the row goes on from a load that failed, and was not computed again",
            "derived",
            (f"{watched.LOAD_FAILED}, A said in step 3: block 2",),
        ),
    ),
    (watched.not_finite_before, watching(a_violation(code="N1", notes=("group 0",))), None),
    (
        watched.not_finite_before,
        watching(a_violation(code="N1", notes=("group 0", f"{watched.READ_BEFORE}: position 4"))),
        Cause(
            "numerics",
            "computed from an entry that was not finite before",
            "derived",
            (f"{watched.READ_BEFORE}: position 4",),
        ),
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule is left out above, nor one that is silent wherever it is asked."""
    assert silent_rules(watched, SAID) == set()
