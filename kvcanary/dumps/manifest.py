"""Manifest: how a dump begins, findings, pools and captured forwards as a dump has them, plain JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import kvcanary
from kvcanary.dumps.container import FORMAT, VERSION
from kvcanary.dumps.event_schema import SAFE_VALUES, WITHHELD

if TYPE_CHECKING:
    from kvcanary.captured.registry import SubstepRegistry
    from kvcanary.captured.substep import CapturedSubstep
    from kvcanary.config import CanaryConfig
    from kvcanary.pools.views import PoolView
    from kvcanary.report.finding import Finding

#: Of the canary's settings, those that a replay takes as they are.
SETTINGS = ("mode", "content", "budget", "poison")
#: Of a pool's view.
VIEW_SETTINGS = ("token_offset", "ahead", "null_slots", "vocab_size", "group", "window")
#: Of shards and stages, which older dumps do not name.
SHARE_SETTINGS: dict[str, Any] = {"first_head": 0, "whole_heads": 0, "layer_numbers": ()}


def head_of_manifest() -> dict[str, Any]:
    """What every dump begins with."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "version": VERSION, "kvcanary": kvcanary.__version__, "created": created}


def settings_of(config: CanaryConfig, names: Sequence[str]) -> dict[str, Any]:
    """These of the canary's settings, and the checks that are off."""
    return {name: getattr(config, name) for name in names} | {"ring": config.ring, "disable": sorted(config.disable)}


def reported_findings(findings: Iterable[Finding], is_plain: bool) -> list[dict[str, Any]]:
    """As their events have them, without what says something of texts, bytes or keys unless all may leave."""
    reported = [finding.to_dict() for finding in findings]
    for finding in reported if not is_plain else ():
        for side in ("expected", "found"):
            finding[side] = {k: v if k in SAFE_VALUES else WITHHELD for k, v in finding[side].items()}
    return reported


def reported_certificate(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Without findings, which a dump has by themselves, and without what names the keys."""
    return {key: value for key, value in certificate.items() if key not in ("seed_id", "findings")}


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
        **{name: getattr(view, name) for name in (*VIEW_SETTINGS, *SHARE_SETTINGS)},
        "map_slots": None if view.slot_map is None else len(view.slot_map),
    }


def shapes_of_captured(registry: SubstepRegistry | None) -> dict[str, Any]:
    """Forwards, moves and accepted tokens over static buffers, as large as these are; None: there are none."""
    if registry is None:
        return {"captured": [], "captured_moves": [], "seats": None}
    seats = registry.accepted_tokens
    return {
        "captured": [shape_of_forward(substep) for substep in registry],
        "captured_moves": [{"pool": move.pool.name, "size": move.size} for move in registry.moves],
        "seats": None if seats is None else [len(seats.accepted), seats.places],
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
