"""Fitting: as many requests as a benchmark asks for, or as the device has memory for, and its record says so."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary_tools.bench.common import progress
from spec_engine.memory.pools.recurrence import num_kv_layers
from spec_engine.models.decoder import Decoder
from spec_engine.models.hybrid import HybridDecoder

SPARE = 8 << 30  # bytes for programs, logits, a prefill's activations, and what the allocator cannot use
RECORDS = 1.06  # with what a canary keeps of a slot, and a head's pool, over the slot's own bytes
WHOLE = 8  # from so many requests on a multiple of it


@dataclass(frozen=True)
class Fit:
    """requests: that fit, of those that were asked for; free: bytes of the device, None where nobody looked."""

    requests: int
    asked: int
    free: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """What a row says of it; nothing where all fit."""
        if self.requests == self.asked or self.free is None:
            return {}
        return {"asked": self.asked, "fitted_to_gb": round(self.free / 1e9, 1)}


def fit(asked: int, engines: int, slots: int, model: Decoder, free: int | None = None, nodes: int = 0) -> Fit:
    """For engines that hold their pools at the same time, each with so many slots a request.

    nodes: of its drafts, behind each of which a recurrent layer leaves a state
    free: bytes; None: of the model's device, where that is a GPU. SystemExit where not one request fits.
    """
    if free is None and not model.embed_weight.is_cuda:
        return Fit(asked, asked)
    free = torch.cuda.mem_get_info(model.embed_weight.device)[0] if free is None else free
    a_request = engines * (slots * slot_bytes(model) * RECORDS + (1 + nodes) * state_bytes(model))
    most = int((free - SPARE) // a_request)
    if most < 1:
        sys.exit(
            f"one request in {engines} engines needs {(a_request + SPARE) / 1e9:.0f} GB of device memory, "
            f"{free / 1e9:.0f} GB are free"
        )
    fits = min(asked, most if most < WHOLE else most - most % WHOLE)
    if fits < asked:
        progress(f"{asked} requests do not fit into {free / 1e9:.0f} GB: {fits} are measured")
    return Fit(fits, asked, free)


def slot_bytes(model: Decoder) -> int:
    """K and V of a token in all layers."""
    config = model.config
    return 2 * num_kv_layers(model) * config.num_kv_heads * config.head_dim * model.embed_weight.itemsize


def state_bytes(model: Decoder) -> int:
    """What a request's layers without attention keep, in float32."""
    return 4 * model.num_state_layers * model.state_size if isinstance(model, HybridDecoder) else 0
