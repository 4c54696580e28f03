"""Pages of the toy engine: free, waiting, named by rows, and kept by a prefix cache."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

Key = tuple[int, tuple[int, ...]]  # the cached page before this one, or 0; tokens of the page and the one behind them


class ToyPages:
    """A page is free, waits in quarantine, is named by rows, or kept by the cache with or without them.

    An entry of a draft pool holds the token behind its position, so cached pages are found by one token more.

    free:    may be granted now
    grants:  [num_pages] int64, how often each page was granted
    holders: [num_pages] int64, how many rows name it
    """

    def __init__(self, num_pages: int, page_size: int, quarantine: int, rng: random.Random) -> None:
        self.free = list(range(1, num_pages))
        self.grants = np.zeros(num_pages, dtype=np.int64)
        self.holders = np.zeros(num_pages, dtype=np.int64)
        self._page_size, self._quarantine, self._random = page_size, quarantine, rng
        self._waiting: deque[tuple[int, int]] = deque()  # (step of the free, page)
        self._cached: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._followers: Counter[int] = Counter()

    def all_free(self) -> list[int]:
        """Those that may be granted, and those that wait."""
        return [*self.free, *(page for _, page in self._waiting)]

    def take(self, count: int, step: int) -> list[int]:
        """Free pages for a row, drawn; under pressure also those that wait, the longest waiting first."""
        while self._waiting and (step - self._waiting[0][0] >= self._quarantine or len(self.free) < count):
            self.free.append(self._waiting.popleft()[1])
        pages = [self.free.pop(self._random.randrange(len(self.free))) for _ in range(count)]
        self.grants[pages] += 1
        self.holders[pages] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One row more names these pages."""
        self.holders[pages] += 1

    def drop(self, pages: Sequence[int], step: int) -> None:
        """One row fewer names these pages; those that nobody keeps are free."""
        self.holders[pages] -= 1
        self._give_back([page for page in pages if not self.holders[page] and page not in self._keys], step)

    # the prefix cache

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """The cache keeps the pages of this row; those that it did not have. Of equal ones it keeps the first."""
        fresh, before = [], 0
        for page, key_tokens in zip(pages, self._split(tokens), strict=False):
            key = (before, key_tokens)
            if key not in self._cached:
                self._cached[key], self._keys[page] = page, key
                self._followers[before] += 1
                fresh.append(page)
            before = self._cached[key]
        return fresh

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The cached pages of the longest known beginning."""
        pages = [0]
        for key_tokens in self._split(tokens):
            page = self._cached.get((pages[-1], key_tokens))
            if page is None:
                break
            pages.append(page)
        return pages[1:]

    def unused(self) -> list[int]:
        """Cached pages that no row names and no other cached page follows."""
        return [page for page in self._keys if not self.holders[page] and not self._followers[page]]

    def num_cached(self) -> int:
        """Cached pages that no row names."""
        return sum(not self.holders[page] for page in self._keys)

    def evict(self, pages: Sequence[int], step: int) -> None:
        for page in pages:
            key = self._keys.pop(page)
            del self._cached[key]
            self._followers[key[0]] -= 1
        self._give_back(pages, step)

    def _split(self, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """By page its tokens and the one behind them."""
        size = self._page_size
        return (tuple(tokens[first : first + size + 1]) for first in range(0, len(tokens) - size, size))

    def _give_back(self, pages: Iterable[int], step: int) -> None:
        self._waiting.extend((step, page) for page in pages)
