"""Rules about rows: why attention may have been told to read a slot that is not its own, or not yet written."""

from __future__ import annotations

from kvcanary.calls.violation import Violation
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import SUBSTEP_KINDS, TREE_KINDS, site_name, unpack_site
from kvcanary.pools.slot_maps import window_start
from kvcanary.report.causes.identity import other_prompt, other_root, other_span
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause
from kvcanary_kernels.record.layout import LOAD_FAILED, LOADING, NEVER_WRITTEN, Record

UNLOADED = (NEVER_WRITTEN, LOADING, LOAD_FAILED)  # states of a page
WRAPPED = 1 << 31  # what a 32-bit index can not hold


def out_of_bounds(facts: Evidence) -> Cause | None:
    slot, text = facts.violation.slot, "the index array or its builder ran past the end of what it holds"
    if not -WRAPPED <= slot < WRAPPED:
        text = "an offset that does not fit 32 bits, or no index at all"
    return Cause("bounds", text, "inferred", (f"slot {slot} of {facts.violation.pool.view.num_slots}",))


def padding_mark(facts: Evidence) -> Cause | None:
    if facts.violation.slot != -1:
        return None
    return Cause("graphs", "-1 is a mark of padding: a padded row counts as live", "inferred", ("the slot is -1",))


def empty_entry(facts: Evidence) -> Cause | None:
    if facts.violation.slot:
        return None
    evidence = ("it names slot 0, as an entry that nothing has filled", *_granted(facts))
    return Cause("uninitialised", "a table entry was never filled, or was filled elsewhere", "inferred", evidence)


def wrong_entry(facts: Evidence) -> Cause | None:
    """The row looks elsewhere than where it was granted something; where the chain breaks (R5), for a final entry."""
    is_looked_for = facts.violation.code != "R5" or (facts.is_final and _granted(facts))
    if facts.is_own_place or exchanged_pages(facts) is not None or not is_looked_for:
        return None
    text = "an entry of the table or index array names the wrong slot"
    return Cause("addressing", text, "inferred", () if facts.violation.code == "R2" else _granted(facts))


def _granted(facts: Evidence) -> tuple[str, ...]:
    """What was granted where the row looks elsewhere."""
    if facts.granted_slot is None or facts.is_own_place:
        return ()
    return (
        f"position {facts.violation.position} was granted slot {facts.granted_slot}, the row looks in "
        f"{facts.violation.slot}",
    )


def more_entries(facts: Evidence) -> Cause | None:
    """A row whose length is wrong too: what it has too many of is no entry of its own."""
    wrong = [violation for violation in facts.incident if violation.code == "R10"]
    if not wrong or wrong[0] is facts.violation:
        return None
    evidence = ("the row's length is not the request's (R10)", *_granted(facts))
    return Cause("lengths", "the row counts entries that the request does not have", "inferred", evidence)


def kept_other_nodes(facts: Evidence) -> Cause | None:
    """The row looks in its own place, and another node of the tree lies there than was accepted."""
    lies = own_entry(facts)
    if lies is None or unpack_site(lies.site)[0] not in TREE_KINDS:
        return None
    wrote = f"{site_name(*unpack_site(lies.site)[:2])}, step {lies.step}, wrote what lies there"
    evidence = ("the row looks in the slot that it was granted", wrote)
    text = "entries were kept by their number, not by the accepted path, or their move went wrong"
    return Cause("draft", text, "derived", evidence)


def own_entry(facts: Evidence) -> Record | None:
    """An entry of the request itself that is wrong where it lies, in the place that was granted for it."""
    lies = facts.different_record if facts.violation.code == "R6" else facts.record if facts.is_own_place else None
    return lies if lies is not None and facts.reader is not None and lies.request == facts.reader.uid else None


def exchange(facts: Evidence) -> Cause | None:
    pair = exchanged_pages(facts)
    if pair is None:
        return None
    one, other = pair
    holds = f"page {one} of the row holds the positions of page {other}, and the other way round"
    text = f"entries {one} and {other} of the row's page table are exchanged"
    return Cause("addressing", text, "inferred", (holds, "the records themselves are intact"))


def exchanged_pages(facts: Evidence) -> tuple[int, int] | None:
    """Table entries i and j when the positions found on page i are those of page j and the other way round."""
    size = facts.violation.pool.view.page_size
    pointed = {(position // size, found // size) for position, found in _misplaced(facts)}
    pairs = [pair for pair in sorted(pointed) if pair[0] < pair[1] and pair[::-1] in pointed]
    return pairs[0] if pairs else None


def shifted_row(facts: Evidence) -> Cause | None:
    """All entries of the row from one place on hold positions that are off by one number."""
    misplaced = _misplaced(facts)
    offsets = {found - position for position, found in misplaced}
    if len(misplaced) < 2 or len(offsets) > 1:
        return None
    offset = offsets.pop()
    evidence = (f"{len(misplaced)} entries hold their position {offset:+d}", *_granted(facts))
    if offset > 0 and min(misplaced)[0] == window_start(facts.violation.pool.view, facts.violation.until or 0):
        first = "the first entries of the row are gone, later ones lie there: a ring too short, or a window moved early"
        return Cause("windows", first, "inferred", evidence)
    return Cause("lengths", "the row is shifted: a length or an offset is wrong by that much", "inferred", evidence)


def _misplaced(facts: Evidence) -> list[tuple[int, int]]:
    """(position, position found there) of the entries of the row in which the finding is."""
    pairs = ((violation.position, violation.found_position) for violation in _in_its_row(facts))
    return [(position, found) for position, found in pairs if position is not None and found is not None]


def _in_its_row(facts: Evidence) -> list[Violation]:
    return [violation for violation in facts.incident if violation.row == facts.violation.row]


def tree_path(facts: Evidence) -> Cause | None:
    if facts.violation.site[0] not in TREE_KINDS or facts.write_site is None or facts.write_site[0] not in TREE_KINDS:
        return None
    evidence = (f"read by {site_name(*facts.violation.site)}", f"written by {facts.last_write}")
    text = "a tree node attends a node that is not its ancestor, or a branch was rejected"
    return Cause("draft", text, "inferred", evidence)


def other_entry(facts: Evidence) -> Cause | None:
    """In a cache without slots, what another entry should hold: of this row of the batch, or of another one."""
    found = facts.violation.found or {}
    row = found.get("row")
    if row is None:
        return None
    if row != facts.violation.row_number:
        text, evidence = "rows were not reordered, or otherwise than the sequences", f"it holds what row {row} should"
        return Cause("identity", text, "inferred", (evidence,))
    text, evidence = "the tensor is shifted against the positions that it is read as", f"it holds {found['position']}"
    return Cause("windows", text, "inferred", (f"{evidence} where position {facts.violation.position} should be",))


def foreign_token(facts: Evidence) -> Cause | None:
    if facts.writer is None or facts.writer == facts.violation.request_id or facts.written_as is not None:
        return None
    if facts.violation.code == "R4" and (facts.own_position is not None or facts.declared is None):
        return None  # a shared page of the row itself: whoever wrote it, the row looks at the wrong one of its entries
    if facts.is_own_place and facts.row.is_own(facts.violation.position):
        return None  # whoever wrote it, it is the row's
    if facts.violation.code == "R5" and wrong_entry(facts) is not None:
        return None
    evidence = (f"the record names {facts.writer!r}",)
    return Cause("identity", "the slot holds a token of another sequence", "derived", evidence)


def row_mixed_up(facts: Evidence) -> Cause | None:
    length, differs, lies = len(facts.violation.row_slots), facts.first_difference, facts.different_record
    if any(rule(facts) is not None for rule in (other_root, other_span, other_prompt)):
        return None
    evidence = [] if differs is None else [f"its tokens differ from position {differs} on, of {length}"]
    if lies is not None and facts.reader is not None and lies.request != facts.reader.uid:
        evidence.append(f"another request has written the entry of position {differs}")
    elif differs is not None and differs == length - 1:
        return Cause("order", "the last token fed is not the one that was accepted", "inferred", tuple(evidence))
    by = "" if facts.write_site is None else f", last written by {facts.last_write}"
    text = f"the row is complete, but of another prompt{by}: a row or prefix mix-up"
    return Cause("identity", text, "inferred", tuple(evidence))


def read_after_free(facts: Evidence) -> Cause | None:
    """The page was given back by the reader itself, or by whoever had it last."""
    code, name = facts.violation.code, facts.violation.request_id
    given_back = [event for event in facts.events if _is_given_back(event, name)]
    if not given_back or (code in ("W2", "R8") and not _had_it(facts, name)):
        return None
    own = [event for event in given_back if event.request_id == name]
    event = own[-1] if own else given_back[-1]
    evidence = [str(event)]
    if own:
        evidence.append("the reader had it before")
    if given_back[-1] is not event and given_back[-1].kind != "released":
        evidence.append(f"{given_back[-1]}, after that")
    if facts.owner is not None:
        evidence.append(f"{_came_to(facts, facts.owner)} {facts.owner!r} since")
    elif facts.is_shared:
        evidence.append(f"held by {facts.held_by}, so that it lives on")
    return Cause("lifetime", "the page was given back while the row still pointed at it", "derived", tuple(evidence))


def _is_given_back(event: PageEvent, reader: str | None) -> bool:
    """Of a page that others have too, only what the reader itself gave up counts."""
    return event.kind in ("freed", "evicted") or (event.kind == "released" and event.request_id == reader)


def _came_to(facts: Evidence, owner: str) -> str:
    """How the page became its owner's: by a grant, or as the last of those who shared it."""
    last = next((event for event in reversed(facts.events) if event.request_id == owner), None)
    return "private to" if last is not None and last.kind in ("taken back", "committed") else "granted to"


def never_granted(facts: Evidence) -> Cause | None:
    if facts.declared is None or facts.granted or facts.owner is not None:
        return None
    evidence = ("generation 0: nobody was ever granted this page",)
    return Cause("uninitialised", "the table entry was never written", "derived", evidence)


def neighbours_row(facts: Evidence) -> Cause | None:
    """Several entries in a row that all lie on pages of other requests."""
    if facts.own_position is not None:
        return None
    foreign = [violation for violation in _in_its_row(facts) if violation.code == "R8"]
    entries = max(len(foreign), foreign[0].run)
    last = max(violation.until or violation.position or 0 for violation in foreign)
    is_whole = facts.reader is not None and last >= facts.reader.committed_len - 1
    if entries <= facts.violation.pool.view.page_size and not (is_whole and entries > 1):
        return None
    evidence = (f"{entries} entries lie on pages of others", f"the first page is of {facts.held_by}")
    return Cause("identity", f"the row of {facts.held_by} was read in the place of this one", "inferred", evidence)


def neighbours_prefix(facts: Evidence) -> Cause | None:
    """Fewer than that, each at its own position of the other's row: its row too, or one page of it."""
    own = _in_its_row(facts)
    if facts.own_position is not None or facts.owner is None or any(violation.code == "R4" for violation in own):
        return None
    evidence = (f"what lies there is of the same position of {facts.owner!r}", *_half_a_page(facts, own))
    return Cause("identity", f"the row of {facts.owner!r} was read, as far as it differs", "inferred", evidence)


def _half_a_page(facts: Evidence, own: list[Violation]) -> tuple[str, ...]:
    """Another's from the head of a page on, and the rest of that page the row's own: no entry of a table leads so."""
    first, size = facts.violation.position, facts.violation.pool.view.page_size
    last = max(violation.until or violation.position or 0 for violation in own if violation.code == "R8")
    goes_on = any(violation.code == "R5" and violation.position == last + 1 for violation in own)
    if first is None or first % size or last == first or not (last + 1) % size or not goes_on:
        return ()
    return (f"entries {first} to {last} are, and {last + 1}, which is on the same page of the row, is not",)


def place_of_two(facts: Evidence) -> Cause | None:
    """The reader has the page itself, for others of its entries: its slot is not another's, it is another entry's."""
    if facts.own_position is None:
        return None
    evidence = (f"the page is {facts.violation.request_id!r}'s own, for others of its positions",)
    text = "two pages of the row lead to one place: the map, or its translation, is older than the grant"
    return Cause("addressing", text, "derived", evidence)


def foreign_page(facts: Evidence) -> Cause | None:
    evidence: list[str] = [] if _had_it(facts, facts.violation.request_id) else ["the reader never had this page"]
    if facts.is_shared and facts.violation.run <= facts.violation.pool.view.page_size:  # one entry of the table
        evidence += _granted(facts)
    return Cause("addressing", f"the row points at a page of {facts.held_by}", "derived", tuple(evidence))


def _had_it(facts: Evidence, request_id: str | None) -> bool:
    return any(event.request_id == request_id for event in facts.events)


def missing_layer(facts: Evidence) -> Cause | None:
    found, every = facts.record, facts.violation.pool.full_layers
    layers = ", ".join(map(str, facts.violation.layers[:4]))
    is_new = facts.declared is None and found is not None and facts.write_step == facts.violation.step
    if layers and (found is None or is_new):  # only the forward's own values say so
        evidence = (f"layer {layers} does not hold what this forward gave it",)
    elif found is None or found.generation != facts.granted or (found.layers == every and not layers):
        return None
    else:
        evidence = (f"the entry is of this grant, layer {layers or 'some'} is not marked as stored",)
    return Cause("uninitialised", "a layer did not store its K and V for this entry", "derived", evidence)


def not_loaded(facts: Evidence) -> Cause | None:
    """The page was granted for a load, and nothing has written the entry since."""
    if is_current_write(facts) or not any(event.kind == "set aside" for event in facts.events):
        return None
    last = f"its last event: {facts.events[-1]}"
    evidence = ("the page was granted for a load", last, "nobody has written the entry since")
    return Cause("transfer", "a load failed, still runs or brought less, and its hit was counted", "derived", evidence)


def without_hooks(facts: Evidence) -> Cause | None:
    """An entry of the row's own that is final, and that no forward has declared."""
    if facts.record is None or not facts.is_own_place or not facts.is_final:
        return None
    if is_current_write(facts) or short_write(facts) is not None:
        return None
    evidence = (
        f"position {facts.violation.position} is final, and in its own place",
        "no forward has declared that it writes here since the page was granted",
    )
    return Cause("hooks", "a forward ran without the canary's hooks", "inferred", evidence)


def is_current_write(facts: Evidence) -> bool:
    """Whether something was written in the slot since its page was granted."""
    found = facts.record
    return found is not None and bool(found.site) and found.generation == facts.granted


def short_write(facts: Evidence) -> Cause | None:
    """A final entry that an extend should have written, with those before it that became final in the same step."""
    position, last = facts.violation.position, facts.row.last_no_guess
    if last is None or position is None or not facts.is_own_place or not facts.is_final:
        return None
    if is_current_write(facts) and (facts.record is None or unpack_site(facts.record.site)[0] != "draft"):
        return None
    place, before = last
    if unpack_site(before.site)[0] == "extend" and _became_final_together(facts, place):
        evidence = (
            f"positions {place} and {position} became final in one step",
            f"extend of step {before.step}, which ran with hooks, wrote position {place}",
            "it wrote nothing behind that",
        )
    elif facts.violation.is_captured and place < position - 1:
        evidence = (
            f"positions {place + 1} to {position - 1} are final, and hold what draft forwards have guessed",
            "no extend has written them again, nor this one",
            "the forward is replayed: without its hooks it would be H1",
        )
    else:
        return None
    return Cause("lengths", "the extend wrote fewer entries of the row than were accepted", "derived", evidence)


def _became_final_together(facts: Evidence, place: int) -> bool:
    """Whether the tokens of an earlier entry of the row and of this one became known in one step."""
    reader, offset, position = facts.reader, facts.violation.pool.view.token_offset, facts.violation.position or 0
    known = [] if reader is None else reader.steps.tolist()
    return position + offset < len(known) and known[place + offset] == known[position + offset]


def rewritten_by_reader(facts: Evidence) -> Cause | None:
    """What the row reads as an earlier entry is a place that the same forward was told to write."""
    violation, found = facts.violation, facts.record
    if found is None or not facts.is_own_write or found.position == violation.position:
        return None
    if violation.code != "R12" and (not facts.is_own_place or any(other.code == "R10" for other in facts.incident)):
        return None
    evidence = (
        f"{facts.last_write}, which reads position {violation.position} here, wrote position {found.position} "
        "here itself",
        f"the slot was granted for position {violation.position}" if facts.is_own_place else "the row reads it before",
        "the record is of this grant",
    )
    text = "the forward was told to write a slot that holds an earlier entry of its own row"
    return Cause("addressing", text, "derived", evidence)


def repeated_number(facts: Evidence) -> Cause | None:
    """A draft forward that finds what another one of its number has written in this step."""
    step, site = facts.violation.step, facts.violation.site
    if site[0] != "draft" or not facts.is_own_write:
        return None
    guesses = [entry for _, entry in facts.row.guesses]
    positions = sorted({e.position for e in guesses if (unpack_site(e.site)[:2], e.step) == (site, step)})
    if len(positions) < 2:
        return None
    evidence = (
        f"{site_name(*site)} of step {step} has written positions {', '.join(map(str, positions[:4]))}",
        "a draft forward writes one position",
    )
    return Cause("hooks", "numbers of substeps repeat: several draft forwards of a step have one", "derived", evidence)


def refused_load(facts: Evidence) -> Cause | None:
    """Tokens became final in pages into which nothing has come."""
    if facts.reader is None:
        return None
    waiting = [page for page in facts.reader.pages if page >= 0 and facts.ledger.states[page] in UNLOADED]
    if not waiting:
        return None
    evidence = (f"{len(waiting)} pages of the row wait for a load, page {waiting[0]} first",)
    return Cause("transfer", "a load was refused or still runs, and its tokens were counted", "derived", evidence)


def past_the_end(facts: Evidence) -> Cause | None:
    if facts.owner is None or facts.owner != facts.violation.request_id:
        return None
    evidence = (f"the page is {facts.owner!r}'s own",)
    return Cause("lengths", "the row reaches past what was written in the request's own pages", "inferred", evidence)


def old_record(facts: Evidence) -> Cause | None:
    """The slot has none, or that of an earlier grant."""
    found = facts.record
    if found is None or (found.site and facts.granted in (None, found.generation)):
        return None
    if not found.site:
        if found.request:
            return None  # somebody wrote it before its page was granted: who hears of grants says so
        return Cause("uninitialised", "nobody has ever written this slot", "derived", ("the record is blank",))
    evidence = (f"the record is of grant {found.generation}, the page is at {facts.granted}",)
    text = "the record is from before the page was granted again"
    if facts.owner is None:
        text = "the page was freed, and the row still points at it"
    return Cause("lifetime", f"stale: {text}", "derived", evidence)


def contradiction(facts: Evidence) -> Cause | None:
    """A plan's numbers do not add up; or an engine tells of a page or a request twice, too late, or not at all."""
    if facts.violation.site[0] in SUBSTEP_KINDS:
        text = "the arrays of this forward do not belong together"
        return Cause("lengths", text, "derived", (facts.violation.message,))
    text = "the engine's books of pages and requests are wrong, or an event before this one was not told"
    return Cause("lifetime", text, "inferred", _last_event(facts))


def no_page_to_name(facts: Evidence) -> Cause | None:
    page = (facts.violation.found or {}).get("page")
    if page is None:
        return None
    evidence = (f"page {page} is a null page, or the pool has none of this number",)
    return Cause("addressing", "a page was named that no request may have", "derived", evidence)


def refused_event(facts: Evidence) -> Cause | None:
    """An event that a page may not have in its state."""
    found, page = facts.violation.found or {}, facts.violation.page
    event, state = found.get("event"), found.get("state")
    if event == "published" and state in ("RESERVED", "WRITTEN"):
        evidence = (f"page {page} is {state}, not yet COMMITTED", *_last_event(facts))
        return Cause("uninitialised", "a page was published before all of it was final", "derived", evidence)
    if event in ("marked loading", "loaded", "restored") and state in ("WRITTEN", "COMMITTED", "SHARED"):
        evidence = (f"page {page} is {state}: it holds entries already", *_last_event(facts))
        return Cause("transfer", "a load was told into a page that holds entries", "derived", evidence)
    return None


def _last_event(facts: Evidence) -> tuple[str, ...]:
    page = facts.violation.page
    return tuple(f"the last event of page {page}: {event} ({event.place})" for event in facts.events[-1:])


def read_elsewhere(facts: Evidence) -> Cause | None:
    """What a probe has shown."""
    if facts.violation.misread is None:
        return None
    family, text, evidence = facts.violation.misread
    return Cause(family, text, "derived", evidence)
