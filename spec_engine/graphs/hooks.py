"""The two doors into a pool for captured forwards, with the canary's graph-safe hooks at both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary_kernels.attention import attention_workspace, paged_attention, paged_attention_torch
from kvcanary_kernels.forward import ForwardPlan
from kvcanary_kernels.table import as_table
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward
from spec_engine.memory.pool import KVPool
from spec_engine.models.decoder import KVAccess

if TYPE_CHECKING:
    from kvcanary import CanaryManager
    from kvcanary.captured_move import StaticMove
    from kvcanary.static import StaticSubstep

TRUTH = (
    "uids",
    "prefix_lens",
    "truths",
    "roots",
)  # sections of a feed that a watched forward needs, by row


@dataclass(frozen=True, eq=False)
class Hooked:
    """A static forward with its hooks; name: of its sections in the feed; workspace: of its attention on a GPU.

    out: [n, heads, head_dim], what a layer's attention gives; padding that no row writes keeps what lies there, finite.
    """

    forward: StaticForward
    out: Tensor
    workspace: Tensor | None
    substep: StaticSubstep | None
    name: str


class StaticForwards:
    """Opens static forwards over one pool; ``num_heads`` are the query heads of the model that owns it."""

    def __init__(self, pool: KVPool, num_heads: int, canary: CanaryManager | None) -> None:
        self.pool, self.num_heads, self.canary = pool, num_heads, canary

    def sections(self, name: str, rows: int) -> dict[str, int]:
        """What a feed must hold for forwards of so many rows."""
        return {} if self.canary is None else {f"{name}_{part}": rows for part in TRUTH}

    def hook(self, forward: StaticForward, feed: Feed, name: str, live: str) -> Hooked:
        """The forward with its hooks over sections ``name`` of the feed; ``live``: the section with its live rows."""
        kv, workspace = self.pool.kv, self._workspace(forward)
        shape = (forward.slots.numel(), self.num_heads, kv.shape[-1])
        out = torch.zeros(shape, dtype=self.pool.dtype, device=kv.device)
        if self.canary is None:
            return Hooked(forward, out, workspace, None, name)
        uids, prefix_lens, truths, roots = (feed[f"{name}_{part}"] for part in TRUTH)
        plan = ForwardPlan(
            as_table(forward.indices),
            forward.indptr[:-1],
            forward.indptr[1:],
            forward.bounds,
            forward.slots,
            forward.tokens,
            forward.positions,
            forward.parents,
            prefix_lens,
            truths,
            uids,
            feed[live],
            forward.ancestors,
            roots,
        )
        substep = self.canary.bank.add(
            self.pool.name,
            forward.kind,
            forward.index,
            plan,
            width=forward.width,
            max_depth=forward.depth,
            tree_mask=forward.tree_mask,
        )
        return Hooked(forward, out, workspace, substep, name)

    def _workspace(self, forward: StaticForward) -> Tensor | None:
        kv, device = self.pool.kv, self.pool.kv.device
        if device.type != "cuda":
            return None
        return attention_workspace(
            forward.slots.numel(),
            self.num_heads,
            *kv.shape[-2:],
            rows=forward.num_rows,
            max_q_len=forward.new,
            max_kv_len=forward.max_kv_len,
            device=device,
        )

    def launch(self, hooked: Hooked, feed: Feed, requests: Sequence[str], written: Sequence[int], reads: int) -> None:
        """Tell the canary that the forward runs next, and the feed what the canary knows of its rows."""
        self.launch_all([hooked], feed, requests, written, [reads])

    def launch_all(
        self,
        hooked: Sequence[Hooked],
        feed: Feed,
        requests: Sequence[str],
        written: Sequence[int],
        reads: Sequence[int],
    ) -> None:
        """The same for forwards over the same sections that run one behind the other, with what each reads."""
        substeps = [one.substep for one in hooked if one.substep is not None]
        if self.canary is None or not substeps:
            return
        truth = self.canary.launch_all(substeps, requests, written, reads)
        name, width = hooked[0].name, hooked[0].forward.width
        for part, values in zip(TRUTH, truth, strict=True):
            feed.set(**{f"{name}_{part}": values if width == 1 else [one for one in values for _ in range(width)]})

    def hook_move(self, size: int) -> StaticMove | None:
        """What tells the canary of moves of at most ``size`` entries; None without one."""
        return None if self.canary is None else self.canary.bank.add_move(self.pool.name, size)

    def launch_move(self, move: StaticMove) -> None:
        """Tell the canary that a move runs next."""
        if self.canary is not None:
            self.canary.launch_move(move)

    @contextmanager
    def open(self, hooked: Hooked) -> Iterator[KVAccess]:
        """The attention of one forward, whose index arrays have been built."""
        substep = hooked.substep
        if substep is not None:
            substep.open()
        yield StaticAttention(self, hooked)
        if substep is not None:
            substep.close(joins=False)

    def join(self) -> None:
        """Within a program, behind its forwards: what the canary does beside them is over when the program is."""
        if self.canary is not None:
            self.canary.bank.join()


class StaticAttention:
    """A `KVAccess` by token indices that lie on the device."""

    def __init__(self, forwards: StaticForwards, hooked: Hooked) -> None:
        self._pool, self._heads = forwards.pool, forwards.num_heads
        self._forward, self._substep, self._workspace = hooked.forward, hooked.substep, hooked.workspace
        self._out = hooked.out

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v ``[n, kv_heads, head_dim]``; the attention of q ``[n, heads, head_dim]``, until the next call."""
        forward, pool = self._forward, self._pool
        if self._substep is None:
            pool.store(layer, forward.slots, k, v)
        else:
            self._substep.store(layer, *pool.stored(k, v))
        kv, scales = pool.rows(layer)
        keys, values = kv.unbind(1)
        k_scale, v_scale = (None, None) if scales is None else scales.unbind(1)
        attend = paged_attention if q.is_cuda else paged_attention_torch
        attend(
            q,
            keys,
            values,
            kv_indptr=forward.indptr,
            kv_indices=forward.indices,
            q_indptr=forward.bounds,
            max_kv_len=forward.max_kv_len,
            max_q_len=forward.new,
            scale=q.shape[-1] ** -0.5,
            out=self._out,
            tree_mask=forward.tree_mask,
            k_scale=k_scale,
            v_scale=v_scale,
            workspace=self._workspace,
        )
        return self._out
