"""W1, W4, R1 and the write side of R12: ids that no forward may use, and what a forward failed to write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcanary.calls.entries import Entries, fired_writes, named
from kvcanary.calls.forward import Forward, Ints, Refused
from kvcanary.calls.violation_log import ViolationBatch


def judge_slots(forward: Forward) -> list[ViolationBatch]:
    """W1 and R1 for ids outside the pool, W4 for every slot that an earlier entry of this forward writes."""
    violations = []
    if forward.refused is not None:
        entries, codes = forward.refused.entries, forward.refused.codes
        violations += [fired_writes(code, forward, entries[codes == code]) for code in np.unique(codes).tolist()]
    if forward.refused_reads is not None:
        violations.append(_refused_reads(forward, forward.refused_reads))
    if len(set(forward.write_slots)) < len(forward.write_slots):
        violations.append(fired_writes("W4", forward, _repeated(forward)))
    return violations


def judge_layer(forward: Forward, layer: int) -> list[ViolationBatch]:
    """W4 at the first slot of the forward for a layer whose bit in the bitmap is set already."""
    if not forward.num_entries or not forward.stored >> layer & 1:
        return []
    return [fired_writes("W4", forward, np.array([0]), layers=_layers(forward, 1 << layer))]


def judge_layers(forward: Forward) -> list[ViolationBatch]:
    """R12 for everything that not every layer has stored."""
    if forward.stored == forward.pool.full_layers:
        return []
    which = np.flatnonzero(forward.planned.slots >= forward.pool.view.null_slots)
    return [fired_writes("R12", forward, which, layers=_layers(forward, ~forward.stored))]


def _layers(forward: Forward, bitmap: int) -> NDArray[np.bool_]:
    """[n, layers] bool: the same layers for every entry."""
    layers = [bool(bitmap >> layer & 1) for layer in range(forward.pool.view.num_layers)]
    return np.broadcast_to(layers, (forward.num_entries, len(layers)))


def _repeated(forward: Forward) -> Ints:
    """Entries whose slot an earlier one writes; padding may share null slots."""
    slots, entries = forward.planned.slots, np.arange(forward.num_entries)
    first = np.empty(forward.pool.view.num_slots, np.int64)
    first[slots[::-1]] = entries[::-1]  # of equal slots the last assignment counts
    return np.flatnonzero((first[slots] != entries) & (slots >= forward.pool.view.null_slots))


def _refused_reads(forward: Forward, refused: Refused) -> ViolationBatch:
    """R1 for every entry whose id is outside the pool."""
    bounds, entries = np.array(forward.bounds), refused.entries
    rows = np.searchsorted(bounds[1:], entries, side="right")
    positions = entries - bounds[rows] + np.array(forward.starts, np.int64)[rows]
    names = [request.request_id for request in forward.requests]
    read = Entries(refused.ids, positions, rows // forward.width, names, names=named(forward.pool, refused.names))
    return read.fired("R1", forward.pool, forward.site, forward.step, np.arange(len(entries)))
