"""PlanLayout: where each array of a forward's plan lies, for Python and for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PlanLayout(NamedTuple):
    """Where arrays of int64 begin, one behind the other, counted from the plan's first number.

    slots, tokens, positions, parents:           [entries]
    bounds:                                      [rows + 1], where rows begin in the indices that they read
    written, starts, owns, begins, skipped:      [rows]
    prefixes:                                    [requests]; the plan ends behind them
    who:    [requests * 2] uids and committed lengths;  chains: [entries] values, once sealed; both behind the plan
    """

    slots: int
    tokens: int
    positions: int
    parents: int
    bounds: int
    written: int
    starts: int
    owns: int
    begins: int
    skipped: int
    prefixes: int
    who: int
    chains: int
    end: int

    def part(self, plan: NDArray[np.int64], name: str) -> NDArray[np.int64]:
        """The array of that name, in place."""
        at = self._fields.index(name)
        return plan[self[at] : self[at + 1]]


def plan_layout(entries: int, rows: int, requests: int) -> PlanLayout:
    """Of a forward that writes `entries` and whose requests have so many `rows`."""
    bounds = 4 * entries
    row = bounds + rows + 1
    prefixes = row + 5 * rows
    who, chains = prefixes + requests, prefixes + 3 * requests
    of_entries, of_rows = (0, entries, 2 * entries, 3 * entries), (row, row + rows, row + 2 * rows, row + 3 * rows)
    return PlanLayout(*of_entries, bounds, *of_rows, row + 4 * rows, prefixes, who, chains, chains + entries)
