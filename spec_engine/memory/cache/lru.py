"""Leaves of a prefix tree in the order in which they may be evicted."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Leaf(Protocol):
    last_access: int
    is_queued: bool

    @property
    def is_evictable(self) -> bool: ...


LeafT = TypeVar("LeafT", bound=Leaf)


class LeafQueue(Generic[LeafT]):
    """A heap by last access that is put right when it is read: a use costs nothing, an eviction O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, LeafT]] = []
        self._num_pushed = 0  # breaks ties, so that leaves are never compared

    def push(self, leaf: LeafT) -> None:
        """Remember a leaf that has become evictable; once is enough."""
        if not leaf.is_queued:
            leaf.is_queued = True
            self._num_pushed += 1
            heapq.heappush(self._heap, (leaf.last_access, self._num_pushed, leaf))

    def pop(self) -> LeafT | None:
        """The evictable leaf that was used least recently, None when there is none."""
        while self._heap:
            access, _, leaf = heapq.heappop(self._heap)
            leaf.is_queued = False
            if leaf.is_evictable and leaf.last_access == access:
                return leaf
            if leaf.is_evictable:
                self.push(leaf)
        return None
