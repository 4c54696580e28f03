"""Diagnosis: what may have caused a finding, best first, each cause with what speaks for it.

A rule looks at the facts of one incident and names a cause or none; the table says for which codes it is asked. More
evidence goes first, then what is derived, then the order of the table; a cause for which nothing speaks is named only
where no other is. Causes are named by the families of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvcanary.codes import ARRIVED, CODES, MISREAD, UNWRITTEN
from kvcanary.provenance.arrival import KINDS
from kvcanary.report.causes import (
    branches,
    hooks,
    identity,
    moves,
    ranks,
    rows,
    states,
    tokens,
    transfers,
    watched,
    writes,
)
from kvcanary.report.causes import bytes as bytes_
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause

MOST_CAUSES = 3
Rule = Callable[[Evidence], Cause | None]


def rank_causes(facts: Evidence) -> tuple[Cause, ...]:
    """The causes that fit what was read, best first; at least one."""
    rules = RULES if facts.violation.state is None else STATE_RULES
    asked = (rule(facts) for codes, rule in rules if facts.violation.kind in codes)
    found = [cause for cause in asked if cause is not None]
    found = [cause for cause in found if cause.evidence] or found
    found.sort(key=lambda cause: (-len(cause.evidence), cause.basis != "derived"))
    wrong_plan = f"the arrays of this forward were built wrong: {CODES[facts.violation.code].name}"
    return tuple(found[:MOST_CAUSES]) or (Cause("addressing", wrong_plan, "inferred"),)


def _fixed(family: str, text: str) -> Rule:
    """A rule that always names this cause."""

    def rule(facts: Evidence) -> Cause | None:
        return Cause(family, text, "inferred")

    return rule


#: For which codes each rule is asked.
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("X1", "X2"), ranks.differs),
    (("L1",), rows.contradiction),
    (("L1",), rows.no_page_to_name),
    (("L1",), rows.refused_event),
    (("R1", "R2", "R4", "R5", "R6", "R10", "R12", "W1", "W2", "W5", "W6"), watched.taken_back),
    (("R12",), watched.load_failed),
    (("R12",), bytes_.gone),
    (("R9",), bytes_.scale),
    (("R9",), bytes_.changed_word),
    (("R9", "R4", "R5", "R6"), moves.undeclared_move),
    (("R9", "P1", "T1", "R12"), bytes_.copied),
    (("R9",), bytes_.untranslated),
    (("R9",), watched.stored_astray),
    (("R9",), bytes_.never_stored),
    (("R9", "P1", "T1"), bytes_.mixed_up),
    (("R9",), bytes_.cleared),
    (("R9", "P1"), bytes_.not_finite),
    (("R9",), bytes_.overwritten),
    (("R9",), bytes_.late_write),
    ((UNWRITTEN,), bytes_.padding_not_finite),
    ((UNWRITTEN,), bytes_.never_cleared),
    ((UNWRITTEN,), bytes_.not_finite_since),
    ((UNWRITTEN,), bytes_.late_write),
    (("N1",), watched.not_finite_before),
    (("N1",), bytes_.first_not_finite),
    (("T1",), _fixed("transfer", "the move copied other bytes than the plan says, or used its source after that")),
    *(((ARRIVED,), partial(transfers.arrived, kind)) for kind in KINDS),
    (("P1",), bytes_.written_when_free),
    (("R3",), bytes_.damaged_record),
    (("R1", "W1"), rows.padding_mark),
    (("R1", "W1"), rows.out_of_bounds),
    (("R2",), rows.empty_entry),
    (("R2",), _fixed("graphs", "rows of padding count as live, or a live row was padded")),
    (("R2", "R4", "R5", "W2"), rows.wrong_entry),
    (("R5",), branches.other_branch),
    (("R5",), branches.copies_of_ancestors),
    (("R5", "R6"), identity.other_root),
    (("R6",), identity.other_span),
    (("R4", "R5", "R6"), identity.other_prompt),
    (("R4", "R5", "R6"), moves.moved_from_elsewhere),
    (("R4", "R5", "R6", "R12"), moves.stale_copy),
    (("R4", "R5", "R12"), moves.forgotten_tail),
    (("R4", "R5", "R12"), rows.rewritten_by_reader),
    (("R5",), identity.other_predecessor),
    (("R6",), identity.rotated),
    (("R4", "R5", "R6"), rows.kept_other_nodes),
    (("R4", "R5"), rows.more_entries),
    (("R4",), rows.exchange),
    (("R4",), rows.shifted_row),
    (("R4", "R6"), rows.other_entry),
    (("R4", "R5"), rows.foreign_token),
    (("R5",), rows.tree_path),
    (("R4", "R5"), _fixed("order", "a later forward wrote the slot, or the entry before it, again")),
    (("R6",), rows.row_mixed_up),
    (("R7", "R8", "W2", "W7"), rows.read_after_free),
    (("R7",), rows.never_granted),
    (("R7", "R8", "R12"), watched.freed_under_its_reader),
    ((MISREAD,), rows.read_elsewhere),
    (("R8",), rows.place_of_two),
    (("R8",), rows.neighbours_row),
    (("R8",), rows.foreign_page),
    (("R8",), rows.neighbours_prefix),
    (("R12",), moves.never_copied),
    (("R12",), rows.not_loaded),
    (("R4", "R5", "R12"), rows.short_write),
    (("R12",), rows.without_hooks),
    (("R12",), rows.missing_layer),
    (("R12",), rows.old_record),
    (("R12",), rows.past_the_end),
    (("R10",), rows.repeated_number),
    (("R10",), watched.outgrown_row),
    (("R10",), watched.unfed_row),
    (("R10",), watched.lost_token),
    (("R10",), _fixed("lengths", "a length was not raised, not rolled back, or counted in the wrong unit")),
    (("R11",), _fixed("order", "the forward ran before, or beside, a write that it should have followed")),
    (("R13",), _fixed("draft", "the mask was built from another tree, or by column in the place of parent")),
    (("W4",), writes.written_twice),
    (("W5",), watched.cache_positions),
    (("W5",), writes.stale_positions),
    (("W5",), writes.miscounted_positions),
    (("W5",), writes.tree_positions),
    (("W5",), watched.draft_positions),
    (("W2", "W3", "W5", "W7"), watched.stored_elsewhere),
    (("R6",), watched.other_weights),
    (("W6",), _fixed("order", "built on a step whose tokens were not known yet, or on those of another row")),
    (("W6",), watched.sampled_early),
    (("W6",), watched.unshifted_chunk_end),
    (("W6",), watched.accepted_otherwise),
    (("W6",), tokens.no_token),
    (("W6",), tokens.view_offset),
    (("W6",), tokens.another_order),
    (("W6",), tokens.unshifted_token),
    (("W6",), tokens.older_token),
    (("W7",), _fixed("lifetime", "a forward was still writing when its page was freed")),
    (("W3",), writes.published_too_early),
    (("W3", "W8"), writes.over_its_own),
    (("W3",), writes.of_no_row),
    (("W8",), _fixed("bounds", "more entries were written than pages were reserved for")),
    (("W9",), writes.padding_of_a_live_row),
    (("W9",), _fixed("graphs", "padding of a replayed batch points at live slots")),
    (("O1",), writes.outdated),
    (("O1",), transfers.unordered),
    (("O1",), transfers.taken_again),
    (("O1",), _fixed("order", "a copy, zeroing or staging buffer was used without waiting for its event")),
    (("H1",), hooks.never_opened),
    (("H1",), hooks.wrong_number),
    (("H1",), rows.refused_load),
    (("H1",), hooks.never_declared),
    (("H1",), _fixed("hooks", "a forward ran without its hooks, or a captured graph lost them")),
    (("H2",), _fixed("hooks", "attached twice, never armed, or a substep outside its bracket")),
)

#: The same where the slot is an entry of a StateView.
STATE_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("L1",), _fixed("lifetime", "an entry of states was granted, or given back, twice")),
    (("R1", "W1"), _fixed("bounds", "an index of states is outside of them: -1 of padding, or another pool's")),
    (("R2",), _fixed("graphs", "a live row counts as padding, or its index was never filled in")),
    (("R4", "R5"), states.published_in_part),
    (("R4",), states.other_column),
    (("R5",), states.other_node),
    (("R4", "R12"), states.not_copied),
    (("R4",), states.not_kept),
    (("R4", "R5", "R6"), states.loaded_stale),
    (("R4",), states.looks_elsewhere),
    (("R4",), states.miscounted),
    (("R6",), states.of_another_root),
    (("R4", "R6"), states.of_another_prompt),
    (("R7", "R8", "W2"), states.freed_under_its_reader),
    (("R8", "W2"), states.neighbours_entry),
    (("R7", "W2"), states.never_granted),
    (("R12",), states.not_cleared),
    (("R12",), states.never_left),
    (("W3",), states.overwritten_in_place),
    (("W4",), states.left_twice),
    (("W9",), states.padding_points_at),
    (("T1",), states.copied_backwards),
    (("R9", "T1", "R12"), states.bytes_of_padding),
    (("R9", "T1"), states.bytes_of_another),
    (("R9", "T1"), states.bytes_cleared),
    (("R9",), states.one_word),
    (("T1",), _fixed("transfer", "a copy or a load brought other bytes than those that left")),
    (("R9",), _fixed("graphs", "a write that nobody told: padding whose index was clamped, or a kernel's wrong index")),
)
