"""Growing a row: the one place that says how many pages it lacks, and takes them."""

from __future__ import annotations

from typing import Protocol

from spec_engine.memory.sizing import step_pages


class Pages(Protocol):
    """Who hands out pages: of one pool, or of several at once."""

    def allocate(self, count: int) -> list[int]:
        """Take so many, or none and raise."""
        ...


def alloc_extend(allocator: Pages, num_owned: int, length: int, page_size: int) -> list[int]:
    """The pages that a row of ``num_owned`` pages takes to hold ``length`` entries; none where it has enough.

    What is missing is counted in whole pages, never in tokens: a pool whose free slots lie in other requests' last
    pages is a full one. The errors of ``allocate``; nothing is taken then.
    """
    missing = step_pages(length, num_owned, 0, page_size)
    return allocator.allocate(missing) if missing else []
