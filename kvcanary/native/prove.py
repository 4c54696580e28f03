"""What waits for a check, judged at once: a loop that proves forwards clean, and leaves it to the rules to explain.

Forwards are given by the addresses of their heads (native/layout.py), in the order of their run.

constants: Keys.constants
table:     [rows, 8] int64, the records of all pools as the canary writes them; live: the same as engines can reach them
judged:    [rows] bool, entries that were found to be their requests' truth
facts:     [requests, pools, FACTS] int64, what the host knows of every request of these forwards (native/layout.py)
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from kvcanary.native.jit import flags_at, longs_at, loop
from kvcanary.native.layout import (
    AHEAD,
    BASE,
    BEFORE,
    COMMITTED,
    CONTENT_A,
    ENTRIES,
    FIRST_ID,
    GRANTED,
    GUESSES,
    HAS_PARENTS,
    HEAD,
    HIGH_LAYERS,
    IDS,
    INDEX,
    JUDGED,
    JUDGED_STEP,
    KIND,
    KNOWN,
    LAGS,
    LANES,
    LAYERS,
    LOW_LAYERS,
    MASK,
    NODES,
    NULL_SLOTS,
    NUM_BEFORE,
    NUM_GRANTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_TRUTHS,
    PAGE_SIZE,
    PLANS_WRONG,
    POOL,
    POOL_CARD,
    POOL_ID,
    READS_WRONG,
    REQUESTS,
    REWRITTEN,
    ROOT,
    ROW_LEN,
    ROWS,
    SEAL_TERM,
    SEALED_BITS,
    SEEN,
    SITE,
    SLOTS,
    START_B,
    STEP,
    TOKEN_OFFSET,
    TOKENS,
    TRUTHS,
    UID,
    VOCABULARY,
    WIDTH,
)
from kvcanary.native.records import are_written_at, mix, seal_entries
from kvcanary_kernels.record.layout import COLUMNS, CONTENT_B, MASK_32, MIX_KEY, MULTIPLIER


@loop()
def _plan(head):
    """`Forward.plan` behind a head, where its rows begin in there, and [requests, 2] uids and committed lengths."""
    forward = longs_at(head, HEAD)
    n, rows, requests = forward[ENTRIES], forward[ROWS], forward[REQUESTS]
    size = 4 * n + 6 * rows + 1 + requests
    plan, who = longs_at(head + 8 * HEAD, size), longs_at(head + 8 * (HEAD + size), 2 * requests)
    return plan, 4 * n + rows + 1, who.reshape(requests, 2)


@loop()
def _find(facts, uid, guess):
    """The request of a uid, looked for from a guess on; -1: none."""
    for number in range(facts.shape[0]):
        request = (guess + number) % facts.shape[0]
        if facts[request, 0, UID] == uid:
            return request
    return -1


@loop()
def _tokens_are_right(forward, pool, plan, at, who, facts):
    """`tokens.judge_tokens` without an oracle, and no entry in a null slot."""
    n, rows, width, size = forward[ENTRIES], forward[ROWS], forward[WIDTH], pool[VOCABULARY]
    tokens, first = plan[n : 2 * n], 0
    for entry in range(n):
        if plan[entry] < pool[NULL_SLOTS] or (size and not 0 <= tokens[entry] < size):
            return False
    if forward[KIND] == GUESSES:
        return True
    for row in range(rows):
        count, place = plan[at + row], plan[at + 3 * rows + row] + pool[TOKEN_OFFSET]
        request = _find(facts, who[row // width, 0], row // width)
        if request < 0:
            return False
        known = longs_at(facts[request, pool[POOL_ID], TOKENS], facts[request, pool[POOL_ID], NUM_TOKENS])
        for entry in range(min(count, 1) if forward[HAS_PARENTS] else count):
            if place + entry < known.shape[0] and known[place + entry] != tokens[first + entry]:
                return False
        first += count
    return True


@loop()
def _mask_is_right(forward, plan, at):
    """`lengths.judge_mask`: every node sees itself and what its parent sees."""
    n, nodes, first = forward[ENTRIES], forward[NODES], 0
    if nodes < 0 or not forward[HAS_PARENTS]:
        return True
    if not forward[MASK]:
        return False
    sees = flags_at(forward[MASK], n * nodes)
    for row in range(forward[ROWS]):
        for entry in range(first, first + plan[at + row]):
            parent = plan[3 * n + entry]
            for node in range(nodes):
                wanted = node == entry - first or (parent >= 0 and sees[parent * nodes + node] != 0)
                if (sees[entry * nodes + node] != 0) != wanted:
                    return False
        first += plan[at + row]
    return True


@loop()
def _is_path(heads, before, forward, ids, first, own, uid, prefix):
    """Whether ids [first, own) of a row are the path of the draft node that wrote the last of them, the latest one."""
    for number in range(before - 1, -1, -1):
        other = longs_at(heads[number], HEAD)
        if other[KIND] != GUESSES or other[POOL] != forward[POOL]:
            continue
        plan, at, who = _plan(heads[number])
        rows, reads, entry = other[ROWS], longs_at(other[IDS], other[NUM_IDS]), other[ENTRIES]
        for row in range(rows - 1, -1, -1):
            entry -= plan[at + row]
            if plan[at + row] != 1 or plan[entry] != ids[own - 1]:
                continue
            end, length = plan[at - rows + row], plan[at + 5 * rows + row // other[WIDTH]]
            begin = plan[at - rows - 1 + row] + length
            if who[row // other[WIDTH], 0] != uid or length != prefix or end - begin != own - first:
                return False
            differs = np.int64(0)
            for place in range(own - first):
                differs |= reads[begin + place] ^ ids[first + place]
            return differs == 0
    return False


@loop()
def _rows_are_right(heads, number, forward, pool, plan, at, who, facts):
    """What `row_spans.sort_rows`, `lengths.judge_lengths` and `judge_starts` look at; then how far rows are written."""
    rows, width, pool_id = forward[ROWS], forward[WIDTH], pool[POOL_ID]
    ids, first = longs_at(forward[IDS], forward[NUM_IDS]), 0
    ancestors = forward[INDEX] if forward[KIND] == GUESSES else 0
    bounds, prefixes = plan[at - rows - 1 : at], plan[at + 5 * rows :]
    for place in range(forward[REQUESTS]):
        request, prefix = _find(facts, who[place, 0], place), prefixes[place]
        if request < 0:
            return False
        fact = facts[request, pool_id]
        if prefix != min(who[place, 1] + pool[AHEAD], fact[ROW_LEN]) or prefix > fact[NUM_GRANTED]:
            return False
        granted = longs_at(fact[GRANTED], prefix)
        for row in range(place * width, (place + 1) * width):
            start, count, own = bounds[row], plan[at + row], plan[at + 2 * rows + row]
            if plan[at + rows + row] != 0 or own - start != prefix + ancestors:
                return False
            differs = np.int64(0)
            for position in range(prefix):
                differs |= ids[start + position] ^ granted[position]
            if differs:
                return False
            if ancestors and not _is_path(heads, number, forward, ids, start + prefix, own, who[place, 0], prefix):
                return False
            for entry in range(count):
                if ids[own + entry] != plan[first + entry]:
                    return False
            first += count
        if prefix > fact[JUDGED]:
            fact[JUDGED], fact[JUDGED_STEP], fact[FIRST_ID] = (
                prefix,
                forward[STEP],
                forward[IDS] + 8 * bounds[place * width],
            )
        if forward[KIND] != GUESSES:
            fact[ROW_LEN] = prefix + plan[at + place * width]
        if forward[KIND] == LAGS:  # what lies beyond is junk
            fact[ROW_LEN] = min(fact[ROW_LEN], fact[COMMITTED] + pool[AHEAD])
    return True


@loop()
def _seal(head, pool, plan, who, facts, generations, states, constants, table, live, judged):
    """Records of all entries of one forward, as `seal_plan`."""
    forward = longs_at(head, HEAD)
    n, roots, uids = forward[ENTRIES], np.empty(forward[ROWS], np.int64), np.empty(forward[REQUESTS], np.int64)
    for place in range(forward[REQUESTS]):
        uids[place] = who[place, 0]
        request = _find(facts, who[place, 0], place)
        for row in range(place * forward[WIDTH], (place + 1) * forward[WIDTH]):
            roots[row] = facts[request, pool[POOL_ID], ROOT]
    return seal_entries(
        plan,
        n,
        forward[ROWS],
        forward[WIDTH],
        forward[HAS_PARENTS] != 0,
        longs_at(forward[BEFORE], forward[NUM_BEFORE]),
        longs_at(head + 8 * (HEAD + plan.shape[0] + 2 * forward[REQUESTS]), n),
        plan[:n],
        longs_at(forward[IDS], forward[NUM_IDS]),
        uids,
        roots,
        generations,
        states,
        pool[PAGE_SIZE],
        forward[STEP] & MASK_32 | forward[SITE] << 32,
        pool[LOW_LAYERS],
        pool[HIGH_LAYERS],
        pool[BASE],
        pool[SLOTS],
        pool[NULL_SLOTS],
        pool[SEAL_TERM],
        constants,
        table,
        live,
        judged,
    )


@loop()
def _keep(forward, pool, plan, table, live):
    """Lanes of what a forward has stored, as `keep_lanes`."""
    n, layers, slots = forward[ENTRIES], pool[LAYERS], pool[SLOTS]
    lanes, content = longs_at(forward[LANES], 2 * layers * n), longs_at(pool[CONTENT_A], layers * slots)
    for entry in range(n):
        slot, lane_b = plan[entry], pool[START_B]
        for layer in range(layers):
            content[layer * slots + slot] = lanes[2 * layer * n + entry]
            lane_b += lanes[(2 * layer + 1) * n + entry]
        table[pool[BASE] + slot, CONTENT_B] = live[pool[BASE] + slot, CONTENT_B] = lane_b


@loop()
def _row_is_true(fact, pool, generations, constants, table, live, judged):
    """`Reader._records_are_intact` and `_untrue` of the longest row of a request, whose truth grows as far."""
    end, known, base = fact[JUDGED], min(fact[KNOWN], fact[JUDGED]), pool[BASE]
    ids = longs_at(fact[FIRST_ID], end)
    for position in range(end):
        row, differs = base + ids[position], np.int64(0)
        for column in range(COLUMNS):
            differs |= live[row, column] ^ table[row, column]
        if differs:
            return False
    if known == end:
        return True
    if end + pool[TOKEN_OFFSET] > fact[NUM_TOKENS]:
        return False
    chains, tokens = longs_at(fact[TRUTHS], end), longs_at(fact[TOKENS], fact[NUM_TOKENS])
    for position in range(fact[NUM_TRUTHS], end):
        value = chains[position - 1] if position else fact[ROOT]
        token = tokens[position + pool[TOKEN_OFFSET]]
        chains[position] = constants[MULTIPLIER] * value + mix(token, position, constants[MIX_KEY])
    fact[NUM_TRUTHS] = max(fact[NUM_TRUTHS], end)
    return are_written_at(
        ids[known:end],
        ids[known:end],
        chains[known:end],
        generations,
        pool[PAGE_SIZE],
        base,
        pool[SLOTS],
        fact[JUDGED_STEP],
        pool[LOW_LAYERS],
        pool[HIGH_LAYERS],
        table,
        judged,
        True,
    )


@loop(
    "int64(int64[::1], int64[:, :, ::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[:, ::1], "
    "int64[:, ::1], boolean[::1])"
)
def settle_forwards(heads, facts, cards, generations, states, constants, table, live, judged):
    """0 where all is clean, sealed and noted in `facts`.

    PLANS_WRONG: what the forwards planned is wrong in some way, and nothing was done.
    READS_WRONG: all is sealed and `facts` say how far rows are written, but some row is not what it should be.
    SEALED_BITS above these: what any forward has seen while it was sealed (layout.py), as it stands in each head.
    REWRITTEN there: nothing that was judged before counts any longer.

    cards: addresses of the pools' cards
    """
    for number in range(heads.shape[0]):
        forward = longs_at(heads[number], HEAD)
        pool = longs_at(forward[POOL], POOL_CARD)
        plan, at, who = _plan(heads[number])
        if not (
            _tokens_are_right(forward, pool, plan, at, who, facts)
            and _mask_is_right(forward, plan, at)
            and _rows_are_right(heads, number, forward, pool, plan, at, who, facts)
        ):
            return PLANS_WRONG
    seen = 0
    for number in range(heads.shape[0]):
        forward = longs_at(heads[number], HEAD)
        pool = longs_at(forward[POOL], POOL_CARD)
        plan, _, who = _plan(heads[number])
        forward[SEEN] = _seal(
            heads[number], pool, plan, who, facts, generations, states, constants, table, live, judged
        )
        seen |= forward[SEEN]
    for number in range(heads.shape[0]):
        forward = longs_at(heads[number], HEAD)
        if forward[LANES]:
            plan, _, _ = _plan(heads[number])
            _keep(forward, longs_at(forward[POOL], POOL_CARD), plan, table, live)
    if seen & REWRITTEN:
        for row in range(judged.shape[0]):
            judged[row] = False
    well = True
    for request in range(facts.shape[0]):
        for pool_id in range(facts.shape[1]):
            fact = facts[request, pool_id]
            if seen & REWRITTEN:
                fact[KNOWN] = 0
            if fact[JUDGED]:
                pool = longs_at(cards[pool_id], POOL_CARD)
                well &= _row_is_true(fact, pool, generations, constants, table, live, judged)
    return (0 if well else READS_WRONG) | seen << SEALED_BITS
