"""What a canary is told of recurrent states: whose rows they are, what forwards take and leave, what is committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary import States
    from kvcanary.captured import CapturedStates


class StateWatch:
    """Entries of row r are [r * size, (r + 1) * size): its state, then those of its nodes."""

    def __init__(self, states: States | CapturedStates, entries_per_row: int) -> None:
        self.states, self._size = states, entries_per_row
        self._owners: dict[int, str] = {}  # by row

    @property
    def rows(self) -> list[int]:
        """Those that requests have."""
        return list(self._owners)

    def reset(self, row: int) -> None:
        """The request that had the row is gone, or begins anew."""
        if self._owners.pop(row, None) is not None:
            self.states.on_free(self._entries(row))

    def begin(
        self, kind: str, ids: Sequence[str], rows: Sequence[int], used: Sequence[int], lens: Sequence[int]
    ) -> None:
        """A forward of these requests begins, which goes on behind ``lens`` tokens from the states of rows ``used``."""
        for name, row in zip(ids, rows, strict=True):
            if row not in self._owners:
                self._owners[row] = name
                self.states.on_alloc(name, self._entries(row))
        self.states.take(kind, ids, [row * self._size for row in used], lens)

    def left(self, kind: str, ids: Sequence[str], used: Sequence[int], lens: Sequence[int]) -> None:
        """It has gone on to ``lens`` tokens."""
        self.states.leave(kind, ids, [row * self._size for row in used], lens)

    def left_nodes(
        self,
        kind: str,
        ids: Sequence[str],
        rows: Sequence[int],
        lens: Sequence[int],
        paths: Sequence[Sequence[Sequence[int]]],
        columns: Sequence[int],
    ) -> None:
        """A verify has left the states of all nodes; ``paths``: of each request, by node the tokens down to it."""
        names = [name for name, own in zip(ids, paths, strict=True) for _ in own]
        entries = [row * self._size + 1 + column for row in rows for column in columns]
        counts = [length + len(path) for length, own in zip(lens, paths, strict=True) for path in own]
        self.states.leave(kind, names, entries, counts, [path for own in paths for path in own])

    def committed(self, rows: Sequence[int], targets: Sequence[int], nodes: Sequence[int]) -> None:
        """States of nodes were copied to those of rows."""
        sources = [row * self._size + 1 + node for row, node in zip(rows, nodes, strict=True)]
        self.states.on_copy(sources, [row * self._size for row in targets])

    def _entries(self, row: int) -> range:
        return range(row * self._size, (row + 1) * self._size)
