"""Each rule by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcanary import rules_bytes as bytes_
from kvcanary import rules_rows as rows
from kvcanary import rules_writes as writes
from kvcanary.findings import Cause
from kvcanary.history import PageEvent
from kvcanary.sites import pack_site
from kvcanary.whose import Whose
from kvcanary_kernels.record import LOADING, WRITTEN, Record

PAGE_SIZE = 4
A_FREE = (PageEvent("granted", 1, "old"), PageEvent("freed", 4, "old"))


def a_hit(**told) -> SimpleNamespace:
    """A verify forward of step 9 found it at position 5 of `me`, slot 21."""
    view = {"num_slots": 64, "page_size": PAGE_SIZE, "num_layers": 3, "null_slots": 4, "token_offset": 0}
    view |= {"vocab_size": 100, "slot_map": None, "window": None} | told.pop("view", {})
    pool = SimpleNamespace(view=SimpleNamespace(**view), name="target", full_layers=0b111, pool_id=0)
    hit = {"code": "R9", "slot": 21, "position": 5, "request_id": "me", "site": ("verify", 0), "step": 9, "layers": ()}
    hit |= {"last_good": None, "until": None, "parent_position": None, "found_position": None, "row_slots": ()}
    hit |= {"fingerprint_hit": False, "named": None, "found": None, "run": 1, "row": (0, "me"), "pool": pool, "page": 5}
    return SimpleNamespace(**hit | told)


def shown(*incident: SimpleNamespace, **read) -> SimpleNamespace:
    """What a rule sees of an incident: nothing but `read`."""
    facts = {"record": None, "writer": None, "word": None, "source": None, "source_is_damaged": False, "owner": None}
    facts |= {"granted": None, "events": (), "reader": None, "write_site": None, "write_step": None, "whose": ()}
    facts |= {"last_write": "nobody", "was_never_right": False, "is_first_look": False, "granted_slot": None}
    facts |= {"is_own_place": False, "own_position": None, "different_record": None, "first_difference": None}
    facts |= {"incident": incident or (a_hit(),), "ledger": SimpleNamespace(states={5: WRITTEN, 6: LOADING})}
    seen = SimpleNamespace(**facts | read)
    seen.hit = seen.incident[0]
    seen.whose_is = lambda *kinds: next((answer for answer in seen.whose if answer.kind in kinds), None)
    return seen


def whose(kind: str, text: str = "what they are") -> tuple[Whose, ...]:
    return (Whose(kind, text, "inferred", 9, 1),)


def a_record(**told) -> Record:
    fields = {"token": 1, "position": 5, "chain": 0, "request": 3, "generation": 2, "step": 7, "content_b": 0}
    return Record(**{"site": pack_site("verify", 0), "layers": 0b111, "seal": 0} | fields | told)


def a_word(bit: int | None = 6, part: str = "K") -> SimpleNamespace:
    return SimpleNamespace(bit=bit, part=part)


def a_reader(**told) -> SimpleNamespace:
    return SimpleNamespace(**{"uid": 3, "committed_len": 8, "pages": [5, 6]} | told)


ONE_WORD = "this word alone explains both fingerprints; 1 of 3 layers differs"
WRONG_SLOT = "an entry of the table or index array names the wrong slot"
PAST = "the index array or its builder ran past the end of what it holds"
NO_INDEX = "an offset that does not fit 32 bits, or no index at all"
KEPT = "entries were kept by their number, not by the accepted path, or their move went wrong"
MIXED_UP = "a copy or store with another layout: the wrong part, axis or stride"
CLEARED = "cleared after it was written: a zeroing that waited for nobody"
OVERWRITTEN = "several words changed: an overwrite that nobody declared"
LATE = "a write of the page's former owner that came late"
FREE_WRITE = "a write into a page after it was freed: a copy or forward was still running"
GIVEN_BACK = "the page was given back while the row still pointed at it"
STALE_POSITIONS = "a replayed batch kept positions of an earlier one"
SHARED = "the page was shared or published while it was still to be written"
LOAD = "a load failed, still runs or brought less, and its hit was counted"
OWN_GRANT = "the entry is of this grant, layer {} is not marked as stored"
CLEARED_NEVER = "the page was granted as it was: memory that nobody cleared, or that held another kind of state"
TWO_ROWS = (a_hit(position=8, found_position=9), a_hit(position=9, found_position=10))
WINDOW = {"view": {"window": 8}, "until": 15}
GONE = "the first entries of the row are gone, later ones lie there: a ring too short, or a window moved early"

SAID = [
    # bytes
    (bytes_.flipped_bit, shown(), None),
    (bytes_.flipped_bit, shown(word=a_word(None)), None),
    (
        bytes_.flipped_bit,
        shown(word=a_word()),
        Cause(
            "bits",
            "one flipped bit: bit 6 of one element, nothing else changed; a hardware fault or a stray write",
            "derived",
            (ONE_WORD,),
        ),
    ),
    (bytes_.changed_word, shown(), None),
    (bytes_.changed_word, shown(word=a_word()), None),
    (
        bytes_.changed_word,
        shown(word=a_word(None)),
        Cause("bits", "one 32-bit word was overwritten, nothing else changed", "derived", (ONE_WORD,)),
    ),
    (bytes_.scale, shown(word=a_word()), None),
    (
        bytes_.scale,
        shown(word=a_word(part="k_scale")),
        Cause(
            "scales",
            "k_scale was overwritten, K and V are as written",
            "derived",
            ("the word that changed lies in k_scale", ONE_WORD),
        ),
    ),
    (
        bytes_.scale,
        shown(whose=whose("scale", "the scale of slot 9")),
        Cause(
            "scales",
            "scales were reset, or addressed by another shape, after they were written",
            "inferred",
            ("the scale of slot 9",),
        ),
    ),
    (bytes_.copied, shown(), None),
    (bytes_.copied, shown(whose=whose("slot"), is_first_look=True), None),
    (
        bytes_.copied,
        shown(whose=whose("slot")),
        Cause(
            "transfer",
            "what they are: a copy that nobody declared",
            "inferred",
            ("the fingerprint of slot 9 in layer 1 is that of these bytes",),
        ),
    ),
    (
        bytes_.copied,
        shown(whose=whose("slot"), source_is_damaged=True),
        Cause(
            "addressing",
            "what they are: rows went to each other's slots",
            "derived",
            (
                "the fingerprint of slot 9 in layer 1 is that of these bytes",
                "slot 9 does not hold its own bytes either",
            ),
        ),
    ),
    (
        bytes_.copied,
        shown(a_hit(code="P1"), whose=whose("slot"), source_is_damaged=True),
        Cause(
            "transfer",
            "what they are: a copy that nobody declared",
            "inferred",
            ("the fingerprint of slot 9 in layer 1 is that of these bytes",),
        ),
    ),
    (bytes_.untranslated, shown(was_never_right=True), None),
    (bytes_.untranslated, shown(a_hit(view={"slot_map": ()})), None),
    (bytes_.untranslated, shown(a_hit(view={"slot_map": ()}), was_never_right=True, word=a_word()), None),
    (bytes_.untranslated, shown(a_hit(code="T1", view={"slot_map": ()}), was_never_right=True), None),
    (
        bytes_.untranslated,
        shown(a_hit(view={"slot_map": ()}), was_never_right=True),
        Cause(
            "windows",
            "the store went by a slot of another pool, or by an old map",
            "inferred",
            ("slots of the target pool are found through a map", "it was never right"),
        ),
    ),
    (bytes_.mixed_up, shown(whose=whose("zero")), None),
    (
        bytes_.mixed_up,
        shown(a_hit(layers=(2,)), whose=whose("layer")),
        Cause("addressing", MIXED_UP, "inferred", ("what they are, in layer 2",)),
    ),
    *(
        (
            bytes_.mixed_up,
            shown(a_hit(layers=(2, 1)), whose=whose(kind)),
            Cause("transfer", MIXED_UP, "inferred", ("what they are, in layer 2",)),
        )
        for kind in ("part", "exchange", "shift")
    ),
    (bytes_.never_stored, shown(is_first_look=True), None),
    (bytes_.never_stored, shown(was_never_right=True), None),
    (bytes_.never_stored, shown(was_never_right=True, is_first_look=True, word=a_word()), None),
    *(
        (bytes_.never_stored, shown(was_never_right=True, is_first_look=True, whose=whose(kind)), None)
        for kind in ("exchange", "shift", "layer")
    ),
    *(
        (
            bytes_.never_stored,
            shown(a_hit(layers=(0, 1, 2, 3, 4)), was_never_right=True, whose=whose(kind)),
            Cause(
                "uninitialised",
                "the store of layer 0, 1, 2, 3 did not arrive, or went elsewhere",
                "inferred",
                ("what they are; it was never right",),
            ),
        )
        for kind in ("poison", "stale", "zero")
    ),
    (
        bytes_.never_stored,
        shown(
            a_hit(layers=(1,)),
            a_hit(layers=(1,), slot=22),
            a_hit(code="R5", slot=23),
            was_never_right=True,
            is_first_look=True,
            whose=whose("slot"),
            source=a_record(step=6),
            record=a_record(step=7),
        ),
        Cause(
            "uninitialised",
            "the store of layer 1 did not arrive, or went elsewhere",
            "inferred",
            (
                "the forward that wrote it found it: nobody came between",
                "the same layers differ in each of 3 slots",
                "these bytes are older than the last declared write",
            ),
        ),
    ),
    (
        bytes_.never_stored,
        shown(
            a_hit(layers=(1,)),
            a_hit(layers=(0,), slot=22),
            was_never_right=True,
            is_first_look=True,
            whose=whose("slot"),
            source=a_record(step=7),
            record=a_record(step=7),
        ),
        Cause(
            "uninitialised",
            "the store of layer 1 did not arrive, or went elsewhere",
            "inferred",
            ("the forward that wrote it found it: nobody came between",),
        ),
    ),
    (
        bytes_.never_stored,
        shown(a_hit(layers=(0, 1, 2)), a_hit(layers=(0, 1, 2), slot=22), was_never_right=True, whose=whose("slot")),
        None,
    ),
    (
        bytes_.never_stored,
        shown(a_hit(), a_hit(slot=22), was_never_right=True, whose=whose("slot")),
        None,
    ),
    (bytes_.cleared, shown(), None),
    (bytes_.cleared, shown(whose=whose("zero")), None),
    (
        bytes_.cleared,
        shown(a_hit(last_good=8), whose=whose("zero")),
        Cause("order", CLEARED, "inferred", ("what they are; they were right at step 8",)),
    ),
    (
        bytes_.cleared,
        shown(whose=whose("zero_part")),
        Cause("order", CLEARED, "inferred", ("what they are, and the rest of the row is not",)),
    ),
    (bytes_.not_finite, shown(), None),
    (
        bytes_.not_finite,
        shown(whose=whose("not_finite")),
        Cause("bits", "overwritten with values that no forward has stored", "inferred", ("what they are",)),
    ),
    (
        bytes_.not_finite,
        shown(a_hit(code="P1"), whose=whose("not_finite")),
        Cause(
            "uninitialised",
            "a page of another kind of layer, or of before the pool was cleared, was not made neutral",
            "inferred",
            ("what they are", "nobody had the page to write it"),
        ),
    ),
    (bytes_.padding_not_finite, shown(a_hit(slot=4)), None),
    (
        bytes_.padding_not_finite,
        shown(a_hit(slot=3)),
        Cause(
            "graphs",
            "padding computed NaN or Inf and stored it, as a row without an entry does that divides by no weight",
            "inferred",
            ("slot 3 is a null slot: only padding may write it",),
        ),
    ),
    (bytes_.never_cleared, shown(), None),
    (
        bytes_.never_cleared,
        shown(a_hit(site=("grant", 0))),
        Cause("uninitialised", CLEARED_NEVER, "derived", ("the page was never used before its grant in this step",)),
    ),
    (
        bytes_.never_cleared,
        shown(a_hit(site=("grant", 0)), events=(PageEvent("freed", 2, "older"), *A_FREE)),
        Cause(
            "uninitialised",
            CLEARED_NEVER,
            "derived",
            ("the page was freed by 'old' at step 4, not poisoned before its grant in this step",),
        ),
    ),
    (bytes_.not_finite_since, shown(events=A_FREE[1:]), None),
    (bytes_.not_finite_since, shown(a_hit(site=("grant", 0)), events=A_FREE), None),
    (
        bytes_.not_finite_since,
        shown(events=(*A_FREE, PageEvent("granted", 6, "me"))),
        Cause(
            "bits",
            "a stray write behind the end of the row",
            "derived",
            ("finite when the page was granted at step 6", "no forward has stored there since"),
        ),
    ),
    (bytes_.late_write, shown(events=A_FREE, word=a_word()), None),
    (bytes_.late_write, shown(events=A_FREE, owner="old"), None),
    (
        bytes_.late_write,
        shown(a_hit(step=12), events=A_FREE, owner="me"),
        Cause("lifetime", LATE, "inferred", ("the page was freed by 'old' at step 4, 8 steps before",)),
    ),
    (
        bytes_.late_write,
        shown(a_hit(step=13), events=(PageEvent("freed", 2, "older"), *A_FREE)),
        Cause("lifetime", LATE, "inferred", ("the page was freed by 'old' at step 4",)),
    ),
    (bytes_.overwritten, shown(word=a_word()), None),
    (
        bytes_.overwritten,
        shown(),
        Cause("bits", OVERWRITTEN, "derived", ("one row changed to bytes that nobody has written here",)),
    ),
    (
        bytes_.overwritten,
        shown(a_hit(), a_hit(slot=22)),
        Cause("bits", OVERWRITTEN, "derived", ("2 rows changed to bytes that nobody has written here",)),
    ),
    (bytes_.overwritten, shown(whose=whose("zero")), Cause("bits", OVERWRITTEN, "derived")),
    (bytes_.overwritten, shown(is_first_look=True), Cause("bits", OVERWRITTEN, "derived")),
    (
        bytes_.moved_wrong,
        shown(),
        Cause("transfer", "the move copied other bytes than the plan says, or used its source after that", "inferred"),
    ),
    (bytes_.written_when_free, shown(), Cause("lifetime", FREE_WRITE, "inferred")),
    (
        bytes_.written_when_free,
        shown(events=A_FREE),
        Cause("lifetime", FREE_WRITE, "inferred", ("freed by 'old' at step 4",)),
    ),
    (
        bytes_.written_when_free,
        shown(events=(PageEvent("freed", 2, "older"), *A_FREE)),
        Cause("lifetime", FREE_WRITE, "inferred", ("freed by 'old' at step 4",)),
    ),
    (
        bytes_.damaged_record,
        shown(),
        Cause("bits", "something wrote over the canary's memory: a stray write", "inferred"),
    ),
    (
        bytes_.damaged_record,
        shown(a_hit(fingerprint_hit=True)),
        Cause(
            "bits",
            "the stored fingerprint was overwritten: K and V are right",
            "derived",
            ("lane b over all layers is right",),
        ),
    ),
    # rows
    *(
        (rows.out_of_bounds, shown(a_hit(slot=slot)), Cause("bounds", text, "inferred", (f"slot {slot} of 64",)))
        for slot, text in ((70, PAST), (-(2**31), PAST), (2**31 - 1, PAST), (2**31, NO_INDEX), (-(2**31) - 1, NO_INDEX))
    ),
    (rows.padding_mark, shown(a_hit(slot=1)), None),
    (
        rows.padding_mark,
        shown(a_hit(slot=-1)),
        Cause("graphs", "-1 is a mark of padding: a padded row counts as live", "inferred", ("the slot is -1",)),
    ),
    (rows.empty_entry, shown(a_hit(slot=1)), None),
    (
        rows.empty_entry,
        shown(a_hit(slot=0)),
        Cause(
            "uninitialised",
            "a table entry was never filled",
            "inferred",
            ("it names slot 0, as an entry that nothing has filled",),
        ),
    ),
    (
        rows.padding,
        shown(),
        Cause("graphs", "rows of padding count as live, or a live row was padded", "inferred"),
    ),
    (rows.wrong_entry, shown(is_own_place=True), None),
    (rows.wrong_entry, shown(), Cause("addressing", WRONG_SLOT, "inferred")),
    (rows.wrong_entry, shown(a_hit(code="R2"), granted_slot=33), Cause("addressing", WRONG_SLOT, "inferred")),
    (
        rows.wrong_entry,
        shown(a_hit(code="R4"), granted_slot=33),
        Cause("addressing", WRONG_SLOT, "inferred", ("position 5 was granted slot 33, the row looks in 21",)),
    ),
    (rows.more_entries, shown(a_hit(code="R4")), None),
    (rows.more_entries, shown(a_hit(code="R10"), a_hit(code="R4")), None),
    (
        rows.more_entries,
        shown(a_hit(code="R4"), a_hit(code="R10"), granted_slot=33),
        Cause(
            "lengths",
            "the row counts entries that the request does not have",
            "inferred",
            ("the row's length is not the request's (R10)", "position 5 was granted slot 33, the row looks in 21"),
        ),
    ),
    (rows.kept_other_nodes, shown(a_hit(code="R4"), reader=a_reader(), record=a_record()), None),
    (rows.kept_other_nodes, shown(a_hit(code="R4"), record=a_record(), is_own_place=True), None),
    (
        rows.kept_other_nodes,
        shown(a_hit(code="R4"), reader=a_reader(uid=4), record=a_record(), is_own_place=True),
        None,
    ),
    (
        rows.kept_other_nodes,
        shown(a_hit(code="R4"), reader=a_reader(), record=a_record(site=pack_site("prefill", 0)), is_own_place=True),
        None,
    ),
    *(
        (
            rows.kept_other_nodes,
            shown(a_hit(code=code), reader=a_reader(), is_own_place=own, record=record, different_record=other),
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
    (rows.exchange, shown(a_hit(position=5, found_position=13)), None),
    (
        rows.exchange,
        shown(a_hit(position=5, found_position=13), a_hit(position=12, found_position=4)),
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
        shown(a_hit(position=5, found_position=13), a_hit(position=12, found_position=4)),
        None,
    ),
    (rows.shifted_row, shown(TWO_ROWS[0]), None),
    (rows.shifted_row, shown(*TWO_ROWS, a_hit(position=10, found_position=10)), None),
    (rows.shifted_row, shown(TWO_ROWS[0], a_hit(position=9, found_position=10, row=(0, "you"))), None),
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
        shown(a_hit(position=9, found_position=10, **WINDOW), a_hit(position=8, found_position=9, **WINDOW)),
        Cause("windows", GONE, "inferred", ("2 entries hold their position +1",)),
    ),
    (
        rows.shifted_row,
        shown(a_hit(position=8, found_position=6, **WINDOW), a_hit(position=9, found_position=7, **WINDOW)),
        Cause(
            "lengths",
            "the row is shifted: a length or an offset is wrong by that much",
            "inferred",
            ("2 entries hold their position -2",),
        ),
    ),
    (rows.tree_path, shown(), None),
    (rows.tree_path, shown(a_hit(site=("decode", 0)), write_site=("draft", 1)), None),
    (rows.tree_path, shown(write_site=("prefill", 0)), None),
    (
        rows.tree_path,
        shown(a_hit(site=("draft", 2)), write_site=("draft", 1), last_write="draft[1], step 7"),
        Cause(
            "draft",
            "a tree node attends a node that is not its ancestor, or a branch was rejected",
            "inferred",
            ("read by draft[2]", "written by draft[1], step 7"),
        ),
    ),
    (
        rows.later_write,
        shown(),
        Cause("order", "a later forward wrote the slot, or the entry before it, again", "inferred"),
    ),
    (rows.foreign_token, shown(), None),
    (rows.foreign_token, shown(writer="me"), None),
    (rows.foreign_token, shown(a_hit(code="R4"), writer="you", own_position=3), None),
    *(
        (
            rows.foreign_token,
            shown(a_hit(code=code), writer="you", own_position=own),
            Cause("identity", "the slot holds a token of another sequence", "derived", ("the record names 'you'",)),
        )
        for code, own in (("R4", None), ("R5", 3))
    ),
    (
        rows.row_mixed_up,
        shown(),
        Cause("identity", "the row is complete, but of other tokens: a row or prefix mix-up", "inferred"),
    ),
    (
        rows.row_mixed_up,
        shown(
            a_hit(row_slots=(20, 21)),
            first_difference=1,
            reader=a_reader(),
            different_record=a_record(request=4),
            write_site=("verify", 0),
            last_write="verify, step 7",
        ),
        Cause(
            "identity",
            "the row is complete, but of other tokens, last written by verify, step 7: a row or prefix mix-up",
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
            shown(a_hit(row_slots=(20, 21)), first_difference=at, reader=a_reader(), different_record=a_record()),
            Cause(family, text, "inferred", (f"its tokens differ from position {at} on, of 2",)),
        )
        for at, family, text in (
            (0, "identity", "the row is complete, but of other tokens: a row or prefix mix-up"),
            (1, "order", "the last token fed is not the one that was accepted"),
        )
    ),
    (rows.read_after_free, shown(events=A_FREE[:1]), None),
    (rows.read_after_free, shown(a_hit(code="W2"), events=A_FREE), None),
    (
        rows.read_after_free,
        shown(a_hit(code="R7"), events=(PageEvent("freed", 2, "older"), *A_FREE)),
        Cause("lifetime", GIVEN_BACK, "derived", ("freed by 'old' at step 4",)),
    ),
    *(
        (
            rule,
            shown(a_hit(code=code, request_id="old"), events=A_FREE, owner="new"),
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
            (rows.freed_too_early, "R8"),
        )
    ),
    (rows.freed_too_early, shown(a_hit(code="R8"), events=A_FREE), None),
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
    (rows.neighbours_row, shown(a_hit(code="R8", run=4, until=8)), None),
    (rows.neighbours_row, shown(a_hit(code="R8", run=4, until=6), reader=a_reader()), None),
    (rows.neighbours_row, shown(a_hit(code="R8", position=7), reader=a_reader()), None),
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
            (5, None, [a_hit(code="R8", run=5, until=9)]),
            (2, a_reader(), [a_hit(code="R8", run=2, until=7)]),
            (2, a_reader(), [a_hit(code="R8", position=6), a_hit(code="R8", position=7), a_hit(code="R5")]),
        )
    ),
    (
        rows.neighbours_row,
        shown(a_hit(code="R8"), a_hit(code="R8", position=7, row=(0, "you")), reader=a_reader()),
        None,
    ),
    (rows.neighbours_row, shown(a_hit(code="R8", run=5, until=9), own_position=5, owner="you"), None),
    (rows.neighbours_prefix, shown(a_hit(code="R8")), None),
    (rows.neighbours_prefix, shown(a_hit(code="R8"), owner="you", own_position=5), None),
    (rows.neighbours_prefix, shown(a_hit(code="R8"), a_hit(code="R4"), owner="you"), None),
    (
        rows.neighbours_prefix,
        shown(a_hit(code="R8"), a_hit(code="R4", row=(0, "other")), owner="you"),
        Cause(
            "identity",
            "the row of 'you' was read, as far as it differs",
            "inferred",
            ("what lies there is of the same position of 'you'",),
        ),
    ),
    (rows.place_of_two, shown(a_hit(code="R8")), None),
    (
        rows.place_of_two,
        shown(a_hit(code="R8"), own_position=0),
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
    (rows.missing_layer, shown(record=a_record(), granted=2), None),
    (rows.missing_layer, shown(record=a_record(layers=1), granted=3), None),
    *(
        (
            rows.missing_layer,
            shown(a_hit(layers=layers), record=a_record(layers=written), granted=2),
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
    (rows.never_written, shown(), None),
    (rows.never_written, shown(record=a_record()), None),
    (
        rows.never_written,
        shown(record=a_record(site=0)),
        Cause("uninitialised", "nobody has ever written this slot", "derived", ("the record is blank",)),
    ),
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
    (rows.old_record, shown(record=a_record(site=0), granted=3), None),
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
    # writes
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
    for rule, facts, cause in SAID:
        assert (rule.__name__, rule(facts)) == (rule.__name__, cause)


@pytest.mark.parametrize("module", [bytes_, rows, writes])
def test_every_rule_is_in_the_table(module):
    """No rule is left out above, nor one that is silent wherever it is asked."""
    named = {rule for rule, _, cause in SAID if cause is not None}
    public = {value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    rules = {rule for rule in public if rule.__annotations__.get("return") == "Cause | None"}
    assert rules - named == set()
