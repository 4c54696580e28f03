"""Pages: what an event does to some of them, or to none where one of them is in no state for it (`pages.EVENTS`)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.cards import (
    ASKS,
    BEGINS,
    ENDS,
    ILLEGAL,
    NOT_A_WRITER,
    NOWHERE,
    NUM_PAGES,
    NUM_STATES,
    PAGE_BOOK,
    PAGE_GENERATIONS,
    PAGE_HOLDERS,
    PAGE_OWNERS,
    PAGE_PUBLISHED,
    PAGE_REFERENCES,
    PAGE_STATES,
    PAGE_WRITERS,
    STAYS,
    WRITABLE_STATES,
)
from kvcanary.loops.memory import flags_at, longs_at, loop

LOW_32 = (1 << 32) - 1


@loop("int64(int64, int64, int64, int64, int64, int64)")
def follow_event(book, n, pages, following, change, owner):
    """The number of the first page to which the event may not happen, and then nothing has; else NOWHERE.

    book:      address of a PAGE_BOOK;  pages: address of [n] distinct numbers inside it
    following: address of [states] uint8, the state that follows each
    change:    ASKS: nothing happens, it is only asked whether it may; STAYS: the state alone; CHANGES_OWNER; BEGINS,
               ENDS: a new generation too, named by the row of this owner or by no row and no cache
    """
    book, pages = longs_at(book, PAGE_BOOK), longs_at(pages, n)
    size, following = book[NUM_PAGES], flags_at(following, book[NUM_STATES])
    states = flags_at(book[PAGE_STATES], size)
    for i in range(n):
        if following[states[pages[i]]] == ILLEGAL:
            return i
    if change == ASKS:
        return NOWHERE
    owners, writers = longs_at(book[PAGE_OWNERS], size), longs_at(book[PAGE_WRITERS], size)
    generations, published = longs_at(book[PAGE_GENERATIONS], size), flags_at(book[PAGE_PUBLISHED], size)
    references, holders = longs_at(book[PAGE_REFERENCES], size), longs_at(book[PAGE_HOLDERS], size)
    is_writable = flags_at(book[WRITABLE_STATES], book[NUM_STATES])
    for i in range(n):
        page = pages[i]
        if change != STAYS:
            owners[page] = owner
        if change in (BEGINS, ENDS):
            generations[page] = max((generations[page] + 1) & LOW_32, 1)
            references[page] = change == BEGINS
            holders[page] = owner if change == BEGINS else 0
        if change == ENDS:
            published[page] = 0
        states[page] = following[states[page]]
        writers[page] = owners[page] if is_writable[states[page]] else NOT_A_WRITER
    return NOWHERE
