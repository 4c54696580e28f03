"""Heard: what a captured forward's line says of it (cards.py), looked through once.

The loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.cards import (
    BASE,
    BOOKS_CARD,
    BOOKS_JUDGED,
    BOOKS_LEARNED,
    BOOKS_STATES,
    LEFT_TO_RULES,
    LINE_BITS,
    LINE_BOUNDS,
    LINE_CARD,
    LINE_ENDS,
    LINE_ENTRIES,
    LINE_GUESSES,
    LINE_MASK,
    LINE_NODES,
    LINE_PARENTS,
    LINE_POOL,
    LINE_SAFE,
    LINE_STARTS,
    LINE_TOKENS,
    LINE_WIDTH,
    NULL_SLOTS,
    NUM_TOKENS_KNOWN,
    PAGE_SIZE,
    PAGES_FRESH,
    POOL_CARD,
    REQUEST_CARD,
    REWRITES,
    SLOTS,
    TOKEN_OFFSET,
    TOKENS_KNOWN,
    VOCABULARY,
)
from kvcanary.loops.memory import flags_at, longs_at, loop
from kvcanary_kernels.record import WRITTEN
from kvcanary_kernels.settle import NUM_RUNS


@loop("int64(int64, int64, int64, int64, int64)")
def look_through(card, books, line, num_requests, requests):
    """Number of its entries << LINE_BITS | what was seen of a forward's run, all given by addresses.

    requests: [num_requests] addresses of their cards
    LEFT_TO_RULES where `Learned.is_plan` is not true, or `judge_tokens` or `judge_mask` would name an entry. Else pages
    PAGES_FRESH are still to be marked as written, REWRITES records that were judged; all are learned.
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
        judged = 0 if own[LINE_GUESSES] else min(end - first, 1 if has_parents else end - first)
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
            if flags_at(world[BOOKS_JUDGED] + base + slot, 1)[0]:
                seen |= REWRITES
            if world[BOOKS_LEARNED]:
                flags_at(world[BOOKS_LEARNED] + base + slot, 1)[0] = 1
    return n << LINE_BITS | seen


@loop("boolean(int64, int64, int64, int64, int64, int64, int64)")
def take_quiet(n, told, seen, planned, totals, counts, size):
    """Headers of n substeps, where none says that anything fired and all have run as planned; else nothing is taken.

    told: [n, 3] number of the substep, address of its header, whether its reads are not compared
    seen: [substeps, size] headers as they were taken last, of which this becomes the last
    planned: [substeps, NUM_RUNS];  totals: [NUM_RUNS], what has run is added
    counts: of a header, in front of its runs
    """
    own, sums = longs_at(told, 3 * n), longs_at(totals, NUM_RUNS)
    for one in range(n):
        number, header = own[3 * one], longs_at(own[3 * one + 1], size)
        last, plan = longs_at(seen + 8 * size * number, size), longs_at(planned + 8 * NUM_RUNS * number, NUM_RUNS)
        for i in range(counts):
            if header[i] != last[i]:
                return False
        for run in range(NUM_RUNS - own[3 * one + 2]):
            if header[counts + run] - last[counts + run] != plan[run]:
                return False
    for one in range(n):
        number, header = own[3 * one], longs_at(own[3 * one + 1], size)
        last = longs_at(seen + 8 * size * number, size)
        for run in range(NUM_RUNS):
            sums[run] += header[counts + run] - last[counts + run]
            last[counts + run] = header[counts + run]
    return True
