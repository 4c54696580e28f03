"""Recording: what the flight recorder keeps of forwards that were proved clean, by the addresses of their heads."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.cards import ENTRIES, HAS_PARENTS, HEAD, IDS, NUM_IDS, REQUESTS, ROWS, WIDTH
from kvcanary.loops.memory import longs_at, loop


@loop()
def _measured(head):
    """Sizes of `Forward.plan`, and of what its rows hold behind the prefixes that it believes."""
    forward = longs_at(head, HEAD)
    n, rows, requests = forward[ENTRIES], forward[ROWS], forward[REQUESTS]
    size = 4 * n + 6 * rows + 1 + requests
    plan, tails = longs_at(head + 8 * HEAD, size), 0
    for row in range(rows):
        known = plan[size - requests + row // forward[WIDTH]] - plan[4 * n + 2 * rows + 1 + row]
        tails += plan[4 * n + row + 1] - plan[4 * n + row] - max(known, 0)
    return size, tails


@loop("int64(int64[::1])")
def measure_plans(heads):
    """Numbers that `keep_plans` fills."""
    total = 0
    for head in heads:
        size, tails = _measured(head)
        total += size + tails
    return total


@loop("boolean(int64[::1], int32[::1], int64[:, ::1])")
def keep_plans(heads, values, ends):
    """By forward its plan, then its tails (`RecordedForward`), one after another; False: 32 bits do not hold them.

    ends: [forwards, 2] where plan and tails end
    """
    at = 0
    for number in range(heads.shape[0]):
        forward = longs_at(heads[number], HEAD)
        n, rows, requests = forward[ENTRIES], forward[ROWS], forward[REQUESTS]
        size, _ = _measured(heads[number])
        plan, ids = longs_at(heads[number] + 8 * HEAD, size), longs_at(forward[IDS], forward[NUM_IDS])
        has_parents, fits = forward[HAS_PARENTS] != 0, True
        for i in range(size):
            value = plan[i] if has_parents or not 3 * n <= i < 4 * n else -1
            fits &= -(1 << 31) <= value < 1 << 31
            values[at + i] = value
        at += size
        ends[number, 0] = at
        for row in range(rows):
            known = plan[size - requests + row // forward[WIDTH]] - plan[4 * n + 2 * rows + 1 + row]
            for i in range(plan[4 * n + row] + max(known, 0), plan[4 * n + row + 1]):
                fits &= -(1 << 31) <= ids[i] < 1 << 31
                values[at] = ids[i]
                at += 1
        ends[number, 1] = at
        if not fits:
            return False
    return True
