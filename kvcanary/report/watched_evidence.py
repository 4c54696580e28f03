"""Watched evidence: what is read about an incident in caches that are only watched: nobody tells of pages there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from kvcanary.calls.violation import Violation
from kvcanary.pools.views import PoolView
from kvcanary.provenance.bytes_of import BY_NAME, Provenance, find_provenance, holds_its_own
from kvcanary.records.state import PoolState
from kvcanary.report.evidence import Evidence
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.rows import PoolRows

MOST_HISTORIES = 8  # of one check that are looked up


@dataclass(frozen=True)
class CacheView:
    """What stands for a PoolView, where entries lie in tensors without slots."""

    name: str
    num_layers: int
    num_slots: int = 0
    page_size: int = 1
    null_slots: int = 0
    token_offset: int = 0
    ahead: int = 0
    vocab_size: int | None = None
    slot_map: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class WatchedPool:
    """What stands for a PoolState: no check runs on it, findings are made from it.

    pool_id: pools of one number share slots;  records: [slots, 8] int64, None: there are none
    label:   what findings call it; empty: as its view
    content_a: [layers, slots] int64, fingerprint a of what was stored; None: bytes have no names
    """

    view: PoolView | CacheView
    pool_id: int = 0
    records: Tensor | None = None
    keys: Keys | None = None
    label: str = ""
    content_a: Tensor | None = None
    cleared_in: int | None = None
    is_gone: bool = False

    @property
    def name(self) -> str:
        return self.label or self.view.name

    @property
    def rows(self) -> PoolRows:
        return cast("PoolView", self.view).rows

    @property
    def full_layers(self) -> int:
        return (1 << self.view.num_layers) - 1

    @classmethod
    def of(cls, view: PoolView | CacheView, *kept: Any) -> PoolState:
        """As a violation takes it; `kept`: the fields behind the view."""
        return cast("PoolState", cls(view, *kept))


class WatchedEvidence:
    """Reads the record of a slot, and who wrote it.

    writers: names of requests by the number that records have
    history: what is known of the block of a violation, oldest first; empty where nobody says anything of blocks
    """

    def __init__(
        self, writers: Mapping[int, str], history: Callable[[Violation], tuple[str, ...]] = lambda violation: ()
    ) -> None:
        self._writers, self._history = writers, history

    def read(self, incident: Sequence[Violation], place: int = 0) -> Evidence:
        violation = incident[0]
        records: Tensor | None = violation.pool.records
        is_inside = records is not None and 0 <= violation.slot < len(records)
        found = record.read_record(violation.pool.records, violation.slot) if is_inside else None
        names = dict.fromkeys(name for own in incident for name in (own.request_id, *own.others) if name is not None)
        declared = (self._history(violation) if place < MOST_HISTORIES else ()) or (
            "nobody tells this canary of grants and frees",
        )
        provenance = _provenance(violation) if place < MOST_HISTORIES else ()
        named = provenance[0].slot if provenance else None
        return Evidence(
            incident,
            None,
            found,
            provenance=provenance,
            source=None if named is None else record.read_record(violation.pool.records, named),
            source_is_damaged=named is not None and not holds_its_own(violation.pool, violation.layers[0], named),
            writer=self._writers.get(found.request) if found is not None and found.site else None,
            word=violation.word,
            history=declared if violation.row_number is None else (f"row {violation.row_number} of the batch",),
            readers=tuple(names),
            exposed_tokens=0 if violation.last_good is None else max(0, violation.step - violation.last_good - 1),
        )


def _provenance(violation: Violation) -> tuple[Provenance, ...]:
    """Of bytes that changed by more than a word: for which slot they were written, where a fingerprint says so."""
    pool = violation.pool
    is_known = violation.code == "R9" and violation.word is None and bool(violation.layers)
    if not is_known or pool.content_a is None or not 0 <= violation.slot < len(pool.records):
        return ()
    return find_provenance(pool, violation.slot, violation.layers[0], hypotheses=BY_NAME)
