"""Request lengths: how much of requests is written, final and in the air, by the addresses of their cards (layout.py).

n: requests;  cards: address of theirs, [n]
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.native.jit import flags_at, longs_at, loop
from kvcanary.native.layout import (
    CHAIN_AHEAD,
    CHAIN_OFFSET,
    CHAIN_READS,
    CHAIN_WRITTEN,
    COMMIT_STEP,
    COMMITTED_LEN,
    FINAL_BOOK,
    FINAL_CARD,
    FINAL_FOLLOWING,
    FINAL_OF,
    FINAL_PAGES,
    FINAL_ROOM,
    FINAL_UIDS,
    GUESSES,
    IS_LIVE,
    LACKING_BITS,
    LAGS,
    LEFT_TO_BOOKS,
    LINE_CARD,
    LINE_KIND,
    LINE_POOL,
    LINE_TURN,
    NO_ROOM,
    NOT_WRITTEN,
    NOWHERE,
    NUM_CHAINS,
    NUM_FINAL,
    NUM_IN_THE_AIR,
    NUM_PAGES,
    NUM_RANGES,
    NUM_ROW_SLOTS,
    NUM_TOKENS_KNOWN,
    NUM_UNHEARD,
    NUM_UNLANDED,
    OWNED_LEN,
    PAGE_BOOK,
    PAGE_STATES,
    PAGES_FINAL,
    PLACE_BITS,
    POOL_CARD,
    POOL_ID,
    QUEUE_CARD,
    RANGES_ROOM,
    RANGES_TO_SPARE,
    REQUEST_CARD,
    ROW_COMMITTED,
    ROW_LACKS,
    ROW_NUMBERS,
    ROW_SLOTS,
    RUN_CARD,
    RUN_CARDS,
    RUN_KEEP,
    RUN_LINE_CARD,
    RUN_PLACES,
    RUN_REQUESTS,
    RUN_ROWS,
    RUN_STEP,
    RUN_TURN,
    RUN_WRITTEN,
    SPREAD_AT,
    SPREAD_CARD,
    SPREAD_PARTS,
    SPREAD_SIZE,
    SPREAD_STEP,
    SPREAD_WIDTH,
    STAYS,
    TOKENS_ROOM,
    UID_KNOWN,
    UNHEARD_AFTER,
    UNHEARD_BEFORE,
    UNHEARD_CARD,
    UNHEARD_ROOM,
    UNHEARD_STEPS,
    UNHEARD_TOKENS,
    UNKNOWN,
)
from kvcanary.native.page_states import follow_event
from kvcanary.native.request_tokens import chain_of, final_len, put_tokens, tell_rows
from kvcanary.native.reread_queue import extend
from kvcanary_kernels.record.layout import SHARED


@loop()
def _heard_len(request):
    """`Request.heard_len`."""
    if request[NUM_UNHEARD] == 0:
        return request[COMMITTED_LEN]
    return longs_at(request[UNHEARD_STEPS], UNHEARD_CARD)[UNHEARD_BEFORE]


@loop()
def _write_row(request, chain, kind, length):
    """A forward of this kind writes the row up to here; guesses lengthen no row."""
    if kind == LAGS:  # what lies beyond is junk
        length = min(length, request[COMMITTED_LEN] + chain[CHAIN_AHEAD])
    if kind != GUESSES:
        chain[CHAIN_WRITTEN] = length


@loop("void(int64, int64, int64, int64, int64, int64)")
def write_rows(n, cards, pool, kind, before, written):
    """Forwards have written rows of a pool, or are about to.

    kind: GUESSES, LAGS or OTHER;  before: address of [n] lengths, 0: all that is final;  written: address of [n]
    """
    own, counts, lens = longs_at(cards, n), longs_at(written, n), longs_at(before, n if before else 0)
    for number in range(n):
        request, chain = longs_at(own[number], REQUEST_CARD), chain_of(own[number], pool)
        length = lens[number] if before else final_len(chain, request[COMMITTED_LEN])
        _write_row(request, chain, kind, length + counts[number])


@loop("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def launch_rows(n, cards, pool, most, forwards, kind, written, rows):
    """So many forwards of one kind run next over rows of a pool; how many of their lengths are UNKNOWN, and above
    LACKING_BITS whether requests lack pages of rows that they are about to read.

    Where all rows are as the engine knows them, and these write what it says, they are as long as that from now on.
    most:    steps that may have accepted what the host has not learned yet
    written: address of [n] entries; 0: what a step accepts that runs before them
    rows:    address of [ROW_NUMBERS * n + 1], out
    """
    unknown = tell_rows(n, cards, pool, most, rows)
    own, told, accepts = longs_at(cards, n), longs_at(rows, ROW_NUMBERS * n + 1), written == 0
    heard, is_behind, is_lacking = 0, accepts, 0
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        is_behind |= request[NUM_UNHEARD] > 0 or request[NUM_UNLANDED] > 0
        heard += _heard_len(request)
        is_lacking |= request[ROW_LACKS]
        told[ROW_COMMITTED * n + number] = request[COMMITTED_LEN]
        request[NUM_IN_THE_AIR] += forwards
        request[NUM_UNLANDED] += accepts
    told[ROW_NUMBERS * n] = heard if is_behind else UNKNOWN
    if not is_behind:
        write_rows(n, cards, pool, kind, 0, written)
    return unknown | is_lacking << LACKING_BITS


@loop("void(int64, int64, int64, int64)")
def spread_rows(n, rows, where, step):
    """The first parts of rows of n requests, and the number of the step, to a place (SPREAD_CARD): each part as often
    as a request has rows, and zeros behind.
    """
    card = longs_at(where, SPREAD_CARD)
    size, parts, width = card[SPREAD_SIZE], card[SPREAD_PARTS], card[SPREAD_WIDTH]
    told, there = longs_at(rows, parts * n), longs_at(card[SPREAD_AT], parts * size)
    there[:] = 0
    longs_at(card[SPREAD_STEP], 1)[0] = step
    for part in range(parts):
        for number in range(n):
            first = part * size + number * width
            there[first : first + width] = told[part * n + number]


@loop("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)")
def launch_runs(n, cards, runs, parts, sizes, rows, written, turn, step, now, most, is_kept, where):
    """Forwards run next, one behind the other, in parts; what `launch_rows` gives, of all of them.

    runs:    address of their cards, of which a `LaunchGroup` has told what stays, and the host what each reads
    sizes:   address of [parts], forwards of each, of one kind and pool
    rows:    address of [parts, ROW_NUMBERS * n + 1], out;  written: of [parts, n], of parts that do not accept
    step, now: its number, and what says number and turn to the device
    is_kept: somebody keeps what is heard of them
    where:   address of [parts] addresses of places to which rows are spread; 0: nobody asks
    """
    counts, places = longs_at(sizes, parts), longs_at(where, parts if where else 0)
    unknown = is_lacking = 0
    for part in range(parts):
        run = longs_at(runs, RUN_CARD)
        line, told = longs_at(run[RUN_LINE_CARD], LINE_CARD), 0 if run[RUN_PLACES] else written
        pool = longs_at(line[LINE_POOL], POOL_CARD)[POOL_ID]
        said = launch_rows(n, cards, pool, most, counts[part], line[LINE_KIND], told, rows)
        unknown += counts[part] * (said & (1 << LACKING_BITS) - 1)
        is_lacking |= said >> LACKING_BITS
        for _ in range(counts[part]):
            run = longs_at(runs, RUN_CARD)
            run[RUN_REQUESTS], run[RUN_CARDS], run[RUN_ROWS] = n, cards, rows
            run[RUN_TURN], run[RUN_STEP], run[RUN_WRITTEN] = turn, step, told
            longs_at(run[RUN_LINE_CARD], LINE_CARD)[LINE_TURN] = turn
            run[RUN_KEEP] = run[RUN_KEEP] + run[RUN_PLACES] * n if is_kept else 0
            runs += 8 * RUN_CARD
        if where:
            spread_rows(n, rows, places[part], now)
        rows, written = rows + 8 * (ROW_NUMBERS * n + 1), written + 8 * n
    return unknown | is_lacking << LACKING_BITS


@loop("int64(int64, int64)")
def sum_committed(n, cards):
    """Of committed lengths."""
    own, total = longs_at(cards, n), 0
    for number in range(n):
        total += longs_at(own[number], REQUEST_CARD)[COMMITTED_LEN]
    return total


@loop()
def _has_room(card, count):
    """For tokens, one more step and what becomes final."""
    request = longs_at(card, REQUEST_CARD)
    has_room = request[NUM_TOKENS_KNOWN] + count <= request[TOKENS_ROOM]
    has_room &= request[NUM_UNHEARD] < request[UNHEARD_ROOM]
    for pool in range(request[NUM_CHAINS]):
        queue = longs_at(chain_of(card, pool)[CHAIN_READS], QUEUE_CARD)
        has_room &= queue[NUM_RANGES] + RANGES_TO_SPARE <= queue[RANGES_ROOM]
    return has_room


@loop()
def _commit(card, length, step):
    """Entries [0, length) are final, and what was final before joins the queues of looks; NOT_WRITTEN, or 0."""
    request, found = longs_at(card, REQUEST_CARD), 0
    for pool in range(request[NUM_CHAINS]):
        chain = chain_of(card, pool)
        extend(longs_at(chain[CHAIN_READS], QUEUE_CARD), final_len(chain, request[COMMITTED_LEN]), request[COMMIT_STEP])
        if chain[CHAIN_OFFSET] == 0 and chain[CHAIN_AHEAD] == 0 and chain[CHAIN_WRITTEN] < length:
            found = NOT_WRITTEN
        chain[CHAIN_WRITTEN] = min(chain[CHAIN_WRITTEN], length + chain[CHAIN_AHEAD])  # rejected nodes lie beyond
    request[COMMITTED_LEN], request[COMMIT_STEP] = length, step
    return found


@loop()
def _final_pages(card, committed_len, page_size):
    """That lie wholly in what is final in every pool, and the request's own."""
    request = longs_at(card, REQUEST_CARD)
    least = request[OWNED_LEN]
    for pool in range(request[NUM_CHAINS]):
        least = min(least, final_len(chain_of(card, pool), committed_len))
    return max(least, 0) // page_size


@loop("int64(int64, int64, int64, int64, int64, boolean)")
def commit_rows(n, cards, lens, step, page_size, is_judged):
    """Committed lengths, address of [n], of rows; a step of which the device has told is told by the engine now.

    NO_ROOM, LEFT_TO_BOOKS (a row shrinks, or the device has told another length, and it is not judged yet): nothing was
    done. NOT_WRITTEN: H1. PAGES_FINAL: of rows of which nothing is in the air.
    """
    own, lengths, found = longs_at(cards, n), longs_at(lens, n), 0
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        if request[NUM_UNHEARD] > 0:
            is_odd = lengths[number] != longs_at(request[UNHEARD_STEPS], UNHEARD_CARD)[UNHEARD_AFTER]
        else:
            is_odd = lengths[number] < request[COMMITTED_LEN]
            if not _has_room(own[number], 0):
                return NO_ROOM
        if is_odd and not is_judged:
            found = LEFT_TO_BOOKS
    if found:
        return found
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        if request[NUM_UNHEARD] > 0:
            request[NUM_UNHEARD] -= 1
            steps = longs_at(request[UNHEARD_STEPS], UNHEARD_CARD * (request[NUM_UNHEARD] + 1))
            for i in range(UNHEARD_CARD * request[NUM_UNHEARD]):
                steps[i] = steps[i + UNHEARD_CARD]
        else:
            found |= _commit(own[number], lengths[number], step)
            are_final = _final_pages(own[number], lengths[number], page_size) > request[FINAL_PAGES]
            if are_final and request[NUM_IN_THE_AIR] == 0:
                found |= PAGES_FINAL
    return found


@loop()
def num_accepted(told, number, stride):
    """Tokens that a request's row names; a device may say anything, and there are no more than have a place."""
    return min(max(told[number * stride], 0), stride - 1)


@loop("int64(int64, int64, int64, int64, int64)")
def accept_rows(n, cards, accepted, stride, step):
    """The books of live requests go on by what a captured step has accepted; the engine tells of it later.

    accepted: address of [n, stride], how many tokens, then these; 0: nothing
    NO_ROOM: nothing was done. NOT_WRITTEN: H1, of the lengths that they have now
    """
    own, told, found = longs_at(cards, n), longs_at(accepted, n * stride if accepted else 0), 0
    for number in range(n if accepted else 0):
        if not _has_room(own[number], num_accepted(told, number, stride)):
            return NO_ROOM
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        request[NUM_UNLANDED] -= 1
        count, before = num_accepted(told, number, stride) if accepted else 0, request[COMMITTED_LEN]
        if request[IS_LIVE] and count > 0:
            put_tokens(request, told[number * stride + 1 :], count, step)
            found |= _commit(own[number], before + count, step)
            place = UNHEARD_CARD * request[NUM_UNHEARD]
            steps = longs_at(request[UNHEARD_STEPS], place + UNHEARD_CARD)
            steps[place + UNHEARD_TOKENS], steps[place + UNHEARD_BEFORE] = count, before
            steps[place + UNHEARD_AFTER] = before + count
            request[NUM_UNHEARD] += 1
    return found


@loop()
def _finalise(request, full, page_size, final):
    """So many pages of its row are written no more; whether the rules have nothing to say of that."""
    told = longs_at(final, FINAL_CARD)
    first, start = request[FINAL_PAGES], told[NUM_FINAL]
    if full * page_size > request[NUM_ROW_SLOTS] or full - first > told[FINAL_ROOM] - start:
        return False
    row, room = longs_at(request[ROW_SLOTS], full * page_size), told[FINAL_ROOM]
    pages, uids = longs_at(told[FINAL_OF], room), longs_at(told[FINAL_UIDS], room)
    book = longs_at(told[FINAL_BOOK], PAGE_BOOK)
    states, end = flags_at(book[PAGE_STATES], book[NUM_PAGES]), start
    for number in range(first, full):
        page = row[number * page_size] // page_size
        if page >= 0 and states[page] != SHARED:
            pages[end], uids[end] = page, request[UID_KNOWN]
            end += 1
    fresh = told[FINAL_OF] + 8 * start
    if follow_event(told[FINAL_BOOK], end - start, fresh, told[FINAL_FOLLOWING], STAYS, 0) != NOWHERE:
        return False
    told[NUM_FINAL], request[FINAL_PAGES] = end, full
    return True


@loop("int64(int64, int64, int64, int64, int64)")
def land_runs(runs, count, first, page_size, final):
    """Runs have landed, and pages that are final now are written no more. Where the next request stands of which the
    rules are to say that, number of the run << PLACE_BITS | number in it, or NOWHERE; those before `first` have landed.

    runs: address of cards. Behind what was final at a launch, others that are in the air may be writing still.
    final: address of what is said of pages that have become final (native/layout.py)
    """
    for one in range(first >> PLACE_BITS, count):
        run = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)
        n, start = run[RUN_REQUESTS], first & (1 << PLACE_BITS) - 1 if one == first >> PLACE_BITS else 0
        own, lens = longs_at(run[RUN_CARDS], n), longs_at(run[RUN_ROWS] + 8 * ROW_COMMITTED * n, n)
        is_last = one + 1 == count or longs_at(runs + 8 * RUN_CARD * (one + 1), RUN_CARD)[RUN_ROWS] != run[RUN_ROWS]
        for number in range(start, n):
            request = longs_at(own[number], REQUEST_CARD)
            request[NUM_IN_THE_AIR] -= 1
            length = lens[number] if request[NUM_IN_THE_AIR] else request[COMMITTED_LEN]
            full = _final_pages(own[number], length, page_size) if is_last and request[NUM_ROW_SLOTS] else 0
            if full > request[FINAL_PAGES] and request[IS_LIVE] and not _finalise(request, full, page_size, final):
                return one << PLACE_BITS | number
    return NOWHERE
