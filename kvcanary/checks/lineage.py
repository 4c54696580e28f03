"""Lineage: from which branch of the draft forward before it a row goes on, and whose entry it reads instead."""

from __future__ import annotations

import numpy as np

from kvcanary.calls.entries import Entries, named
from kvcanary.calls.forward import Forward, Ints
from kvcanary.calls.violation import NO_BRANCH
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary_kernels.record.layout import CHAIN


def judge_lineage(forward: Forward, records: Ints) -> list[ViolationBatch]:
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
