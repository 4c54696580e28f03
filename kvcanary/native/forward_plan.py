"""Plans of a forward: taken to the canary's own memory, looked through once, and kept by the flight recorder.

A loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, cast

from kvcanary.native.jit import flags_at, longs_at, loop, view
from kvcanary.native.layout import ASKED, CONTRADICTS, FORWARD, GUESSES, POOL, REFUSES, PlanLayout, plan_layout
from kvcanary.pools.slot_maps import first_visible

Plan = cast(Any, namedtuple)("Plan", PlanLayout._fields[:-1])
_layout_of, _first_visible = loop()(plan_layout), loop()(first_visible)


@loop()
def layout_of(forward):
    """`PlanLayout` of a forward, by its head."""
    return _layout_of(forward.entries, forward.rows, forward.requests)


@loop()
def _part(plan, begin, end):
    return longs_at(plan + 8 * begin, end - begin)


@loop()
def plan_of(head):
    """The arrays of a forward's plan and what lies behind it, as `PlanLayout` has them, by the address of its head."""
    at, plan = layout_of(view(FORWARD, head)), head + 8 * FORWARD.size
    return Plan(
        _part(plan, at.slots, at.tokens),
        _part(plan, at.tokens, at.positions),
        _part(plan, at.positions, at.parents),
        _part(plan, at.parents, at.bounds),
        _part(plan, at.bounds, at.written),
        _part(plan, at.written, at.starts),
        _part(plan, at.starts, at.owns),
        _part(plan, at.owns, at.begins),
        _part(plan, at.begins, at.skipped),
        _part(plan, at.skipped, at.prefixes),
        _part(plan, at.prefixes, at.who),
        _part(plan, at.who, at.chains),
        _part(plan, at.chains, at.end),
    )


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


@loop("void(int64[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[::1], int64[::1])")
def publish_pages(pages, generations, owners, states, to_generations, to_owners, to_states):
    """Copy what is true of these pages; the others [num_pages]."""
    for page in pages:
        to_generations[page], to_owners[page] = generations[page], owners[page]
        to_states[page] = states[page]


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
