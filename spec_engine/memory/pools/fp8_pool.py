"""A pool of 8-bit numbers: K and V as e4m3, and beside them a scale for each K row and each V row.

A row is what one token stores in one layer, all its heads. Its scale is its largest magnitude / 448, so that the
largest number of e4m3 stands for it. No scale depends on another token: draft, verify and decode quantise equal rows to
equal bytes, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcanary import PoolView
from spec_engine.memory.pools.pool import KVPool

if TYPE_CHECKING:
    from kvcanary import SubstepCanary, WarmupSubstep

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST_SCALE = torch.finfo(torch.float32).tiny


class Fp8Pool(KVPool):
    """``kv`` in e4m3, and ``scales [layers, slots, 2] float32``: of K and of V. ``dtype`` is what it is read in."""

    def __init__(self, name: str, *, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(name, dtype=E4M3, **settings)
        self.dtype = dtype
        self.scales = torch.zeros(self.kv.shape[:3], dtype=torch.float32, device=self.kv.device)
        self._bytes = self.kv.view(torch.uint8)  # not every operation knows 8-bit floats
        self.parts = (self._bytes, self.scales)

    def store(
        self,
        layer: int,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        substep: SubstepCanary | WarmupSubstep | None = None,
    ) -> None:
        """Quantise k, v ``[n, kv_heads, head_dim]`` of one layer; write them and their scales at ``slots [n]``."""
        values, scales = quantise(torch.stack((k, v), 1))
        if substep is not None and substep.put(layer, slots, *values.unbind(1), *scales.unbind(1)):
            return
        self._bytes[layer].index_copy_(0, slots, values.view(torch.uint8))
        self.scales[layer].index_copy_(0, slots, scales)
        if substep is not None:
            substep.store(layer, *values.unbind(1), *scales.unbind(1))

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Numbers of K and of V ``[n, kv_heads, head_dim]`` e4m3, and their scales ``[n] float32``."""
        values, scales = quantise(torch.stack((k, v), 1))
        return *values.unbind(1), *scales.unbind(1)

    def load(self, layer: int, indices: Tensor) -> Tensor:
        """K and V of one layer at ``indices [n]``: ``[n, 2, kv_heads, head_dim]`` in ``dtype``."""
        values, scales = (part[layer].index_select(0, indices) for part in self.parts)
        return dequantise(values.view(E4M3), scales, self.dtype)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """All K and V of one layer as they lie, ``[slots, 2, kv_heads, head_dim]``, and their scales ``[slots, 2]``."""
        return self.kv[layer], self.scales[layer]

    def view(self) -> PoolView:
        """The pool as the canary sees it: scales are protected as K and V are."""
        k_scales, v_scales = self.scales.unbind(2)
        return replace(super().view(), extras={"k_scale": tuple(k_scales), "v_scale": tuple(v_scales)})


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows [..., heads, dim]`` as e4m3 numbers and scales ``[...] float32``, by which they are to be multiplied.

    A row of zeros has scale 1. A row that holds NaN or an infinity is read as NaN throughout: nothing is hidden.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = wide.abs().amax((-2, -1))
    divisor = torch.full_like(largest, LARGEST)  # by a plain number a GPU would multiply with its reciprocal
    scales = (largest / divisor).float().clamp_min(LEAST_SCALE).masked_fill_(largest == 0, 1.0)
    return (wide / scales.to(wide.dtype)[..., None, None]).to(E4M3), scales


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``values [..., heads, dim]`` e4m3 times ``scales [...]``: exact in float64, 16-bit types by way of float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return (values.to(wide) * scales.to(wide)[..., None, None]).to(dtype)
