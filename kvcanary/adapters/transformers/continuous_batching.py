"""Continuous batching in transformers: the paged caches behind `generate_batch`, in both shapes that their API has had.

A cache tells which request comes where in a batch (`extend_read_and_write_indices`), the forward which tokens are fed
and along which indices they are written and read, `update` what each layer stores and what attention is given.
`paged_cache` keeps the records and judges.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from kvcanary.adapters.compatibility import resolved
from kvcanary.adapters.transformers.judging import DenseCanary
from kvcanary.adapters.transformers.paged_cache import BatchedCache
from kvcanary.adapters.transformers.paged_layout import group_of
from kvcanary.errors import AdapterError

CACHE = "transformers.generation.continuous_batching.cache:PagedAttentionCache"
COPIES = ("perform_cache_copy", "copy_cache")
FORKS = ("prepare_fork_request", "fork_request")
#: By path of needs.py, methods that are left alone where it is closed.
OPTIONAL = {"forks": (*COPIES, *FORKS), "prefix sharing": ("search_prefix_match",)}
#: Those of them that a release has are replaced.
REPLACED = ("update", "extend_read_and_write_indices", "search_prefix_match", "free_blocks", "reset", *COPIES, *FORKS)


#: What a forward of a batch is given, beside its cache.
GIVEN = ("input_ids", "position_ids", "read_index", "write_index")


class Batching:
    """The caches of one model: methods of PagedAttentionCache are replaced until `undo`, none where they are gone."""

    def __init__(self, config: Any, canary: DenseCanary) -> None:
        """`config`: of the model, which its caches hold too."""
        self.canary, self._config = canary, config
        self._caches: weakref.WeakKeyDictionary[Any, BatchedCache] = weakref.WeakKeyDictionary()
        self.failure: Exception | None = None
        self._own: dict[str, Any] = {}
        self._kind: type | None = None if "generate_batch" in canary.closed else resolved(CACHE)
        if self._kind is None:
            return
        self._update_of = inspect.signature(self._kind.update)  # type: ignore[attr-defined]
        # one dict of the forward's keyword arguments (from 5.20), or two lists of indices (to 5.17)
        self._is_by_allocator = "kwargs" in self._update_of.parameters
        closed = {name for path, names in OPTIONAL.items() if path in canary.closed for name in names}
        for name in REPLACED:
            if hasattr(self._kind, name) and name not in closed:
                self._replace(name, getattr(self, f"_{name}"))

    def undo(self) -> None:
        for name, method in self._own.items():
            setattr(self._kind, name, method)
        self._own = {}

    def of(self, cache: Any) -> BatchedCache | None:
        """The records of a cache of this model."""
        if self._kind is None or not isinstance(cache, self._kind):
            return None
        if getattr(cache, "config", None) is not self._config:
            return None
        if cache not in self._caches:
            self._caches[cache] = BatchedCache(cache, self.canary)
        return self._caches[cache]

    def cache_in(self, named: Mapping[str, Any]) -> BatchedCache | None:
        """The records of the paged cache of this model that a forward is given, under whatever name."""
        return next((held for value in named.values() if (held := self.of(value)) is not None), None)

    def before_forward(self, held: BatchedCache, named: Mapping[str, Any]) -> str:
        """Judge what a forward is about to read; why it cannot be, where it cannot."""
        if named.get("block_table") is not None:
            return "the kernel stores a batch by its block table"
        absent = [name for name in GIVEN if named.get(name) is None]
        if not absent:
            self._guard(held.before, *(named[name] for name in GIVEN))
            return ""
        reason = f"a batch must be given {', '.join(GIVEN)}, it has no {', '.join(absent)}"
        if self.canary.config.mode == "raise":
            self.failure = self.failure or AdapterError(reason)
            raise AdapterError(reason)
        held.skip()
        return reason

    def _replace(self, name: str, wrapper: Callable[..., Any]) -> None:
        kind = self._kind
        method = self._own[name] = getattr(kind, name)

        def hook(method: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
            held = self.of(cache)
            if held is None:
                return method(cache, *args, **kwargs)
            return wrapper(held, functools.partial(method, cache), *args, **kwargs)

        setattr(kind, name, self.canary.guard.around(hook, method))

    def _guard(self, function: Callable[..., Any], *args: Any) -> None:
        """An error ends a background thread, where the caller does not see it: keep it."""
        try:
            function(*args)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _update(self, held: BatchedCache, method: Any, *args: Any, **kwargs: Any) -> Any:
        named = self._update_of.bind(held.cache, *args, **kwargs).arguments
        given: dict[str, Any] = named["kwargs"] if self._is_by_allocator else named
        layer, read, write = named["layer_idx"], given.get("read_index"), given.get("write_index")
        is_by_table = given.get("block_table") is not None  # the kernel stores by itself: nothing is seen here
        output = method(*args, **kwargs)
        if read is not None and write is not None and not is_by_table:
            group, new = group_of(held.cache, layer), (named["key_states"], named["value_states"])
            # [1, heads, n, dim], or [n, heads, dim]
            shaped = [values if values.dim() == 4 else values.transpose(0, 1)[None] for values in output]
            self._guard(held.stored, layer, new, shaped, read[group], write[group])
        return output

    def _extend_read_and_write_indices(
        self,
        held: BatchedCache,
        method: Any,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: Any,
        write_index: Any,
    ) -> Any:
        held.placed(request_id, past_length, query_length, write_index)
        return method(request_id, past_length, query_length, read_index, write_index)

    def _search_prefix_match(self, held: BatchedCache, method: Any, request_id: str, prompt_ids: list[int]) -> int:
        length = method(request_id, prompt_ids)
        held.prefix(request_id, prompt_ids, length)
        return length

    def _free_blocks(self, held: BatchedCache, method: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        held.freed(request_id)
        return method(request_id, *args, **kwargs)

    def _reset(self, held: BatchedCache, method: Any) -> Any:
        held.reset()
        return method()

    def _perform_cache_copy(self, held: BatchedCache, method: Any, copy_src_and_dst: dict[str, Any]) -> Any:
        result = method(copy_src_and_dst)
        allocators = held.cache.cache_allocators
        blocks = {allocators[name].index: pair for name, pair in copy_src_and_dst.items()}
        self._guard(held.copied, blocks)
        return result

    def _copy_cache(
        self, held: BatchedCache, method: Any, list_source_blocks: list[int], list_forked_blocks: list[int]
    ) -> Any:
        result = method(list_source_blocks, list_forked_blocks)
        blocks = {group.number: (list_source_blocks, list_forked_blocks) for group in held.groups}
        self._guard(held.copied, blocks)
        return result

    def _prepare_fork_request(self, held: BatchedCache, method: Any, src_state: Any, *args: Any, **kwargs: Any) -> Any:
        forked = method(src_state, *args, **kwargs)
        held.forked(src_state.request_id, forked)
        return forked

    def _fork_request(
        self, held: BatchedCache, method: Any, source_request_id: str, destination_request_ids: list[str]
    ) -> Any:
        result = method(source_request_id, destination_request_ids)
        held.forked(source_request_id, destination_request_ids)
        return result
