"""Rules about writes: how a forward may have come to write a wrong place."""

from __future__ import annotations

from kvcanary.pools.launch_site import TREE_KINDS
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause
from kvcanary.transfers.async_ops import FREED, OUTDATED


def written_twice(facts: Evidence) -> Cause | None:
    if facts.violation.layers:
        evidence = (f"layer {facts.violation.layers[0]} was marked as stored already",)
        return Cause("order", "the layer's store ran twice in this forward", "derived", evidence)
    text = "two entries of this forward were given one slot"
    is_own = facts.owner is None or facts.owner == facts.violation.request_id
    return Cause("draft" if facts.violation.site[0] in TREE_KINDS and is_own else "addressing", text, "derived")


def tree_positions(facts: Evidence) -> Cause | None:
    violation, text = facts.violation, "positions of the tree are off, or of an earlier step"
    if violation.site[0] not in TREE_KINDS:
        return None
    off = f"position {violation.position}, the parent's is {violation.parent_position}"
    # A captured forward tells where, and not by how much; nobody tells of parents in pools that are only watched.
    is_told = violation.position is not None and (facts.declared is not None or violation.parent_position is not None)
    return Cause("draft", text, "inferred", (off,) if is_told else ())


def stale_positions(facts: Evidence) -> Cause | None:
    """Of a captured forward, whose buffers outlive it."""
    if not facts.violation.is_captured:
        return None
    evidence: tuple[str, ...] = ()
    if facts.reader is not None and facts.is_final:
        before = f"position {facts.violation.position} was final before this forward"
        evidence = (before, f"{facts.reader.committed_len} entries are final")
    return Cause("graphs", "a replayed batch kept positions of an earlier one", "inferred", evidence)


def miscounted_positions(facts: Evidence) -> Cause | None:
    """Positions of an eager forward that are off by one number, which may be a length that the row has."""
    violation = facts.violation
    if violation.is_captured or violation.position is None or violation.parent_position is None:
        return None
    off = violation.position - violation.parent_position - 1
    if violation.site[0] in TREE_KINDS and not _is_root(facts, off):
        return None
    evidence = [f"its position is {violation.position}, its parent's {violation.parent_position}: {off:+d}"]
    wrong = [other for other in facts.incident if other.code == "W5" and other.row == violation.row]
    if len(wrong) > 1 or violation.until is not None:
        evidence.append("what the row writes behind it is off as well")
    counted = _length_of(facts, abs(off))
    if counted is None:
        is_old = off < 0 and facts.is_final
        evidence += [f"position {violation.position} was final before this forward"] if is_old else []
        text = "positions are those of an earlier forward" if is_old else f"positions are off by {off:+d}"
        return Cause("lengths", text, "inferred", tuple(evidence))
    how = f"{counted} was counted twice" if off > 0 else f"positions were counted without {counted}"
    return Cause("lengths", how, "inferred", (*evidence, f"{counted} is {abs(off)} entries"))


def _is_root(facts: Evidence, off: int) -> bool:
    """Whether a tree begins at a wrong position; one off in a draft forward is a position raised too early or late."""
    begins = facts.reader is not None and facts.violation.parent_position == facts.reader.committed_len - 1
    return begins and not (facts.violation.site[0] == "draft" and abs(off) == 1)


def _length_of(facts: Evidence, length: int) -> str | None:
    """What of the row is so long."""
    begin = (facts.violation.parent_position or 0) + 1
    if facts.row.given_len == length:
        return "the cached prefix"
    if facts.reader is not None and facts.reader.committed_len == length:
        return "the committed length"
    return "where the chunk begins" if begin == length else None


def padding_of_a_live_row(facts: Evidence) -> Cause | None:
    """Padding of a replay that writes where a live request writes, or should."""
    place, owner = facts.row.owners_place, facts.owner
    if place is None or facts.record is None or owner is None:
        return None
    where = f"the slot is {owner!r}'s own, for position {place}"
    if facts.is_own_write:
        evidence = (where, f"{facts.last_write} wrote it as well, for {owner!r}")
        return Cause("graphs", "a row of padding names a live request's row", "derived", evidence)
    evidence = (where, f"nobody wrote it for {owner!r} in this forward")
    text = "a live row was counted as padding, or padding kept the row of an earlier replay"
    return Cause("graphs", text, "inferred", evidence)


def over_its_own(facts: Evidence) -> Cause | None:
    """The request's own page, at a place that is behind it already."""
    here, position = facts.own_position, facts.violation.position
    if here is None or position is None or here >= position:
        return None
    evidence = (f"the slot was granted for position {here}, the entry stands at {position}",)
    return Cause("addressing", "the slot was computed from another coordinate than the position", "derived", evidence)


def of_no_row(facts: Evidence) -> Cause | None:
    """A shared page that the request has not."""
    if facts.reader is None or facts.own_position is not None:
        return None
    text = "an entry of the table or index array names the wrong slot"
    return Cause("addressing", text, "derived", (f"page {facts.violation.page} is in no place of the request's row",))


def published_too_early(facts: Evidence) -> Cause | None:
    step, shared = facts.violation.step, [event for event in facts.events if event.kind in ("published", "forked")]
    evidence = tuple(f"{event}, and written in step {step}" for event in shared[-1:] if event.step >= step - 1)
    return Cause("lifetime", "the page was shared or published while it was still to be written", "derived", evidence)


def outdated(facts: Evidence) -> Cause | None:
    """Work that was planned for an earlier grant of the page, or that a free did not wait for."""
    found = facts.violation.found or {}
    if found.get("hazard") not in (OUTDATED, FREED) or facts.violation.page < 0:
        return None
    text = "the page was given back while work on it was planned or in flight"
    return Cause("lifetime", text, "derived", (f"{found['hazard']}: {found['access']}",))
