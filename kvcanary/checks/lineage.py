"""Lineage: from which branch of the draft forward before it a row goes on, and whose entry it reads instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcanary.calls.entries import Entries, named
from kvcanary.calls.forward import Forward, Ints
from kvcanary.calls.violation import NO_BRANCH, Lineage
from kvcanary.calls.violation_log import HitBatch
from kvcanary.captured.decoded import Launched, Learned
from kvcanary.captured.readback import StaticHit
from kvcanary_kernels.record.layout import CHAIN


def judge_lineage(forward: Forward, records: Ints) -> list[HitBatch]:
    """R5 where a row reads, in front of its own entry, another one than its lineage goes on from.

    records: [slots, 8] as the canary has written them. Chain values are compared and not slots: copies keep them.
    """
    if forward.lineage is None or forward.chains_before is None:
        return []
    forward.read_rows()
    places, width, pool = np.array(forward.owns) - 1, forward.width, forward.pool
    rows, branches, before = np.arange(len(places)), forward.lineage, forward.chains_before.reshape(-1, width)
    slots, names = forward.ids[places], forward.names[places]
    read = records[slots, CHAIN]
    parents = np.where((branches >= 0) & (branches < width), branches, NO_BRANCH)
    wanted = np.where(parents == NO_BRANCH, 0, before[rows // width, parents])
    is_same = before[rows // width] == read[:, None]
    found = np.where(is_same.any(1), is_same.argmax(1), NO_BRANCH)
    astray = (read != wanted) & (slots >= pool.view.null_slots) & (places >= forward.bounds[:-1])
    entries = Entries(slots, np.array(forward.begins) - 1, rows // width, forward.request_ids, names=named(pool, names))
    lineages = np.stack((rows % width, branches, found), 1)
    return [entries.fired("R5", pool, forward.site, forward.step, np.flatnonzero(astray), lineages=lineages)]


def lineage_of(hit: StaticHit, runs: Sequence[Launched]) -> Lineage | None:
    """The same of what a captured forward, one of these runs, has found; None where its lineage says nothing of it."""
    run = next((run for run in runs if _is_of(hit, run)), None)
    if run is None or hit.code != "R5" or not hit.is_exact:
        return None
    last = next((last for last in runs if last.substep is run.substep.before and last.batch is run.batch), None)
    told = _told(run)
    if last is None or told.lineage is None or hit.place != told.begins[hit.row] - 1:
        return None
    first = hit.row // told.width * told.width
    slots = _told(last).planned.slots[first : first + told.width].tolist()
    found = slots.index(hit.slot) if hit.slot in slots else NO_BRANCH
    parent = int(told.lineage[hit.row])
    return None if found == parent else Lineage(hit.row - first, parent, found)


def _is_of(hit: StaticHit, run: Launched) -> bool:
    is_here = (hit.pool, hit.site) == (run.substep.pool.name, run.substep.site)
    return is_here and hit.row >= 0 and hit.uid in [request.uid for request in run.batch.requests]


def _told(run: Launched) -> Learned:
    return Learned(run.substep, run.step, len(run.batch), run.line.parts())
