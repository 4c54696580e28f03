"""Divergence report: where the map of a window pool says something else than its books, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from kvcanary import first_visible
from spec_engine.memory.pools.window_pool import WindowPool, WindowRow

_events = structlog.get_logger("spec_engine")


@dataclass(frozen=True)
class RowDivergence:
    """The window of one row through the map, as the next reader finds it.

    first_position:   the first position that it sees
    window_slots:     what the map says of this position and all that follow in the row's pages, its reserve included
    unmapped:         positions that the map sends nowhere, though the books have a slot for them
    evicted:          positions whose window page was given back: too early, since they are seen
    wrong:            positions that the map sends to another slot than the books
    agreed_len:       all positions before this one agree
    last_agreed_step: step of the last report that found nothing in this row; None: there was none
    """

    request_id: str
    committed_len: int
    first_position: int
    window_slots: tuple[int, ...]
    unmapped: tuple[int, ...]
    evicted: tuple[int, ...]
    wrong: tuple[int, ...]
    agreed_len: int
    last_agreed_step: int | None

    @property
    def is_clean(self) -> bool:
        return not (self.unmapped or self.evicted or self.wrong)

    def to_json(self) -> dict[str, Any]:
        """The fields; plain JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class WindowReports:
    """Compares the map with the books, and remembers when each row of the last report last agreed."""

    def __init__(self, pool: WindowPool) -> None:
        self._pool = pool
        self._agreed: dict[str, int] = {}

    def compare(self, rows: Sequence[WindowRow]) -> list[RowDivergence]:
        """One entry a row, clean ones too; every other one is also an event, ``spec_engine.window_divergence``.

        Copies the rows' windows of the map to the host: for a debugging command, or now and then.
        """
        found = [self._compare(row) for row in rows]
        self._agreed = {row.request_id: self._agreed[row.request_id] for row in found if row.request_id in self._agreed}
        for row in found:
            if row.is_clean:
                self._agreed[row.request_id] = self._pool.step
            else:
                _events.error("spec_engine.window_divergence", step=self._pool.step, **row.to_json())
        return found

    def _compare(self, row: WindowRow) -> RowDivergence:
        size, first = self._pool.page_size, first_visible(row.committed_len, self._pool.window)
        pages = row.pages[first // size :]
        booked = self._pool.booked_slots(pages)[first % size :].tolist()
        mapped = self._pool.mapped_slots(pages)[first % size :].tolist()
        kinds = [_kind(slot, book, size) for slot, book in zip(mapped, booked, strict=True)]
        agreed = next((place for place, kind in enumerate(kinds) if kind), len(kinds))

        def positions(kind: str) -> tuple[int, ...]:
            return tuple(first + place for place, found in enumerate(kinds) if found == kind)

        return RowDivergence(
            row.request_id,
            row.committed_len,
            first,
            tuple(mapped),
            positions("unmapped"),
            positions("evicted"),
            positions("wrong"),
            first + agreed,
            self._agreed.get(row.request_id),
        )


def _kind(slot: int, booked: int, page_size: int) -> str | None:
    """What is wrong with the map's entry of a position that is seen; the first page of slots is nobody's."""
    if not booked:
        return "evicted"
    if slot == booked:
        return None
    return "unmapped" if slot < page_size else "wrong"
