"""Queues of re-reads: which bytes of rows are read again in a step, oldest first; where rows end; what was found."""

from kvcanary.config import share_of
from kvcanary.native import layout
from kvcanary.native.jit import longs_at, loop, nth, view
from kvcanary.native.layout import LISTED, POOL, QUEUE, RANGE, REQUEST, ROW_END, SLICE, TAKEN
from kvcanary.native.request_tokens import chain_of, final_len
from kvcanary.pools.slot_maps import first_visible

_share, first_seen = loop()(share_of), loop()(first_visible)


@loop()
def _nth_range(queue, place):
    return nth(RANGE, queue.ranges, (queue.first + place) % queue.room)


@loop()
def _join(queue, start, end, step):
    """At the end of a queue that has room."""
    last = _nth_range(queue, queue.num_ranges)
    last.start, last.end, last.step = start, end, step
    queue.num_ranges += 1


@loop()
def _join_last(queue, start, end, step):
    """The same, with the last range where that goes on: else each token of an answer stays a range for good."""
    last = _nth_range(queue, max(queue.num_ranges, 1) - 1)
    if queue.num_ranges and last.end == start and last.step == step:
        last.end = end
    else:
        _join(queue, start, end, step)


@loop("void(int64, int64, int64)")
def extend_queue(queue, length, step):
    """Positions up to here are final; the queue, which is given by its address, has room."""
    queue = view(QUEUE, queue)
    if length > queue.length:
        _join(queue, queue.length, length, step)
        queue.length = length


@loop()
def _put(taken, place, row, start, end, step):
    there = nth(TAKEN, taken, place)
    there.row, there.start, there.end, there.step = row, start, end, step


@loop("int64(int64, int64, int64, int64, int64)")
def take_ranges(queue, count, before, step, taken):
    """So many positions, of re-reads before a step, are read in this one; how many ranges they are.

    queue: its address;  taken: address of [ranges in the queue, TAKEN] out, of row 0
    """
    found, queue = 0, view(QUEUE, queue)
    while count > 0 and queue.num_ranges > 0:
        first = _nth_range(queue, 0)
        start, end, read = first.start, first.end, first.step
        if read >= before:
            break
        cut = min(end, start + count)
        if cut < end:
            first.start = cut
        else:
            queue.first = (queue.first + 1) % queue.room
            queue.num_ranges -= 1
        _join_last(queue, start, cut, step)
        _put(taken, found, 0, start, cut, read)
        found += 1
        count -= cut - start
    return found


@loop("int64(int64)")
def oldest_read(queue):
    """The step of the position that waits longest, of a queue that has some, by its address."""
    queue = view(QUEUE, queue)
    oldest = 0
    for place in range(queue.num_ranges):
        step = _nth_range(queue, place).step
        oldest = step if place == 0 else min(oldest, step)
    return oldest


@loop()
def _count(queue, asked, stride):
    """Positions that are read."""
    length = queue.length
    return _share(length, stride) if asked == layout.ITS_SHARE else min(asked, length)


@loop("int64(int64, int64, int64, int64, int64, int64, int64, boolean, int64[::1], int64[:, ::1], int64)")
def take_slice(n, structs, pool, counts, stride, before, step, is_mapped, slots, ranges, said):
    """What is read in a step of rows in a pool: of what was read before this step, oldest re-read first.

    structs:  address of [n];  pool: address of its struct
    counts: address of [n] positions, ITS_SHARE: as `config.share_of` has it of all; 0: the share of every row
    slots:  out, as rows name them, where the pool does too without those in front of its own
    ranges: [ranges, TAKEN] out, in their order; what the pool's window has left is not among them
    said:   address of a SLICE, out
    NO_ROOM: a queue has none. LEFT_TO_LEDGER: slots or ranges have none for as many as `said` has. Nothing was looked
             at
    """
    own, asked, pool = longs_at(structs, n), longs_at(counts, n if counts else 0), view(POOL, pool)
    said, taken = view(SLICE, said), ranges.ctypes.data
    said.slots, said.ranges, said.wait = 0, 0, 0
    for number in range(n):
        request, chain = view(REQUEST, own[number]), chain_of(own[number], pool.pool_id)
        queue = view(QUEUE, chain.reads)
        if queue.num_ranges + layout.RANGES_TO_SPARE > queue.room:
            return layout.NO_ROOM
        extend_queue(chain.reads, final_len(chain, request.committed_len), request.commit_step)
        said.slots += _count(queue, asked[number] if counts else layout.ITS_SHARE, stride)
        said.ranges += queue.num_ranges
    if said.slots > slots.shape[0] or said.ranges > ranges.shape[0]:
        return layout.LEFT_TO_LEDGER
    num_slots, num_ranges, wait = 0, 0, 0
    for number in range(n):
        request, chain = view(REQUEST, own[number]), chain_of(own[number], pool.pool_id)
        queue, row = view(QUEUE, chain.reads), longs_at(request.row, request.num_row)
        count = _count(queue, asked[number] if counts else layout.ITS_SHARE, stride)
        first = first_seen(final_len(chain, request.committed_len), pool.window) if pool.window else 0
        found, kept = take_ranges(chain.reads, count, before, step, taken + 8 * TAKEN.size * num_ranges), num_ranges
        for one in range(num_ranges, num_ranges + found):
            own_range = nth(TAKEN, taken, one)
            start, end, read = max(own_range.start, first), own_range.end, own_range.step
            if end <= first:
                continue
            _put(taken, kept, number, start, end, read)
            kept += 1
            wait = max(wait, step - read)
            for position in range(start, min(end, row.shape[0])):
                if is_mapped or row[position] >= pool.null_slots:
                    slots[num_slots] = row[position]
                    num_slots += 1
        num_ranges = kept
    said.slots, said.ranges, said.wait = num_slots, num_ranges, wait
    return 0


@loop("int64(int64, int64, int64, int64, boolean, int64, int64)")
def end_rows(n, structs, pool, generations, again, always, ends):
    """Rows whose last page has room behind final entries and was not looked at in its grant; how many.

    structs:  address of [n];  pool: address of its struct;  generations: address of [pages]
    again:  those that were looked at before, too;  always: address of [n], of which rows they too are asked; 0: of none
    ends:   [n, ROW_END] out: number of the row, its final length, its last page
    """
    own, hurried = longs_at(structs, n), longs_at(always, n if always else 0)
    pool, found = view(POOL, pool), 0
    size = pool.page_size
    for number in range(n):
        request, chain = view(REQUEST, own[number]), chain_of(own[number], pool.pool_id)
        length = final_len(chain, request.committed_len)
        first = length - length % size
        if first == length or first >= request.num_row:
            continue
        page = longs_at(request.row, request.num_row)[first] // size
        if page < 0:
            continue
        grant = longs_at(generations, page + 1)[page]
        if not again and not (always and hurried[number]) and chain.tail_page == page and chain.tail_grant == grant:
            continue
        chain.tail_page, chain.tail_grant = page, grant
        end = nth(ROW_END, ends, found)
        end.row, end.length, end.page = number, length, page
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

    ends:   address of [n, ROW_END], as `loops.end_rows` has them;  rows: 0 for the first of these, and so on
    listed: [LISTED, n * page_size] out
    """
    slots, grants = listed[LISTED.slots], listed[LISTED.grants]
    positions, rows = listed[LISTED.positions], listed[LISTED.rows]
    found = 0
    for i in range(n):
        end = nth(ROW_END, ends, i)
        page, length = end.page, end.length
        grant = longs_at(generations, page + 1)[page]
        for position in range(length, length - length % page_size + page_size):
            slots[found], grants[found] = page_size * page + position % page_size, grant
            positions[found], rows[found] = position, i
            found += 1
    return found


@loop("void(int64, int64, int64, int64, int64, int64, int64[::1], int64[::1])")
def put_slots(live, to_slots, to_grants, answers, numbers, first, slots, grants):
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
