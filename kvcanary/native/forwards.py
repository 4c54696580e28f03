"""Forwards that the host judges: their plans are taken and looked through, all that wait are proved clean, and kept.

A loop says only whether all is well; what is wrong is named by the rules that its docstring points to. Forwards are
given by the addresses of their heads (native/layout.py), in the order of their run.

constants: Keys.constants
table:     [rows, 8] int64, the records of all pools as the canary writes them; live: the same as engines can reach them
judged:    [rows] bool, entries that were found to be their requests' truth
facts:     [requests, pools, FACTS] int64, what the host knows of every request of these forwards (native/layout.py)
"""

import numpy as np

from kvcanary.native.fingerprints import keep_fingerprints
from kvcanary.native.jit import flags_at, longs_at, loop, nth, view
from kvcanary.native.layout import (
    ASKED,
    CONTRADICTS,
    FACT,
    FORWARD,
    GUESSES,
    LAGS,
    PLANS_WRONG,
    POOL,
    READS_WRONG,
    REFUSES,
    REWRITTEN,
    SEALED_BITS,
)
from kvcanary.native.plans import layout_of, plan_of
from kvcanary.native.records import are_written, chain_tokens, match_records, seal_plan
from kvcanary.pools.slot_maps import first_visible
from kvcanary_kernels.record.layout import MIX_KEY, MULTIPLIER

_first_visible = loop()(first_visible)

# when one is opened


@loop()
def _copy(source, target):
    if source:
        target[:] = longs_at(source, target.shape[0])


@loop()
def _may_use(pool, forward, plan):
    """Whether all ids lie in the pool, and every slot on a page that its request may write, and is written once."""
    if not pool.writers:
        return False
    num_slots, slots, written = pool.num_slots, plan.slots, plan.written
    reads, seen = longs_at(forward.ids, forward.num_ids), flags_at(pool.seen_slots, num_slots)
    writers = longs_at(pool.writers, -(-num_slots // pool.page_size))
    well = True
    for i in range(forward.num_ids):
        well &= 0 <= reads[i] < num_slots
    first = 0
    for row in range(written.shape[0]):
        uid = plan.who[row // forward.width * 2]
        for entry in range(first, first + written[row]):
            slot = slots[entry]
            if not 0 <= slot < num_slots:
                well = False
            elif slot >= pool.null_slots:
                well &= writers[slot // pool.page_size] == uid and not seen[slot]
                seen[slot] = 1
        first += written[row]
    for entry in range(slots.shape[0]):
        if 0 <= slots[entry] < num_slots:
            seen[slots[entry]] = 0
    return well


@loop("int64(int64, int64[::1])")
def take_plan(given, memory):
    """Fill `Forward.memory` from what was ASKED (native/layout.py), by its address; its address, and what was seen.

    CONTRADICTS by the rules of `forward.refuse_contradiction`; else REFUSES where `admission` would refuse something or
    `writes.judge_slots` would name a slot that is written twice, where a row is too short for what it must read and
    write, and where the loops do not know the pages. What a short row writes stands where its prefix says (R10).
    """
    head, asked = memory.ctypes.data, view(ASKED, given)
    forward, pool = view(FORWARD, head), view(POOL, asked.pool)
    _copy(given, longs_at(head, FORWARD.fingerprints))
    forward.fingerprints = forward.before = forward.num_before = forward.seen = forward.not_finite = 0
    plan = plan_of(head)
    for row in range(asked.rows):
        plan.written[row], plan.starts[row] = asked.count, 0
    _copy(asked.slots, plan.slots)
    _copy(asked.tokens, plan.tokens)
    _copy(asked.positions, plan.positions)
    _copy(asked.lineage if asked.lineage else asked.parents, plan.parents)
    _copy(asked.indptr, plan.bounds)
    _copy(asked.written, plan.written)
    _copy(asked.starts, plan.starts)
    _copy(asked.prefixes, plan.prefixes)
    _copy(given + 8 * ASKED.size, plan.who)
    n, bounds, written, starts, window = asked.entries, plan.bounds, plan.written, plan.starts, pool.window
    wrong, short, first = bounds[0] != 0 or bounds[asked.rows] != asked.num_ids, False, 0
    ancestors = asked.index if asked.kind == GUESSES else 0
    for row in range(asked.rows):
        prefix, before = plan.prefixes[row // asked.width], bounds[row + 1] - bounds[row] - written[row]
        wrong |= prefix < 0 or starts[row] < 0 or written[row] < 0 or bounds[row + 1] < bounds[row]
        plan.owns[row], begin = bounds[row] + max(before, 0), starts[row] + before
        if before < 0 or begin < prefix:
            short, begin = True, max(begin, prefix + ancestors)
        plan.begins[row] = begin
        hidden = max(0, _first_visible(begin, window) - starts[row]) if window else 0
        plan.skipped[row] = min(hidden, max(before, 0))
        wrong |= asked.nodes >= 0 and written[row] != asked.nodes
        wrong |= asked.lineage != 0 and written[row] != 1
        if asked.parents and not wrong:
            for entry in range(first, min(first + written[row], n)):
                wrong |= not (plan.parents[entry] == -1 or first <= plan.parents[entry] < entry)
        first += written[row]
    if wrong or first != n:
        return head | CONTRADICTS
    return head | (0 if not short and _may_use(pool, forward, plan) else REFUSES)


# when all that wait are judged


@loop()
def _fact(facts, request, pool):
    return nth(FACT, facts.ctypes.data, request * facts.shape[1] + pool)


@loop()
def _find(facts, uid, guess):
    """The request of a uid, looked for from a guess on; -1: none."""
    for number in range(facts.shape[0]):
        request = (guess + number) % facts.shape[0]
        if _fact(facts, request, 0).uid == uid:
            return request
    return -1


@loop()
def _tokens_are_right(forward, pool, plan, facts):
    """`tokens.judge_tokens` without an oracle, and no entry in a null slot."""
    width, size, first = forward.width, pool.vocabulary, 0
    for entry in range(forward.entries):
        if plan.slots[entry] < pool.null_slots or (size and not 0 <= plan.tokens[entry] < size):
            return False
    if forward.kind == GUESSES:
        return True
    for row in range(forward.rows):
        count, place = plan.written[row], plan.begins[row] + pool.token_offset
        request = _find(facts, plan.who[row // width * 2], row // width)
        if request < 0:
            return False
        fact = _fact(facts, request, pool.pool_id)
        known = longs_at(fact.tokens, fact.num_tokens)
        for entry in range(min(count, 1) if forward.has_parents else count):
            if place + entry < known.shape[0] and known[place + entry] != plan.tokens[first + entry]:
                return False
        first += count
    return True


@loop()
def _mask_is_right(forward, plan):
    """`lengths.judge_mask`: every node sees itself and what its parent sees."""
    nodes, first = forward.nodes, 0
    if nodes < 0 or not forward.has_parents:
        return True
    if not forward.mask:
        return False
    sees = flags_at(forward.mask, forward.entries * nodes)
    for row in range(forward.rows):
        for entry in range(first, first + plan.written[row]):
            parent = plan.parents[entry]
            for node in range(nodes):
                wanted = node == entry - first or (parent >= 0 and sees[parent * nodes + node] != 0)
                if (sees[entry * nodes + node] != 0) != wanted:
                    return False
        first += plan.written[row]
    return True


@loop()
def _are_same(ids, others, n):
    differs = np.int64(0)
    for i in range(n):
        differs |= ids[i] ^ others[i]
    return differs == 0


@loop()
def _is_path(heads, before, forward, ids, first, own, uid, prefix):
    """Whether ids [first, own) of a row are the path of the draft node that wrote the last of them, the latest one."""
    for number in range(before - 1, -1, -1):
        other = view(FORWARD, heads[number])
        if other.kind != GUESSES or other.pool != forward.pool:
            continue
        plan, reads, entry = plan_of(heads[number]), longs_at(other.ids, other.num_ids), other.entries
        for row in range(other.rows - 1, -1, -1):
            entry -= plan.written[row]
            if plan.written[row] != 1 or plan.slots[entry] != ids[own - 1]:
                continue
            end, place = plan.bounds[row + 1], row // other.width
            begin = plan.bounds[row] + plan.prefixes[place]
            if plan.who[2 * place] != uid or plan.prefixes[place] != prefix or end - begin != own - first:
                return False
            return _are_same(reads[begin:], ids[first:], own - first)
    return False


@loop()
def _rows_are_right(heads, number, forward, pool, plan, facts):
    """What `row_spans.sort_rows`, `lengths.judge_lengths` and `judge_starts` look at; then how far rows are written."""
    width, pool_id = forward.width, pool.pool_id
    ids, first = longs_at(forward.ids, forward.num_ids), 0
    ancestors = forward.index if forward.kind == GUESSES else 0
    for place in range(forward.requests):
        uid, committed_len, prefix = plan.who[2 * place], plan.who[2 * place + 1], plan.prefixes[place]
        request = _find(facts, uid, place)
        if request < 0:
            return False
        fact = _fact(facts, request, pool_id)
        if prefix != min(committed_len + pool.ahead, fact.row_len) or prefix > fact.num_granted:
            return False
        granted = longs_at(fact.granted, prefix)
        for row in range(place * width, (place + 1) * width):
            start, count, own = plan.bounds[row], plan.written[row], plan.owns[row]
            if plan.starts[row] != 0 or own - start != prefix + ancestors:
                return False
            if not _are_same(ids[start:], granted, prefix):
                return False
            if ancestors and not _is_path(heads, number, forward, ids, start + prefix, own, uid, prefix):
                return False
            if not _are_same(ids[own:], plan.slots[first:], count):
                return False
            first += count
        if prefix > fact.judged:
            fact.judged, fact.judged_step = prefix, forward.step
            fact.first_id = forward.ids + 8 * plan.bounds[place * width]
        if forward.kind != GUESSES:
            fact.row_len = prefix + plan.written[place * width]
        if forward.kind == LAGS:  # what lies beyond is junk
            fact.row_len = min(fact.row_len, fact.committed_len + pool.ahead)
    return True


@loop()
def _seal(head, forward, pool, plan, facts, generations, states, constants, table, live, judged):
    """Records of all entries of one forward, as `seal_plan`."""
    roots, reads = np.empty(forward.rows, np.int64), longs_at(forward.ids, forward.num_ids)
    for row in range(forward.rows):
        place = row // forward.width
        roots[row] = _fact(facts, _find(facts, plan.who[2 * place], place), pool.pool_id).root
    low, high = pool.low_layers, pool.high_layers
    return seal_plan(head, plan.slots, reads, roots, generations, states, low, high, constants, table, live, judged)


@loop()
def _keep(forward, pool, slots, table, live):
    """Fingerprints of what a forward has stored, as `keep_fingerprints`."""
    n, layers, base = forward.entries, pool.layers, pool.base
    fingerprints = longs_at(forward.fingerprints, 2 * layers * n).reshape(layers, 2, n)
    content = longs_at(pool.content_a, layers * pool.num_slots).reshape(layers, pool.num_slots)
    keep_fingerprints(slots, fingerprints, pool.start_b, content, live[base:], table[base:])


@loop()
def _row_is_true(fact, struct, generations, constants, table, live, judged):
    """`Reader._records_are_intact` and `_untrue` of the longest row of a request, whose truth grows as far."""
    end, known, pool = fact.judged, min(fact.known, fact.judged), view(POOL, struct)
    if not match_records(fact.first_id, end, live[pool.base :], table[pool.base :]):
        return False
    if known == end:
        return True
    if end + pool.token_offset > fact.num_tokens:
        return False
    chains, first = longs_at(fact.truths, end), fact.num_truths
    tokens = longs_at(fact.tokens, fact.num_tokens)[first + pool.token_offset : end + pool.token_offset]
    before = chains[first - 1] if first else fact.root
    chain_tokens(tokens, first, before, constants[MULTIPLIER], constants[MIX_KEY], chains[first:])
    fact.num_truths = max(first, end)
    own = fact.first_id + 8 * known
    return are_written(own, own, chains[known:], generations, struct, fact.judged_step, table, judged, True)


@loop(
    "int64(int64[::1], int64[:, :, ::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[:, ::1], "
    "int64[:, ::1], boolean[::1])"
)
def prove_forwards(heads, facts, structs, generations, states, constants, table, live, judged):
    """0 where all is clean, sealed and noted in `facts`.

    PLANS_WRONG: what the forwards planned is wrong in some way, and nothing was done.
    READS_WRONG: all is sealed and `facts` say how far rows are written, but some row is not what it should be.
    SEALED_BITS above these: what any forward has seen while it was sealed (layout.py), as it stands in each head.
    REWRITTEN there: nothing that was judged before counts any longer.

    structs: addresses of the pools' structs
    """
    for number in range(heads.shape[0]):
        forward, plan = view(FORWARD, heads[number]), plan_of(heads[number])
        pool = view(POOL, forward.pool)
        if forward.not_finite or not (
            _tokens_are_right(forward, pool, plan, facts)
            and _mask_is_right(forward, plan)
            and _rows_are_right(heads, number, forward, pool, plan, facts)
        ):
            return PLANS_WRONG
    seen = 0
    for head in heads:
        forward, plan = view(FORWARD, head), plan_of(head)
        pool = view(POOL, forward.pool)
        forward.seen = _seal(head, forward, pool, plan, facts, generations, states, constants, table, live, judged)
        seen |= forward.seen
    for head in heads:
        forward = view(FORWARD, head)
        if forward.fingerprints:
            _keep(forward, view(POOL, forward.pool), plan_of(head).slots, table, live)
    if seen & REWRITTEN:
        for row in range(judged.shape[0]):
            judged[row] = False
    well = True
    for request in range(facts.shape[0]):
        for pool_id in range(facts.shape[1]):
            fact = _fact(facts, request, pool_id)
            if seen & REWRITTEN:
                fact.known = 0
            if fact.judged:
                well &= _row_is_true(fact, structs[pool_id], generations, constants, table, live, judged)
    return (0 if well else READS_WRONG) | seen << SEALED_BITS


# what the flight recorder keeps


@loop()
def _tail_at(plan, row, width):
    """Where in the indices begins what a row holds behind the prefix that the plan believes."""
    return plan.bounds[row] + max(plan.prefixes[row // width] - plan.starts[row], 0)


@loop("int64(int64[::1], int32[::1], int64[:, ::1])")
def keep_plans(heads, values, ends):
    """By forward its plan, then its tails (`RecordedForward`), one after another; how many numbers these are.

    More than there is room for in `values`, and none is there; -1: 32 bits do not hold them.
    ends: [forwards, 2] where plan and tails end
    """
    total = 0
    for head in heads:
        forward, plan = view(FORWARD, head), plan_of(head)
        total += layout_of(forward).who
        for row in range(forward.rows):
            total += plan.bounds[row + 1] - _tail_at(plan, row, forward.width)
    if total > values.shape[0]:
        return total
    at = 0
    for number in range(heads.shape[0]):
        forward, plan = view(FORWARD, heads[number]), plan_of(heads[number])
        where, ids = layout_of(forward), longs_at(forward.ids, forward.num_ids)
        numbers = longs_at(heads[number] + 8 * FORWARD.size, where.who)
        has_parents, fits = (forward.has_parents | forward.has_lineage) != 0, True
        for i in range(where.who):
            value = numbers[i] if has_parents or not where.parents <= i < where.bounds else -1
            fits &= -(1 << 31) <= value < 1 << 31
            values[at + i] = value
        at += where.who
        ends[number, 0] = at
        for row in range(forward.rows):
            for i in range(_tail_at(plan, row, forward.width), plan.bounds[row + 1]):
                fits &= -(1 << 31) <= ids[i] < 1 << 31
                values[at] = ids[i]
                at += 1
        ends[number, 1] = at
        if not fits:
            return -1
    return total
