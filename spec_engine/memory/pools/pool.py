"""One model's KV pool: a single tensor for all layers, addressed by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcanary import PoolView

if TYPE_CHECKING:
    from kvcanary import SubstepCanary, WarmupSubstep


class KVPool:
    """``kv [layers, slots, 2, kv_heads, head_dim]``: K at index 0 and V at index 1 of a slot's row.

    dtype: what K and V are given and read in; parts: everything that a slot has, each ``[layers, slots, ...]``.
    token_offset: slot p of a row holds token p + token_offset; ahead: entries beyond the committed length.
    Slots [0, page_size) are the null page: padding may write and read there, no request owns it.
    """

    def __init__(
        self,
        name: str,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        token_offset: int,
        ahead: int = 0,
        first_head: int = 0,
        whole_heads: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.page_size = page_size
        self.token_offset, self.ahead = token_offset, ahead
        self.first_head, self.whole_heads = first_head, whole_heads
        num_slots = (num_pages + 1) * page_size
        self.kv = torch.zeros(num_layers, num_slots, 2, kv_heads, head_dim, dtype=dtype, device=device)
        self.dtype = dtype
        self.parts: tuple[torch.Tensor, ...] = (self.kv,)
        self._rows = list(self.kv)
        self._k = [rows[:, 0] for rows in self._rows]
        self._v = [rows[:, 1] for rows in self._rows]

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def store(
        self,
        layer: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        substep: SubstepCanary | WarmupSubstep | None = None,
    ) -> None:
        """Write k, v ``[n, kv_heads, head_dim]`` of one layer at ``slots [n]``; ``substep`` does it, where it can."""
        if substep is not None and substep.put(layer, slots, k, v):
            return
        if k.is_cuda:
            from kvcanary_kernels.engine.scatter import scatter  # an engine on a CPU loads no kernels

            scatter(slots, k, v, self._k[layer], self._v[layer])
        else:
            self._k[layer].index_copy_(0, slots, k)
            self._v[layer].index_copy_(0, slots, v)
        if substep is not None:
            substep.store(layer, k, v)

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What k, v ``[n, kv_heads, head_dim]`` are in the pool, in the order of its view: K, V and extras."""
        return k, v

    def load(self, layer: int, indices: torch.Tensor) -> torch.Tensor:
        """K and V of one layer at ``indices [n]``: ``[n, 2, kv_heads, head_dim]``."""
        return self._rows[layer].index_select(0, indices)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All K and V of one layer as they lie, ``[slots, 2, kv_heads, head_dim]``, and their scales, if they have."""
        return self._rows[layer], None

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy the rows of all layers, all their parts; every source is read before any destination is written."""
        for part in self.parts:
            part[:, destination] = part[:, source]

    def view(self) -> PoolView:
        """The pool as the canary sees it."""
        return PoolView(
            name=self.name,
            k=tuple(self._k),
            v=tuple(self._v),
            page_size=self.page_size,
            token_offset=self.token_offset,
            ahead=self.ahead,
            null_slots=self.page_size,
            first_head=self.first_head,
            whole_heads=self.whole_heads,
        )
