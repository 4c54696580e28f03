"""What a forward was fed, compared with what it should have been fed, where the host or another forward knows it.

Tokens, positions and slots are compared on the device; the host looks only when the counter of findings says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Group
from kvcanary.calls.violation import Violation
from kvcanary.report.causes.watched import LAST_ENTRY
from kvcanary.report.watched_evidence import WatchedPool

UNKNOWN = -1  # in `expected`: nobody knows


@dataclass(frozen=True)
class Entries:
    """The entries of one forward, in the order in which they are fed.

    requests:  by row
    where:     what the report says besides of an entry, by its number: its branch, or its node in a tree
    rows:      [n] on the host, the row of each entry
    positions: [n] where it stands in its row
    slots:     [n] where it is stored
    indices:   [n] on the host, where they are of several forwards of a kind: of which
    """

    requests: Sequence[str]
    rows: NDArray[np.integer]
    positions: Tensor
    slots: Tensor
    where: Callable[[int], str] | None = None
    indices: NDArray[np.integer] | None = None


@dataclass(frozen=True, eq=False)
class Fed:
    """An event of a step: what was fed and what should have been, [n] each, and where they differ."""

    code: str
    what: str
    found: Tensor
    expected: Tensor
    wrong: Tensor
    entries: Entries
    group: Group
    site: tuple[str, int]

    def violations(self, step: int) -> Iterator[Violation]:
        """The first of each row. All of them are one incident, and so are those of its requests in later forwards."""
        told, rows = set[int](), self.entries.rows
        for entry in self.wrong.nonzero()[:, 0].tolist():
            row = int(rows[entry])
            if row in told:
                continue
            told.add(row)
            pool = WatchedPool.of(self.group.layers[0].view, self.group.number, self.group.records)
            slot, position = int(self.entries.slots[entry]), int(self.entries.positions[entry])
            index = self.site[1] if self.entries.indices is None else int(self.entries.indices[entry])
            site = self.site[0], index
            violation = Violation(self.code, pool, slot, position, self.entries.requests[row], site, step)
            violation.expected = {self.what: int(self.expected[entry])}
            violation.found = {self.what: int(self.found[entry])}
            violation.along = self.group.number, step
            violation.notes = (LAST_ENTRY,) if entry + 1 == len(rows) or rows[entry + 1] != row else ()
            violation.notes += () if self.entries.where is None else (self.entries.where(entry),)
            yield violation


@dataclass(frozen=True, eq=False)
class Outgrown:
    """An event of a step: rows were given more entries than a line of the table has, so that the rest went elsewhere.

    requests: each with the entries that it was given, and the slot of the first that went elsewhere
    width:    of a line
    """

    requests: Sequence[tuple[str, int, int]]
    width: int
    group: Group

    def violations(self, step: int) -> Iterator[Violation]:
        """R10 of each."""
        pool = WatchedPool.of(self.group.layers[0].view, self.group.number, self.group.records)
        for request, length, slot in self.requests:
            violation = Violation("R10", pool, slot, self.width, request, ("grant", 0), step)
            violation.expected, violation.found = {"row_width": self.width}, {"length": length}
            violation.along = self.group.number, step
            yield violation


def tell_outgrown(canary: PagedCanary, requests: Sequence[tuple[str, int, int]], width: int) -> None:
    """Rows were given more entries than a line of the table has; as `Outgrown`."""
    canary.memory.total += len(requests)
    canary.events.append(Outgrown(requests, width, canary.groups[0]))


def judge_fed(
    canary: PagedCanary,
    code: str,
    what: str,
    found: Tensor,
    expected: Tensor,
    entries: Entries,
    site: tuple[str, int],
) -> None:
    """Compare what a forward is fed with what it should be fed, UNKNOWN where nobody knows; told with the next step.

    found, expected: [n] on the device. No wait.
    """
    wrong = (found != expected) & (expected != UNKNOWN)
    canary.memory.total += wrong.sum()
    # the engine may use its tensors again before the host looks
    kept = replace(entries, positions=entries.positions.clone(), slots=entries.slots.clone())
    canary.events.append(Fed(code, what, found.clone(), expected, wrong, kept, canary.groups[0], site))
