"""Long chunks of prompts: cuDNN attends, to their own K and V as they were computed, to earlier ones from the pool."""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

from kvcanary_kernels.engine.attention import merge_passes
from spec_engine.core import ForwardBatch
from spec_engine.memory.pools.pool import KVPool

LEAST_LONG = 1024  # tokens of a row in one forward; over fewer our kernel takes no longer
LENGTH_STEP = 512
NEW, SEEN, PREPARED = range(3)


class Lengths(threading.local):
    """What cuDNN has been asked for in this thread, which is what it is prepared for: that takes the host long.

    states: by rows, their tokens, heads and type: SEEN in one forward so far, or PREPARED
    """

    def __init__(self) -> None:
        self.states: dict[tuple, int] = {}


LENGTHS = Lengths()


class LongChunks:
    """The attention of rows that are equally long and lie behind equally much.

    A length that is met for the first time is filled up to a multiple of LENGTH_STEP: the attention of its tokens is
    the same, bit by bit, and there are few such lengths. One that comes again is prepared for by the last layer, while
    the device computes those before it, and is not filled up any more.
    """

    def __init__(self, pool: KVPool, batch: ForwardBatch, num_heads: int, indices: Tensor | None = None) -> None:
        """``indices``: as of `PoolAttention`; None: there is nothing before the chunks, and their K and V are plain."""
        self._pool, self._num_rows = pool, len(batch.new_lens)
        self._num_own = batch.new_lens[0]
        self._num_before = batch.kv_lens[0] - self._num_own
        self._is_plain = is_plain(pool)
        self._last = pool.kv.shape[0] - 1
        self._key = (self._num_rows, self._num_own, num_heads, *pool.kv.shape[-2:], pool.dtype)
        self._state = LENGTHS.states.get(self._key, NEW)
        if indices is not None:
            rows = indices.view(self._num_rows, -1)
            self._earlier, self._own = rows[:, : self._num_before].flatten(), rows[:, self._num_before :].flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of q ``[n, heads, head_dim]``; k and v ``[n, kv_heads, head_dim]`` lie in the pool by now."""
        if not self._is_plain:
            k, v = self._pool.load(layer, self._own).unbind(1)
        own, lse = self._see_own(layer, *map(self._by_row, (q, k, v)))
        if not self._num_before:
            return own.transpose(1, 2).flatten(0, 1)
        before = self._pool.load(layer, self._earlier).unbind(1)
        earlier, earlier_lse = _pass(*(self._by_row(values).transpose(1, 2) for values in (q, *before)), causal=False)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        merge_passes(own, earlier, lse, earlier_lse, out.view(self._num_rows, -1, *q.shape[1:]))
        return out

    def _see_own(self, layer: int, *values: Tensor) -> tuple[Tensor, Tensor]:
        """Attention and its LSE, ``[rows, heads, n, ...]``, of the chunks' own q over their own k and v."""
        n = self._num_own
        if layer == self._last:
            LENGTHS.states[self._key] = min(self._state + 1, PREPARED)
        if not self._is_exact(layer):
            values = tuple(_filled(one, -(-n // LENGTH_STEP) * LENGTH_STEP) for one in values)
        out, lse = _pass(*(one.transpose(1, 2) for one in values), causal=True)
        return out[:, :, :n], lse[:, :, :n]

    def _is_exact(self, layer: int) -> bool:
        is_met = self._state == PREPARED or (self._state == SEEN and layer == self._last)
        return is_met or self._num_own % LENGTH_STEP == 0 or self._num_before > 0

    def _by_row(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self._num_rows, -1))


def is_long(pool: KVPool, batch: ForwardBatch) -> bool:
    """Whether every row is a long chunk of a prompt behind others as long or none, all alike, where cuDNN attends."""
    is_causal = batch.tree_mask is None and batch.window is None
    is_alike = len({*batch.new_lens}) == len({*batch.kv_lens}) == 1
    is_chunk = is_causal and is_alike and batch.new_lens[0] >= LEAST_LONG and batch.kv_lens[0] % batch.new_lens[0] == 0
    return is_chunk and _has_cudnn(pool.dtype, pool.kv.device)


def is_plain(pool: KVPool) -> bool:
    """Whether the pool holds K and V as they are given to it."""
    return pool.kv.dtype is pool.dtype


def _filled(values: Tensor, length: int) -> Tensor:
    """``values [rows, n, ...]`` as ``[rows, length, ...]``, zeros behind them."""
    out = values.new_empty(values.shape[0], length, *values.shape[2:])
    out[:, : values.shape[1]] = values
    out[:, values.shape[1] :].zero_()
    return out


def _pass(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention of q over k, v, all ``[rows, heads, n, head_dim]``, and its LSE ``[rows, heads, n]``."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.view(out.shape[:3])


@cache
def _has_cudnn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN attends here, in 16-bit types alone."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return torch.backends.cudnn.is_available() and dtype in (torch.bfloat16, torch.float16)
