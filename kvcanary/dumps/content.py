"""Content: the bytes of the slots that findings name, for those who asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save

from kvcanary.records.state import CanaryState

MOST_SLOTS = 256


def content_of(state: CanaryState, findings: Sequence[dict[str, Any]]) -> bytes:
    """By pool `POOL.slots` [n] and `POOL.words` [layers, n, words a row] int32, as safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    for pool in state.pools:
        named = {finding["slot"] for finding in findings if finding["pool"] == pool.name}
        slots = sorted(slot for slot in named if 0 <= slot < pool.view.num_slots)[:MOST_SLOTS]
        if slots:
            where = state.ints(slots)
            words = [pool.rows.gather_layer(layer, where) for layer in range(pool.view.num_layers)]
            tensors[f"{pool.name}.slots"] = where.cpu().clone()
            tensors[f"{pool.name}.words"] = torch.stack(words).cpu()
    return save(tensors)
