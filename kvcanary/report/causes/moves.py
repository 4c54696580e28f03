"""Rules about moves and loads: entries that should have come from elsewhere, and did not, or came from a wrong one."""

from __future__ import annotations

from kvcanary.pools.launch_site import TREE_KINDS, site_name, unpack_site
from kvcanary.report.causes.rows import is_current_write, own_entry
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause
from kvcanary_kernels.record.layout import Record


def undeclared_move(facts: Evidence) -> Cause | None:
    """Other bytes than the record's, where another node's record lies than the one that was accepted."""
    lies = own_entry(facts)
    place = facts.first_difference if facts.violation.code == "R6" else facts.own_position
    if lies is None or facts.reader is None or facts.holds_its_own:
        return None
    kind, index, _ = unpack_site(lies.site)
    is_final = place is not None and place < facts.reader.committed_len and not facts.row.is_own(place)
    if kind not in TREE_KINDS or not is_final or (facts.violation.code == "R6" and kind == "draft"):
        return None
    evidence = (
        f"the record is of a node that {site_name(kind, index)} wrote in step {lies.step}, and that was not accepted",
        "the bytes are not that node's",
        "no move into this slot was declared since",
    )
    return Cause("transfer", "accepted entries were moved, and the canary was not told", "derived", evidence)


def moved_from_elsewhere(facts: Evidence) -> Cause | None:
    """A declared move whose source is not what the row has at this position."""
    lies, wanted = _wrong_entry(facts)
    if lies is None or unpack_site(lies.site)[0] != "move":
        return None
    other = facts.row.of_other(lies)
    if other is None and lies.position == wanted:
        return None  # another node of the row's own tree, or nobody knows whose
    moved = f"a declared move of step {lies.step} brought what lies there"
    evidence = (moved, _writer(lies, wanted, other), "the row looks in the slot that it was granted")
    source = "another request's row" if other is not None else "another place"
    return Cause("transfer", f"the move took its source from {source}", "derived", evidence)


def stale_copy(facts: Evidence) -> Cause | None:
    """A load or swap brought entries of the request's own page as they were at an earlier time, or of another page."""
    if facts.violation.code == "R12":
        return _without_this_entry(facts)
    lies, wanted = _wrong_entry(facts)
    if lies is None or facts.reader is None or unpack_site(lies.site)[0] != "load":
        return None
    other = facts.row.of_other(lies)
    is_own = other is None and lies.request == facts.reader.uid and _is_place_of(facts, lies, wanted)
    writer = _writer(lies, wanted, other)
    if is_own and lies.position == wanted:
        writer = "it is the request's own entry of this position, and not what is final there now"
    loaded = f"a load of step {lies.step} brought what lies there, as it was when it left"
    evidence = (loaded, writer, "no forward has written it since")
    if is_own and facts.row.was_given(lies.position):
        return Cause("identity", "a load brought the tokens of another prompt", "derived", evidence)
    text = "stale: an earlier copy of the page came back" if is_own else "the bytes of another page came back"
    return Cause("transfer", text, "derived", evidence)


def _is_place_of(facts: Evidence, lies: Record, wanted: int | None) -> bool:
    """Whether an entry may once have lain where `wanted` does: nodes of a tree lie at other places than positions."""
    if wanted is None or lies.position == wanted:
        return wanted is not None
    is_guess = not facts.row.was_given(lies.position)
    return is_guess and (lies.position - wanted) % facts.violation.pool.view.page_size != 0


def _writer(lies: Record, wanted: int | None, other: str | None) -> str:
    if other is not None:
        return f"it continues the row of {other!r}"
    if lies.position == wanted:
        return "it is of another request"
    return f"it was written for position {lies.position}, and lies at {wanted}"


def _without_this_entry(facts: Evidence) -> Cause | None:
    if not facts.is_own_place or is_current_write(facts):
        return None
    loaded = _came_by(facts, "load")
    if not loaded:
        return None
    step = max(entry.step for entry in loaded)
    evidence = (
        f"{len(loaded)} entries of the page came back by a load in step {step}, and not this one",
        "the row looks in the slot that it was granted",
        "no forward has written it since",
    )
    return Cause("transfer", "stale: the copy that came back was made before this entry was", "derived", evidence)


def never_copied(facts: Evidence) -> Cause | None:
    """A page in the place of another one, whose bytes did not follow."""
    if not facts.is_own_place or is_current_write(facts) or facts.row.copied_from is None:
        return None
    source, page, moved = facts.row.copied_from, facts.violation.page, _came_by(facts, "move")
    how, text = f"no move into page {page} was declared since (on_move)", f"to {page} by name only"
    if moved:
        how, text = f"{len(moved)} of its slots came by a declared move, this one did not", "in part"
    evidence = (
        f"page {page} took the place of page {source} in the row of {facts.violation.request_id!r} (on_copy)",
        how,
        f"position {facts.violation.position} lies there, and nothing has written it since",
    )
    text = f"page {source} was copied {text}: no move of these bytes was declared"
    return Cause("transfer", text, "derived", evidence)


def forgotten_tail(facts: Evidence) -> Cause | None:
    """A place of the prefix on the pages of a draft branch, which the prefix's own entry should have been copied to."""
    violation, reader, place = facts.violation, facts.reader, facts.own_position
    size = violation.pool.view.page_size
    if reader is None or place is None or violation.position is None or violation.site[0] != "draft":
        return None
    length = reader.final_len(violation.pool.pool_id)
    tail = length % size
    if not length - tail <= violation.position < length <= place or (place - violation.position) % size:
        return None
    starts = [start // size for start, entry in facts.row.guesses if entry.position == length]
    if place // size not in starts:
        return None  # no branch begins on the page
    of, before = f"branch {starts.index(place // size)}", facts.record
    evidence = (
        f"the row reads position {violation.position} in a page of {of}, before the branch's own first entry",
        f"slot {facts.granted_slot} holds that entry, and no move of this step brought it to slot {violation.slot}",
        "nobody has written there" if before is None or not before.site else f"what lies there: {facts.last_write}",
    )
    text = f"the prefix tail was not copied for {of}, or too late: offset {violation.position % size} of {tail}"
    return Cause("transfer", text, "derived", evidence)


def _wrong_entry(facts: Evidence) -> tuple[Record | None, int | None]:
    """What lies in the row's own place and is not the request's entry, and where: the one found, or the one before."""
    position = facts.violation.position
    if facts.violation.code == "R6":
        return facts.different_record, facts.first_difference
    if not facts.is_own_place or position is None:
        return None, None
    if not facts.row.is_own(position):
        return facts.record, position
    return (None, None) if facts.row.is_own(position - 1) else (facts.row.before, position - 1)


def _came_by(facts: Evidence, kind: str) -> list[Record]:
    """Entries of the page that came by a move or a load since it was granted."""
    current = [entry for entry in facts.row.page if entry is not None and entry.generation == facts.granted]
    return [entry for entry in current if unpack_site(entry.site)[0] == kind]
