"""What a rule of the diagnosis is shown, built by hand: an incident, and the facts that were read about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import pack_site
from kvcanary.provenance.bytes_of import Provenance
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause
from kvcanary_kernels.record.layout import LOADING, WRITTEN, Record

PAGE_SIZE = 4
A_FREE = (PageEvent("granted", 1, "old"), PageEvent("freed", 4, "old"))
Said = tuple[Callable[[SimpleNamespace], Cause | None], SimpleNamespace, Cause | None]


def a_violation(**reported) -> SimpleNamespace:
    """A verify forward of step 9 found it at position 5 of `me`, slot 21."""
    view = {"num_slots": 64, "page_size": PAGE_SIZE, "num_layers": 3, "null_slots": 4, "token_offset": 0}
    view |= {"vocab_size": 100, "slot_map": None, "window": None} | reported.pop("view", {})
    pool = SimpleNamespace(view=SimpleNamespace(**view), name="target", full_layers=0b111, pool_id=0, cleared_in=None)
    violation = {
        "code": "R9",
        "slot": 21,
        "position": 5,
        "request_id": "me",
        "site": ("verify", 0),
        "step": 9,
        "layers": (),
    }
    violation |= {"last_good": None, "until": None, "parent_position": None, "found_position": None, "row_slots": ()}
    violation |= {
        "fingerprint_violation": False,
        "lineage": None,
        "is_captured": False,
        "named": None,
        "row_number": None,
        "found": None,
        "run": 1,
        "row": (0, "me"),
        "pool": pool,
        "page": 5,
        "notes": (),
        "misread": None,
    }
    return SimpleNamespace(**violation | reported)


def shown(*incident: SimpleNamespace, **read) -> SimpleNamespace:
    """What a rule sees of an incident: nothing but `read`."""
    facts = {"record": None, "writer": None, "word": None, "source": None, "source_is_damaged": False, "owner": None}
    facts |= {"granted": None, "events": (), "reader": None, "write_site": None, "write_step": None, "provenance": ()}
    facts |= {"finite_since": None}
    facts |= {"last_write": "nobody", "was_never_right": False, "is_first_read": False, "granted_slot": None}
    facts |= {"is_shared": False, "written_as": None}
    facts |= {"is_own_place": False, "own_position": None, "different_record": None, "first_difference": None}
    facts |= {"incident": incident or (a_violation(),), "ledger": SimpleNamespace(states={5: WRITTEN, 6: LOADING})}
    facts |= {"row": a_row(), "holds_its_own": True}
    seen = SimpleNamespace(**facts | read)
    seen.declared = seen.ledger
    seen.violation = seen.incident[0]
    seen.held_by = repr(seen.owner) if seen.owner is not None else "a prefix cache"
    seen.is_final, seen.is_own_write = (of(seen) for of in (Evidence.is_final.fget, Evidence.is_own_write.fget))
    seen.provenance_of = lambda *kinds: next((answer for answer in seen.provenance if answer.kind in kinds), None)
    return seen


def a_row(**reported) -> SimpleNamespace:
    """What the records of the row say: nothing but `reported`; `own`: positions that hold the request's own entry."""
    own, given, other = reported.pop("own", ()), reported.pop("given", {}), reported.pop("other", None)
    prompt = reported.pop("prompt", ())
    row = {"before": None, "page": (), "copied_from": None, "fed": {}, "shift": 0, "was_pool_right": False}
    row |= {"together": ([], []), "first_of": None, "guesses": [], "given_len": 0, "owners_place": None}
    row |= {"last_no_guess": None, "is_own": lambda position: position in own, "given": given.get}
    row |= {"was_given": lambda position: position in prompt}
    return SimpleNamespace(**row | {"of_other": lambda entry: other} | reported)


def provenance(kind: str, text: str = "what they are") -> tuple[Provenance, ...]:
    return (Provenance(kind, text, "inferred", 9, 1),)


def a_record(**reported) -> Record:
    fields = {"token": 1, "position": 5, "chain": 0, "request": 3, "generation": 2, "step": 7, "content_b": 0}
    return Record(**{"site": pack_site("verify", 0), "layers": 0b111, "seal": 0} | fields | reported)


def a_word(bit: int | None = 6, part: str = "K") -> SimpleNamespace:
    return SimpleNamespace(bit=bit, part=part)


def a_reader(**reported) -> SimpleNamespace:
    return SimpleNamespace(**{"uid": 3, "committed_len": 8, "pages": [5, 6], "tokens": []} | reported)


def expect_said(said: Sequence[Said]) -> None:
    """Each rule names its cause for what it is shown, word for word, or none."""
    for rule, facts, cause in said:
        assert (rule.__name__, rule(facts)) == (rule.__name__, cause)


def silent_rules(module: ModuleType, said: Sequence[Said]) -> set[str]:
    """Rules of the module that name a cause nowhere there."""
    named = {rule.__name__ for rule, _, cause in said if cause is not None}
    public = (value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__)
    rules = {rule.__name__ for rule in public if rule.__annotations__.get("return") == "Cause | None"}
    return {name for name in rules if not name.startswith("_")} - named
