"""Manifest: pools and captured forwards as that of a dump has them, plain JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary.captured.substep import CapturedSubstep
    from kvcanary.pools.views import PoolView


def shape_of_pool(view: PoolView) -> dict[str, Any]:
    """What a replay needs of a pool to have one of the same size."""
    return {
        "name": view.name,
        "root_name": view.root_name,
        "num_slots": view.num_slots,
        "layers": view.num_layers,
        "parts": [
            {"name": part.name, "shape": list(part.shape), "dtype": str(part.dtype).removeprefix("torch.")}
            for part in view.parts
        ],
        "slot_bytes": view.slot_bytes,
        "token_offset": view.token_offset,
        "ahead": view.ahead,
        "null_slots": view.null_slots,
        "vocab_size": view.vocab_size,
        "group": view.group,
        "window": view.window,
        "map_slots": None if view.slot_map is None else len(view.slot_map),
    }


def shape_of_forward(substep: CapturedSubstep) -> dict[str, Any]:
    """A captured forward, as large as its bucket."""
    forward, masks = substep.forward, substep.masks
    return {
        "pool": substep.pool.name,
        "kind": substep.site[0],
        "index": substep.site[1],
        "rows": forward.num_rows,
        "entries": forward.num_entries,
        "indices": forward.capacity,
        "width": substep.width,
        "depth": substep.depth,
        "ancestors": forward.ancestors,
        "has_parents": forward.parents is not None,
        "has_lineage": forward.lineage is not None,
        "has_truths": forward.truths is not None,
        "has_roots": forward.roots is not None,
        "judges_bytes": substep.judges_bytes,
        "nodes": None if masks is None else masks.device.shape[-1],
    }
