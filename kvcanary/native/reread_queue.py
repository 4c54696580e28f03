"""Queues of re-reads: which bytes of rows are read again in a step, oldest first; where rows end; what was found."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.config import share_of
from kvcanary.native.jit import longs_at, loop
from kvcanary.native.layout import (
    CHAIN_READS,
    COMMIT_STEP,
    COMMITTED_LEN,
    END,
    END_LENGTH,
    END_PAGE,
    END_ROW,
    FIRST_RANGE,
    ITS_SHARE,
    LEFT_TO_BOOKS,
    NO_ROOM,
    NULL_SLOTS,
    NUM_RANGES,
    NUM_ROW_SLOTS,
    PAGE_SIZE,
    POOL_CARD,
    POOL_ID,
    QUEUE_CARD,
    QUEUE_LENGTH,
    RANGE,
    RANGE_END,
    RANGE_START,
    RANGE_STEP,
    RANGES,
    RANGES_ROOM,
    RANGES_TO_SPARE,
    REQUEST_CARD,
    ROW_SLOTS,
    SLICE_RANGES,
    SLICE_SAID,
    SLICE_SLOTS,
    SLICE_WAIT,
    TAIL_GRANT,
    TAIL_PAGE,
    TAKEN,
    TAKEN_END,
    TAKEN_ROW,
    TAKEN_START,
    TAKEN_STEP,
    WINDOW,
)
from kvcanary.native.request_tokens import chain_of, final_len
from kvcanary.pools.slot_maps import first_visible

_share, first_seen = loop()(share_of), loop()(first_visible)


@loop()
def _ranges(queue):
    return longs_at(queue[RANGES], RANGE * queue[RANGES_ROOM])


@loop()
def _join(queue, start, end, step):
    """At the end of a queue that has room."""
    ranges, count = _ranges(queue), queue[NUM_RANGES]
    at = RANGE * ((queue[FIRST_RANGE] + count) % queue[RANGES_ROOM])
    ranges[at + RANGE_START], ranges[at + RANGE_END], ranges[at + RANGE_STEP] = start, end, step
    queue[NUM_RANGES] = count + 1


@loop()
def extend(queue, length, step):
    """Positions up to here are final; the queue has room."""
    if length > queue[QUEUE_LENGTH]:
        _join(queue, queue[QUEUE_LENGTH], length, step)
        queue[QUEUE_LENGTH] = length


@loop()
def _join_last(queue, start, end, step):
    """The same, with the last range where that goes on: else each token of an answer stays a range for good."""
    ranges, count = _ranges(queue), queue[NUM_RANGES]
    last = RANGE * ((queue[FIRST_RANGE] + max(count, 1) - 1) % queue[RANGES_ROOM])
    if count and ranges[last + RANGE_END] == start and ranges[last + RANGE_STEP] == step:
        ranges[last + RANGE_END] = end
    else:
        _join(queue, start, end, step)


@loop("void(int64, int64, int64)")
def extend_queue(queue, length, step):
    """`extend`, by the queue's address."""
    extend(longs_at(queue, QUEUE_CARD), length, step)


@loop()
def _put(taken, place, row, start, end, step):
    at = TAKEN * place
    taken[at + TAKEN_ROW], taken[at + TAKEN_STEP] = row, step
    taken[at + TAKEN_START], taken[at + TAKEN_END] = start, end


@loop()
def _take(queue, count, before, step, row, taken):
    """So many positions, of looks before a step, are looked at in this one; how many ranges of this row they are.

    taken: [TAKEN * (ranges in the queue)] out
    """
    ranges, found = _ranges(queue), 0
    while count > 0 and queue[NUM_RANGES] > 0:
        first = RANGE * queue[FIRST_RANGE]
        start, end, read = ranges[first + RANGE_START], ranges[first + RANGE_END], ranges[first + RANGE_STEP]
        if read >= before:
            break
        cut = min(end, start + count)
        if cut < end:
            ranges[first + RANGE_START] = cut
        else:
            queue[FIRST_RANGE] = (queue[FIRST_RANGE] + 1) % queue[RANGES_ROOM]
            queue[NUM_RANGES] -= 1
        _join_last(queue, start, cut, step)
        at = TAKEN * found
        taken[at + TAKEN_ROW], taken[at + TAKEN_START], taken[at + TAKEN_END], taken[at + TAKEN_STEP] = (
            row,
            start,
            cut,
            read,
        )
        found += 1
        count -= cut - start
    return found


@loop("int64(int64, int64, int64, int64, int64)")
def take_ranges(queue, count, before, step, taken):
    """`_take`, by addresses of the queue and of what is taken."""
    queue = longs_at(queue, QUEUE_CARD)
    return _take(queue, count, before, step, 0, longs_at(taken, TAKEN * queue[NUM_RANGES]))


@loop("int64(int64)")
def oldest_look(queue):
    """The step of the position that waits longest, of a queue that has some, by its address."""
    queue = longs_at(queue, QUEUE_CARD)
    ranges, oldest = _ranges(queue), 0
    for place in range(queue[NUM_RANGES]):
        step = ranges[RANGE * ((queue[FIRST_RANGE] + place) % queue[RANGES_ROOM]) + RANGE_STEP]
        oldest = step if place == 0 else min(oldest, step)
    return oldest


@loop()
def _count(queue, asked, stride):
    """Positions that are looked at."""
    length = queue[QUEUE_LENGTH]
    return _share(length, stride) if asked == ITS_SHARE else min(asked, length)


@loop("int64(int64, int64, int64, int64, int64, int64, int64, boolean, int64[::1], int64[:, ::1], int64)")
def take_slice(n, cards, pool, counts, stride, before, step, is_mapped, slots, ranges, said):
    """What is looked at in a step of rows in a pool: of what was looked at before this step, oldest look first.

    cards:  address of [n];  pool: address of its card
    counts: address of [n] positions, ITS_SHARE: as `config.share_of` has it of all; 0: the share of every row
    slots:  out, as rows name them, where the pool does too without those in front of its own
    ranges: [ranges, TAKEN] out, in their order; what the pool's window has left is not among them
    said:   address of [SLICE_SAID] out
    NO_ROOM: a queue has none. LEFT_TO_BOOKS: slots or ranges have none for as many as `said` has. Nothing was looked at
    """
    own, asked, pool = longs_at(cards, n), longs_at(counts, n if counts else 0), longs_at(pool, POOL_CARD)
    said, taken = longs_at(said, SLICE_SAID), ranges.reshape(ranges.size)
    said[SLICE_SLOTS], said[SLICE_RANGES], said[SLICE_WAIT] = 0, 0, 0
    for number in range(n):
        request, chain = longs_at(own[number], REQUEST_CARD), chain_of(own[number], pool[POOL_ID])
        queue = longs_at(chain[CHAIN_READS], QUEUE_CARD)
        if queue[NUM_RANGES] + RANGES_TO_SPARE > queue[RANGES_ROOM]:
            return NO_ROOM
        extend(queue, final_len(chain, request[COMMITTED_LEN]), request[COMMIT_STEP])
        said[SLICE_SLOTS] += _count(queue, asked[number] if counts else ITS_SHARE, stride)
        said[SLICE_RANGES] += queue[NUM_RANGES]
    if said[SLICE_SLOTS] > slots.shape[0] or said[SLICE_RANGES] > ranges.shape[0]:
        return LEFT_TO_BOOKS
    num_slots, num_ranges, wait = 0, 0, 0
    for number in range(n):
        request, chain = longs_at(own[number], REQUEST_CARD), chain_of(own[number], pool[POOL_ID])
        queue, row = longs_at(chain[CHAIN_READS], QUEUE_CARD), longs_at(request[ROW_SLOTS], request[NUM_ROW_SLOTS])
        count = _count(queue, asked[number] if counts else ITS_SHARE, stride)
        first = first_seen(final_len(chain, request[COMMITTED_LEN]), pool[WINDOW]) if pool[WINDOW] else 0
        found, kept = _take(queue, count, before, step, number, taken[TAKEN * num_ranges :]), num_ranges
        for one in range(num_ranges, num_ranges + found):
            at = TAKEN * one
            end = taken[at + TAKEN_END]
            if end <= first:
                continue
            start, read = max(taken[at + TAKEN_START], first), taken[at + TAKEN_STEP]
            to, kept = TAKEN * kept, kept + 1
            taken[to + TAKEN_ROW], taken[to + TAKEN_START], taken[to + TAKEN_END], taken[to + TAKEN_STEP] = (
                number,
                start,
                end,
                read,
            )
            wait = max(wait, step - read)
            for position in range(start, min(end, row.shape[0])):
                if is_mapped or row[position] >= pool[NULL_SLOTS]:
                    slots[num_slots] = row[position]
                    num_slots += 1
        num_ranges = kept
    said[SLICE_SLOTS], said[SLICE_RANGES], said[SLICE_WAIT] = num_slots, num_ranges, wait
    return 0


@loop("int64(int64, int64, int64, int64, boolean, int64, int64)")
def end_rows(n, cards, pool, generations, again, always, ends):
    """Rows whose last page has room behind final entries and was not looked at in its grant; how many.

    cards:  address of [n];  pool: address of its card;  generations: address of [pages]
    again:  those that were looked at before, too;  always: address of [n], of which rows they too are asked; 0: of none
    ends:   [n, END] out: number of the row, its final length, its last page
    """
    own, hurried, ends = longs_at(cards, n), longs_at(always, n if always else 0), longs_at(ends, END * n)
    pool, found = longs_at(pool, POOL_CARD), 0
    size = pool[PAGE_SIZE]
    for number in range(n):
        request, chain = longs_at(own[number], REQUEST_CARD), chain_of(own[number], pool[POOL_ID])
        length = final_len(chain, request[COMMITTED_LEN])
        first = length - length % size
        if first == length or first >= request[NUM_ROW_SLOTS]:
            continue
        page = longs_at(request[ROW_SLOTS], request[NUM_ROW_SLOTS])[first] // size
        if page < 0:
            continue
        grant = longs_at(generations, page + 1)[page]
        if not again and not (always and hurried[number]) and chain[TAIL_PAGE] == page and chain[TAIL_GRANT] == grant:
            continue
        chain[TAIL_PAGE], chain[TAIL_GRANT] = page, grant
        ends[END * found + END_ROW], ends[END * found + END_LENGTH], ends[END * found + END_PAGE] = number, length, page
        found += 1
    return found


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
