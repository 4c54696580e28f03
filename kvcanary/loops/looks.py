"""Looks: the slots that they are asked for, and what they have found."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.cards import END, END_LENGTH, END_PAGE
from kvcanary.loops.memory import longs_at, loop


@loop("void(int64, int64, int64, int64, int64[::1], int64[::1])")
def list_slots(n, pages, page_size, generations, slots, grants):
    """All slots of these pages, and the grant that each is in.

    pages: address of [n];  slots, grants: [n * page_size] out
    generations: address of those of all pages; 0: nobody asks for grants, and all are 0
    """
    pages = longs_at(pages, n)
    for i in range(n):
        grant = longs_at(generations, pages[i] + 1)[pages[i]] if generations else 0
        for at in range(page_size * i, page_size * (i + 1)):
            slots[at], grants[at] = page_size * pages[i] + at - page_size * i, grant


@loop("int64(int64, int64, int64, int64, int64[:, ::1])")
def list_ends(n, ends, page_size, generations, listed):
    """The same behind the final entries of rows, on their last pages, with position and row; how many these are.

    ends:   address of [n, END], as `loops.end_rows` has them;  rows: 0 for the first of these, and so on
    listed: [4, n * page_size] out: slots, grants, positions, rows
    """
    ends, found = longs_at(ends, END * n), 0
    slots, grants, positions, rows = listed[0], listed[1], listed[2], listed[3]
    for i in range(n):
        page, length = ends[END * i + END_PAGE], ends[END * i + END_LENGTH]
        grant = longs_at(generations, page + 1)[page]
        for position in range(length, length - length % page_size + page_size):
            slots[found], grants[found] = page_size * page + position % page_size, grant
            positions[found], rows[found] = position, i
            found += 1
    return found


@loop("void(int64, int64, int64, int64, int64, int64, int64[::1], int64[::1])")
def tell_slots(live, to_slots, to_grants, answers, numbers, first, slots, grants):
    """Slots [n], behind the first ones of a place, and that none of its answers is known yet.

    live, to_slots, to_grants, answers: addresses of [1], [first + n], [first + n] and [numbers] out
    grants: [n]; [1]: one for all of them; [0]: none is told
    """
    n, answers = slots.shape[0], longs_at(answers, numbers)
    to_slots, to_grants = longs_at(to_slots, first + n), longs_at(to_grants, first + n)
    longs_at(live, 1)[0] = first + n
    answers[:] = 0
    for i in range(n):
        to_slots[first + i] = slots[i]
        if grants.shape[0]:
            to_grants[first + i] = grants[min(i, grants.shape[0] - 1)]


@loop("boolean(int64, int64)")
def are_zero(n, parts):
    """Whether all numbers of these parts of memory are; `parts`: address of [n, 2], address and count of each."""
    parts = longs_at(parts, 2 * n)
    for i in range(n):
        for number in longs_at(parts[2 * i], parts[2 * i + 1]):
            if number:
                return False
    return True
