"""StepBook: what a step changes of its requests, all of them at once, by compiled loops over their structs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, repeat

from kvcanary.ledger.page_states import Pages
from kvcanary.ledger.requests import Batch, RequestBook
from kvcanary.native.layout import KINDS, LEFT_TO_LEDGER, NO_ROOM, OTHER, RUN


class StepBook:
    """What steps do to the rows of live requests."""

    def __init__(self, book: RequestBook, pages: Pages, page_size: int) -> None:
        from kvcanary.native import loops

        self._book, self._pages, self._page_size, self._loops = book, pages, page_size, loops

    def append(self, batch: Batch, counts: array[int], tokens: array[int], step: int) -> None:
        """Tokens that were accepted, `in_a_row`; where the device has reported of them, the same are expected."""
        arguments = *batch.loop_arguments, counts.buffer_info()[0], tokens.buffer_info()[0], step
        found = self._loops.append_tokens(*arguments)
        if found == NO_ROOM:
            batch.make_room(counts)
            found = self._loops.append_tokens(*arguments)
        if found == LEFT_TO_LEDGER:
            for request, end, count in zip(batch.requests, accumulate(counts), counts, strict=True):
                if request.uncollected:
                    self._book.confirm(request, tokens[end - count : end])

    def commit_rows(self, batch: Batch, committed_lens: array[int], step: int, is_judged: bool) -> int:
        """Entries [0, committed length) are final; `loops.commit_rows`."""
        arguments = *batch.loop_arguments, committed_lens.buffer_info()[0], step, self._page_size, is_judged
        found: int = self._loops.commit_rows(*arguments)
        if found == NO_ROOM:
            batch.make_room(repeat(0, len(batch)))
            found = self._loops.commit_rows(*arguments)
        return found

    def finalise_runs(self, structs: array[int], first: int) -> int:
        """`loops.finalise_runs` of the runs of these structs."""
        arguments = structs.buffer_info()[0], len(structs) // RUN.size, first, self._page_size, self._pages.final_at
        return int(self._loops.finalise_runs(*arguments))

    def write_rows(self, batch: Batch, kind: str, pool_id: int, before: array[int] | None, written: array[int]) -> None:
        """A forward of this kind has written rows of so many entries, None: of all that is final."""
        at = 0 if before is None else before.buffer_info()[0]
        self._loops.write_rows(*batch.loop_arguments, pool_id, KINDS.get(kind, OTHER), at, written.buffer_info()[0])

    def describe_rows(self, batch: Batch, pool_id: int, pending_acceptances: int) -> tuple[array[int], int]:
        """[ROW_NUMBERS * requests + 1] (native/layout.py) of rows of which nothing runs yet, and how many lengths are
        UNKNOWN.

        pending_acceptances: steps that may have accepted what the host has not learned yet
        """
        rows = batch.no_rows[:]
        return rows, self._loops.describe_rows(
            *batch.loop_arguments, pool_id, pending_acceptances, rows.buffer_info()[0]
        )


def in_a_row(values: Sequence[Sequence[int]]) -> tuple[array[int], array[int]]:
    """How many each request has, and those of all one behind the other."""
    return array("q", map(len, values)), array("q", map(int, chain.from_iterable(values)))
