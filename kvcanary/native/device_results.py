"""Device results: what a captured forward's line says of it (native/layout.py), looked through once.

The loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.native.jit import flags_at, longs_at, loop
from kvcanary.native.layout import (
    ALL_DONE,
    BASE,
    BOOKS_CARD,
    BOOKS_JUDGED,
    BOOKS_LEARNED,
    BOOKS_STATES,
    CHAIN_WRITTEN,
    FINAL_BOOK,
    FINAL_CARD,
    FRESH_OF,
    FRESH_ROOM,
    GUESSES,
    HAS_MORE,
    HAS_RUN,
    IS_SHORT,
    LACKS_ROOM,
    LEFT_TO_RULES,
    LINE_BITS,
    LINE_BOUNDS,
    LINE_CARD,
    LINE_ENDS,
    LINE_ENTRIES,
    LINE_HEADER,
    LINE_KIND,
    LINE_MASK,
    LINE_NODES,
    LINE_NUMBER,
    LINE_PARENTS,
    LINE_POOL,
    LINE_SAFE,
    LINE_STARTS,
    LINE_STEP,
    LINE_TOKENS,
    LINE_WIDTH,
    MOVE_CARD,
    MOVE_KEEP,
    MOVE_LINE,
    MOVE_POOL,
    MOVE_SIZE,
    MOVE_TURN,
    NO_ROOM,
    NOT_QUIET,
    NOT_WRITTEN,
    NOWHERE,
    NULL_SLOTS,
    NUM_FINAL,
    NUM_FRESH,
    NUM_PAGES,
    NUM_TOKENS_KNOWN,
    PAGE_BOOK,
    PAGE_OWNERS,
    PAGE_SIZE,
    PAGES_FRESH,
    POOL_CARD,
    POOL_ID,
    QUIET_BOOKS,
    QUIET_CARD,
    QUIET_COUNTS,
    QUIET_FINAL,
    QUIET_HEADER,
    QUIET_PAGE_SIZE,
    QUIET_SAID,
    QUIET_SEEN,
    REQUEST_CARD,
    REWRITES,
    ROW_NUMBERS,
    RUN_ACCEPTED,
    RUN_BITS,
    RUN_CARD,
    RUN_CARDS,
    RUN_KEEP,
    RUN_LINE,
    RUN_LINE_CARD,
    RUN_PLACES,
    RUN_READS,
    RUN_REQUESTS,
    RUN_ROWS,
    RUN_SEEN,
    RUN_STEP,
    RUN_TURN,
    RUN_WRITTEN,
    SAID,
    SAID_END,
    SAID_PLACE,
    SAID_RUNS,
    SAID_SEEN,
    SAID_SUMS,
    SLOTS,
    SUM_ENTRIES,
    SUM_FORWARDS,
    SUM_READS,
    SUM_WRITERS,
    TOKEN_OFFSET,
    TOKENS_KNOWN,
    UID_KNOWN,
    UNKNOWN,
    VOCABULARY,
)
from kvcanary.native.page_states import write_pages
from kvcanary.native.request_lengths import accept_rows, land_runs, num_accepted, sum_committed, write_rows
from kvcanary.native.request_tokens import chain_of
from kvcanary_kernels.judge.settle import NUM_RUNS, RUN_READ
from kvcanary_kernels.judge.settle import RUN_ROWS as RUN_ROWS_LIVE
from kvcanary_kernels.judge.settle import RUN_WRITTEN as RUN_ENTRIES
from kvcanary_kernels.record.layout import WRITTEN


@loop()
def _learn(books, row):
    """The device has sealed this record; REWRITES where the one that lay there was judged."""
    if books[BOOKS_LEARNED]:
        flags_at(books[BOOKS_LEARNED] + row, 1)[0] = 1
    return REWRITES if flags_at(books[BOOKS_JUDGED] + row, 1)[0] else 0


@loop()
def _look_through(card, books, line, num_requests, requests):
    """Number of its entries << LINE_BITS | what was seen of a forward's run, all given by addresses.

    requests: [num_requests] addresses of their cards
    LEFT_TO_RULES where `DecodedForward.is_plan` is false, or `judge_tokens` or `judge_mask` would name an entry. Else
    pages PAGES_FRESH are still to be marked as written, REWRITES records that were judged; all are learned.
    """
    own, world = longs_at(card, LINE_CARD), longs_at(books, BOOKS_CARD)
    pool, cards = longs_at(own[LINE_POOL], POOL_CARD), longs_at(requests, num_requests)
    width, rows, nodes = own[LINE_WIDTH], num_requests * own[LINE_WIDTH], own[LINE_NODES]
    bounds = longs_at(line + 8 * own[LINE_BOUNDS], rows + 1)
    starts, ends = longs_at(line + 8 * own[LINE_STARTS], rows), longs_at(line + 8 * own[LINE_ENDS], rows)
    n = bounds[rows]
    if bounds[0] != 0 or not 0 <= n <= own[LINE_ENTRIES]:
        return LEFT_TO_RULES
    tokens, safe = longs_at(line + 8 * own[LINE_TOKENS], n), longs_at(line + 8 * own[LINE_SAFE], n)
    has_parents, has_mask = own[LINE_PARENTS] >= 0, own[LINE_MASK] >= 0
    parents = longs_at(line + 8 * own[LINE_PARENTS], n if has_parents else 0)
    sees = flags_at(line + 8 * own[LINE_MASK], n * nodes if has_mask else 0)
    for row in range(rows):
        first, end = bounds[row], bounds[row + 1]
        begin = ends[row] - starts[row] - (end - first)
        if end < first or end > n or begin < 0 or (has_mask and end - first != nodes):
            return LEFT_TO_RULES
        request = longs_at(cards[row // width], REQUEST_CARD)
        known, place = longs_at(request[TOKENS_KNOWN], request[NUM_TOKENS_KNOWN]), begin + pool[TOKEN_OFFSET]
        judged = 0 if own[LINE_KIND] == GUESSES else min(end - first, 1 if has_parents else end - first)
        for entry in range(first, end):
            token = tokens[entry]
            wrong = pool[VOCABULARY] and not 0 <= token < pool[VOCABULARY]
            at = place + entry - first
            wrong |= entry - first < judged and at < known.shape[0] and known[at] != token
            wrong |= not 0 <= safe[entry] < pool[SLOTS]
            if has_parents:
                parent = parents[entry]
                wrong |= not (parent == -1 or first <= parent < entry)
                for node in range(nodes if has_mask and not wrong else 0):
                    is_seen = node == entry - first or (parent >= 0 and sees[parent * nodes + node] != 0)
                    wrong |= (sees[entry * nodes + node] != 0) != is_seen
            if wrong:
                return LEFT_TO_RULES
    if has_mask and not has_parents:
        return LEFT_TO_RULES
    seen, base = 0, pool[BASE]
    for entry in range(n):
        slot = safe[entry]
        if slot >= pool[NULL_SLOTS]:
            if flags_at(world[BOOKS_STATES] + slot // pool[PAGE_SIZE], 1)[0] != WRITTEN:
                seen |= PAGES_FRESH
            seen |= _learn(world, base + slot)
    return n << LINE_BITS | seen


@loop("int64(int64, int64, int64, int64, int64, boolean)")
def hear_runs(first, count, runs, books, planned, proves):
    """The books go on by what runs say, from the first on, and each is looked through; the end of those that were.

    runs, books: addresses of cards
    planned: [substeps, NUM_RUNS], what is to run is added; rows may be longer than the engine knew when it launched
    proves:  else all are left to the rules
    Behind one that is left to the rules, or IS_SHORT (NOT_WRITTEN), it stops, and before one that has no room.
    """
    for one in range(first, count):
        run = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)
        own, n, cards = longs_at(run[RUN_LINE_CARD], LINE_CARD), run[RUN_REQUESTS], run[RUN_CARDS]
        has_run = longs_at(run[RUN_LINE] + 8 * own[LINE_STEP], 1)[0] >> 32 == run[RUN_TURN]
        heard = longs_at(run[RUN_ROWS] + 8 * ROW_NUMBERS * n, 1)[0]
        is_behind, more, total, found = heard != UNKNOWN, sum_committed(n, cards) - heard, 0, 0
        counts = np.zeros(n, np.int64)
        if run[RUN_WRITTEN]:
            counts[:] = longs_at(run[RUN_WRITTEN], n)
        else:
            accepted = run[RUN_ACCEPTED] if has_run else 0
            found = accept_rows(n, cards, accepted, run[RUN_PLACES], run[RUN_STEP])
            if found == NO_ROOM:
                return one
            told = longs_at(accepted, n * run[RUN_PLACES] if accepted else 0)
            for number in range(n if accepted else 0):
                counts[number] = num_accepted(told, number, run[RUN_PLACES])
            total = counts.sum()
        if own[LINE_NUMBER] != NOWHERE:
            plan = longs_at(planned + 8 * NUM_RUNS * own[LINE_NUMBER], NUM_RUNS)
            plan[RUN_ROWS_LIVE] += n * own[LINE_WIDTH]
            plan[RUN_ENTRIES] += counts.sum() * own[LINE_WIDTH]
            plan[RUN_READ] += run[RUN_READS] + (more + total if is_behind else 0) * own[LINE_WIDTH]
        if has_run and is_behind:
            pool = longs_at(own[LINE_POOL], POOL_CARD)[POOL_ID]
            write_rows(n, cards, pool, own[LINE_KIND], 0, np.int64(counts.ctypes.data))
        seen = LEFT_TO_RULES
        if has_run and proves and own[LINE_NUMBER] != NOWHERE:
            seen = _look_through(run[RUN_LINE_CARD], books, run[RUN_LINE], n, cards)
        is_short = found == NOT_WRITTEN
        run[RUN_SEEN] = seen << RUN_BITS | (IS_SHORT if is_short else 0) | (HAS_RUN if has_run else 0)
        if is_short or (has_run and seen & LEFT_TO_RULES):
            return one + 1
    return count


@loop("boolean(int64, int64, int64, int64, int64, int64, int64)")
def take_quiet(n, runs, seen, planned, totals, counts, size):
    """Headers of n runs, where none says that anything fired and all have run as planned; else nothing is taken.

    runs: address of their cards
    seen: [substeps, size] headers as they were taken last, of which this becomes the last
    planned: [substeps, NUM_RUNS];  totals: [NUM_RUNS], what has run is added
    counts: of a header, in front of its runs
    """
    sums = longs_at(totals, NUM_RUNS)
    for takes in (False, True):
        for one in range(n):
            run = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)
            own = longs_at(run[RUN_LINE_CARD], LINE_CARD)
            number, header = own[LINE_NUMBER], longs_at(run[RUN_LINE] + 8 * own[LINE_HEADER], size)
            if number == NOWHERE:
                continue
            last, plan = longs_at(seen + 8 * size * number, size), longs_at(planned + 8 * NUM_RUNS * number, NUM_RUNS)
            for i in range(counts if not takes else 0):
                if header[i] != last[i]:
                    return False
            for kind in range(NUM_RUNS):
                new = header[counts + kind] - last[counts + kind]
                if takes:
                    sums[kind] += new
                    last[counts + kind] = header[counts + kind]
                elif new != plan[kind]:
                    return False
    return True


@loop()
def _keep(kept, numbers, count):
    """So many numbers are kept here; where the next ones are."""
    longs_at(kept, count)[:] = longs_at(numbers, count)
    return kept + 8 * count


@loop()
def _keep_all(n, runs, count, moves, kept):
    """What is kept of n runs, then of moves."""
    for one in range(n):
        run = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)
        accepted = run[RUN_REQUESTS] * run[RUN_PLACES] if run[RUN_KEEP] else 0
        kept = _keep(kept, run[RUN_LINE], run[RUN_KEEP] - accepted)
        kept = _keep(kept, run[RUN_ACCEPTED], accepted)
    for one in range(count):
        move = longs_at(moves + 8 * MOVE_CARD * one, MOVE_CARD)
        kept = _keep(kept, move[MOVE_LINE], move[MOVE_KEEP])


@loop()
def _write_pages(n, runs, page_size, final):
    """Pages that n runs have written first are WRITTEN, and are to be told of (FRESH_OF)."""
    pages = longs_at(final, FINAL_CARD)
    for one in range(n):
        run = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)
        own, seen = longs_at(run[RUN_LINE_CARD], LINE_CARD), run[RUN_SEEN] >> RUN_BITS
        if seen & PAGES_FRESH:
            slots = longs_at(run[RUN_LINE] + 8 * own[LINE_SAFE], seen >> LINE_BITS)
            room = longs_at(pages[FRESH_OF], pages[FRESH_ROOM])[pages[NUM_FRESH] :]
            pages[NUM_FRESH] += write_pages(pages[FINAL_BOOK], slots, page_size, room)


@loop()
def _card_of(uid, n, runs):
    """Address of the card of a request that has rows in one of n runs; 0: none has."""
    last = 0
    for one in range(n):
        run = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)
        cards = longs_at(run[RUN_CARDS], run[RUN_REQUESTS] if run[RUN_CARDS] != last else 0)
        for number in range(cards.shape[0]):
            if longs_at(cards[number], REQUEST_CARD)[UID_KNOWN] == uid:
                return cards[number]
        last = run[RUN_CARDS]
    return 0


@loop()
def _arrived(count, moves, n, runs, page_size, final):
    """Whether moves have run, all bytes came along, and nothing was put behind what n runs have written of its row.

    moves: address of their cards; else `CapturedStep.learn_moves` and `Mover.arrived` have something to do
    """
    book = longs_at(longs_at(final, FINAL_CARD)[FINAL_BOOK], PAGE_BOOK)
    owners, card, uid = longs_at(book[PAGE_OWNERS], book[NUM_PAGES]), 0, 0
    for one in range(count):
        move = longs_at(moves + 8 * MOVE_CARD * one, MOVE_CARD)
        size, pool = move[MOVE_SIZE], longs_at(move[MOVE_POOL], POOL_CARD)
        line = longs_at(move[MOVE_LINE], 5 * size + 1)
        if line[5 * size] >> 32 != move[MOVE_TURN] or line[3 * size : 5 * size].any():
            return False
        for entry in range(size):
            slot, position = line[entry], line[2 * size + entry] >> 32
            if slot < 0:
                continue
            if slot >= min(pool[SLOTS], owners.size * page_size) or position < 0:
                return False
            if card == 0 or owners[slot // page_size] != uid:
                uid = owners[slot // page_size]
                card = _card_of(uid, n, runs)
            if card == 0 or position >= chain_of(card, pool[POOL_ID])[CHAIN_WRITTEN]:
                return False
    return True


@loop()
def _learn_moved(count, moves, books):
    """Records that moves have brought are learned; REWRITES where one that lay there was judged."""
    found = 0
    for one in range(count):
        move = longs_at(moves + 8 * MOVE_CARD * one, MOVE_CARD)
        base = longs_at(move[MOVE_POOL], POOL_CARD)[BASE]
        for slot in longs_at(move[MOVE_LINE], move[MOVE_SIZE]):
            if slot >= 0:
                found |= _learn(longs_at(books, BOOKS_CARD), base + slot)
    return found


@loop("int64(int64, int64, int64, int64, int64, boolean, int64, int64)")
def land_quiet(n, runs, count, moves, planned, proves, kept, quiet):
    """`hear_runs`; where all n have run and were proved clean, and what `count` moves have brought is as it was,
    `take_quiet`; where nothing fired `land_runs`.

    NOT_QUIET, ALL_DONE, HAS_MORE or LACKS_ROOM (layout.py); pages that were written first are marked, what has run is
    added up.

    kept: what is kept of runs and moves, one behind the other;  quiet: address of [QUIET_CARD]
    """
    own = longs_at(quiet, QUIET_CARD)
    books, page_size, final, said = own[QUIET_BOOKS], own[QUIET_PAGE_SIZE], own[QUIET_FINAL], own[QUIET_SAID]
    told, plain = longs_at(said, SAID), HAS_RUN
    told[SAID_SEEN:SAID_SUMS] = 0
    told[SAID_END] = hear_runs(told[SAID_END], n, runs, books, planned, proves)
    for one in range(told[SAID_END]):
        bits = longs_at(runs + 8 * RUN_CARD * one, RUN_CARD)[RUN_SEEN]
        plain &= bits
        told[SAID_SEEN] |= bits & (1 << RUN_BITS + LINE_BITS) - 1
    if not plain or told[SAID_SEEN] & (IS_SHORT | LEFT_TO_RULES << RUN_BITS):
        return NOT_QUIET
    if told[SAID_END] != n:
        return LACKS_ROOM
    if not _arrived(count, moves, n, runs, page_size, final):
        return NOT_QUIET
    headers, counts, size = own[QUIET_SEEN], own[QUIET_COUNTS], own[QUIET_HEADER]
    if not take_quiet(n, runs, headers, planned, said + 8 * SAID_RUNS, counts, size):
        return NOT_QUIET
    told[SAID_SEEN] |= _learn_moved(count, moves, books) << RUN_BITS
    if told[SAID_SEEN] >> RUN_BITS & PAGES_FRESH:
        _write_pages(n, runs, page_size, final)
    told[SAID_PLACE] = land_runs(runs, n, 0, page_size, final)
    _keep_all(n, runs, count, moves, kept)
    entries, sums = told[SAID_RUNS + RUN_ENTRIES], told[SAID_SUMS:]
    sums[SUM_FORWARDS] += n
    sums[SUM_ENTRIES] += entries
    sums[SUM_READS] += told[SAID_RUNS + RUN_READ]
    sums[SUM_WRITERS] += entries > 0
    pages = longs_at(final, FINAL_CARD)
    has_more = told[SAID_SEEN] >> RUN_BITS or told[SAID_PLACE] != NOWHERE or pages[NUM_FINAL] or pages[NUM_FRESH]
    return HAS_MORE if has_more else ALL_DONE
