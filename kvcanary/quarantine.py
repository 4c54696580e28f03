"""Quarantine: freed pages wait some steps before they are reused, so that a late access still meets their old state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Quarantine:
    """Pages in the order in which they came, each with its step."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, pages: Iterable[int], step: int) -> None:
        self.waiting.extend((page, step) for page in pages)

    def leave(self, step: int, steps: int, wanted: int = 0, least: int = 0) -> list[int]:
        """The pages that may go now, longest waiting first.

        steps:  how long a page waits
        wanted: under pressure so many pages are needed: they go earlier, but never before `least` steps
        """
        left: list[int] = []
        while self.waiting:
            page, since = self.waiting[0]
            if step - since < (least if len(left) < wanted else steps):
                break
            self.waiting.popleft()
            left.append(page)
        return left
