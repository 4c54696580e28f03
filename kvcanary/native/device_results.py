"""Device results: what a captured forward's line says of it (native/layout.py), looked through once.

The loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.native.jit import (
    books_at,
    final_at,
    flags_at,
    line_at,
    longs_at,
    loop,
    pool_at,
    request_at,
    run_at,
    said_at,
)
from kvcanary.native.layout import (
    ALL_DONE,
    GUESSES,
    HAS_MORE,
    HAS_RUN,
    IS_SHORT,
    LEFT_TO_RULES,
    LINE_BITS,
    NO_ROOM,
    NOT_QUIET,
    NOT_WRITTEN,
    NOWHERE,
    PAGES_FRESH,
    REWRITES,
    ROWS,
    RUN,
    RUN_BITS,
    SAID,
    UNKNOWN,
)
from kvcanary.native.page_states import write_pages
from kvcanary.native.request_lengths import accept_rows, land_runs, num_accepted, sum_committed, write_rows
from kvcanary_kernels.judge.settle import NUM_RUNS, RUN_READ, RUN_ROWS, RUN_WRITTEN
from kvcanary_kernels.record.layout import WRITTEN


@loop()
def _look_through(card, books, line, num_requests, requests):
    """Number of its entries << LINE_BITS | what was seen of a forward's run, all given by addresses.

    requests: [num_requests] addresses of their cards
    LEFT_TO_RULES where `DecodedForward.is_plan` is false, or `judge_tokens` or `judge_mask` would name an entry. Else
    pages PAGES_FRESH are still to be marked as written, REWRITES records that were judged; all are learned.
    """
    own, world = line_at(card), books_at(books)
    pool, cards = pool_at(own.pool), longs_at(requests, num_requests)
    width, rows, nodes = own.width, num_requests * own.width, own.nodes
    bounds = longs_at(line + 8 * own.bounds, rows + 1)
    starts, ends = longs_at(line + 8 * own.starts, rows), longs_at(line + 8 * own.ends, rows)
    n = bounds[rows]
    if bounds[0] != 0 or not 0 <= n <= own.entries:
        return LEFT_TO_RULES
    tokens, safe = longs_at(line + 8 * own.tokens, n), longs_at(line + 8 * own.safe, n)
    has_parents, has_mask = own.parents >= 0, own.mask >= 0
    parents = longs_at(line + 8 * own.parents, n if has_parents else 0)
    sees = flags_at(line + 8 * own.mask, n * nodes if has_mask else 0)
    for row in range(rows):
        first, end = bounds[row], bounds[row + 1]
        begin = ends[row] - starts[row] - (end - first)
        if end < first or end > n or begin < 0 or (has_mask and end - first != nodes):
            return LEFT_TO_RULES
        request = request_at(cards[row // width])
        known, place = longs_at(request.tokens, request.num_tokens), begin + pool.token_offset
        judged = 0 if own.kind == GUESSES else min(end - first, 1 if has_parents else end - first)
        for entry in range(first, end):
            token = tokens[entry]
            wrong = pool.vocabulary and not 0 <= token < pool.vocabulary
            at = place + entry - first
            wrong |= entry - first < judged and at < known.shape[0] and known[at] != token
            wrong |= not 0 <= safe[entry] < pool.num_slots
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
    seen, base = 0, pool.base
    for entry in range(n):
        slot = safe[entry]
        if slot >= pool.null_slots:
            if flags_at(world.states + slot // pool.page_size, 1)[0] != WRITTEN:
                seen |= PAGES_FRESH
            if flags_at(world.judged + base + slot, 1)[0]:
                seen |= REWRITES
            if world.learned:
                flags_at(world.learned + base + slot, 1)[0] = 1
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
        run = run_at(runs + 8 * RUN.size * one)
        own, n, cards = line_at(run.line_card), run.requests, run.cards
        has_run = longs_at(run.line + 8 * own.step, 1)[0] >> 32 == run.turn
        heard = longs_at(run.rows + 8 * ROWS.size * n, 1)[0]
        is_behind, more, total, found = heard != UNKNOWN, sum_committed(n, cards) - heard, 0, 0
        counts = np.zeros(n, np.int64)
        if run.written:
            counts[:] = longs_at(run.written, n)
        else:
            accepted = run.accepted if has_run else 0
            found = accept_rows(n, cards, accepted, run.places, run.step)
            if found == NO_ROOM:
                return one
            told = longs_at(accepted, n * run.places if accepted else 0)
            for number in range(n if accepted else 0):
                counts[number] = num_accepted(told, number, run.places)
            total = counts.sum()
        if own.number != NOWHERE:
            plan = longs_at(planned + 8 * NUM_RUNS * own.number, NUM_RUNS)
            plan[RUN_ROWS] += n * own.width
            plan[RUN_WRITTEN] += counts.sum() * own.width
            plan[RUN_READ] += run.reads + (more + total if is_behind else 0) * own.width
        if has_run and is_behind:
            pool = pool_at(own.pool).pool_id
            write_rows(n, cards, pool, own.kind, 0, np.int64(counts.ctypes.data))
        seen = LEFT_TO_RULES
        if has_run and proves and own.number != NOWHERE:
            seen = _look_through(run.line_card, books, run.line, n, cards)
        is_short = found == NOT_WRITTEN
        run.seen = seen << RUN_BITS | (IS_SHORT if is_short else 0) | (HAS_RUN if has_run else 0)
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
            run = run_at(runs + 8 * RUN.size * one)
            own = line_at(run.line_card)
            number, header = own.number, longs_at(run.line + 8 * own.header, size)
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
def _keep(run, kept, first):
    """What is kept of a run, from this place on; where the next one begins."""
    end = first + run.keep
    accepted = run.requests * run.places if run.keep else 0
    own = longs_at(kept, end)
    own[first : end - accepted] = longs_at(run.line, end - accepted - first)
    own[end - accepted :] = longs_at(run.accepted, accepted)
    return end


@loop()
def _write_pages(n, runs, page_size, final):
    """Pages that n runs have written first are WRITTEN, and are to be told of (FINAL.fresh)."""
    pages = final_at(final)
    for one in range(n):
        run = run_at(runs + 8 * RUN.size * one)
        own, seen = line_at(run.line_card), run.seen >> RUN_BITS
        if seen & PAGES_FRESH:
            slots = longs_at(run.line + 8 * own.safe, seen >> LINE_BITS)
            room = longs_at(pages.fresh, pages.fresh_room)[pages.num_fresh :]
            pages.num_fresh += write_pages(pages.book, slots, page_size, room)


@loop("int64(int64, int64, int64, int64, boolean, int64, int64, int64, int64, int64, int64, int64)")
def land_quiet(n, runs, books, planned, proves, seen, counts, size, page_size, final, kept, said):
    """`hear_runs`, and where all n have run and were proved clean `take_quiet`, and where nothing fired `land_runs`.

    NOT_QUIET, ALL_DONE or HAS_MORE (layout.py); pages that were written first are marked, what has run is added up.

    kept: what is kept of them, one behind the other;  said: SAID (native/layout.py), how far it came
    """
    told, plain = said_at(said), HAS_RUN
    told.seen = 0
    told.ran_rows = told.ran_written = told.ran_read = 0
    told.end = hear_runs(0, n, runs, books, planned, proves)
    if told.end != n:
        return NOT_QUIET
    for one in range(n):
        bits = run_at(runs + 8 * RUN.size * one).seen
        plain &= bits
        told.seen |= bits & (1 << RUN_BITS + LINE_BITS) - 1
    if not plain or told.seen & (IS_SHORT | LEFT_TO_RULES << RUN_BITS):
        return NOT_QUIET
    if not take_quiet(n, runs, seen, planned, said + 8 * SAID.ran_rows, counts, size):
        return NOT_QUIET
    if told.seen >> RUN_BITS & PAGES_FRESH:
        _write_pages(n, runs, page_size, final)
    told.place, end = land_runs(runs, n, 0, page_size, final), 0
    for one in range(n):
        end = _keep(run_at(runs + 8 * RUN.size * one), kept, end)
    told.forwards += n
    told.entries += told.ran_written
    told.reads += told.ran_read
    told.writers += told.ran_written > 0
    pages = final_at(final)
    has_more = told.seen >> RUN_BITS or told.place != NOWHERE or pages.num_final or pages.num_fresh
    return HAS_MORE if has_more else ALL_DONE
