"""The pool equation: free + quarantined + owned + cached == total, after every step and at idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcanary.invariants import check_pages_add_up, check_references


@dataclass(frozen=True)
class PoolAccounting:
    """Pages by where they are; the null page is not counted.

    free, quarantined: nobody's; owned: private pages of live requests; evictable, protected: in the prefix tree,
    unlocked and locked. A page of the tree counts there and nowhere else, however many requests read it.
    """

    total: int
    free: int
    quarantined: int
    owned: int
    evictable: int = 0
    protected: int = 0

    def check(self) -> None:
        """PageLeakError, with all terms, unless they add up to the pool."""
        check_pages_add_up(self.free, self.quarantined, self.owned, self.evictable, self.protected, self.total)


def check_holders(references: Mapping[int, int], rows: Iterable[Sequence[int]], cached: Iterable[int]) -> None:
    """ReferenceCountError unless each page has one reference for each row that names it, and one for the prefix tree.

    references: page -> holders, as the allocator counts them; rows: the pages of every live request; cached: the pages
    of the tree. Reads every page of the pool: for idle moments and tests.
    """
    named = Counter(page for row in rows for page in row)
    named.update(cached)
    check_references(references, named)
