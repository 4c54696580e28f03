"""Quarantine: freed pages wait some steps before they are reused, so that a late access still meets their old state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from kvcanary.ledger.page_states import Array

_NONE = np.zeros(0, np.int64)


class Quarantine:
    """Pages in the order in which they came.

    waiting: those of one event together, with its step
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Array, int]] = deque()

    def __len__(self) -> int:
        return sum(len(pages) for pages, _ in self.waiting)

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Every page and its step, longest waiting first."""
        for pages, since in self.waiting:
            yield from ((page, since) for page in pages.tolist())

    def add(self, pages: Array, step: int) -> None:
        """[n] int64"""
        if len(pages):
            self.waiting.append((pages, step))

    def remove(self, pages: Array) -> None:
        """These wait no longer, if they did."""
        left = ((waiting[~np.isin(waiting, pages)], since) for waiting, since in self.waiting)
        self.waiting = deque((waiting, since) for waiting, since in left if len(waiting))

    def leave(self, step: int, steps: int, wanted: int = 0, least: int = 0) -> Array:
        """[n] int64: the pages that may go now, longest waiting first.

        steps:  how long a page waits
        wanted: under pressure so many pages are needed: they go earlier, but never before `least` steps
        """
        left = list[Array]()
        while self.waiting:
            pages, since = self.waiting[0]
            going = len(pages) if step - since >= steps else wanted if step - since >= least else 0
            if going <= 0:
                break
            self.waiting.popleft()
            if going < len(pages):
                self.waiting.appendleft((pages[going:], since))
            left.append(pages[:going])
            wanted -= len(left[-1])
        return np.concatenate(left) if left else _NONE
