"""Hearing: the books go on by what captured forwards say of their runs, and a loop looks before the rules do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat

from kvcanary.captured.decoded import Launched
from kvcanary.captured.substep import SAFE
from kvcanary.ledger.page_states import Pages
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import LEFT_TO_RULES, LINE_BITS, PAGES_FRESH, QUIET, REWRITES, SAID, filled
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState


class Hearing:
    """Runs of captured forwards, heard of in their order with what is true of pages and records.

    land_quiet: `loops.land_quiet`;  quiet_at: the last of its arguments;  said: how far it came
    """

    def __init__(
        self, state: CanaryState, pages: Pages, mirror: RecordStore, headers: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """`headers`: as of `SubstepRegistry.seen`; `land_quiet` needs them."""
        self._pages, self._mirror, loops = pages, mirror, state.pools[0].loops
        self._hear_runs, self.land_quiet = loops.hear_runs, loops.land_quiet
        self._books = array("q", (pages.states.ctypes.data, *mirror.flags_of_loops))
        self._books_at, self._page_size = self._books.buffer_info()[0], state.page_size
        self.said = array("q", bytes(8 * SAID.size))
        seen, counts, header = headers
        self._quiet = filled(
            QUIET,
            books=self._books_at,
            seen=seen,
            counts=counts,
            header=header,
            page_size=state.page_size,
            final=pages.final_at,
            said=self.said.buffer_info()[0],
        )
        self.quiet_at = self._quiet.buffer_info()[0]

    def hear(self, runs: Sequence[Launched], cards: array[int], first: int, planned: array[int], proves: bool) -> int:
        """`loops.hear_runs`, with room for it; `cards`: of all of them."""
        told = first, len(runs), cards.buffer_info()[0], self._books_at, planned.buffer_info()[0], proves
        end: int = self._hear_runs(*told)
        if end == first:
            accepted = runs[first].accepted
            make_room(runs[first].batch, 0 if accepted is None else accepted.shape[1])
            end = self._hear_runs(*told)
        return end

    def is_clean(self, run: Launched, seen: int) -> bool:
        """Whether nothing is left to the rules: then pages are written, and the mirror knows where new records lie."""
        if seen & LEFT_TO_RULES:
            return False
        if seen & PAGES_FRESH:
            self._pages.wrote(run.line[SAFE][: seen >> LINE_BITS], self._page_size)
        self._mirror.heard(seen & REWRITES)
        return True


def make_room(batch: Batch, places: int) -> None:
    """For what a step accepts of these requests; `places`: numbers that it tells of each, as `LaunchGroup` has it."""
    batch.make_room(repeat(max(places - 1, 0), len(batch)))
