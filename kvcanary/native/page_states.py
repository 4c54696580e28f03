"""Page states: what an event does to some pages, or to none where one is in no state for it (`page_states.EVENTS`)."""

from kvcanary.native.jit import flags_at, longs_at, loop, view
from kvcanary.native.layout import ASKS, BEGINS, ENDS, ILLEGAL, NOT_A_WRITER, NOWHERE, PAGES, REQUEST, ROWS_FULL, STAYS
from kvcanary_kernels.record.layout import WRITTEN

LOW_32 = (1 << 32) - 1


@loop("int64(int64, int64, int64, int64, int64, int64)")
def follow_event(struct, n, pages, following, change, owner):
    """The number of the first page to which the event may not happen, and then nothing has; else NOWHERE.

    struct:      address of PAGES;  pages: address of [n] distinct numbers inside it
    following: address of [states] uint8, the state that follows each
    change:    ASKS: nothing happens, it is only asked whether it may; STAYS: the state alone; CHANGES_OWNER; BEGINS,
               ENDS: a new generation too, named by the row of this owner or by no row and no cache
    """
    struct, pages = view(PAGES, struct), longs_at(pages, n)
    size, following = struct.num_pages, flags_at(following, struct.num_states)
    states = flags_at(struct.states, size)
    for i in range(n):
        if following[states[pages[i]]] == ILLEGAL:
            return i
    if change == ASKS:
        return NOWHERE
    owners, writers = longs_at(struct.owners, size), longs_at(struct.writers, size)
    generations, published = longs_at(struct.generations, size), flags_at(struct.published, size)
    references, holders = longs_at(struct.references, size), longs_at(struct.holders, size)
    is_writable = flags_at(struct.writable_states, struct.num_states)
    for i in range(n):
        page = pages[i]
        if change != STAYS:
            owners[page] = owner
        if change in (BEGINS, ENDS):
            generations[page] = max((generations[page] + 1) & LOW_32, 1)
            references[page] = change == BEGINS
            holders[page] = owner if change == BEGINS else 0
        if change == ENDS:
            struct.num_published -= published[page]
            published[page] = 0
        states[page] = following[states[page]]
        writers[page] = owners[page] if is_writable[states[page]] else NOT_A_WRITER
    return NOWHERE


@loop("int64(int64, int64, int64, int64[::1], int64, int64, int64)")
def grant_rows(n, structs, counts, pages, struct, following, page_size):
    """Pages that BEGIN, at the ends of rows of n requests; `follow_event` of all of them.

    structs:  address of those of requests, [n], each once;  counts: address of [n], how many of the pages each is
              granted
    ROWS_FULL: a row has no room for its own, and nothing has happened
    """
    own, new, at = longs_at(structs, n), longs_at(counts, n), 0
    for number in range(n):
        request = view(REQUEST, own[number])
        if request.num_row + page_size * new[number] > request.row_room:
            return ROWS_FULL
    wrong = follow_event(struct, pages.size, pages.ctypes.data, following, ASKS, 0)
    if wrong != NOWHERE:
        return wrong
    for number in range(n):
        request, count = view(REQUEST, own[number]), new[number]
        follow_event(struct, count, pages.ctypes.data + 8 * at, following, BEGINS, request.uid)
        end = request.num_row
        request.num_row = end + page_size * count
        slots = longs_at(request.row, request.num_row)
        for place in range(count):
            for offset in range(page_size):
                slots[end + page_size * place + offset] = page_size * pages[at + place] + offset
        at += count
    return NOWHERE


@loop("int64(int64, int64[::1], int64, int64[::1])")
def write_pages(struct, slots, page_size, fresh):
    """Pages in which a slot was written are WRITTEN, where they may be and were not yet; how many these are.

    slots: [n];  fresh: out, these pages, as many as have room: the others stay as they are
    """
    struct, found = view(PAGES, struct), 0
    states = flags_at(struct.states, struct.num_pages)
    is_writable = flags_at(struct.writable_states, struct.num_states)
    for slot in slots:
        page = slot // page_size
        is_fresh = 0 <= page < struct.num_pages and states[page] != WRITTEN and is_writable[states[page]]
        if is_fresh and found < fresh.size:
            states[page] = WRITTEN
            fresh[found] = page
            found += 1
    return found


@loop("void(int64, int64[::1], int64, int64)")
def describe_pages(struct, pages, numbers, room):
    """What is true of these pages, which are some; behind them the first of them again, as often as there is room.

    numbers: address of [4, room] out: pages, generations, owners, states
    """
    struct, numbers = view(PAGES, struct), longs_at(numbers, 4 * room)
    size = struct.num_pages
    generations, owners = longs_at(struct.generations, size), longs_at(struct.owners, size)
    states = flags_at(struct.states, size)
    for i in range(room):
        page = pages[i if i < pages.size else 0]
        numbers[i], numbers[room + i] = page, generations[page]
        numbers[2 * room + i], numbers[3 * room + i] = owners[page], states[page]


@loop("void(int64[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[::1], int64[::1])")
def publish_pages(pages, generations, owners, states, to_generations, to_owners, to_states):
    """Copy what is true of these pages; the others [num_pages]."""
    for page in pages:
        to_generations[page], to_owners[page] = generations[page], owners[page]
        to_states[page] = states[page]
