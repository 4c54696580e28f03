"""RowEvidence: what the records of a row say, beside the tokens of its request and the rows of all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import cast

import numpy as np

from kvcanary.calls.violation import Violation
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import unpack_site
from kvcanary.pools.slot_maps import slots_in
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import MASK_64, Record, mix_host

MOST_ENTRIES = 256  # of a row that are looked at
FURTHEST_SHIFT = 4
_GIVEN = frozenset({"acquired", "forked"})
_GRANTED = frozenset({"granted", "set aside", "copied"})


class RowEvidence:
    """Of the row in which an incident lies, read when it is described; all of it is about the slots granted to it."""

    def __init__(self, incident: Sequence[Violation], declared: Ledger | None, reader: Request | None) -> None:
        self._incident, self._reader = incident, reader
        self._ledger = cast("Ledger", declared)  # asked for what is about a reader, whom nobody knows without it
        self._violation, self._pool = incident[0], incident[0].pool

    def at(self, position: int | None) -> Record | None:
        """The record of the slot that was granted for a position; None where nobody has written there."""
        return None if position is None or self._reader is None else self._of(self._reader, position)

    def is_own(self, position: int | None) -> bool:
        """Whether that slot holds the request's own token, behind all of its own tokens before it."""
        return self._reader is not None and position is not None and self._is_of(self._reader, position)

    @cached_property
    def before(self) -> Record | None:
        """The record of the entry before the one that was found."""
        return self.at(None if self._violation.position is None else self._violation.position - 1)

    @cached_property
    def last_no_guess(self) -> tuple[int, Record] | None:
        """Position and record of the last entry before the one that was found that no draft forward wrote."""
        position = self._violation.position or 0
        for place in range(position - 1, max(-1, position - MOST_ENTRIES), -1):
            entry = self.at(place)
            if entry is None or unpack_site(entry.site)[0] != "draft":
                return None if entry is None else (place, entry)
        return None

    def of_other(self, entry: Record) -> str | None:
        """Another live request in whose row an entry stands, or behind whose row it was guessed."""
        before = (entry.chain - mix_host(entry.token, entry.position, self._pool.keys)) * self._pool.keys.inverse
        wanted = ((entry.position + 1, entry.chain), (entry.position, before & MASK_64))
        truth, pool_id = self._ledger.truth, self._pool.pool_id
        for name, request in self._ledger.requests.items():
            if request is not self._reader and any(truth(request, pool_id, end) == chain for end, chain in wanted):
                return name
        return None

    def given(self, position: int | None) -> PageEvent | None:
        """The prefix hit or fork by which the request has its page for a position."""
        if self._reader is None or position is None:
            return None
        number = position // self._pool.view.page_size
        page = self._reader.pages[number] if number < len(self._reader.pages) else -1
        own = [e for e in self._ledger.history.of(page) if e.request_id == self._reader.request_id]
        return own[-1] if own and own[-1].kind in _GIVEN else None

    def was_given(self, position: int) -> bool:
        """Whether the token of an entry was known when the request came: no step has changed it since."""
        steps = [] if self._reader is None else self._reader.steps.tolist()
        place = position + self._pool.view.token_offset
        return place < len(steps) and steps[place] == steps[0]

    @property
    def given_len(self) -> int:
        """Entries of the row's head that came by a prefix hit or a fork, by whole pages."""
        size, length = self._pool.view.page_size, 0
        while self.given(length) is not None:
            length += size
        return length

    @property
    def owners_place(self) -> int | None:
        """Where the slot stands in the row of the request whose private page it is."""
        page, size, pages = self._violation.page, self._pool.view.page_size, self._ledger.pages
        owner = self._ledger.owner_of(page) if 0 <= page < len(pages) else None
        request = None if owner is None else self._ledger.requests.get(owner)
        return None if request is None else request.pages.index(page) * size + self._violation.slot % size

    @cached_property
    def page(self) -> tuple[Record | None, ...]:
        """[page_size] the records of the page in which the slot lies; None where nobody has written."""
        size, slot = self._pool.view.page_size, self._violation.slot
        return tuple(self._read(slot - slot % size + offset) for offset in range(size))

    @cached_property
    def copied_from(self) -> int | None:
        """The page of which the granted page is to be a copy; None where it was granted for something else."""
        granted = [event for event in self._ledger.history.of(self._violation.page) if event.kind in _GRANTED]
        is_copy = granted and granted[-1].kind == "copied"
        return self._ledger.copies.get(self._violation.page) if is_copy else None

    @cached_property
    def fed(self) -> dict[int, int]:
        """By position of this row, the token of every entry that was fed a wrong one (W6), as its record has it."""
        own = [one for one in self._incident if one.code == "W6" and one.row == self._violation.row]
        spans = [range(one.position, (one.until or one.position) + 1) for one in own if one.position is not None]
        positions = sorted(set().union(*spans))[:MOST_ENTRIES]
        return {position: entry.token for position in positions if (entry := self.at(position)) is not None}

    @cached_property
    def shift(self) -> int:
        """By how many positions all tokens that were fed wrongly are off, two of them at least; 0: by no one number."""
        if self._reader is None:
            return 0
        tokens, offset = self._reader.tokens, self._pool.view.token_offset
        for by in sorted(range(-FURTHEST_SHIFT, FURTHEST_SHIFT + 1), key=abs)[1:]:
            known = {p + offset + by: token for p, token in self.fed.items() if 0 <= p + offset + by < len(tokens)}
            if len(known) > 1 and all(tokens[place] == token for place, token in known.items()):
                return by
        return 0

    @cached_property
    def was_pool_right(self) -> bool:
        """Whether the first entry of any row of this pool is its request's own."""
        return any(self._is_of(request, 0) for request in self._ledger.requests.values())

    @cached_property
    def together(self) -> tuple[list[int], list[int]]:
        """Tokens that the forward which wrote the entry wrote around it in the row, and the request's own there."""
        middle, position = self.at(self._violation.position), self._violation.position
        if middle is None or position is None or self._reader is None:
            return [], []
        below = list(self._same_write(middle, range(position - 1, position - MOST_ENTRIES, -1)))[::-1]
        fed = [*below, middle.token, *self._same_write(middle, range(position + 1, position + MOST_ENTRIES))]
        first = position - len(below) + self._pool.view.token_offset
        return fed, self._reader.tokens[first : first + len(fed)].tolist()

    @cached_property
    def first_of(self) -> str | None:
        """A request, the row's own or another, that begins with the token of the entry that was found."""
        entry = self.at(self._violation.position)
        names = [] if entry is None else [n for n, r in self._ledger.requests.items() if entry.token in r.tokens[:1]]
        return names[0] if names else None

    @cached_property
    def guesses(self) -> list[tuple[int, Record]]:
        """Entries behind those that are final, on the request's own pages: place, counted along its row, and record."""
        if self._reader is None:
            return []
        first, end = self._reader.final_len(self._pool.pool_id), len(self._reader.pages) * self._pool.view.page_size
        places = range(first, min(end, first + MOST_ENTRIES))
        return [(place, entry) for place in places if (entry := self._of(self._reader, place)) is not None]

    # helpers

    def _same_write(self, like: Record, positions: Sequence[int]) -> Iterator[int]:
        for position in positions:
            entry = self.at(position)
            if entry is None or (entry.site, entry.step, entry.request) != (like.site, like.step, like.request):
                return
            yield entry.token

    def _is_of(self, request: Request, position: int) -> bool:
        entry = self._of(request, position)
        return entry is not None and entry.chain == self._ledger.truth(request, self._pool.pool_id, position + 1)

    def _of(self, request: Request, position: int) -> Record | None:
        name = self._ledger.slot(request, position) if position >= 0 else -1
        return None if name < 0 else self._read(int(slots_in(self._pool.view, np.array([name]))[0]))

    def _read(self, slot: int) -> Record | None:
        if not 0 <= slot < self._pool.view.num_slots:
            return None
        found = record.read_record(self._pool.records, slot)
        return found if found.site else None
