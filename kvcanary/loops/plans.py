"""Plans of a forward: taken to the canary's own memory, and looked through once.

A loop says only whether all is well; what is wrong is named by the rules that its docstring points to.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.loops.memory import longs_at, loop


@loop()
def _copy(source, n, plan, at):
    if source:
        values = longs_at(source, n)
        for i in range(n):
            plan[at + i] = values[i]
    return at + n


@loop(
    "boolean(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, "
    "int64, int64[::1])"
)
def take_plan(
    slots,
    tokens,
    positions,
    parents,
    n,
    indptr,
    written,
    count,
    starts,
    rows,
    prefixes,
    width,
    num_indices,
    window,
    nodes,
    plan,
):
    """Fill `Forward.plan` from tensors at these addresses, 0 where there is none; whether it contradicts itself.

    count:  entries that every row writes, where `written` is 0
    window: positions that attention sees, 0: all
    nodes:  entries that every row must write, as many as its tree mask says; -1: any
    The rules are those of `forward.refuse_contradiction`.
    """
    at = _copy(slots, n, plan, 0)
    at = _copy(tokens, n, plan, at)
    at = _copy(positions, n, plan, at)
    own_parents = plan[at : at + n]
    at = _copy(parents, n, plan, at)
    bounds = plan[at : at + rows + 1]
    at = _copy(indptr, rows + 1, plan, at)
    own_written, own_starts = plan[at : at + rows], plan[at + rows : at + 2 * rows]
    own_written[:] = count
    own_starts[:] = 0
    at = _copy(written, rows, plan, at)
    at = _copy(starts, rows, plan, at)
    owns, begins, skipped = plan[at : at + rows], plan[at + rows : at + 2 * rows], plan[at + 2 * rows : at + 3 * rows]
    lengths = plan[at + 3 * rows :]
    _copy(prefixes, lengths.shape[0], plan, at + 3 * rows)
    wrong, first = bounds[0] != 0 or bounds[rows] != num_indices, 0
    for row in range(rows):
        owns[row] = bounds[row + 1] - own_written[row]
        begin = begins[row] = own_starts[row] + owns[row] - bounds[row]
        skipped[row] = max(0, begin + 1 - window - own_starts[row]) if window and begin + 1 > window else 0
        prefix = lengths[row // width]
        wrong |= not (0 <= prefix <= begin and 0 <= own_starts[row] <= begin) or own_written[row] < 0
        wrong |= nodes >= 0 and own_written[row] != nodes
        if parents and not wrong:
            for entry in range(first, min(first + own_written[row], n)):
                wrong |= not (own_parents[entry] == -1 or first <= own_parents[entry] < entry)
        first += own_written[row]
    return wrong or first != n


@loop(
    "boolean(int64, int64, int64, int64[::1], int64, int64, int64, int64[::1], int64[::1], int64, int64, boolean[::1])"
)
def nothing_to_refuse(
    indices, num_indices, num_slots, plan, n, rows, width, uids, writers, page_size, null_slots, seen
):
    """Whether `refusing` would refuse nothing, and `writing.judge_slots` would name no slot that is written twice.

    indices: address of what is read;  plan: Forward.plan
    uids:    [requests]; writers: [pages] who may write them
    seen:    [num_slots] all False, before and after
    """
    reads = longs_at(indices, num_indices)
    slots, written = plan[:n], plan[4 * n + rows + 1 : 4 * n + 2 * rows + 1]
    well = True
    for i in range(num_indices):
        well &= 0 <= reads[i] < num_slots
    first = 0
    for row in range(written.shape[0]):
        uid = uids[row // width]
        for entry in range(first, first + written[row]):
            slot = slots[entry]
            if not 0 <= slot < num_slots:
                well = False
            elif slot >= null_slots:
                well &= writers[slot // page_size] == uid and not seen[slot]
                seen[slot] = True
        first += written[row]
    for entry in range(slots.shape[0]):
        if 0 <= slots[entry] < num_slots:
            seen[slots[entry]] = False
    return well


@loop("void(boolean[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[::1], int64[::1])")
def publish_pages(changed, generations, owners, states, to_generations, to_owners, to_states):
    """Copy what is true of the pages that have changed, and mark them as unchanged; all [num_pages]."""
    for page in range(changed.shape[0]):
        if changed[page]:
            to_generations[page], to_owners[page] = generations[page], owners[page]
            to_states[page] = states[page]
            changed[page] = False
