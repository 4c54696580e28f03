"""Device results: what a captured forward's message says of it (native/layout.py), looked through once.

The loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

import numpy as np

from kvcanary.native import layout
from kvcanary.native.jit import flags_at, longs_at, loop, nth, view
from kvcanary.native.layout import BOOKS, FINAL, LINE, MOVE, PAGES, POOL, QUIET, REQUEST, ROWS, RUN, SAID
from kvcanary.native.page_states import write_pages
from kvcanary.native.request_lengths import accept_rows, finalise_runs, num_accepted, write_rows
from kvcanary.native.request_tokens import chain_of
from kvcanary_kernels.judge.settle import NUM_RUNS, RUN_READ, RUN_ROWS, RUN_WRITTEN
from kvcanary_kernels.record.layout import WRITTEN


@loop()
def _learn(tables, row):
    """The device has sealed this record; REWRITES where the one that lay there was judged."""
    if tables.learned:
        flags_at(tables.learned + row, 1)[0] = 1
    return layout.REWRITES if flags_at(tables.judged + row, 1)[0] else 0


@loop()
def _scan(struct, tables, message, num_requests, requests):
    """Number of its entries << MESSAGE_BITS | what was seen of a forward's run, all given by addresses.

    requests: [num_requests] addresses of their structs
    LEFT_TO_RULES where `DecodedForward.is_plan` is false, or `judge_tokens` or `judge_mask` would name an entry. Else
    pages PAGES_FRESH are still to be marked as written, REWRITES records that were judged; all are learned.
    """
    own, world = view(LINE, struct), view(BOOKS, tables)
    pool, structs = view(POOL, own.pool), longs_at(requests, num_requests)
    width, rows, nodes = own.width, num_requests * own.width, own.nodes
    bounds = longs_at(message + 8 * own.bounds, rows + 1)
    starts, ends = longs_at(message + 8 * own.starts, rows), longs_at(message + 8 * own.ends, rows)
    n = bounds[rows]
    if bounds[0] != 0 or not 0 <= n <= own.entries:
        return layout.LEFT_TO_RULES
    tokens, safe = longs_at(message + 8 * own.tokens, n), longs_at(message + 8 * own.safe, n)
    has_parents, has_mask = own.parents >= 0, own.mask >= 0
    parents = longs_at(message + 8 * own.parents, n if has_parents else 0)
    sees = flags_at(message + 8 * own.mask, n * nodes if has_mask else 0)
    for row in range(rows):
        first, end = bounds[row], bounds[row + 1]
        begin = ends[row] - starts[row] - (end - first)
        if end < first or end > n or begin < 0 or (has_mask and end - first != nodes):
            return layout.LEFT_TO_RULES
        request = view(REQUEST, structs[row // width])
        known, place = longs_at(request.tokens, request.num_tokens), begin + pool.token_offset
        judged = 0 if own.kind == layout.GUESSES else min(end - first, 1 if has_parents else end - first)
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
                return layout.LEFT_TO_RULES
    if has_mask and not has_parents:
        return layout.LEFT_TO_RULES
    seen, base = 0, pool.base
    for entry in range(n):
        slot = safe[entry]
        if slot >= pool.null_slots:
            if flags_at(world.states + slot // pool.page_size, 1)[0] != WRITTEN:
                seen |= layout.PAGES_FRESH
            seen |= _learn(world, base + slot)
    return n << layout.MESSAGE_BITS | seen


@loop("int64(int64, int64, int64, int64, int64, boolean)")
def read_runs(first, count, runs, tables, planned, proves):
    """The ledger goes on by what runs say, from the first on, and each is looked through; the end of those that were.

    runs, tables: addresses of structs
    planned: [substeps, NUM_RUNS], what is to run is added; rows may be longer than the engine knew when it launched
    proves:  else all are left to the rules
    Behind one that is left to the rules, or IS_SHORT (NOT_WRITTEN), it stops, and before one that has no room.
    """
    for one in range(first, count):
        run = nth(RUN, runs, one)
        own, n, structs = view(LINE, run.message_struct), run.requests, run.structs
        has_run = longs_at(run.message + 8 * own.step, 1)[0] >> 32 == run.turn
        collected = longs_at(run.rows + 8 * ROWS.size * n, 1)[0]
        is_behind, more, total, found = collected != layout.UNKNOWN, -collected, 0, 0
        for struct in longs_at(structs, n):
            more += view(REQUEST, struct).committed_len
        counts = np.zeros(n, np.int64)
        if run.written:
            counts[:] = longs_at(run.written, n)
        else:
            accepted = run.accepted if has_run else 0
            found = accept_rows(n, structs, accepted, run.places, run.step)
            if found == layout.NO_ROOM:
                return one
            numbers = longs_at(accepted, n * run.places if accepted else 0)
            for number in range(n if accepted else 0):
                counts[number] = num_accepted(numbers, number, run.places)
            total = counts.sum()
        if own.number != layout.NOWHERE:
            plan = longs_at(planned + 8 * NUM_RUNS * own.number, NUM_RUNS)
            plan[RUN_ROWS] += n * own.width
            plan[RUN_WRITTEN] += counts.sum() * own.width
            plan[RUN_READ] += run.reads + (more + total if is_behind else 0) * own.width
        if has_run and is_behind:
            pool = view(POOL, own.pool).pool_id
            write_rows(n, structs, pool, own.kind, 0, np.int64(counts.ctypes.data))
        seen = layout.LEFT_TO_RULES
        if has_run and proves and own.number != layout.NOWHERE:
            seen = _scan(run.message_struct, tables, run.message, n, structs)
        is_short = found == layout.NOT_WRITTEN
        run.seen = seen << layout.RUN_BITS | (layout.IS_SHORT if is_short else 0) | (layout.HAS_RUN if has_run else 0)
        if is_short or (has_run and seen & layout.LEFT_TO_RULES):
            return one + 1
    return count


@loop("boolean(int64, int64, int64, int64, int64, int64, int64)")
def take_quiet(n, runs, seen, planned, totals, counts, size):
    """Headers of n runs, where none says that anything fired and all have run as planned; else nothing is taken.

    runs: address of their structs
    seen: [substeps, size] headers as they were taken last, of which this becomes the last
    planned: [substeps, NUM_RUNS];  totals: [NUM_RUNS], what has run is added
    counts: of a header, in front of its runs
    """
    sums = longs_at(totals, NUM_RUNS)
    for takes in (False, True):
        for one in range(n):
            run = nth(RUN, runs, one)
            own = view(LINE, run.message_struct)
            number, header = own.number, longs_at(run.message + 8 * own.header, size)
            if number == layout.NOWHERE:
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
    longs_at(kept, count)[:] = longs_at(numbers, count)
    return kept + 8 * count


@loop()
def _keep_all(n, runs, count, moves, kept):
    """What is kept of n runs, then of moves."""
    for one in range(n):
        run = nth(RUN, runs, one)
        accepted = run.requests * run.places if run.keep else 0
        kept = _keep(kept, run.message, run.keep - accepted)
        kept = _keep(kept, run.accepted, accepted)
    for one in range(count):
        move = nth(MOVE, moves, one)
        kept = _keep(kept, move.message, move.keep)


@loop()
def _write_pages(n, runs, page_size, final):
    """Pages that n runs have written first are WRITTEN, and are to be told of (FINAL.fresh)."""
    pages = view(FINAL, final)
    for one in range(n):
        run = nth(RUN, runs, one)
        own, seen = view(LINE, run.message_struct), run.seen >> layout.RUN_BITS
        if seen & layout.PAGES_FRESH:
            slots = longs_at(run.message + 8 * own.safe, seen >> layout.MESSAGE_BITS)
            room = longs_at(pages.fresh, pages.fresh_room)[pages.num_fresh :]
            pages.num_fresh += write_pages(pages.struct, slots, page_size, room)


@loop()
def _struct_of(uid, n, runs):
    """Address of the struct of a request that has rows in one of n runs; 0: none has."""
    last = 0
    for one in range(n):
        run = nth(RUN, runs, one)
        structs = longs_at(run.structs, run.requests if run.structs != last else 0)
        for number in range(structs.shape[0]):
            if view(REQUEST, structs[number]).uid == uid:
                return structs[number]
        last = run.structs
    return 0


@loop()
def _arrived(count, moves, n, runs, page_size, final):
    """Whether moves have run, all bytes came along, and nothing was put behind what n runs have written of its row.

    moves: address of their structs; else `CapturedStep.learn_moves` and `Mover.arrived` have something to do
    """
    pages, struct, uid = view(PAGES, view(FINAL, final).struct), 0, 0
    owners = longs_at(pages.owners, pages.num_pages)
    for one in range(count):
        move = nth(MOVE, moves, one)
        size, pool = move.count, view(POOL, move.pool)
        message = longs_at(move.message, 5 * size + 1)
        if message[5 * size] >> 32 != move.turn or message[3 * size : 5 * size].any():
            return False
        for entry in range(size):
            slot, position = message[entry], message[2 * size + entry] >> 32
            if slot < 0:
                continue
            if slot >= min(pool.num_slots, owners.size * page_size) or position < 0:
                return False
            if struct == 0 or owners[slot // page_size] != uid:
                uid = owners[slot // page_size]
                struct = _struct_of(uid, n, runs)
            if struct == 0 or position >= chain_of(struct, pool.pool_id).written:
                return False
    return True


@loop()
def _learn_moved(count, moves, tables):
    """Records that moves have brought are learned; REWRITES where one that lay there was judged."""
    found = 0
    for one in range(count):
        move = nth(MOVE, moves, one)
        for slot in longs_at(move.message, move.count):
            if slot >= 0:
                found |= _learn(tables, view(POOL, move.pool).base + slot)
    return found


@loop("int64(int64, int64, int64, int64, int64, boolean, int64, int64)")
def collect_quiet(n, runs, count, moves, planned, proves, kept, quiet):
    """`read_runs`; where all n have run and were proved clean, and what `count` moves have brought is as it was,
    `take_quiet`; where nothing fired `finalise_runs`.

    NOT_QUIET, ALL_DONE, HAS_MORE or LACKS_ROOM (layout.py); pages that were written first are marked, what has run is
    added up.

    kept: what is kept of runs and moves, one behind the other;  quiet: address of QUIET
    """
    own, plain = view(QUIET, quiet), layout.HAS_RUN
    numbers, page_size, final = view(SAID, own.said), own.page_size, own.final
    numbers.seen = 0
    numbers.ran_rows = numbers.ran_written = numbers.ran_read = 0
    numbers.end = read_runs(numbers.end, n, runs, own.tables, planned, proves)
    for one in range(numbers.end):
        bits = nth(RUN, runs, one).seen
        plain &= bits
        numbers.seen |= bits & (1 << layout.RUN_BITS + layout.MESSAGE_BITS) - 1
    if not plain or numbers.seen & (layout.IS_SHORT | layout.LEFT_TO_RULES << layout.RUN_BITS):
        return layout.NOT_QUIET
    if numbers.end != n:
        return layout.LACKS_ROOM
    if not _arrived(count, moves, n, runs, page_size, final):
        return layout.NOT_QUIET
    if not take_quiet(n, runs, own.seen, planned, own.said + 8 * SAID.ran_rows, own.counts, own.header):
        return layout.NOT_QUIET
    numbers.seen |= _learn_moved(count, moves, view(BOOKS, own.tables)) << layout.RUN_BITS
    if numbers.seen >> layout.RUN_BITS & layout.PAGES_FRESH:
        _write_pages(n, runs, page_size, final)
    numbers.place = finalise_runs(runs, n, 0, page_size, final)
    _keep_all(n, runs, count, moves, kept)
    numbers.forwards += n
    numbers.entries += numbers.ran_written
    numbers.reads += numbers.ran_read
    numbers.writers += numbers.ran_written > 0
    pages = view(FINAL, final)
    has_more = numbers.seen >> layout.RUN_BITS or numbers.place != layout.NOWHERE or pages.num_final or pages.num_fresh
    return layout.HAS_MORE if has_more else layout.ALL_DONE
