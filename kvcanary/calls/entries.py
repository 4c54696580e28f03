"""Entries: places in rows as arrays, with whose they are, from which a check takes those at which it fires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcanary.calls.forward import Ints
from kvcanary.calls.model_call import ModelCall
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.ledger.ledger import Request
from kvcanary.records.state import PoolState


@dataclass(slots=True, eq=False)
class Entries:
    """Entries of some rows of one pool, row after row and along each row.

    slots:     [n] int64, as the plan named them
    positions: [n] int64 in their rows; -1: not known
    rows:      [n] int64 into `request_ids`; -1: nobody's
    last_good: [n] int64, step in which the entry was last known good; -1: not known, None: of none of them
    names:     [n] int64, slots of the full group that a slot map sends there; None: slots are the pool's own
    """

    slots: Ints
    positions: Ints
    rows: Ints
    request_ids: Sequence[str]
    last_good: Ints | None = None
    names: Ints | None = None

    @property
    def known_good(self) -> Ints:
        """[n] int64: `last_good`, whether it is known or not."""
        return np.full(len(self.slots), -1) if self.last_good is None else self.last_good

    def fired(
        self, code: str, pool: PoolState, site: tuple[str, int], step: int, which: Ints, **evidence: NDArray[Any]
    ) -> ViolationBatch:
        """One check at those of them that `which` numbers, rising; `evidence`: arrays with a row for each entry."""
        own = slice(None) if len(which) == len(self.slots) else which
        some = self.at(own)
        kept: dict[str, Any] = {name: values[own] for name, values in evidence.items()}
        kept |= {"last_good": some.last_good, "names": some.names}
        return ViolationBatch(code, pool, site, step, some.slots, some.positions, some.rows, some.request_ids, **kept)

    def at(self, which: slice | Ints) -> Entries:
        """Some of them."""
        good, names = (None if column is None else column[which] for column in (self.last_good, self.names))
        return Entries(self.slots[which], self.positions[which], self.rows[which], self.request_ids, good, names)


def written_entries(forward: ModelCall) -> Entries:
    """The write plan of a forward, with the slots that it asked for."""
    slots, names, rows = forward.planned.slots, forward.slot_names, np.arange(len(forward.written)) // forward.width
    if forward.refused is not None:
        slots, names = slots.copy(), names.copy()
        slots[forward.refused.entries], names[forward.refused.entries] = forward.refused.ids, forward.refused.names
    requests = [request.request_id for request in forward.requests]
    owners = rows.repeat(forward.written)
    return Entries(slots, forward.planned.positions, owners, requests, names=named(forward.pool, names))


def named(pool: PoolState, names: Ints) -> Ints | None:
    """What a plan calls its slots, where that is not what the pool calls them."""
    return None if pool.view.slot_map is None else names


def join_entries(parts: Sequence[Entries]) -> Entries:
    """All of these, one after another."""
    firsts = accumulate((len(part.request_ids) for part in parts), initial=0)
    return Entries(
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.rows + first for part, first in zip(parts, firsts, strict=False)]),
        [name for part in parts for name in part.request_ids],
        np.concatenate([part.known_good for part in parts]),
        None if parts[0].names is None else np.concatenate([part.names for part in parts if part.names is not None]),
    )


def fired_writes(code: str, forward: ModelCall, which: Ints, **evidence: NDArray[Any]) -> ViolationBatch:
    """One check at some entries of a forward's write plan; `which` and `evidence` as in `Entries.fired`."""
    return written_entries(forward).fired(code, forward.pool, forward.site, forward.step, which, **evidence)


def last_judged(requests: Sequence[Request], pool_id: int, rows: Ints, positions: Ints) -> Ints:
    """[n] int64: identity is judged in every forward, so an entry that was judged before was good at that time."""
    lengths = np.array([request.judged[pool_id].length for request in requests])
    steps = np.array([request.judged[pool_id].step for request in requests])
    return np.where(positions < lengths.take(rows), steps.take(rows), -1)
