"""W1, W4, R1 and the write side of R12: ids that no forward may use, and what a forward failed to write."""

from __future__ import annotations

from kvcanary.forward import Forward
from kvcanary.hits import Hit, entry_hit


def judge_slots(forward: Forward) -> list[Hit]:
    """W1 and R1 for ids outside the pool, W4 for every slot that an earlier entry of this forward writes."""
    hits = [entry_hit(code, forward, entry) for entry, (code, _) in forward.refused.items()] + _refused_reads(forward)
    if len(set(forward.write_slots)) < len(forward.write_slots):
        seen: set[int] = set()
        for entry, slot in enumerate(forward.write_slots):
            if slot in seen and slot >= forward.pool.view.null_slots:  # padding may share null slots
                hits.append(entry_hit("W4", forward, entry))
            seen.add(slot)
    return hits


def judge_layer(forward: Forward, layer: int) -> list[Hit]:
    """W4 at the first slot of the forward for a layer whose bit in the bitmap is set already."""
    if not forward.write_slots or not forward.stored >> layer & 1:
        return []
    return [entry_hit("W4", forward, 0, layers=(layer,))]


def judge_layers(forward: Forward) -> list[Hit]:
    """R12 for everything that not every layer has stored."""
    if forward.stored == forward.pool.full_layers:
        return []
    layers = range(forward.pool.view.num_layers)
    missing = tuple(layer for layer in layers if not forward.stored >> layer & 1)
    return [
        entry_hit("R12", forward, entry, layers=missing)
        for entry, slot in enumerate(forward.write_slots)
        if slot >= forward.pool.view.null_slots
    ]


def _refused_reads(forward: Forward) -> list[Hit]:
    """R1 for every entry whose id is outside the pool."""
    hits = []
    for entry, slot in forward.refused_reads.items():
        row = next(row for row in range(len(forward.written)) if entry < forward.bounds[row + 1])
        position, request_id = entry - forward.bounds[row], forward.request_of(row).request_id
        hits.append(Hit("R1", forward.pool, slot, position, request_id, forward.site, forward.step))
    return hits
