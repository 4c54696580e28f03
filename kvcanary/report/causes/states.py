"""Rules about recurrent states: why one has absorbed other tokens, is another's, or has other bytes."""

from __future__ import annotations

from kvcanary.calls.state_facts import StateFacts
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause


def _known(facts: Evidence) -> StateFacts:
    return facts.violation.state or StateFacts()


def _is_anothers(facts: Evidence) -> bool:
    """Whether another request's state lies in an entry that no prefix cache has, and it has absorbed other tokens."""
    state = _known(facts)
    is_anothers = state.lies.writer not in (None, facts.violation.request_id)
    return is_anothers and not state.is_shared and state.first_difference is not None


def published_in_part(facts: Evidence) -> Cause | None:
    """A prefix cache has, or is given, a state that covers a part of the tokens by which it is known."""
    state, site = _known(facts), facts.violation.site[0]
    if not (site == "publish" or state.is_shared) or state.wanted is None or state.lies.absorbed >= state.wanted:
        return None
    evidence = (
        f"the state in entry {facts.violation.slot} has absorbed {state.lies.absorbed} tokens",
        f"it is published as that of {state.wanted}: a chunk ended inside the block, and nobody completed it",
        f"{facts.last_write} left it last",
    )
    return Cause("lengths", "a state was published that covers a part of its block", "derived", evidence)


def other_column(facts: Evidence) -> Cause | None:
    """The verify left a state for each node or count, and not that of the accepted one is taken."""
    state = _known(facts)
    if not state.lies.drafted or state.wanted is None or state.elsewhere_step > state.lies.step or _is_anothers(facts):
        return None
    over = state.lies.absorbed - state.wanted
    evidence = [f"{facts.last_write} left it behind {state.lies.drafted} drafts, {state.lies.absorbed} tokens in all"]
    if over > 0:
        evidence.append(f"the row goes on at {state.wanted}: {over} of these drafts were not kept")
    else:
        evidence.append(f"the row goes on at {state.wanted}: more of the drafts were accepted")
    if state.elsewhere is not None:
        evidence.append(f"the state after {state.wanted} tokens lies in entry {state.elsewhere}")
    text = "the state of another accepted count is taken: a stale column, or drafts that were dropped since"
    return Cause("draft", text, "derived", tuple(evidence))


def other_node(facts: Evidence) -> Cause | None:
    """It has absorbed as many tokens, but those of a branch that was not accepted."""
    state = _known(facts)
    if not state.lies.drafted:
        return None
    differs = "" if state.first_difference is None else f" from position {state.first_difference} on"
    evidence = (
        f"{facts.last_write} left it behind {state.lies.drafted} drafts",
        f"these are not the tokens that the request has there{differs}",
    )
    return Cause("draft", "the state of a tree node that was not accepted is taken", "derived", evidence)


def not_copied(facts: Evidence) -> Cause | None:
    """The right state lies in another entry of the request, and no copy of it has come here."""
    state = _known(facts)
    if state.elsewhere is None or _is_anothers(facts) or (state.lies.kind and state.elsewhere_step <= state.lies.step):
        return None
    here = facts.violation.slot
    evidence = [
        f"the state after {state.wanted} tokens lies in entry {state.elsewhere}, since step {state.elsewhere_step}"
    ]
    evidence.append(
        f"what lies in entry {here} is older: {state.lies.absorbed} tokens, step {state.lies.step}"
        if state.lies.kind
        else f"nothing was left in entry {here} since it was granted"
    )
    return Cause("transfer", f"the state was not copied from entry {state.elsewhere}", "derived", tuple(evidence))


def not_kept(facts: Evidence) -> Cause | None:
    """Of a captured step, whose device knows no more than how much the entry has absorbed, and since when."""
    state = _known(facts)
    if state.last_ran is None or state.wanted is None or state.lies.absorbed >= state.wanted:
        return None
    if not state.lies.kind or _is_anothers(facts):
        return None
    evidence = (
        f"{facts.last_write} left what lies there: {state.lies.absorbed} tokens",
        f"behind step {state.last_ran}, the last of this row, it goes on at {state.wanted}",
    )
    if state.lies.kind == "move" and state.lies.step == state.last_ran:
        return Cause("draft", "behind the verify the state of another accepted count was kept", "inferred", evidence)
    if state.lies.step < state.last_ran:
        return Cause(
            "transfer", "the last verify's state was not copied to where its row goes on", "inferred", evidence
        )
    return None


def looks_elsewhere(facts: Evidence) -> Cause | None:
    """The same evidence the other way round: the row names a wrong entry."""
    state = _known(facts)
    if state.elsewhere is None or not state.lies.kind:
        return None
    evidence = (f"the state after {state.wanted} tokens lies in entry {state.elsewhere}",)
    return Cause("addressing", "the row names another of its entries", "inferred", evidence)


def loaded_stale(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.lies.kind != "load" or state.wanted is None:
        return None
    evidence = (
        f"a load at step {state.lies.step} brought it, as it had left",
        f"it has absorbed {state.lies.absorbed} tokens of {state.lies.writer!r}, the row goes on at {state.wanted}",
    )
    text = "a load brought a state of another time, or of another request"
    return Cause("transfer", text, "derived", evidence)


def miscounted(facts: Evidence) -> Cause | None:
    """Absorbed and wanted, where nothing but the numbers is known."""
    state = _known(facts)
    if state.wanted is None or not state.lies.kind or _is_anothers(facts):
        return None
    over = state.lies.absorbed - state.wanted
    if abs(over) == 1:
        text = (
            f"the state is taken one token {'late' if over > 0 else 'early'}: lengths count another token than states"
        )
    elif over > 0:
        text = "tokens that it has absorbed are fed again: the length was rolled back, the state was not"
    else:
        text = (
            "tokens that lie behind the row were never fed to the state: a forward left it out, or another one was kept"
        )
    evidence = (f"the state has absorbed {state.lies.absorbed} tokens, the row goes on at {state.wanted}",)
    return Cause("lengths", text, "inferred", evidence)


def of_another_root(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if not state.same_tokens:
        return None
    evidence = (f"all {state.lies.absorbed} tokens are the row's", "the chain is not: salt or adapter differs")
    text = "the salt or the adapter differs: a state of another tenant, adapter or version of the weights"
    return Cause("identity", text, "derived", evidence)


def of_another_prompt(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.lies.writer is None or state.same_tokens or not (facts.violation.code == "R6" or _is_anothers(facts)):
        return None
    here = f"the state in entry {facts.violation.slot} has absorbed tokens of {state.lies.writer!r}"
    differs = [] if state.first_difference is None else [f"they differ from position {state.first_difference} on"]
    if state.lies.kind in ("move", "load"):
        how = "copy" if state.lies.kind == "move" else "load"
        return Cause("transfer", f"a {how} brought the state of another request", "derived", (here, *differs))
    return Cause("identity", "a prefix hit brought the state of another prompt", "derived", (here, *differs))


def freed_under_its_reader(facts: Evidence) -> Cause | None:
    """The request had the entry once."""
    state, name = _known(facts), facts.violation.request_id
    if name is None or not any(f"granted to {name!r}" in event for event in state.history):
        return None
    now = "free" if state.is_free else "a prefix cache's" if state.is_shared else f"that of {state.owner!r}"
    evidence = (*state.history[-3:], f"it is {now} now")
    return Cause("lifetime", "the entry was given back while its row still goes on from it", "derived", evidence)


def neighbours_entry(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.owner is None or state.owner == facts.violation.request_id:
        return None
    evidence = (f"entry {facts.violation.slot} was granted to {state.owner!r}",)
    return Cause("addressing", "the index of another row is used: the entry is another request's", "derived", evidence)


def never_granted(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if not state.is_free or state.history:
        return None
    return Cause("addressing", "an entry is named that nobody was granted", "derived", ("no grant of it was told",))


def not_cleared(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.wanted != 0:
        return None
    evidence = ("the row begins here, at length 0, and reads the entry", "its bytes are not zero")
    text = "the entry was not cleared when it was granted: the state of its last owner lies there"
    return Cause("uninitialised", text, "derived", evidence)


def never_left(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.lies.kind or state.wanted == 0:
        return None
    evidence = ("no forward, copy or load has left a state there since it was granted",)
    return Cause("uninitialised", "the entry is taken before anybody has left a state in it", "derived", evidence)


def overwritten_in_place(facts: Evidence) -> Cause | None:
    if not _known(facts).is_shared:
        return None
    evidence = ("a prefix cache has the entry", "its owner went on in place, instead of in an entry of its own")
    return Cause(
        "lifetime", "a published state is overwritten by the request that goes on from it", "derived", evidence
    )


def padding_points_at(facts: Evidence) -> Cause | None:
    state = _known(facts)
    whose = "a prefix cache" if state.is_shared else repr(state.owner) if state.owner else "nobody"
    evidence = (f"entry {facts.violation.slot} is that of {whose}",)
    return Cause("graphs", "padding of a batch leaves its state in an entry that is not padding's", "derived", evidence)


def left_twice(facts: Evidence) -> Cause | None:
    rows = ", ".join(repr(name) for name in (facts.violation.request_id, *facts.violation.others) if name)
    evidence = (f"one forward leaves two states there, of {rows}",)
    return Cause("addressing", "two rows, or two nodes, name the same entry", "derived", evidence)


def bytes_of_padding(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.bytes_source != "null":
        return None
    evidence = (f"{state.bytes_of} lie there", "padding leaves its states in these", "nobody has told of a write here")
    return Cause("graphs", "padding wrote its state here: its index names a live entry", "derived", evidence)


def bytes_of_another(facts: Evidence) -> Cause | None:
    state = _known(facts)
    if state.bytes_source != "entry":
        return None
    moved = facts.violation.code == "T1" or facts.violation.site[0] in ("move", "load")
    text = (
        "a copy or a load went to, or came from, another entry" if moved else "a state of another entry was stored here"
    )
    evidence = (f"{state.bytes_of} lie there", "nobody has told of that")
    return Cause("transfer" if moved else "addressing", text, "derived", evidence)


def bytes_cleared(facts: Evidence) -> Cause | None:
    if _known(facts).bytes_source != "zero":
        return None
    if facts.violation.code == "T1":
        return Cause("transfer", "nothing has arrived: the entry is zero", "derived", ("all bytes there are zero",))
    evidence = ("all bytes there are zero", "nobody has told of a grant since")
    return Cause("lifetime", "the entry was cleared while its request goes on from it", "derived", evidence)


def one_word(facts: Evidence) -> Cause | None:
    if facts.word is None:
        return None
    evidence = ("one word of one layer differs, all others are as they were left",)
    return Cause("bits", "one word changed where the state lay", "derived", evidence)


def copied_backwards(facts: Evidence) -> Cause | None:
    if facts.violation.code != "T1" or "those of entry" not in str((facts.violation.expected or {}).get("bytes")):
        return None
    if f"those of entry {facts.violation.slot}" != (facts.violation.expected or {}).get("bytes"):
        return None
    evidence = ("the source of the copy has changed by it", "source and destination hold the same bytes now")
    return Cause("transfer", "the copy went the other way round: its source was overwritten", "derived", evidence)
