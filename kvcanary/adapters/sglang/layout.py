"""Where K and V lie in a memory pool of SGLang: read by the class of the pool, then proved by letting it store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcanary.errors import AdapterError
from kvcanary.pools.views import PoolView

#: Pools of plain slots, by the name of their class: [slots, heads, dim], or with pages where heads come first.
PLAIN = ("MHATokenToKVPool",)


@dataclass(frozen=True)
class Part:
    """Layers that share slots: their view, and what they are called.

    window: tokens that attention over them sees; 0: all
    """

    view: PoolView
    names: tuple[str, ...]
    window: int = 0


def parts_of(pool: Any, role: str, token_offset: int = 0) -> list[Part]:
    """Every part of this pool. AdapterError where its layout is not known, or is not the one that it stores by."""
    kind = type(pool).__name__
    if kind not in PLAIN or getattr(pool, "kv_cache_layout", "nhd") not in ("nhd", "hnd"):
        raise AdapterError(
            f"pools of class {kind} ({getattr(pool, 'kv_cache_layout', 'nhd')}) are not followed yet, only "
            f"{', '.join(PLAIN)}; unset KVCANARY_MODE to serve without a canary"
        )
    layout = "HND" if pool.use_hnd else "NHD"
    view = PoolView(
        role, list(pool.k_buffer), list(pool.v_buffer), page_size=pool.page_size, layout=layout,
        token_offset=token_offset,
    )  # fmt: skip
    fault = probe(pool, view)
    if fault:
        raise AdapterError(f"where K and V of {role} lie is not known: {fault}")
    names = tuple(f"layer {number}" for number in range(pool.start_layer, pool.start_layer + len(pool.k_buffer)))
    return [Part(view, names)]


@torch.inference_mode()
def probe(pool: Any, view: PoolView) -> str:
    """What speaks against this reading, after the pool has stored K and V that are known; empty: nothing.

    Slots of page 0 are nobody's; their bytes are put back as they were.
    """
    slots = torch.arange(min(2, view.page_size), device=view.device)
    page = slice(0, 1) if view.k[0].dim() == 4 else slice(0, view.page_size)
    last = view.num_layers - 1
    held = [part[page].clone() for part in (pool.k_buffer[last], pool.v_buffer[last])]
    generator = torch.Generator().manual_seed(1)
    kinds = [(pool.head_num, pool.head_dim), (pool.head_num, pool.v_head_dim)]
    values = [torch.randn(len(slots), *kind, generator=generator).to(pool.dtype).to(view.device) for kind in kinds]
    try:
        pool.set_kv_buffer(None, slots, *values, layer_id_override=pool.start_layer + last)
        if pool.dtype != view.dtype:
            return ""  # it converts what it is given
        wanted = torch.cat([value.flatten(1).contiguous().view(torch.int32) for value in values], 1)
        return "" if torch.equal(view.rows.gather_layer(last, slots), wanted) else "it does not show what was stored"
    finally:
        for part, before in zip((pool.k_buffer[last], pool.v_buffer[last]), held, strict=True):
            part[page] = before
