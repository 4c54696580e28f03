"""Each rule about bytes by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

from types import SimpleNamespace

from kvcanary.ledger.page_history import PageEvent
from kvcanary.report.causes import bytes as bytes_
from kvcanary.report.finding import Cause
from rule_facts import A_FREE, a_record, a_violation, a_word, expect_said, provenance, shown, silent_rules

ONE_WORD = "this word alone explains both fingerprints; 1 of 3 layers differs"
MIXED_UP = "a copy or store with another layout: the wrong part, axis or stride"
CLEARED = "cleared after it was written: a zeroing that waited for nobody"
OVERWRITTEN = "several words changed: an overwrite that nobody declared"
LATE = "a write of the page's former owner that came late"
FREE_WRITE = "a write into a page after it was freed: a copy or forward was still running"
CLEARED_NEVER = "the page was granted as it was: memory that nobody cleared, or that held another kind of state"

GONE = {"code": "R12", "pool": SimpleNamespace(cleared_in=8)}
SAID = [
    (
        bytes_.gone,
        shown(a_violation(**GONE), record=a_record(layers=0), last_write="prefill, step 7"),
        Cause(
            "lifetime",
            "the bytes are gone: the pool was cleared after they were written, and its pages were kept",
            "derived",
            (
                "the pool was cleared, or allocated anew, in step 8",
                "prefill, step 7 wrote the entry before that",
                "nobody has written it since",
                "the pages were not freed, nor evicted, when their bytes went",
            ),
        ),
    ),
    *(
        (bytes_.gone, shown(a_violation(code="R12", **pool), record=found), None)
        for pool, found in (
            ({}, a_record(layers=0)),
            ({"pool": GONE["pool"]}, None),
            ({"pool": GONE["pool"]}, a_record()),
            ({"pool": GONE["pool"]}, a_record(layers=0, step=9)),
            ({"pool": GONE["pool"]}, a_record(layers=0, site=0)),
        )
    ),
    (
        bytes_.changed_word,
        shown(word=a_word()),
        Cause(
            "bits",
            "one flipped bit: bit 6 of one element, nothing else changed; a hardware fault or a stray write",
            "derived",
            (ONE_WORD,),
        ),
    ),
    (bytes_.changed_word, shown(), None),
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
        shown(provenance=provenance("scale_order", "its own v_scale, in another order")),
        Cause(
            "scales",
            "scales were stored in another order, or as those of another part",
            "derived",
            ("its own v_scale, in another order: that explains the fingerprint", "K and V are as written"),
        ),
    ),
    (
        bytes_.scale,
        shown(provenance=provenance("scale", "the scale of slot 9")),
        Cause(
            "scales",
            "scales were reset, or addressed by another shape, after they were written",
            "inferred",
            ("the scale of slot 9",),
        ),
    ),
    (bytes_.copied, shown(), None),
    (bytes_.copied, shown(provenance=provenance("slot"), is_first_read=True), None),
    (
        bytes_.copied,
        shown(provenance=provenance("slot")),
        Cause(
            "transfer",
            "what they are: a copy that nobody declared",
            "inferred",
            ("the fingerprint of slot 9 in layer 1 is that of these bytes",),
        ),
    ),
    (
        bytes_.copied,
        shown(provenance=provenance("slot"), source_is_damaged=True),
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
        shown(a_violation(code="P1"), provenance=provenance("slot"), source_is_damaged=True),
        Cause(
            "transfer",
            "what they are: a copy that nobody declared",
            "inferred",
            ("the fingerprint of slot 9 in layer 1 is that of these bytes",),
        ),
    ),
    (bytes_.untranslated, shown(was_never_right=True), None),
    (bytes_.untranslated, shown(a_violation(view={"slot_map": ()})), None),
    (bytes_.untranslated, shown(a_violation(view={"slot_map": ()}), was_never_right=True, word=a_word()), None),
    (bytes_.untranslated, shown(a_violation(code="T1", view={"slot_map": ()}), was_never_right=True), None),
    (
        bytes_.untranslated,
        shown(a_violation(view={"slot_map": ()}), was_never_right=True),
        Cause(
            "windows",
            "the store went by a slot of another pool, or by an old map",
            "inferred",
            ("slots of the target pool are found through a map", "it was never right"),
        ),
    ),
    (bytes_.mixed_up, shown(provenance=provenance("zero")), None),
    (
        bytes_.mixed_up,
        shown(a_violation(layers=(2,)), provenance=provenance("layer")),
        Cause("addressing", MIXED_UP, "inferred", ("what they are, in layer 2",)),
    ),
    *(
        (
            bytes_.mixed_up,
            shown(a_violation(layers=(2, 1)), provenance=provenance(kind)),
            Cause("transfer", MIXED_UP, "inferred", ("what they are, in layer 2",)),
        )
        for kind in ("part", "exchange", "shift")
    ),
    (bytes_.never_stored, shown(is_first_read=True), None),
    (bytes_.never_stored, shown(was_never_right=True), None),
    (bytes_.never_stored, shown(was_never_right=True, is_first_read=True, word=a_word()), None),
    *(
        (bytes_.never_stored, shown(was_never_right=True, is_first_read=True, provenance=provenance(kind)), None)
        for kind in ("exchange", "shift", "layer")
    ),
    *(
        (
            bytes_.never_stored,
            shown(a_violation(layers=(0, 1, 2, 3, 4)), was_never_right=True, provenance=provenance(kind)),
            Cause(
                "uninitialised",
                "the store of layer 0, 1, 2, 3 did not arrive, or went elsewhere",
                "inferred",
                ("what they are; it was never right",),
            ),
        )
        for kind in ("poison", "zero")
    ),
    (
        bytes_.never_stored,
        shown(
            a_violation(layers=(1,)),
            a_violation(layers=(1,), slot=22),
            a_violation(code="R5", slot=23),
            was_never_right=True,
            is_first_read=True,
            provenance=provenance("slot"),
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
            a_violation(layers=(1,)),
            a_violation(layers=(0,), slot=22),
            was_never_right=True,
            is_first_read=True,
            provenance=provenance("slot"),
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
        shown(
            a_violation(layers=(0, 1, 2)),
            a_violation(layers=(0, 1, 2), slot=22),
            was_never_right=True,
            provenance=provenance("slot"),
        ),
        None,
    ),
    (
        bytes_.never_stored,
        shown(a_violation(), a_violation(slot=22), was_never_right=True, provenance=provenance("slot")),
        None,
    ),
    (bytes_.cleared, shown(), None),
    (bytes_.cleared, shown(provenance=provenance("zero")), None),
    (
        bytes_.cleared,
        shown(a_violation(last_good=8), provenance=provenance("zero")),
        Cause("order", CLEARED, "inferred", ("what they are; they were right at step 8",)),
    ),
    (
        bytes_.cleared,
        shown(provenance=provenance("zero_part")),
        Cause("order", CLEARED, "inferred", ("what they are, and the rest of the row is not",)),
    ),
    (bytes_.not_finite, shown(), None),
    (
        bytes_.not_finite,
        shown(provenance=provenance("not_finite")),
        Cause("bits", "overwritten with values that no forward has stored", "inferred", ("what they are",)),
    ),
    (
        bytes_.not_finite,
        shown(a_violation(code="P1"), provenance=provenance("not_finite")),
        Cause(
            "uninitialised",
            "a page of another kind of layer, or of before the pool was cleared, was not made neutral",
            "inferred",
            ("what they are", "nobody had the page to write it"),
        ),
    ),
    (bytes_.padding_not_finite, shown(a_violation(slot=4)), None),
    (
        bytes_.padding_not_finite,
        shown(a_violation(slot=3)),
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
        shown(a_violation(site=("grant", 0))),
        Cause("uninitialised", CLEARED_NEVER, "derived", ("the page was never used before its grant in this step",)),
    ),
    (
        bytes_.never_cleared,
        shown(a_violation(site=("grant", 0)), events=(PageEvent("freed", 2, "older"), *A_FREE)),
        Cause(
            "uninitialised",
            CLEARED_NEVER,
            "derived",
            ("the page was freed by 'old' at step 4, not poisoned before its grant in this step",),
        ),
    ),
    (bytes_.never_cleared, shown(events=(PageEvent("granted", 6, "me"),), finite_since=6), None),
    (bytes_.never_cleared, shown(a_violation(slot=3), events=(PageEvent("granted", 6, "me"),)), None),
    (
        bytes_.never_cleared,
        shown(events=(*A_FREE, PageEvent("granted", 6, "me"))),
        Cause(
            "uninitialised",
            CLEARED_NEVER,
            "inferred",
            (
                "the page was freed by 'old' at step 4, not poisoned before its grant at step 6",
                "nobody has found it finite since then",
            ),
        ),
    ),
    (
        bytes_.never_cleared,
        shown(a_violation(site=("sweep", 2)), events=(PageEvent("granted", 9, "me"),)),
        Cause("uninitialised", CLEARED_NEVER, "derived", ("the page was never used before its grant in this step",)),
    ),
    (
        bytes_.never_cleared,
        shown(a_violation(site=("sweep", 2)), a_violation(site=("grant", 0)), events=(PageEvent("granted", 9, "me"),)),
        Cause("uninitialised", CLEARED_NEVER, "derived", ("the page was never used before its grant in this step",)),
    ),
    (bytes_.not_finite_since, shown(events=(*A_FREE, PageEvent("granted", 6, "me"))), None),
    (bytes_.not_finite_since, shown(a_violation(site=("grant", 0)), finite_since=9), None),
    (bytes_.not_finite_since, shown(a_violation(), a_violation(site=("grant", 0)), finite_since=9), None),
    (
        bytes_.not_finite_since,
        shown(finite_since=6),
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
        shown(a_violation(step=12), events=A_FREE, owner="me"),
        Cause("lifetime", LATE, "inferred", ("the page was freed by 'old' at step 4, 8 steps before",)),
    ),
    (
        bytes_.late_write,
        shown(a_violation(step=13), events=(PageEvent("freed", 2, "older"), *A_FREE)),
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
        shown(a_violation(), a_violation(slot=22)),
        Cause("bits", OVERWRITTEN, "derived", ("2 rows changed to bytes that nobody has written here",)),
    ),
    (bytes_.overwritten, shown(provenance=provenance("zero")), Cause("bits", OVERWRITTEN, "derived")),
    (bytes_.overwritten, shown(is_first_read=True), Cause("bits", OVERWRITTEN, "derived")),
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
        shown(a_violation(fingerprint_violation=True)),
        Cause(
            "bits",
            "the stored fingerprint was overwritten: K and V are right",
            "derived",
            ("fingerprint b over all layers is right",),
        ),
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule is left out above, nor one that is silent wherever it is asked."""
    assert silent_rules(bytes_, SAID) == set()
