"""RunReader: the ledger goes on by what captured forwards say of their runs, and a loop looks before the rules do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat

from kvcanary.captured.launch_group import Launched
from kvcanary.captured.substep import SAFE
from kvcanary.ledger.page_states import Pages
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import LEFT_TO_RULES, MESSAGE_BITS, PAGES_FRESH, QUIET, REWRITES, SAID, filled
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState


class RunReader:
    """Runs of captured forwards, read in their order with what is true of pages and records.

    collect_quiet: `loops.collect_quiet`;  quiet_at: the last of its arguments;  said: how far it came
    """

    def __init__(
        self, state: CanaryState, pages: Pages, record_store: RecordStore, headers: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """`headers`: as of `SubstepRegistry.seen`; `collect_quiet` needs them."""
        self._pages, self._record_store, loops = pages, record_store, state.pools[0].loops
        self._read_runs, self.collect_quiet = loops.read_runs, loops.collect_quiet
        self._tables = array("q", (pages.states.ctypes.data, *record_store.flags_address))
        self._books_at, self._page_size = self._tables.buffer_info()[0], state.page_size
        self.said = array("q", bytes(8 * SAID.size))
        seen, counts, header = headers
        own = {"tables": self._books_at, "page_size": state.page_size, "final": pages.final_at}
        said_at = self.said.buffer_info()[0]
        self._quiet = filled(QUIET, **own, seen=seen, counts=counts, header=header, said=said_at)
        self.quiet_at = self._quiet.buffer_info()[0]

    def read(self, runs: Sequence[Launched], structs: array[int], first: int, planned: array[int], proves: bool) -> int:
        """`loops.read_runs`, with room for it; `structs`: of all of them."""
        arguments = first, len(runs), structs.buffer_info()[0], self._books_at, planned.buffer_info()[0], proves
        end: int = self._read_runs(*arguments)
        if end == first:
            accepted = runs[first].accepted
            make_room(runs[first].batch, 0 if accepted is None else accepted.shape[1])
            end = self._read_runs(*arguments)
        return end

    def is_clean(self, run: Launched, seen: int) -> bool:
        """Whether nothing is left to the rules: pages are written then, and the record store knows new records."""
        if seen & LEFT_TO_RULES:
            return False
        if seen & PAGES_FRESH:
            self._pages.wrote(run.message[SAFE][: seen >> MESSAGE_BITS], self._page_size)
        self._record_store.collected(seen & REWRITES)
        return True


def make_room(batch: Batch, places: int) -> None:
    """For what a step accepts of these requests; `places`: numbers that it tells of each, as `LaunchGroup` has it."""
    batch.make_room(repeat(max(places - 1, 0), len(batch)))
