"""Recording: what the flight recorder keeps of forwards that were proved clean, and of records."""

from kvcanary.native.forward_plan import layout_of, plan_of
from kvcanary.native.jit import longs_at, loop, view
from kvcanary.native.layout import FORWARD
from kvcanary_kernels.record.layout import LAYERS_HIGH, LAYERS_LOW, STEP_SITE


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


@loop("int64(int64[:, ::1], int64, int64, int64, int64, int64[:, ::1], int64[::1])")
def copy_records(table, first, end, low, high, kept, partial):
    """Copy the first columns of these rows of records to the same rows of `kept`, unless it has none.

    partial: filled with the rows that some layers have written and others not; how many these are
    """
    num_partial = 0
    for row in range(first, end):
        for column in range(kept.shape[1] if kept.shape[0] else 0):
            kept[row, column] = table[row, column]
        is_whole = table[row, LAYERS_LOW] == low and table[row, LAYERS_HIGH] == high
        if not is_whole and table[row, STEP_SITE] >> 32:
            partial[num_partial] = row
            num_partial += 1
    return num_partial
