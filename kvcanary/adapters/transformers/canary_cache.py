"""CanaryCache: a dense cache of transformers that tells the canary of everything that is done to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from kvcanary.adapters.transformers.dense_cache import DenseRows
from kvcanary.adapters.transformers.judging import DenseCanary
from kvcanary.adapters.transformers.needs import check, closed_paths
from kvcanary.adapters.transformers.states import STATEFUL, UNFOLLOWED, states_of
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, CanaryConfigError, HookOrderError, PlanError

STORES_NOTHING = "DummyLayer"  # of a layer without attention, or with that of another's K and V
#: Layers whose tensors hold the last entries of the row, in order. Others are refused, never half-followed.
FOLLOWED = (
    "DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer", *STATEFUL, STORES_NOTHING,
)  # fmt: skip


def make_canary(config: CanaryConfig | None) -> DenseCanary:
    """What the caches of one attachment share; AdapterError where nothing of this transformers can be watched."""
    faults = check()
    if faults:
        raise AdapterError("; ".join(faults))
    config = CanaryConfig.from_env() if config is None else config
    if not config.enabled:
        raise CanaryConfigError("mode 'off' installs nothing: do not attach")
    return DenseCanary(config, closed_paths())


def _operation(method: Callable[..., None]) -> Callable[..., None]:
    """Of a cache, named as in transformers. Where its names are gone it is refused, or the cache left, by the mode."""
    name = method.__name__

    @functools.wraps(method)
    def operation(cache: CanaryCache, *args: Any, **kwargs: Any) -> None:
        if name not in cache.kv_rows.canary.closed:
            return method(cache, *args, **kwargs)
        _refuse_or_leave(cache, cache.kv_rows.canary.closed_error(name))
        return getattr(cache, name)(*args, **kwargs)  # type: ignore[no-any-return]

    return operation


class CanaryCache:
    """A cache that tells the canary of everything that is done to it: `CanaryCache(cache)` gives the same cache back.

    It stays what it was, also for isinstance, with one class before its own; `kv_rows` holds its records.
    """

    kv_rows: DenseRows
    layers: list[Any]

    def __new__(cls, cache: Any = None, config: CanaryConfig | None = None) -> Any:
        return object.__new__(cls) if cache is None else watch(cache, make_canary(config))  # None: a copy is being made

    def __init__(self, cache: Any = None, config: CanaryConfig | None = None) -> None:
        """Nothing: the cache exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise HookOrderError(
                "a compiled forward runs without the canary: set generation_config.disable_compile=True"
            )
        new, guard = (key_states, value_states), self.kv_rows.canary.guard
        was_cut = guard.run(self._was_cut_unseen, layer_idx)
        read = super().update(*new, layer_idx, *args, **kwargs)  # type: ignore[misc]
        guard.run(self._stored, layer_idx, new, read, was_cut)
        return read

    def _stored(self, layer: int, new: tuple[Tensor, Tensor], read: Any, was_cut: bool) -> None:
        try:
            _expect_followed(self.layers[layer])
            if was_cut:
                raise self.kv_rows.canary.closed_error("crop")
            self.kv_rows.stored(layer, new, read, self._said(layer))
        except (AdapterError, PlanError) as error:
            _refuse_or_leave(self, error)  # the next forward tells of it

    @_operation
    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)  # type: ignore[misc]
        self.kv_rows.canary.guard.run(self._cropped, *args, *kwargs.values())

    def _cropped(self, number: Any) -> None:
        # to 5.17 a positive number is the length that is left
        removed = max(self.kv_rows.length - int(number), 0) if number > 0 else -int(number)
        self.kv_rows.cropped(removed, self._said, self._held)
        states = self.kv_rows.states
        if states and (not removed or states.are_changed(states_of(self))):  # else they still have what was removed
            states.keep(states_of(self), states.absorbed - removed)

    @_operation
    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._selected(lambda rows: beam_idx)

    @_operation
    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._selected(lambda rows: rows.repeat_interleave(repeats))

    @_operation
    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._selected(lambda rows: rows[indices.cpu()])

    @_operation
    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.kv_rows.canary.guard.run(self.kv_rows.forget)

    def _selected(self, which: Callable[[Tensor], Tensor]) -> None:
        """Rows are others now: `which` of those that there were."""

        def selected() -> None:
            rows = which(torch.arange(self._batch_size()))
            self.kv_rows.selected(rows, self._held)
            self.kv_rows.reordered(rows, states_of(self))

        self.kv_rows.canary.guard.run(selected)

    def _said(self, layer: int) -> int:
        return int(self.layers[layer].get_seq_length())

    def _held(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.layers[layer].keys, self.layers[layer].values

    def _batch_size(self) -> int:
        return next((own.fingerprints.shape[1] for own in self.kv_rows.layers.values()), self.kv_rows.states.batch)

    def _was_cut_unseen(self, layer: int) -> bool:
        """Whether a layer is shorter than its records, in a release whose crop() has another name."""
        if "crop" not in self.kv_rows.canary.closed or layer not in self.kv_rows.layers:
            return False
        return self._said(layer) < self.kv_rows.length_of(layer)


def watch(cache: Any, canary: DenseCanary) -> Any:
    """Put CanaryCache before the class of a cache; what lies in it already is taken as it lies."""
    if isinstance(cache, CanaryCache):
        raise HookOrderError("this cache has a canary already: use that one")
    if "generate" in canary.closed:
        raise canary.closed_error("generate")
    if not isinstance(cache, cache_utils.Cache) or isinstance(cache, cache_utils.EncoderDecoderCache):
        raise AdapterError(f"a cache must be a decoder's Cache, got {type(cache).__name__}: it is not followed yet")
    for layer in cache.layers:
        _expect_followed(layer)
    rows = DenseRows(canary)
    for number, layer in enumerate(cache.layers):
        is_there = getattr(layer, "is_initialized", False) and getattr(layer, "keys", None) is not None
        if is_there and int(layer.get_seq_length()):
            rows.adopt(number, layer.keys, layer.values, int(layer.get_seq_length()))
    if lying := states_of(cache):
        rows.states.keep(lying, rows.length or 1)
        rows.states.is_trusted = True
        canary.coverage.skip(UNFOLLOWED, len(lying))
    cache.__class__ = _watched(type(cache))  # type: ignore[arg-type]
    cache.kv_rows = rows
    return cache


def leave(cache: Any) -> None:
    """Nobody watches it any more."""
    cache.__class__ = type(cache).__mro__[2]
    del cache.kv_rows


def _refuse_or_leave(cache: CanaryCache, error: AdapterError | PlanError) -> None:
    """The error in mode raise; else the cache goes on without a canary."""
    if cache.kv_rows.canary.config.mode == "raise":
        raise error
    leave(cache)


@functools.cache
def _watched(kind: type) -> type:
    return type(f"Canary{kind.__name__}", (CanaryCache, kind), {"__module__": kind.__module__})


def _expect_followed(layer: Any) -> None:
    if type(layer).__name__ not in FOLLOWED:
        raise AdapterError(f"layers of a cache must be one of {', '.join(FOLLOWED)}, got {type(layer).__name__}")
