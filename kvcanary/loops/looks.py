"""Looks: the slots that they are asked for, and what they have found."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.cards import END, END_LENGTH, END_PAGE
from kvcanary.loops.memory import longs_at, loop


@loop("void(int64, int64, int64, int64, int64, int64)")
def list_slots(n, pages, page_size, generations, slots, grants):
    """All slots of these pages, and the grant that each is in.

    pages: address of [n];  slots, grants: addresses of [n * page_size] out
    generations: address of those of all pages; 0: nobody asks for grants, and all are 0
    """
    pages, slots, grants = longs_at(pages, n), longs_at(slots, n * page_size), longs_at(grants, n * page_size)
    for i in range(n):
        grant = longs_at(generations, pages[i] + 1)[pages[i]] if generations else 0
        for at in range(page_size * i, page_size * (i + 1)):
            slots[at], grants[at] = page_size * pages[i] + at - page_size * i, grant


@loop("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def list_ends(n, ends, page_size, generations, slots, grants, positions, rows):
    """The same behind the final entries of rows, on their last pages, with position and row; how many these are.

    ends: address of [n, END], as `loops.end_rows` has them;  rows: 0 for the first of these, and so on
    slots, grants, positions, rows: addresses with room for n pages
    """
    ends, found = longs_at(ends, END * n), 0
    slots, grants = longs_at(slots, n * page_size), longs_at(grants, n * page_size)
    positions, rows = longs_at(positions, n * page_size), longs_at(rows, n * page_size)
    for i in range(n):
        page, length = ends[END * i + END_PAGE], ends[END * i + END_LENGTH]
        grant = longs_at(generations, page + 1)[page]
        for position in range(length, length - length % page_size + page_size):
            slots[found], grants[found] = page_size * page + position % page_size, grant
            positions[found], rows[found] = position, i
            found += 1
    return found


@loop("boolean(int64, int64)")
def are_zero(n, parts):
    """Whether all numbers of these parts of memory are; `parts`: address of [n, 2], address and count of each."""
    parts = longs_at(parts, 2 * n)
    for i in range(n):
        for number in longs_at(parts[2 * i], parts[2 * i + 1]):
            if number:
                return False
    return True
