"""Judging states: the rules by which a state that a forward begins from, leaves or shares is right, one entry each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcanary.calls.state_facts import StateFacts
from kvcanary.calls.violation import Violation
from kvcanary.ledger.ledger import Request
from kvcanary.pools.launch_site import site_name
from kvcanary.pools.state_views import NO_STATE, StateView
from kvcanary.records.state import PoolState
from kvcanary.states.entries import FREE, GRANTED, SHARED, Entries
from kvcanary.states.state_bytes import StateBytes


@dataclass(frozen=True)
class Event:
    """What is judged: a forward's kind, or `publish`, `copy`, `load`; and the step."""

    kind: str
    step: int

    @property
    def site(self) -> tuple[str, int]:
        return self.kind, 0

    def __str__(self) -> str:
        return f"{site_name(*self.site)}, step {self.step}"


class Judge:
    """Makes the violations of one view's entries."""

    def __init__(self, view: StateView, pool: PoolState, entries: Entries, contents: StateBytes) -> None:
        self._view, self._pool, self._entries, self._bytes = view, pool, entries, contents

    # a state that somebody reads

    def taken(self, request: Request, entry: int, length: int, event: Event) -> Violation | None:
        """R1, R2, R4, R5, R6, R7, R8 or R12 of the entry from which a row goes on at this length."""
        if entry == NO_STATE:
            return None if not length else self._of_nothing(request, length, event)
        code = self._place(entry)
        if not code and self._entries.status[entry] != SHARED and self._entries.owners[entry] != request.uid:
            code = "R8"
        if code:
            return self.violation(code, entry, request, event, length)
        if not length and not self._entries.writers[entry]:
            return self._begun_dirty(request, entry, event)
        return self.absorbed(request, entry, length, event)

    def absorbed(self, request: Request, entry: int, length: int, event: Event) -> Violation | None:
        """R12, R4, R5 or R6: the state in this entry is that of the request's first `length` tokens, or not."""
        entries = self._entries
        if not entries.writers[entry]:
            return self.violation("R12", entry, request, event, length)
        if entries.lengths[entry] != length:
            return self.violation("R4", entry, request, event, length)
        are_kept = entries.has_drafts_of(entry, request)
        if are_kept is False:
            return self.violation("R5", entry, request, event, length)
        if are_kept:
            entries.drafts.pop(entry, None)  # they are the request's own tokens now
        if entries.writers[entry] == request.uid:
            return None
        wanted, found = entries.truth(request, length), entries.chain(entry)
        if wanted is None or found is None or wanted == found:
            return None
        return self.violation("R6", entry, request, event, length)

    def changed(self, entries: Sequence[int], names: Sequence[str | None], event: Event) -> list[Violation]:
        """R9 of those whose bytes are not what was left there; `names`: whose rows they are."""
        found = self._bytes.changed(entries)
        readers = dict(zip(entries, names, strict=True)) if found else {}
        violations = []
        for entry, layers in found:
            known: dict[str, Any] = {
                "last_good": int(self._entries.steps[entry]),
                "word": self._bytes.changed_word(entry, layers),
            }
            violations.append(self.violation("R9", entry, readers[entry], event, layers=layers, **known))
        return violations

    # a state that somebody writes

    def written(self, request: Request, entry: int, event: Event) -> Violation | None:
        """W1, W2 or W3 of the entry into which a row's state goes."""
        if not 0 <= entry < len(self._entries):
            return self.violation("W1", entry, request, event)
        if self._entries.status[entry] == SHARED:
            return self.violation("W3", entry, request, event)
        is_null = entry < self._view.null_entries
        return self.violation("W2", entry, request, event) if is_null or self._is_others(entry, request) else None

    def padded(self, entry: int, event: Event) -> Violation | None:
        """W9: padding leaves its state in an entry that is not padding's."""
        if entry == NO_STATE or 0 <= entry < self._view.null_entries:
            return None
        return self.violation("W9" if 0 <= entry < len(self._entries) else "W1", entry, None, event)

    # how they are made

    def violation(
        self, code: str, entry: int, reader: Request | str | None, event: Event, wanted: int | None = None, **known: Any
    ) -> Violation:
        """One check that fired, with all that is known of the entry now."""
        request = reader if isinstance(reader, Request) else None
        name = reader.request_id if isinstance(reader, Request) else reader
        is_inside = 0 <= entry < len(self._entries)
        facts = self._facts(code, entry, request, wanted, known.get("layers", ())) if is_inside else StateFacts(wanted)
        expected, found = _sides(code, facts, wanted, name)
        expected, found = expected | known.pop("expected", {}), found | known.pop("found", {})
        return Violation(
            code,
            self._pool,
            entry,
            wanted,
            name,
            event.site,
            event.step,
            expected=expected,
            found=found,
            state=facts,
            **known,
        )

    def _facts(
        self, code: str, entry: int, request: Request | None, wanted: int | None, layers: Sequence[int]
    ) -> StateFacts:
        entries = self._entries
        bytes_of, source = self._bytes.whose(entry, layers) if code in ("R9", "T1", "R12") else ("", "")
        lies, differs, elsewhere = entries.lies(entry), None, None
        if request is not None and lies.writer is not None and code in ("R4", "R5", "R6"):
            differs = entries.first_difference(entry, request)
        if request is not None and wanted:
            elsewhere = entries.of_request(request.uid, wanted, entry)
        return StateFacts(
            wanted=wanted,
            lies=lies,
            owner=entries.name(int(entries.owners[entry])),
            is_shared=bool(entries.status[entry] == SHARED),
            is_free=bool(entries.status[entry] == FREE),
            generation=int(entries.generations[entry]),
            elsewhere=elsewhere,
            elsewhere_step=0 if elsewhere is None else int(entries.steps[elsewhere]),
            first_difference=differs,
            same_tokens=code == "R6" and differs is None,
            bytes_of=bytes_of,
            bytes_source=source,
            history=entries.history(entry),
        )

    def _place(self, entry: int) -> str:
        if not 0 <= entry < len(self._entries):
            return "R1"
        if entry < self._view.null_entries:
            return "R2"
        return "R7" if self._entries.status[entry] == FREE else ""

    def _is_others(self, entry: int, request: Request) -> bool:
        return self._entries.status[entry] == FREE or bool(self._entries.owners[entry] != request.uid)

    def _of_nothing(self, request: Request, length: int, event: Event) -> Violation:
        """A row that begins from nothing though tokens lie behind it."""
        sides: dict[str, Any] = {"expected": {"absorbed": length}, "found": {"absorbed": 0, "entry": "none"}}
        elsewhere = self._entries.of_request(request.uid, length, -1)
        where = 0 if elsewhere is None else int(self._entries.steps[elsewhere])
        facts = StateFacts(length, elsewhere=elsewhere, elsewhere_step=where)
        place = 0 if elsewhere is None else elsewhere
        return Violation(
            "R4", self._pool, place, length, request.request_id, event.site, event.step, state=facts, **sides
        )

    def _begun_dirty(self, request: Request, entry: int, event: Event) -> Violation | None:
        """R12: a row that begins reads an entry in which nobody has left anything, and which is not zero."""
        if self._bytes.content == "write" or self._entries.status[entry] != GRANTED or self._bytes.are_zero(entry):
            return None
        return self.violation("R12", entry, request, event, 0)


def _sides(
    code: str, facts: StateFacts, wanted: int | None, reader: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a report says was expected and found."""
    lies = facts.lies
    expected: dict[str, Any] = {} if wanted is None else {"absorbed": wanted}
    found: dict[str, Any] = {"absorbed": lies.absorbed}
    if lies.drafted:
        found["drafts_absorbed"] = lies.drafted
    if lies.writer is not None and lies.writer != reader:
        found["of_request"] = lies.writer
    if code in ("R7", "R8", "W2", "W3", "W9"):
        return expected | {"owner": reader or "padding"}, found | {"owner": _owner(facts)}
    if facts.first_difference is not None:
        found["first_different_position"] = facts.first_difference
    if facts.bytes_of:
        found["bytes"] = facts.bytes_of
    return expected, found


def _owner(facts: StateFacts) -> str:
    if facts.is_shared:
        return "a prefix cache"
    return "nobody" if facts.owner is None else facts.owner
