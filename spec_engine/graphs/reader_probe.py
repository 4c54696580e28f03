"""Attention in captured programs for the canary's reader probe: what a captured step reads, over known entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward
from spec_engine.graphs.hooks import StaticAttention, StaticForwards
from spec_engine.graphs.program import Recorder
from spec_engine.memory.pools.pool import KVPool

if TYPE_CHECKING:
    from kvcanary import ProbeForward
    from spec_engine.step.reader_probe import ProbedReader

CAPTURED = ("decode", "verify", "draft")  # paths


class CapturedReader:
    """`kvcanary.probe.reader.Attend` by programs, one for each forward and layer; what none captures reads ``eager``.

    They have no hooks: what is asked is the attention of captured steps, with its index arrays and its padding.
    """

    def __init__(self, pool: KVPool, num_heads: int, eager: ProbedReader) -> None:
        self._forwards, self._eager = StaticForwards(pool, num_heads, None), eager
        self._recorder = Recorder(pool.kv.device)
        self._programs: dict[tuple[str, int, int], _Program] = {}

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if forward.path not in CAPTURED:
            return self._eager(forward, layer, q, k, v)
        which = forward.path, forward.index, layer
        if which not in self._programs:
            self._programs[which] = _Program(self._forwards, forward, layer, self._recorder)
        return self._programs[which](forward, q, k, v)


class _Program:
    """One layer's attention over requests of a forward like this one, and one of padding behind them."""

    def __init__(self, forwards: StaticForwards, like: ProbeForward, layer: int, recorder: Recorder) -> None:
        pool, width, new = forwards.pool, like.branches, like.num_new[0]
        self._width, self._num_slots, self._layer = width, pool.num_slots, layer
        self._tail = like.index + new  # entries of a row that lie behind its request's prefix
        requests, longest = len(like.slots) // width + 1, max(map(len, like.slots)) - self._tail
        device = pool.kv.device
        self._table = torch.zeros(requests, longest, dtype=torch.int64, device=device)
        self._rows = torch.arange(requests, device=device).roll(-1)  # 0, of padding, is the last
        self._lens = torch.zeros_like(self._rows)
        self._tails = torch.zeros(requests * width, self._tail, dtype=torch.int64, device=device)
        sizes = {"requests": requests, "width": width, "new": new, "ancestors": like.index}
        is_tree = like.mask is not None
        self._forward = StaticForward.allocate(like.kind, like.index, self._table, **sizes, is_tree=is_tree)
        rows = forwards.rows(Feed({"live": 1}, device), "probe", "live", width)
        hooked = forwards.hook(self._forward, rows)
        self._attention, self._out = StaticAttention(forwards, hooked), hooked.out
        entries, (kv_heads, dim) = requests * width * new, pool.kv.shape[-2:]
        heads = forwards.num_heads, kv_heads, kv_heads
        self._qkv = [torch.zeros(entries, own, dim, dtype=pool.dtype, device=device) for own in heads]
        self._run = recorder.record(self._body)

    def __call__(self, forward: ProbeForward, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What attention gives for the new tokens of its rows, [n, heads, head_dim]."""
        for request, slots in enumerate(forward.slots[:: self._width]):
            prefix = slots[: len(slots) - self._tail]
            self._table[request + 1, : len(prefix)] = torch.tensor(prefix)
            self._lens[request] = len(prefix)
        self._tails[: len(forward.slots)] = torch.tensor([slots[-self._tail :] for slots in forward.slots])
        self._forward.slots[: len(q)] = torch.tensor(forward.written)
        if forward.mask is not None and self._forward.tree_mask is not None:
            self._forward.tree_mask.copy_(forward.mask.expand_as(self._forward.tree_mask))
        for own, given in zip(self._qkv, (q, k, v), strict=True):
            own[: len(q)] = given
        self._run()
        return self._out[: len(q)].clone()

    def _body(self) -> None:
        self._forward.read(self._table, self._rows, self._lens, self._tails, self._num_slots)
        self._attention.attend(self._layer, *self._qkv)
