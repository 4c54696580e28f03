"""Pages: what may happen to a page in which state, in one table, and what is true of every page, in arrays."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.errors import LifetimeError, PageStateError
from kvcanary.ledger.page_history import PageHistory, phrase
from kvcanary.native.layout import (
    ASKS,
    BEGINS,
    CHANGES_OWNER,
    ENDS,
    FINAL,
    ILLEGAL,
    NOT_A_WRITER,
    NOWHERE,
    PAGES,
    ROWS_FULL,
    STAYS,
)
from kvcanary_kernels.record.layout import (
    COMMITTED,
    FREE,
    LOAD_FAILED,
    LOADING,
    NEVER_WRITTEN,
    NO_OWNER,
    QUARANTINED,
    RESERVED,
    SHARED,
    SHARED_OWNER,
    WRITTEN,
)

if TYPE_CHECKING:
    from kvcanary.ledger.requests import Batch

Array = NDArray[Any]


class Event(NamedTuple):
    """What may happen to a page: the states in which it may, each with the state that follows, and what to do else.

    change: of owner and generation, as `loops.follow_event` has it
    """

    after: dict[int, int]
    remedy: str
    change: int = STAYS


_FREE_IT = "free it first, and let it leave its quarantine"
EVENTS: dict[str, Event] = {
    "granted": Event({FREE: RESERVED}, _FREE_IT, BEGINS),
    "set aside": Event({FREE: NEVER_WRITTEN}, _FREE_IT, BEGINS),  # granted as the destination of a load
    "copied": Event({FREE: WRITTEN}, _FREE_IT, BEGINS),  # granted as the private copy of a shared page
    "written": Event({RESERVED: WRITTEN, WRITTEN: WRITTEN, LOAD_FAILED: WRITTEN}, "grant it for writing first"),
    "committed": Event({WRITTEN: COMMITTED, COMMITTED: COMMITTED}, "commit only what was written or loaded"),
    "marked loading": Event(
        {NEVER_WRITTEN: LOADING, LOAD_FAILED: LOADING}, "load only into pages that were granted with for_load"
    ),
    "loaded": Event({LOADING: WRITTEN}, "begin its load first, and end it once"),
    "marked load-failed": Event({LOADING: LOAD_FAILED, NEVER_WRITTEN: LOAD_FAILED}, "begin its load first"),
    "restored": Event({NEVER_WRITTEN: WRITTEN, RESERVED: WRITTEN}, "restore only into pages that hold nothing yet"),
    "published": Event(
        {COMMITTED: SHARED, SHARED: SHARED},
        "commit it first, a cache must not hold what may still be written",
        CHANGES_OWNER,
    ),
    "forked": Event(dict.fromkeys((WRITTEN, COMMITTED, SHARED), SHARED), "fork only what was written", CHANGES_OWNER),
    "acquired": Event({SHARED: SHARED}, "drop it from the prefix cache, which must name only pages that it holds"),
    "released": Event({SHARED: SHARED}, "release or copy only what is shared"),  # one reference fewer
    "taken back": Event({SHARED: WRITTEN}, "take back only what is shared"),  # by the last request of a fork
    "freed": Event(
        dict.fromkeys((NEVER_WRITTEN, LOAD_FAILED, RESERVED, WRITTEN, COMMITTED, SHARED), FREE),
        "free a page once, and never while it loads",
        ENDS,
    ),
    "evicted": Event({SHARED: FREE}, "evict only what was published", ENDS),
    "taken away": Event(dict.fromkeys(range(SHARED + 1), FREE), "name a page of the pool", ENDS),  # granted to another
    "quarantined": Event({FREE: QUARANTINED}, "free it first"),
    "left quarantine": Event({QUARANTINED: FREE}, "quarantine it first"),
}
_STATES = "FREE QUARANTINED NEVER_WRITTEN LOADING LOAD_FAILED RESERVED WRITTEN COMMITTED SHARED"
STATE_NAMES = dict(enumerate(_STATES.split()))  # record.FREE is 0

_NEXT = {
    name: np.array([event.after.get(state, ILLEGAL) for state in STATE_NAMES], dtype=np.uint8)
    for name, event in EVENTS.items()
}
_NEXT_AT = {name: following.ctypes.data for name, following in _NEXT.items()}
_IS_WRITABLE = _NEXT["written"] != ILLEGAL
_MOST_FINAL = 4096  # pages that one step makes final without the rules
_MOST_LISTS = 4096  # of changed pages, before they become one
_NONE = np.zeros(0, np.int64)


class Pages:
    """What is true of every page; arrays are changed in place, never replaced. All are [num_pages].

    generations: int64, counts up at every grant and at every free; 0 is never granted
    states:      uint8, record.FREE to record.SHARED
    owners:      int64, the uid whose private page it is, NO_OWNER or SHARED_OWNER
    refcounts:   int64, rows that name the page; a cache's own hold on a published page does not count
    published:   bool, a prefix cache holds the page
    writers:     int64, the uid whose forwards may write the page now; else a value that is no uid
    looked_at:   int64 [2, num_pages], generation and step in which what lay in the page at its grant was found finite

    changed: pages to which something has happened since the last `changes`, event by event
    struct:    PAGES (native/layout.py), where loops find all this;  struct_at: its address
    """

    def __init__(self, num_pages: int, null_pages: int) -> None:
        from kvcanary.native import loops

        self.null_pages = null_pages
        self.generations = np.zeros(num_pages, dtype=np.int64)
        self.states = np.full(num_pages, FREE, dtype=np.uint8)
        self.owners = np.full(num_pages, NO_OWNER, dtype=np.int64)
        self.refcounts = np.zeros(num_pages, dtype=np.int64)
        self.published = np.zeros(num_pages, dtype=np.bool_)
        self.writers = np.full(num_pages, NOT_A_WRITER, dtype=np.int64)
        self.writers[:null_pages] = NO_OWNER  # padding may write here
        self.looked_at = np.zeros((2, num_pages), dtype=np.int64)
        self.history = PageHistory(num_pages)
        self.changed: list[Array] = []
        self.holder_sums = np.zeros(num_pages, dtype=np.int64)  # uids of the rows that name a page, added up
        arrays = self.states, self.owners, self.writers, self.generations, self.refcounts, self.published
        addresses = [own.ctypes.data for own in (*arrays, self.holder_sums)]
        self.struct = array("q", (*addresses, num_pages, _IS_WRITABLE.ctypes.data, len(STATE_NAMES), 0))
        self.struct_at = self.struct.buffer_info()[0]
        self._fresh: Array = np.empty(num_pages, np.int64)  # for pages that a forward has written first
        room = min(num_pages, _MOST_FINAL)
        self._final: Array = np.empty((2, room), np.int64)  # pages, and the uids of their rows
        arguments = self.struct_at, _NEXT_AT["committed"], room, *(row.ctypes.data for row in self._final), 0
        self.final_struct = array("q", (*arguments, num_pages, self._fresh.ctypes.data, 0))
        self.final_at = self.final_struct.buffer_info()[0]
        self._loops = loops

    def __len__(self) -> int:
        return len(self.states)

    def numbers(self, pages: Sequence[int] | Array) -> Array:
        """[n] int64; pages that one event names are inside the pool, not null, and distinct."""
        where = np.array(pages, dtype=np.int64)
        listed = where.tolist()
        if not listed:
            return where
        if min(listed) < self.null_pages or max(listed) >= len(self.states):
            wrong = next(page for page in listed if not self.null_pages <= page < len(self))
            error = LifetimeError(
                f"page must be in [{self.null_pages}, {len(self)}), got {wrong}: null pages are never granted or "
                "freed, take them out of the engine's free list"
            )
            error.outside = wrong
            raise error
        if len(set(listed)) < len(listed):
            twice = next(page for page in listed if listed.count(page) > 1)
            raise LifetimeError(f"an event must name a page once, got page {twice} twice: name it once")
        return where

    def expect(self, event: str, pages: Array, request_id: str | None = None) -> None:
        """All of these pages are in a state in which the event is legal."""
        self._happen(event, pages, request_id, ASKS)

    def advance(self, event: str, pages: Array, step: int, request_id: str | None = None, uid: int = NO_OWNER) -> None:
        """The event happens to all of these pages, or is refused for all; references stay.

        uid: of the request whose private pages they become, where the event begins a grant. A new generation begins
        with it, and when a page is nobody's any more, so that no record of the last one fits.
        """
        if not pages.size:
            return
        change = EVENTS[event].change
        self._happen(event, pages, request_id, change, SHARED_OWNER if change == CHANGES_OWNER else uid)
        self._note_changes(pages)
        self.history.add(event, pages, step, request_id)

    def grant_all(self, event: str, pages: Array, batch: Batch, counts: array[int], step: int, page_size: int) -> None:
        """The same to several requests, each once, at the ends of their rows: so many of the pages each, in order."""
        arguments = *batch.loop_arguments, counts.buffer_info()[0], pages, self.struct_at, _NEXT_AT[event], page_size
        wrong = self._loops.grant_rows(*arguments)
        if wrong == ROWS_FULL:
            batch.make_row_room([page_size * count for count in counts])
            wrong = self._loops.grant_rows(*arguments)
        if wrong != NOWHERE:
            number = int(np.searchsorted(np.cumsum(counts), wrong, side="right"))
            raise self._refused(event, int(pages[wrong]), batch.names[number])
        self._note_changes(pages)
        self.history.add_all(event, pages, step, batch.names, counts)

    def record_final_pages(self, step: int, name_of: Callable[[int], str]) -> None:
        """Of runs that were collected: pages that loops have marked as written first, and made final.

        name_of: a live uid's request
        """
        struct = self.final_struct
        if fresh := struct[FINAL.num_fresh]:
            struct[FINAL.num_fresh] = 0
            self._note_changes(self._fresh[:fresh].copy())
        count = struct[FINAL.num_final]
        if not count:
            return
        struct[FINAL.num_final] = 0
        pages, uids = self._final[:, :count]
        pages = pages.copy()
        self._note_changes(pages)
        self.history.add_all("committed", pages, step, map(name_of, uids.tolist()), repeat(1))

    def publish(self, pages: Array, step: int, request_id: str) -> None:
        """A prefix cache holds these pages too, in which all is final: they are shared from now on."""
        self.advance("published", pages, step, request_id)
        self.published[pages] = True
        self._count_published()

    def add_reference(self, pages: Array, uid: int) -> None:
        self.refcounts[pages] += 1
        self.holder_sums[pages] += uid

    def drop_reference(self, pages: Array, uid: int) -> None:
        self.refcounts[pages] -= 1
        self.holder_sums[pages] -= uid

    def wrote(self, slots: Array, page_size: int = 1) -> None:
        """A forward has written these slots; pages that it must not write stay as they are."""
        room = self._fresh[self.final_struct[FINAL.num_fresh] :]  # in front are those of which nobody was told yet
        if found := self._loops.write_pages(self.struct_at, slots, page_size, room):
            self._note_changes(room[:found].copy())

    def found_finite(self, pages: Array, step: int) -> None:
        """What lies in these pages, [n] int64, was looked at under the grant that they have."""
        self.looked_at[0, pages], self.looked_at[1, pages] = self.generations[pages], step

    def finite_since(self, page: int) -> int | None:
        """The step in which somebody found finite what lay there when it was granted; None: nobody has."""
        generation, step = self.looked_at[:, page].tolist()
        return step if generation and generation == self.generations[page] else None

    def write_codes(self, pages: Array, uids: Array | np.int64) -> dict[int, str]:
        """By entry the code of a write that is not its row's to make; empty when all is well.

        pages: [entries] int64, page of the slot that the entry writes, inside the pool
        uids:  [entries] int64, uid of the entry's row, or one for all; NO_OWNER for padding, which may write null pages
               only
        """
        wrong, uids = (self.writers.take(pages) != uids).nonzero()[0].tolist(), np.broadcast_to(uids, pages.shape)
        return {entry: self._write_code(int(pages[entry]), int(uids[entry])) for entry in wrong}

    def changed_everywhere(self) -> None:
        """The arrays were filled from elsewhere."""
        self.changed = [np.arange(len(self))]
        self._count_published()

    def changes(self) -> Array:
        """[n] int64: pages to which something has happened since the last call, for a copy of the arrays; some twice.

        As many as there were events, whatever the pool's size.
        """
        changed, self.changed = self.changed, []
        return np.concatenate(changed) if len(changed) > 1 else changed[0] if changed else _NONE

    def _count_published(self) -> None:
        self.struct[PAGES.num_published] = int(np.count_nonzero(self.published))

    def _note_changes(self, pages: Array) -> None:
        self.changed.append(pages)
        if len(self.changed) > _MOST_LISTS:  # nobody asks
            self.changed = [np.unique(np.concatenate(self.changed))]

    def _write_code(self, page: int, uid: int) -> str:
        if self.states[page] == QUARANTINED:
            return "W7"
        if self.owners[page] == SHARED_OWNER:
            return "W3"
        return "W8" if self.owners[page] == uid >= 0 else "W2"

    def _happen(self, event: str, pages: Array, request_id: str | None, change: int, owner: int = NO_OWNER) -> None:
        """`loops.follow_event`; PageStateError names the first page to which it may not happen."""
        arguments = self.struct_at, pages.size, pages.ctypes.data, _NEXT_AT[event], change, owner
        if (wrong := self._loops.follow_event(*arguments)) != NOWHERE:
            raise self._refused(event, int(pages[wrong]), request_id)

    def _refused(self, event: str, page: int, request_id: str | None) -> PageStateError:
        since = "".join(f" ({last}, {last.place})" for last in self.history.of(page)[-1:])
        return _refusal(event, page, request_id, int(self.states[page]), since)


def taken(event: str, page: int, request_id: str, other: str) -> PageStateError:
    """Another request has had the same event of a free page before, in the same call."""
    return _refusal(event, page, request_id, EVENTS[event].after[FREE], f" ({phrase(event, other)} just now)")


def _refusal(event: str, page: int, request_id: str | None, state: int, since: str) -> PageStateError:
    *others, last = [STATE_NAMES[legal] for legal in EVENTS[event].after]
    wanted = f"{', '.join(others)} or {last}" if others else last
    return PageStateError(
        f"page {page} must be {wanted} to be {phrase(event, request_id)}, it is {STATE_NAMES[state]}{since}: "
        f"{EVENTS[event].remedy}",
        page=page,
        state=STATE_NAMES[state],
        event=event,
    )
