"""Rules about bytes: how K, V, poison or a record may have come to be other than what was written."""

from __future__ import annotations

from kvcanary.ledger.page_history import PageEvent
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause

PARTS = ("K", "V")
LATE_STEPS = 8  # in which a copy that was in flight when its page was freed has surely landed


def gone(facts: Evidence) -> Cause | None:
    """An entry that was whole until its pool was cleared."""
    found, step = facts.record, facts.violation.pool.cleared_in
    if step is None or found is None or not found.site or found.layers or found.step > step:
        return None
    evidence = (
        f"the pool was cleared, or allocated anew, in step {step}",
        f"{facts.last_write} wrote the entry before that",
        "nobody has written it since",
        "the pages were not freed, nor evicted, when their bytes went",
    )
    text = "the bytes are gone: the pool was cleared after they were written, and its pages were kept"
    return Cause("lifetime", text, "derived", evidence)


def changed_word(facts: Evidence) -> Cause | None:
    if facts.word is None:
        return None
    bit, text = facts.word.bit, "one 32-bit word was overwritten, nothing else changed"
    if bit is not None:
        text = f"one flipped bit: bit {bit} of one element, nothing else changed; a hardware fault or a stray write"
    return Cause("bits", text, "derived", _one_word(facts))


def _one_word(facts: Evidence) -> tuple[str, ...]:
    layers = facts.violation.pool.view.num_layers
    return (f"this word alone explains both fingerprints; 1 of {layers} layers differs",)


def scale(facts: Evidence) -> Cause | None:
    """What lies beside K and V is another slot's, or reset, in another order, or one word of it changed."""
    provenance, order, word = facts.provenance_of("scale"), facts.provenance_of("scale_order"), facts.word
    if word is not None and word.part not in PARTS:
        evidence = (f"the word that changed lies in {word.part}", *_one_word(facts))
        return Cause("scales", f"{word.part} was overwritten, K and V are as written", "derived", evidence)
    if order is not None:
        text = "scales were stored in another order, or as those of another part"
        evidence = (f"{order.text}: that explains the fingerprint", "K and V are as written")
        return Cause("scales", text, "derived", evidence)
    if provenance is None:
        return None
    text = "scales were reset, or addressed by another shape, after they were written"
    return Cause("scales", text, "inferred", (provenance.text,))


def copied(facts: Evidence) -> Cause | None:
    """The row of another slot: exchanged with it, or copied."""
    provenance = facts.provenance_of("slot")
    if provenance is None or facts.is_first_read or untranslated(facts) is not None:
        return None
    evidence = f"the fingerprint of slot {provenance.slot} in layer {provenance.layer} is that of these bytes"
    if facts.source_is_damaged and facts.violation.code == "R9":
        other = f"slot {provenance.slot} does not hold its own bytes either"
        return Cause("addressing", f"{provenance.text}: rows went to each other's slots", "derived", (evidence, other))
    return Cause("transfer", f"{provenance.text}: a copy that nobody declared", "inferred", (evidence,))


def untranslated(facts: Evidence) -> Cause | None:
    """A pool behind a map, in whose slot a store has not arrived: it went to where the unmapped number leads."""
    pool, is_lost = facts.violation.pool, facts.was_never_right and facts.word is None
    if facts.violation.code != "R9" or pool.view.slot_map is None or not is_lost:
        return None
    evidence = (f"slots of the {pool.name} pool are found through a map", "it was never right")
    return Cause("windows", "the store went by a slot of another pool, or by an old map", "inferred", evidence)


def mixed_up(facts: Evidence) -> Cause | None:
    provenance = facts.provenance_of("part", "exchange", "layer", "shift")
    if provenance is None:
        return None
    family = "addressing" if provenance.kind == "layer" else "transfer"
    text = "a copy or store with another layout: the wrong part, axis or stride"
    return Cause(family, text, "inferred", (f"{provenance.text}, in layer {facts.violation.layers[0]}",))


def never_stored(facts: Evidence) -> Cause | None:
    """What was there before the last declared write is still there."""
    if not facts.was_never_right or facts.word is not None or facts.provenance_of("exchange", "shift", "layer"):
        return None
    evidence = []
    provenance, slots = facts.provenance_of("poison", "zero"), {violation.slot for violation in facts.incident}
    is_older = facts.source is not None and facts.record is not None and facts.source.step < facts.record.step
    if provenance is not None:
        evidence.append(f"{provenance.text}; it was never right")
    if facts.is_first_read:
        evidence.append("the forward that wrote it found it: nobody came between")
    if facts.provenance and len(slots) > 1 and _layers_agree(facts):
        evidence.append(f"the same layers differ in each of {len(slots)} slots")
    if evidence and is_older:
        evidence.append("these bytes are older than the last declared write")
    if not evidence:
        return None
    layers = ", ".join(map(str, facts.violation.layers[:4]))
    text = f"the store of layer {layers} did not arrive, or went elsewhere"
    return Cause("uninitialised", text, "inferred", tuple(evidence))


def _layers_agree(facts: Evidence) -> bool:
    content = [violation.layers for violation in facts.incident if violation.code == "R9"]
    return len(set(content)) == 1 and 0 < len(content[0]) < facts.violation.pool.view.num_layers


def cleared(facts: Evidence) -> Cause | None:
    provenance, last_good = facts.provenance_of("zero_part", "zero"), facts.violation.last_good
    if provenance is None or (provenance.kind == "zero" and last_good is None):
        return None
    more = f"; they were right at step {last_good}"
    if provenance.kind == "zero_part":
        more = ", and the rest of the row is not"  # a store that is lost loses the whole row
    text = "cleared after it was written: a zeroing that waited for nobody"
    return Cause("order", text, "inferred", (f"{provenance.text}{more}",))


def not_finite(facts: Evidence) -> Cause | None:
    provenance = facts.provenance_of("not_finite")
    if provenance is None:
        return None
    if facts.violation.code == "P1":
        text = "a page of another kind of layer, or of before the pool was cleared, was not made neutral"
        return Cause("uninitialised", text, "inferred", (provenance.text, "nobody had the page to write it"))
    return Cause("bits", "overwritten with values that no forward has stored", "inferred", (provenance.text,))


def first_not_finite(facts: Evidence) -> Cause:
    """What this layer and those before it computed: the first layer is named, not those to which NaN has spread."""
    violation = facts.violation
    text = "an overflow of the type, weights or scales that are not finite, or memory that a kernel read beside its row"
    layer = violation.layers[0] if violation.layers else 0
    before = f"layers before it stored finite values for {violation.request_id!r}" if layer else "it is the first layer"
    return Cause("numerics", text, "inferred", (f"layer {layer} is the first in which it was seen: {before}",))


def padding_not_finite(facts: Evidence) -> Cause | None:
    violation = facts.violation
    if violation.slot >= violation.pool.view.null_slots:
        return None
    text = "padding computed NaN or Inf and stored it, as a row without an entry does that divides by no weight"
    return Cause("graphs", text, "inferred", (f"slot {violation.slot} is a null slot: only padding may write it",))


def never_cleared(facts: Evidence) -> Cause | None:
    """Found by the first look since the page was granted, where nobody has written."""
    at_grant, grant, freed = _is_at_grant(facts), _last_grant(facts), _frees(facts)
    if not at_grant and (grant is None or facts.finite_since is not None):
        return None
    before = f"freed by {freed[-1].request_id!r} at step {freed[-1].step}, not poisoned" if freed else "never used"
    text = "the page was granted as it was: memory that nobody cleared, or that held another kind of state"
    if grant is None or at_grant or grant.step == facts.violation.step:
        return Cause("uninitialised", text, "derived", (f"the page was {before} before its grant in this step",))
    evidence = f"the page was {before} before its grant at step {grant.step}", "nobody has found it finite since then"
    return Cause("uninitialised", text, "inferred", evidence)


def not_finite_since(facts: Evidence) -> Cause | None:
    """Behind the end of a row: what lay there at the grant was found finite."""
    if facts.finite_since is None or _is_at_grant(facts):
        return None
    evidence = (f"finite when the page was granted at step {facts.finite_since}", "no forward has stored there since")
    return Cause("bits", "a stray write behind the end of the row", "derived", evidence)


def _is_at_grant(facts: Evidence) -> bool:
    return any(violation.site[0] == "grant" for violation in facts.incident)


def _frees(facts: Evidence) -> list[PageEvent]:
    return [event for event in facts.events if event.kind == "freed"]


def _last_grant(facts: Evidence) -> PageEvent | None:
    """Of a page that is granted to somebody."""
    if facts.violation.slot < facts.violation.pool.view.null_slots:
        return None
    granted = [event for event in facts.events if event.kind in ("granted", "set aside", "copied")]
    return granted[-1] if granted else None


def late_write(facts: Evidence) -> Cause | None:
    """Someone who had the page before may still write it."""
    former = [event for event in _frees(facts) if event.request_id != facts.owner]
    if not former or facts.word is not None:
        return None
    last, steps = former[-1], facts.violation.step - former[-1].step
    since = f", {steps} steps before" if steps <= LATE_STEPS else ""
    evidence = (f"the page was freed by {last.request_id!r} at step {last.step}{since}",)  # one event, however late
    return Cause("lifetime", "a write of the page's former owner that came late", "inferred", evidence)


def overwritten(facts: Evidence) -> Cause | None:
    if facts.word is not None:
        return None
    slots = len({violation.slot for violation in facts.incident})
    strange = f"{'one row' if slots == 1 else f'{slots} rows'} changed to bytes that nobody has written here"
    is_strange = facts.declared is not None and not facts.provenance and not facts.is_first_read
    evidence = (strange,) if is_strange else ()
    return Cause("bits", "several words changed: an overwrite that nobody declared", "derived", evidence)


def written_when_free(facts: Evidence) -> Cause | None:
    evidence = tuple(f"freed by {event.request_id!r} at step {event.step}" for event in _frees(facts)[-1:])
    text = "a write into a page after it was freed: a copy or forward was still running"
    return Cause("lifetime", text, "inferred", evidence)


def damaged_record(facts: Evidence) -> Cause | None:
    if facts.violation.fingerprint_violation:
        evidence = ("fingerprint b over all layers is right",)
        return Cause("bits", "the stored fingerprint was overwritten: K and V are right", "derived", evidence)
    return Cause("bits", "something wrote over the canary's memory: a stray write", "inferred")
