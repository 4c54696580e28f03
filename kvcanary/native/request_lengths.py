"""Request lengths: how much of requests is written, final and in flight, by the addresses of their structs (layout.py).

n: requests;  structs: address of theirs, [n]
"""

from kvcanary.native import layout
from kvcanary.native.jit import flags_at, longs_at, loop, nth, view
from kvcanary.native.layout import FINAL, LINE, PAGES, POOL, QUEUE, REQUEST, ROWS, RUN, SPREAD, UNCOLLECTED
from kvcanary.native.page_states import follow_event
from kvcanary.native.request_tokens import chain_of, describe_rows, final_len, put_tokens
from kvcanary.native.reread_queue import extend_queue
from kvcanary_kernels.record.layout import SHARED


@loop("void(int64, int64, int64, int64, int64, int64)")
def write_rows(n, structs, pool, kind, before, written):
    """Forwards have written rows of a pool, or are about to.

    kind: GUESSES, LAGS or OTHER;  before: address of [n] lengths, 0: all that is final;  written: address of [n]
    """
    own, counts, lens = longs_at(structs, n), longs_at(written, n), longs_at(before, n if before else 0)
    for number in range(n):
        request, chain = view(REQUEST, own[number]), chain_of(own[number], pool)
        length = counts[number] + (lens[number] if before else final_len(chain, request.committed_len))
        if kind == layout.LAGS:  # what lies beyond is junk
            length = min(length, request.committed_len + chain.ahead)
        if kind != layout.GUESSES:  # which lengthen no row
            chain.written = length


@loop("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def launch_rows(n, structs, pool, most, forwards, kind, written, rows):
    """So many forwards of one kind run next over rows of a pool; how many of their lengths are UNKNOWN, and above
    LACKING_BITS whether requests lack pages of rows that they are about to read.

    Where all rows are as the engine knows them, and these write what it says, they are as long as that from now on.
    most:    steps that may have accepted what the host has not learned yet
    written: address of [n] entries; 0: what a step accepts that runs before them
    rows:    address of [ROWS.size * n + 1], out
    """
    unknown = describe_rows(n, structs, pool, most, rows)
    own, numbers, accepts = longs_at(structs, n), longs_at(rows, ROWS.size * n + 1), written == 0
    collected, is_behind, is_lacking = 0, accepts, 0
    for number in range(n):
        request = view(REQUEST, own[number])
        is_behind |= request.num_uncollected > 0 or request.num_pending_acceptances > 0
        heard = request.num_uncollected == 0
        collected += request.committed_len if heard else view(UNCOLLECTED, request.uncollected).before
        is_lacking |= request.row_lacks
        numbers[ROWS.committed * n + number] = request.committed_len
        request.num_in_flight += forwards
        request.num_pending_acceptances += accepts
    numbers[ROWS.size * n] = collected if is_behind else layout.UNKNOWN
    if not is_behind:
        write_rows(n, structs, pool, kind, 0, written)
    return unknown | is_lacking << layout.LACKING_BITS


@loop("void(int64, int64, int64, int64)")
def spread_rows(n, rows, where, step):
    """Parts of rows and the number of the step to a place (SPREAD): each as often as a request has rows, then zeros."""
    struct = view(SPREAD, where)
    size, parts, width = struct.room, struct.parts, struct.width
    numbers, there = longs_at(rows, parts * n), longs_at(struct.at, parts * size)
    there[:] = 0
    longs_at(struct.step, 1)[0] = step
    for part in range(parts):
        for number in range(n):
            first = part * size + number * width
            there[first : first + width] = numbers[part * n + number]


@loop("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)")
def launch_runs(n, structs, runs, parts, sizes, rows, written, turn, step, now, most, is_kept, where):
    """Forwards run next, one behind the other, in parts; what `launch_rows` gives, of all of them.

    runs:    address of their structs, of which a `LaunchGroup` has told what stays, and the host what each reads
    sizes:   address of [parts], forwards of each, of one kind and pool
    rows:    address of [parts, ROWS.size * n + 1], out;  written: of [parts, n], of parts that do not accept
    step, now: its number, and what says number and turn to the device
    is_kept: somebody keeps what is collected of them
    where:   address of [parts] addresses of places to which rows are spread; 0: nobody asks
    """
    counts, places = longs_at(sizes, parts), longs_at(where, parts if where else 0)
    unknown = is_lacking = 0
    for part in range(parts):
        run = view(RUN, runs)
        message, numbers = view(LINE, run.message_struct), 0 if run.places else written
        pool = view(POOL, message.pool).pool_id
        said = launch_rows(n, structs, pool, most, counts[part], message.kind, numbers, rows)
        unknown += counts[part] * (said & (1 << layout.LACKING_BITS) - 1)
        is_lacking |= said >> layout.LACKING_BITS
        for _ in range(counts[part]):
            run = view(RUN, runs)
            run.requests, run.structs, run.rows = n, structs, rows
            run.turn, run.step, run.written = turn, step, numbers
            view(LINE, run.message_struct).turn = turn
            run.keep = run.keep + run.places * n if is_kept else 0
            runs += 8 * RUN.size
        if where:
            spread_rows(n, rows, places[part], now)
        rows, written = rows + 8 * (ROWS.size * n + 1), written + 8 * n
    return unknown | is_lacking << layout.LACKING_BITS


@loop()
def _has_room(struct, count):
    """For tokens, one more step and what becomes final."""
    request = view(REQUEST, struct)
    has_room = request.num_tokens + count <= request.tokens_room
    has_room &= request.num_uncollected < request.uncollected_room
    for pool in range(request.num_chains):
        queue = view(QUEUE, chain_of(struct, pool).reads)
        has_room &= queue.num_ranges + layout.RANGES_TO_SPARE <= queue.room
    return has_room


@loop()
def _commit(struct, length, step):
    """Entries [0, length) are final, and what was final before joins the queue of re-reads; NOT_WRITTEN, or 0."""
    request, found = view(REQUEST, struct), 0
    for pool in range(request.num_chains):
        chain = chain_of(struct, pool)
        extend_queue(chain.reads, final_len(chain, request.committed_len), request.commit_step)
        if chain.offset == 0 and chain.ahead == 0 and chain.written < length:
            found = layout.NOT_WRITTEN
        chain.written = min(chain.written, length + chain.ahead)  # rejected nodes lie beyond
    request.committed_len, request.commit_step = length, step
    return found


@loop()
def _final_pages(struct, committed_len, page_size):
    """That lie wholly in what is final in every pool, and the request's own."""
    request = view(REQUEST, struct)
    least = request.owned_len
    for pool in range(request.num_chains):
        least = min(least, final_len(chain_of(struct, pool), committed_len))
    return max(least, 0) // page_size


@loop("int64(int64, int64, int64, int64, int64, boolean)")
def commit_rows(n, structs, lens, step, page_size, is_judged):
    """Committed lengths, address of [n], of rows; a step that the device has reported is declared by the engine now.

    NO_ROOM, LEFT_TO_LEDGER (a row shrinks, or the device has reported another length, and it is not judged yet):
    nothing was done. NOT_WRITTEN: H1. PAGES_FINAL: of rows of which nothing is in flight.
    """
    own, lengths, found = longs_at(structs, n), longs_at(lens, n), 0
    for number in range(n):
        request = view(REQUEST, own[number])
        if request.num_uncollected > 0:
            is_odd = lengths[number] != view(UNCOLLECTED, request.uncollected).after
        else:
            is_odd = lengths[number] < request.committed_len
            if not _has_room(own[number], 0):
                return layout.NO_ROOM
        if is_odd and not is_judged:
            found = layout.LEFT_TO_LEDGER
    if found:
        return found
    for number in range(n):
        request = view(REQUEST, own[number])
        if request.num_uncollected > 0:
            request.num_uncollected -= 1
            steps = longs_at(request.uncollected, UNCOLLECTED.size * (request.num_uncollected + 1))
            for i in range(UNCOLLECTED.size * request.num_uncollected):
                steps[i] = steps[i + UNCOLLECTED.size]
        else:
            found |= _commit(own[number], lengths[number], step)
            are_final = _final_pages(own[number], lengths[number], page_size) > request.final_pages
            if are_final and request.num_in_flight == 0:
                found |= layout.PAGES_FINAL
    return found


@loop()
def num_accepted(numbers, number, stride):
    """Tokens that a request's row names; a device may say anything, and there are no more than have a place."""
    return min(max(numbers[number * stride], 0), stride - 1)


@loop("int64(int64, int64, int64, int64, int64)")
def accept_rows(n, structs, accepted, stride, step):
    """The ledger of live requests goes on by what a captured step has accepted; the engine declares it later.

    accepted: address of [n, stride], how many tokens, then these; 0: nothing
    NO_ROOM: nothing was done. NOT_WRITTEN: H1, of the lengths that they have now
    """
    own, numbers, found = longs_at(structs, n), longs_at(accepted, n * stride if accepted else 0), 0
    for number in range(n if accepted else 0):
        if not _has_room(own[number], num_accepted(numbers, number, stride)):
            return layout.NO_ROOM
    for number in range(n):
        request = view(REQUEST, own[number])
        request.num_pending_acceptances -= 1
        count, before = num_accepted(numbers, number, stride) if accepted else 0, request.committed_len
        if request.is_live and count > 0:
            put_tokens(request, numbers[number * stride + 1 :], count, step)
            found |= _commit(own[number], before + count, step)
            uncollected = nth(UNCOLLECTED, request.uncollected, request.num_uncollected)
            uncollected.tokens, uncollected.before, uncollected.after = count, before, before + count
            request.num_uncollected += 1
    return found


@loop()
def _finalise(request, full, page_size, final):
    """So many pages of its row are written no more; whether the rules have nothing to say of that."""
    numbers = view(FINAL, final)
    first, start = request.final_pages, numbers.num_final
    if full * page_size > request.num_row or full - first > numbers.room - start:
        return False
    row, room = longs_at(request.row, full * page_size), numbers.room
    pages, uids = longs_at(numbers.pages, room), longs_at(numbers.uids, room)
    struct = view(PAGES, numbers.struct)
    states, end = flags_at(struct.states, struct.num_pages), start
    for number in range(first, full):
        page = row[number * page_size] // page_size
        if page >= 0 and states[page] != SHARED:
            pages[end], uids[end] = page, request.uid
            end += 1
    fresh = numbers.pages + 8 * start
    if follow_event(numbers.struct, end - start, fresh, numbers.following, layout.STAYS, 0) != layout.NOWHERE:
        return False
    numbers.num_final, request.final_pages = end, full
    return True


@loop("int64(int64, int64, int64, int64, int64)")
def finalise_runs(runs, count, first, page_size, final):
    """Runs were collected, and pages that are final now are written no more. Where the next request stands of which the
    rules are to say that, number of the run << PLACE_BITS | number in it, or NOWHERE; those before `first` have landed.

    runs: address of cards. Behind what was final at a launch, others that are in flight may be writing still.
    final: address of what is said of pages that have become final (native/layout.py)
    """
    for one in range(first >> layout.PLACE_BITS, count):
        run = nth(RUN, runs, one)
        n, start = run.requests, first & (1 << layout.PLACE_BITS) - 1 if one == first >> layout.PLACE_BITS else 0
        own, lens = longs_at(run.structs, n), longs_at(run.rows + 8 * ROWS.committed * n, n)
        is_last = one + 1 == count or nth(RUN, runs, one + 1).rows != run.rows
        for number in range(start, n):
            request = view(REQUEST, own[number])
            request.num_in_flight -= 1
            length = lens[number] if request.num_in_flight else request.committed_len
            full = _final_pages(own[number], length, page_size) if is_last and request.num_row else 0
            if full > request.final_pages and request.is_live and not _finalise(request, full, page_size, final):
                return one << layout.PLACE_BITS | number
    return layout.NOWHERE
