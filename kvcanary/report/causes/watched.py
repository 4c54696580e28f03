"""Causes in caches that are only watched, where nobody tells of pages and a forward's own writes are its records."""

from __future__ import annotations

from typing import Any

from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause

READ_BEFORE = "its row has read what is not finite"  # begins a note that says what, and who stored it
GRANTED_ANEW = "the slot was granted again since"  # begins a note that says what lay there before, and whose it is now
TAKEN_BACK = "the scheduler took the row back"  # begins a note that says from which entry to which
LOAD_FAILED = "the load of this block failed"  # begins a note that says who said so, and when
LAST_ENTRY = "the last entry that the row writes in this forward"  # a note of those who compare what was fed
FIRST_ENTRY = "the first entry that the row writes in this forward, where what was sampled of it last belongs"


def stored_astray(facts: Evidence) -> Cause | None:
    """Where nobody tells of pages: the step that reads the slot has written another position there."""
    if facts.declared is not None or facts.record is None or facts.write_step != facts.violation.step:
        return None
    if facts.record.position == facts.violation.position:
        return None
    position = f"position {facts.record.position} of {facts.writer!r}"
    evidence = (f"{facts.last_write} was to store {position} there",)
    return Cause("addressing", "another row's entry was stored into this slot", "derived", evidence)


def not_finite_before(facts: Evidence) -> Cause | None:
    """The row had NaN or Inf before this forward: what it stores follows from that."""
    evidence = tuple(note for note in facts.violation.notes if note.startswith(READ_BEFORE))
    if not evidence:
        return None
    return Cause("numerics", "computed from an entry that was not finite before", "derived", evidence)


def taken_back(facts: Evidence) -> Cause | None:
    """The scheduler has a row computed again from an earlier entry, and the forward goes on where the row was."""
    evidence = tuple(note for note in facts.violation.notes if note.startswith(TAKEN_BACK))
    if not evidence:
        return None
    return Cause("lengths", "the row was taken back, and the model runner went on behind it", "derived", evidence)


def load_failed(facts: Evidence) -> Cause | None:
    """A connector has told of a failed load, and a forward reads what did not come before it is computed again."""
    evidence = tuple(note for note in facts.violation.notes if note.startswith(LOAD_FAILED))
    if not evidence:
        return None
    return Cause("transfer", "the row goes on from a load that failed, and was not computed again", "derived", evidence)


def stored_elsewhere(facts: Evidence) -> Cause | None:
    """The forward was told another slot for an entry than its row has."""
    wanted, found = _fed(facts)
    if "slot" not in wanted or "slot" not in found or facts.violation.site[0] == "draft":
        return None
    violation = facts.violation
    where = f"slot {found['slot']}, the row of {violation.request_id!r} has slot {wanted['slot']}"
    evidence = (f"position {violation.position} was stored into {where} for it", *violation.notes[1:])
    return Cause("addressing", "the forward stores an entry where its row has another one", "derived", evidence)


def outgrown_row(facts: Evidence) -> Cause | None:
    """Rows lie behind each other: what a row has no room for becomes the next one's."""
    wanted, found = _fed(facts)
    if "row_width" not in wanted:
        return None
    width, length = wanted["row_width"], found["length"]
    evidence = (
        f"{length} entries were reserved, a row of the table has {width}",
        "the next row's first entries follow",
    )
    return Cause("bounds", "more entries are reserved than a row of the table has room for", "derived", evidence)


def unfed_row(facts: Evidence) -> Cause | None:
    """A row of a forward has no entry of its own there, and something is sampled of it."""
    wanted, _ = _fed(facts)
    if "fewest_new" not in wanted:
        return None
    text = "the hit of a prefix cache was counted to the prompt's end: its last token must be computed"
    evidence = (f"the forward computes nothing of {facts.violation.request_id!r} and samples its next token",)
    return Cause("lengths", text, "derived", evidence)


def lost_token(facts: Evidence) -> Cause | None:
    """A row has entries of tokens that its request does not have."""
    wanted, found = _fed(facts)
    if "tokens" not in wanted:
        return None
    evidence = (
        f"{facts.violation.request_id!r} has {found['tokens']} tokens, its row has those of {wanted['tokens']}",
    )
    return Cause("order", "a token that was sampled did not come into its request's answer", "derived", evidence)


def draft_positions(facts: Evidence) -> Cause | None:
    """A draft step was fed a position, or a slot, that is not the next one of its branch."""
    wanted, found = _fed(facts)
    if facts.violation.site[0] != "draft" or not wanted.keys() & {"position", "slot"}:
        return None
    if "slot" in wanted:
        evidence = (f"it stores into slot {found['slot']}, its branch has slot {wanted['slot']} there",)
        return Cause("draft", "a draft step stores where another entry belongs", "derived", evidence)
    off = found["position"] - wanted["position"]
    evidence = (f"it was fed position {found['position']}, its branch goes on at {wanted['position']}",)
    where = f"{abs(off)} too {'far' if off > 0 else 'early'}"
    return Cause("draft", f"the draft's positions are {where}", "derived", evidence)


def cache_positions(facts: Evidence) -> Cause | None:
    """Positions of a forward over a cache whose rows end elsewhere."""
    wanted, found = _fed(facts)
    if facts.declared is not None or facts.violation.row_number is None or "position" not in wanted:
        return None
    off, length = found["position"] - wanted["position"], facts.violation.position
    evidence = [f"it was fed position {found['position']}, the row goes on at {wanted['position']}: {off:+d}"]
    if off != length:
        return Cause("lengths", f"positions are off by {off:+d}", "derived", tuple(evidence))
    evidence.append(f"the cache has {length} entries before it")
    return Cause("lengths", "the cached length was counted twice", "derived", tuple(evidence))


def other_weights(facts: Evidence) -> Cause | None:
    """A cache that the model's weights of now did not write."""
    wanted, found = _fed(facts)
    if "weights" not in wanted:
        return None
    evidence = (
        f"state {found['weights']} of the model's parameters wrote the cache, state {wanted['weights']} reads it",
        "no token and no byte of it is another",
    )
    text = "weights were replaced: what the ones before computed is read as if it were of now"
    return Cause("identity", text, "derived", evidence)


def unshifted_chunk_end(facts: Evidence) -> Cause | None:
    """A draft is fed the token behind each entry; behind the last one of a chunk stands the prompt's next token."""
    wanted, found = _fed(facts)
    is_last = LAST_ENTRY in facts.violation.notes
    if not facts.violation.pool.view.token_offset or facts.violation.site[0] != "prefill" or "token" not in wanted:
        return None
    evidence = (f"the draft was fed token {found['token']}, the prompt goes on with {wanted['token']}",)
    if not is_last:
        return Cause("draft", "the draft's tokens are not the prompt's, one place on", "derived", evidence)
    text = "the token behind the chunk is not the prompt's next one"
    return Cause("draft", text, "derived", (*evidence, LAST_ENTRY))


def sampled_early(facts: Evidence) -> Cause | None:
    """Behind its prompt a row is fed a token that was not sampled there."""
    wanted, found = _fed(facts)
    if wanted.get("token", found) is not None:
        return None
    position = facts.violation.position
    evidence = (f"nothing has been sampled for position {position}, and the row was fed token {found['token']} there",)
    return Cause("order", "what was sampled in the middle of a prompt counts as its answer", "derived", evidence)


def accepted_otherwise(facts: Evidence) -> Cause | None:
    """What was accepted holds another token than the target has chosen for that place."""
    wanted, found = _fed(facts)
    if facts.violation.site[0] != "verify" or "token" not in wanted or FIRST_ENTRY in facts.violation.notes:
        return None
    evidence = (f"the entry was computed from token {found['token']}, the target chose {wanted['token']} before it",)
    return Cause("draft", "the accepted length, or the path that was accepted, is wrong", "derived", evidence)


def _fed(facts: Evidence) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a forward of a watched engine should have been fed, and what it was; nothing where nobody compares that."""
    if facts.declared is not None:
        return {}, {}
    return facts.violation.expected or {}, facts.violation.found or {}


def freed_under_its_reader(facts: Evidence) -> Cause | None:
    """Where an engine tells of slots alone: the row stored there, or another has since, and the slot is not its own;
    or it was granted again, and nobody has stored there yet.
    """
    anew = tuple(note for note in facts.violation.notes if note.startswith(GRANTED_ANEW))
    if anew:
        return Cause("lifetime", "the slot was given back while the row still reads it", "derived", anew)
    if facts.declared is not None or facts.record is None or not facts.record.site or facts.violation.code == "R12":
        return None
    if facts.writer == facts.violation.request_id:
        evidence = (f"the entry there is the row's own, {facts.last_write}", *facts.violation.notes[1:])
        return Cause("lifetime", "the slot was given back while the row still reads it", "derived", evidence)
    if facts.violation.code == "R8":
        evidence = (f"{facts.writer!r} has stored there since, {facts.last_write}", *facts.violation.notes[1:])
        return Cause("lifetime", "the slot was given back too early, and another request has it", "inferred", evidence)
    return None
