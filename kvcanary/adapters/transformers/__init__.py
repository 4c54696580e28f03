"""transformers: the canary inside `generate`, over the dense caches of Hugging Face models.

    handle = attach(model)          # and with every cache that this model is called with
    model.generate(**inputs)        # KVCorruptionError before a token of a damaged step leaves
    handle.certificate()
    handle.detach()                 # or `with attach(model) as handle:`

`CanaryCache(DynamicCache(config=model.config))` watches one cache alone, whatever calls it: bytes, lengths and moves,
but not whose tokens a row holds. docs/adapters.md says what is checked and what is not.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.compatibility import Needed, missing
from kvcanary.adapters.transformers.continuous_batching import Batching
from kvcanary.adapters.transformers.dense_cache import DenseRows
from kvcanary.adapters.transformers.judging import DENSE_FED, NOT_KNOWN, DenseCanary
from kvcanary.adapters.transformers.unwatched import Unwatched, cache_argument
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, CanaryConfigError, HookOrderError, PlanError
from kvcanary.report.finding import Finding

try:
    import transformers
    from transformers import cache_utils
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
except ImportError as error:
    raise ImportError("kvcanary.adapters.transformers needs transformers: pip install 'kvcanary[hf]'") from error

#: Releases (major and minor) that the tests of this module ran with.
KNOWN_VERSIONS = ("5.17", "5.23")
#: Codes that something here feeds: W5 in `generate_batch` alone.
FED = DENSE_FED | {"W5"}
_CACHE, _LAYER = "transformers.cache_utils:Cache.", "transformers.cache_utils:CacheLayerMixin."
_PAGED = "transformers.generation.continuous_batching.cache:PagedAttentionCache."
_GENERATION = "transformers.generation.utils:GenerationMixin."
NEEDED = (
    Needed(f"{_CACHE}update", ("self", "key_states", "value_states", "layer_idx")),
    Needed(f"{_CACHE}crop", ("self", "tokens_to_remove")),
    Needed(f"{_CACHE}reorder_cache", ("self", "beam_idx")),
    Needed(f"{_CACHE}batch_repeat_interleave", ("self", "repeats")),
    Needed(f"{_CACHE}batch_select_indices", ("self", "indices")),
    Needed(f"{_CACHE}reset", ("self",)),
    Needed(f"{_LAYER}update", ("self", "key_states", "value_states")),
    Needed(f"{_LAYER}get_seq_length", ("self",)),
    Needed("transformers.cache_utils:DynamicLayer"),
    Needed("transformers.cache_utils:DynamicSlidingWindowLayer"),
    Needed("transformers.cache_utils:StaticLayer"),
    Needed("transformers.cache_utils:StaticSlidingWindowLayer"),
    Needed(f"{_PAGED}update", ("self", "key_states", "value_states", "layer_idx")),
    Needed(
        f"{_PAGED}extend_read_and_write_indices",
        ("self", "request_id", "past_length", "query_length", "read_index", "write_index"),
    ),
    Needed(f"{_PAGED}search_prefix_match", ("self", "request_id", "prompt_ids")),
    Needed(f"{_PAGED}free_blocks", ("self", "request_id")),
    Needed(f"{_GENERATION}generate", ("self",)),
    Needed(f"{_GENERATION}prepare_inputs_for_generation", ("self", "input_ids", "next_sequence_length")),
)
#: Layers whose tensors hold the last entries of the row, in order. Others are refused, never half-followed.
FOLLOWED = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
_attached: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()


def check(version: str | None = None) -> list[str]:
    """What speaks against attaching to the transformers that is installed, one sentence each; empty: nothing."""
    version = transformers.__version__ if version is None else version
    faults = missing(NEEDED)
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        faults.insert(0, f"transformers {version} is not known here: install {' or '.join(KNOWN_VERSIONS)}")
    return faults


def attach(model: Any, config: CanaryConfig | None = None) -> Handle:
    """Watch every cache that this model is called with, from now on; `detach()` undoes it.

    config: modes `log` and `raise`; content `rolling` re-reads a slice of every layer at each step and everything when
            rows move and when `generate` ends, `full` everything at each step. None: CanaryConfig.from_env()
    AdapterError, with nothing attached, where transformers or the model are not as known, or the model takes no cache
    that is; HookOrderError for a second canary. An assistant model is another model: attach to it as well.
    """
    if model in _attached:
        raise HookOrderError("this model has a canary already: detach() it first, or use that one")
    handle = Handle(model, _canary(config))
    _attached[model] = handle
    return handle


class CanaryCache:
    """A cache that tells the canary of everything that is done to it: `CanaryCache(cache)` gives the same cache back.

    It stays what it was, also for isinstance, with one class before its own; `kv_rows` holds its records.
    """

    kv_rows: DenseRows
    layers: list[Any]

    def __new__(cls, cache: Any = None, config: CanaryConfig | None = None) -> Any:
        return object.__new__(cls) if cache is None else _watch(cache, _canary(config))  # None: a copy is being made

    def __init__(self, cache: Any = None, config: CanaryConfig | None = None) -> None:
        """Nothing: the cache exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise HookOrderError(
                "a compiled forward runs without the canary: set generation_config.disable_compile=True"
            )
        new = key_states, value_states
        read = super().update(*new, layer_idx, *args, **kwargs)  # type: ignore[misc]
        try:
            _expect_followed(self.layers[layer_idx])
            self.kv_rows.stored(layer_idx, new, read, self._said(layer_idx))
        except (AdapterError, PlanError):
            if self.kv_rows.canary.config.mode == "raise":
                raise
            _leave(self)  # the next forward tells of it
        return read

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        removed = -int(tokens_to_remove)
        if removed < 0:  # 5.17 takes a positive number for the length that is left
            removed = max(self.kv_rows.length + removed, 0)
        self.kv_rows.cropped(removed, self._said, self._held)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.kv_rows.selected(beam_idx, self._held)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self._batch_size()).repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.kv_rows.selected(rows, self._held)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(self._batch_size())[indices.cpu()]
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.kv_rows.selected(rows, self._held)

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.kv_rows.forget()

    def _said(self, layer: int) -> int:
        return int(self.layers[layer].get_seq_length())

    def _held(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.layers[layer].keys, self.layers[layer].values

    def _batch_size(self) -> int:
        return next((own.fingerprints.shape[1] for own in self.kv_rows.layers.values()), 0)


class Handle:
    """The canary of one model, until `detach()`; also a context manager."""

    def __init__(self, model: Any, canary: DenseCanary) -> None:
        self._model, self._canary, self._cache = model, canary, cache_argument(model)
        canary.num_layers = max(canary.num_layers, int(getattr(model.config, "num_hidden_layers", 0) or 0))
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_use: list[Any] | None = None  # caches of the generate() that runs
        self._row_tokens: Tensor | None = None
        self._before = 0
        self._unwatched = Unwatched(model, canary.config, canary.coverage)
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._replaced = {"generate": self._generate, "prepare_inputs_for_generation": self._prepare}
        self._batching = Batching(model.config, canary, PagedAttentionCache)
        self._replaced["generate_batch"] = self._generate_batch
        self._own = {name: model.__dict__[name] for name in self._replaced if name in model.__dict__}
        for name, wrapper in self._replaced.items():
            setattr(model, name, self._around(getattr(model, name), wrapper))

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self._canary.log.findings

    def certificate(self) -> dict[str, Any]:
        """What was checked, what was not and why; plain JSON."""
        return self._canary.certificate(
            sum(cache.kv_rows.live_bytes for cache in self._caches if isinstance(cache, CanaryCache))
        )

    def detach(self) -> None:
        """Undo everything: hooks, methods, and the classes of the caches that are still there. Twice is harmless."""
        if _attached.get(self._model) is not self:
            return
        del _attached[self._model]
        for hook in self._hooks:
            hook.remove()
        self._batching.undo()
        for name in self._replaced:
            del self._model.__dict__[name]
        self._model.__dict__.update(self._own)
        for cache in list(self._caches):
            if isinstance(cache, CanaryCache):
                _leave(cache)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    # around the model's methods

    @staticmethod
    def _around(method: Any, wrapper: Any) -> Any:
        @functools.wraps(method)  # generate() reads the signature
        def around(*args: Any, **kwargs: Any) -> Any:
            return wrapper(method, *args, **kwargs)

        return around

    def _generate(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        outer, self._in_use = self._in_use, []
        before, entries = self._unwatched.num_forwards, self._num_entries
        try:
            output = method(*args, **kwargs)
            self._unwatched.ended(before, self._num_entries - entries)
            for cache in self._in_use:
                if self._canary.config.content != "write" and isinstance(cache, CanaryCache):
                    cache.kv_rows.reread_all(cache._held, ("release", 0))
            return output
        finally:
            self._in_use, self._row_tokens = outer, None

    @property
    def _num_entries(self) -> int:
        """Written and read so far."""
        return self._canary.coverage.slots_sealed + self._canary.coverage.slots_checked

    def _generate_batch(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._batching.failure, self._canary.fed = None, FED
        output = method(*args, **kwargs)
        if self._batching.failure is not None:  # its thread has told the requests, not the caller
            raise self._batching.failure
        return output

    def _prepare(self, method: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = method(input_ids, *args, **kwargs)
        fed = inputs.get("input_ids")
        is_tail = fed is not None and input_ids.dim() == 2 and torch.equal(fed, input_ids[:, -fed.shape[1] :])
        self._row_tokens = input_ids if is_tail else None
        return inputs

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named, row_tokens = self._by_name(args, kwargs), self._row_tokens
        cache, tokens = named.get(self._cache), named.get("input_ids")
        self._row_tokens = None
        if self._batching.before_forward(named):
            return
        self._unwatched.num_forwards += 1
        if cache is None:
            self._unwatched.skip(f"a forward was given no {self._cache}")
            return
        if not isinstance(cache, CanaryCache):
            try:
                _watch(cache, self._canary)
            except (AdapterError, PlanError) as error:
                self._unwatched.refuse(error)
                return
            self._caches.add(cache)
        if self._in_use is not None and not any(cache is known for known in self._in_use):
            self._in_use.append(cache)
        self._before = cache.kv_rows.length
        if row_tokens is not None and tokens is not None:
            cache.kv_rows.expect(row_tokens, tokens.shape[1])

    def _after_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        named = self._by_name(args, kwargs)
        cache, tokens = named.get(self._cache), named.get("input_ids")
        if isinstance(cache, CanaryCache):
            if tokens is None:
                tokens = torch.full(named["inputs_embeds"].shape[:2], NOT_KNOWN)
            cache.kv_rows.fed(tokens, self._before)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._parameters, args, strict=False)) | kwargs


def _canary(config: CanaryConfig | None) -> DenseCanary:
    faults = check()
    if faults:
        raise AdapterError("; ".join(faults))
    config = CanaryConfig.from_env() if config is None else config
    if not config.enabled:
        raise CanaryConfigError("mode 'off' installs nothing: do not attach")
    return DenseCanary(config)


def _watch(cache: Any, canary: DenseCanary) -> Any:
    """Put CanaryCache before the class of a cache; what lies in it already is taken as it lies."""
    if isinstance(cache, CanaryCache):
        raise HookOrderError("this cache has a canary already: use that one")
    if not isinstance(cache, cache_utils.Cache) or isinstance(cache, cache_utils.EncoderDecoderCache):
        raise AdapterError(f"a cache must be a decoder's Cache, got {type(cache).__name__}: it is not followed yet")
    for layer in cache.layers:
        _expect_followed(layer)
    rows = DenseRows(canary)
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized and int(layer.get_seq_length()):
            rows.adopt(number, layer.keys, layer.values, int(layer.get_seq_length()))
    cache.__class__ = _watched(type(cache))  # type: ignore[arg-type]
    cache.kv_rows = rows
    return cache


def _leave(cache: Any) -> None:
    """Nobody watches it any more."""
    cache.__class__ = type(cache).__mro__[2]
    del cache.kv_rows


@functools.cache
def _watched(kind: type) -> type:
    return type(f"Canary{kind.__name__}", (CanaryCache, kind), {"__module__": kind.__module__})


def _expect_followed(layer: Any) -> None:
    if type(layer).__name__ not in FOLLOWED:
        raise AdapterError(f"layers of a cache must be one of {', '.join(FOLLOWED)}, got {type(layer).__name__}")
