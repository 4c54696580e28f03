"""Plans of a forward: taken to the canary's own memory, and looked through once.

A loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.native.jit import flags_at, longs_at, loop
from kvcanary.native.layout import CONTRADICTS, FORWARD, GUESSES, REFUSES
from kvcanary.native.structs import forward_at, pool_at


@loop()
def _copy(source, n, plan, at):
    if source:
        values = longs_at(source, n)
        for i in range(n):
            plan[at + i] = values[i]
    return at + n


@loop()
def _may_use(pool, indices, num_indices, slots, written, width, who):
    """Whether all ids lie in the pool, and every slot on a page that its request may write, and is written once."""
    if not pool.writers:
        return False
    num_slots = pool.num_slots
    reads, seen = longs_at(indices, num_indices), flags_at(pool.seen_slots, num_slots)
    writers = longs_at(pool.writers, -(-num_slots // pool.page_size))
    well = True
    for i in range(num_indices):
        well &= 0 <= reads[i] < num_slots
    first = 0
    for row in range(written.shape[0]):
        uid = who[row // width * 2]
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


@loop(
    "int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, "
    "int64, int64, int64, int64, int64, int64, int64, int64, int64, int64[::1])"
)
def take_plan(
    card,
    kind,
    index,
    step,
    site,
    slots,
    tokens,
    positions,
    parents,
    lineage,
    n,
    indptr,
    written,
    count,
    starts,
    rows,
    prefixes,
    width,
    indices,
    num_indices,
    mask,
    nodes,
    who_at,
    requests,
    memory,
):
    """Fill `Forward.memory` from tensors at these addresses, 0 where there is none; its address, and what was seen.

    count: entries that every row writes, where `written` is 0
    nodes: entries that every row must write, as many as its tree mask says; -1: any
    who_at: address of [requests * 2] uids and committed lengths
    CONTRADICTS by the rules of `forward.refuse_contradiction`; else REFUSES where `admission` would refuse something or
    `writes.judge_slots` would name a slot that is written twice, where a row is too short for what it must read and
    write, and where the loops do not know the pages. What a short row writes stands where its prefix says (R10).
    """
    pool, who = pool_at(card), longs_at(who_at, 2 * requests)
    head = forward_at(memory.ctypes.data)
    head.pool, head.kind, head.index, head.step, head.site = card, kind, index, step, site
    head.entries, head.rows, head.width, head.requests = n, rows, width, requests
    head.has_parents, head.has_lineage = parents != 0, lineage != 0
    head.ids, head.num_ids, head.mask, head.nodes = indices, num_indices, mask, nodes
    head.lanes = head.before = head.num_before = head.seen = 0
    plan = memory[FORWARD.size : memory.shape[0] - who.shape[0] - n]
    for i in range(who.shape[0]):
        memory[FORWARD.size + plan.shape[0] + i] = who[i]
    at = _copy(slots, n, plan, 0)
    at = _copy(tokens, n, plan, at)
    at = _copy(positions, n, plan, at)
    own_parents = plan[at : at + n]
    at = _copy(lineage if lineage else parents, n, plan, at)
    bounds = plan[at : at + rows + 1]
    at = _copy(indptr, rows + 1, plan, at)
    own_written, own_starts = plan[at : at + rows], plan[at + rows : at + 2 * rows]
    for row in range(rows):
        own_written[row], own_starts[row] = count, 0
    at = _copy(written, rows, plan, at)
    at = _copy(starts, rows, plan, at)
    owns, begins, skipped = plan[at : at + rows], plan[at + rows : at + 2 * rows], plan[at + 2 * rows : at + 3 * rows]
    lengths, window = plan[at + 3 * rows :], pool.window
    _copy(prefixes, lengths.shape[0], plan, at + 3 * rows)
    wrong, short, first = bounds[0] != 0 or bounds[rows] != num_indices, False, 0
    ancestors = index if kind == GUESSES else 0
    for row in range(rows):
        prefix, before = lengths[row // width], bounds[row + 1] - bounds[row] - own_written[row]
        wrong |= prefix < 0 or own_starts[row] < 0 or own_written[row] < 0 or bounds[row + 1] < bounds[row]
        owns[row], begin = bounds[row] + max(before, 0), own_starts[row] + before
        if before < 0 or begin < prefix:
            short, begin = True, max(begin, prefix + ancestors)
        begins[row] = begin
        hidden = max(0, begin + 1 - window - own_starts[row]) if window and begin + 1 > window else 0
        skipped[row] = min(hidden, max(before, 0))
        wrong |= nodes >= 0 and own_written[row] != nodes
        wrong |= lineage != 0 and own_written[row] != 1
        if parents and not wrong:
            for entry in range(first, min(first + own_written[row], n)):
                wrong |= not (own_parents[entry] == -1 or first <= own_parents[entry] < entry)
        first += own_written[row]
    if wrong or first != n:
        return memory.ctypes.data | CONTRADICTS
    return memory.ctypes.data | (
        0 if not short and _may_use(pool, indices, num_indices, plan[:n], own_written, width, who) else REFUSES
    )


@loop("void(int64[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[::1], int64[::1])")
def publish_pages(pages, generations, owners, states, to_generations, to_owners, to_states):
    """Copy what is true of these pages; the others [num_pages]."""
    for page in pages:
        to_generations[page], to_owners[page] = generations[page], owners[page]
        to_states[page] = states[page]
