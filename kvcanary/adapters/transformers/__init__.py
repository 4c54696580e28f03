"""transformers: the canary inside `generate`, over the dense caches of Hugging Face models.

    handle = attach(model)          # and with every cache that this model is called with
    model.generate(**inputs)        # KVCorruptionError before a token of a damaged step leaves
    handle.certificate()
    handle.detach()                 # or `with attach(model) as handle:`

`CanaryCache(DynamicCache(config=model.config))` watches one cache alone, whatever calls it: bytes, lengths and moves,
but not whose tokens a row holds. docs/transformers.md says what is checked and what is not.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from types import TracebackType
from typing import Any

import structlog
import torch
from torch import Tensor

try:
    import transformers
except ModuleNotFoundError as error:
    raise ImportError("kvcanary.adapters.transformers needs transformers: pip install 'kvcanary[hf]'") from error

from kvcanary.adapters.transformers.attention_probe import misread_violation, probe, why_not
from kvcanary.adapters.transformers.canary_cache import CanaryCache, leave, make_canary, watch
from kvcanary.adapters.transformers.continuous_batching import Batching
from kvcanary.adapters.transformers.dense_cache import DenseRows
from kvcanary.adapters.transformers.judging import DENSE_FED, NOT_KNOWN, DenseCanary
from kvcanary.adapters.transformers.needs import NEEDED, TESTED, check, closed_paths
from kvcanary.adapters.transformers.positions import fed_by
from kvcanary.adapters.transformers.states import states_of
from kvcanary.adapters.transformers.unwatched import Unwatched, cache_argument, cache_given, cache_in
from kvcanary.adapters.transformers.weights import Weights
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, HookOrderError, PlanError
from kvcanary.report.finding import Finding

__all__ = ["FED", "NEEDED", "TESTED", "CanaryCache", "Handle", "attach", "check", "closed_paths", "transformers"]
FED = DENSE_FED  #: Codes that something here feeds.
_attached: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
_events = structlog.get_logger("kvcanary")


def attach(model: Any, config: CanaryConfig | None = None) -> Handle:
    """Watch every cache that this model is called with, from now on; `detach()` undoes it.

    config: modes `log` and `raise`; content `rolling` re-reads a slice of every layer at each step and everything when
            rows move and when `generate` ends, `full` everything at each step. None: CanaryConfig.from_env()
    AdapterError, with nothing attached, where nothing of this transformers can be watched, or the model takes no cache
    that can; HookOrderError for a second canary. A path whose names are gone in this release is told now, and refused
    where it is used. An assistant model is another model: attach to it as well.
    """
    if model in _attached:
        raise HookOrderError("this model has a canary already: detach() it first, or use that one")
    handle = Handle(model, make_canary(config))
    _attached[model] = handle
    return handle


class Handle:
    """The canary of one model, until `detach()`; also a context manager."""

    def __init__(self, model: Any, canary: DenseCanary) -> None:
        self._model, self._canary, self._cache = model, canary, cache_argument(model)
        canary.num_layers = max(canary.num_layers, int(getattr(model.config, "num_hidden_layers", 0) or 0))
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_use: list[Any] | None = None  # caches of the generate() that runs
        self._row_tokens: Tensor | None = None  # of whole rows, or of a part of a prompt that is fed in chunks
        self._prompt: Tensor | None = None  # whole rows, while they are fed in chunks
        self._prompt_end: int | None = None  # of its last chunk; None before the first
        self._num_missing = 0  # entries of a row in front of the tokens that generate() knows
        self._before = 0
        self._is_without = False  # the forward that runs was given no cache
        self._weights = Weights(model)
        self._unwatched = Unwatched(model, canary.config, canary.coverage)
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        run = canary.guard.run
        run(self._probe)
        self._hooks = [
            model.register_forward_pre_hook(functools.partial(run, self._before_forward), with_kwargs=True),
            model.register_forward_hook(functools.partial(run, self._after_forward), with_kwargs=True),
        ]
        self._replaced = {"generate": self._generate}
        if "tokens of rows" not in canary.closed:
            self._replaced |= {"prepare_inputs_for_generation": self._prepare, "_prefill": self._prefill}
        self._batching = Batching(model.config, canary)
        if hasattr(model, "generate_batch"):
            self._replaced["generate_batch"] = self._generate_batch
        self._own = {name: model.__dict__[name] for name in self._replaced if name in model.__dict__}
        for name, wrapper in self._replaced.items():
            setattr(model, name, self._canary.guard.around(wrapper, getattr(model, name)))
        for path, reason in canary.closed.items():
            _events.warning("kvcanary.closed_path", path=path, reason=reason)

    def _probe(self) -> None:
        """Ask the model's attention what it reads, by a few short forwards that nobody watches (`attention_probe`).

        KVCorruptionError in mode raise. Where a model cannot be asked the certificate says why.
        """
        coverage, reason, found = self._canary.coverage, why_not(self._model), None
        try:
            found = probe(self._model) if reason is None else None
        except Exception as error:  # a model of one's own, which takes other arguments
            reason = f"{type(error).__name__}: {error}"
        coverage.reader_probes += reason is None
        coverage.not_probed = reason or ""
        if found is not None:
            self._canary.report([misread_violation(found)], 0)

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self._canary.log.findings

    def certificate(self) -> dict[str, Any]:
        """What was checked, what was not and why; plain JSON."""
        return self._canary.certificate(
            sum(cache.kv_rows.live_bytes for cache in self._caches if isinstance(cache, CanaryCache))
        )

    def on_weights(self, keeps: bool = False) -> None:
        """The model's weights are others now, by a way that torch does not count (`.data`, a kernel of one's own).

        keeps: caches that are there go on with what the ones before wrote, a mix that is meant, also where torch counts
        """
        self._weights.changed()
        for cache in self._caches if keeps else ():
            if isinstance(cache, CanaryCache):
                cache.kv_rows.weights = NOT_KNOWN

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
                leave(cache)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    # around the model's methods

    def _generate(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        outer, missing, self._in_use = self._in_use, self._num_missing, []
        before, entries = self._unwatched.num_forwards, self._num_entries
        try:
            output = method(*args, **kwargs)
            if self._canary.guard.stopped:
                return output
            self._unwatched.ended("generate", before, self._num_entries - entries)
            for cache in self._in_use:
                if self._canary.config.content != "write" and isinstance(cache, CanaryCache):
                    cache.kv_rows.reread_all(cache._held, ("release", 0))
            return output
        finally:
            self._in_use, self._row_tokens, self._num_missing = outer, None, missing

    @property
    def _num_entries(self) -> int:
        """Written and read so far."""
        coverage = self._canary.coverage
        return coverage.slots_sealed + coverage.slots_checked + coverage.states_checked

    def _generate_batch(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if "generate_batch" in self._canary.closed:
            self._unwatched.refuse(self._canary.closed_error("generate_batch"))
            return method(*args, **kwargs)
        self._batching.failure, self._canary.fed = None, FED
        before, entries = self._unwatched.num_forwards, self._num_entries
        output = method(*args, **kwargs)
        if self._batching.failure is not None:  # its thread has told the requests, not the caller
            raise self._batching.failure
        if output and not self._canary.guard.stopped:
            self._unwatched.ended("generate_batch", before, self._num_entries - entries)
        return output

    def _prefill(
        self, method: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The first forwards of a generate(), whose rows may begin with what it has no tokens of."""
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        masked = getattr(generation_config, "_mask_length", None) or 0  # where it was dropped, since it hides nothing
        if isinstance(mask, Tensor) and mask.dim() == 2:
            masked = mask.shape[1]
        known, given = input_ids.shape[1], 0 if embeds is None else embeds.shape[1]
        self._num_missing = max(known, masked, given) - known
        if generation_config.prefill_chunk_size is not None:
            self._prompt, self._prompt_end = self._whole(input_ids), None
        try:
            return method(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            self._prompt = None

    def _whole(self, tokens: Tensor) -> Tensor:
        """[batch, n] tokens behind those that nobody knows."""
        return torch.nn.functional.pad(tokens, (self._num_missing, 0), value=NOT_KNOWN)

    def _rows_of(self, prepared: Tensor, fed: int, length: int) -> Tensor:
        """[batch, n] tokens of whole rows, of which the last `fed` are fed to a cache of this length.

        prepared: what generate() had the forward prepared for
        """
        if self._prompt is None:
            return self._whole(prepared)
        self._prompt_end = fed + (length if self._prompt_end is None else self._prompt_end)
        return self._prompt[:, : self._prompt_end]

    def _prepare(self, method: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = method(input_ids, *args, **kwargs)
        fed = inputs.get("input_ids")
        is_tail = fed is not None and input_ids.dim() == 2 and torch.equal(fed, input_ids[:, -fed.shape[1] :])
        self._row_tokens = input_ids if is_tail else None
        return inputs

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named, row_tokens = self._by_name(args, kwargs), self._row_tokens
        cache, tokens = cache_given(named), named.get("input_ids")
        self._row_tokens, self._is_without = None, False
        self._unwatched.num_forwards += 1
        paged = self._batching.cache_in(named)
        if paged is not None:
            reason = self._batching.before_forward(paged, named)
            if reason:
                self._unwatched.skip(reason)
            return
        if cache is None:
            self._is_without = True  # until it is over: a model may make its own
            return
        try:
            self._watch(cache)
        except (AdapterError, PlanError) as error:
            self._unwatched.refuse(error)
            return
        is_new = self._in_use is None or not any(cache is known for known in self._in_use)
        if self._in_use is not None and is_new:
            self._in_use.append(cache)
        num_fed = 1 if tokens is None else tokens.shape[1]
        if states := states_of(cache):
            cache.kv_rows.begin(states, num_fed)
        self._before = cache.kv_rows.length
        if row_tokens is not None and tokens is not None:
            rows, fed = cache.kv_rows, tokens.shape[1]
            rows.expect(self._rows_of(row_tokens, fed, rows.length), fed)
        self._judge_inputs(cache.kv_rows, named, self._before, is_new)

    def _watch(self, cache: Any) -> None:
        """Watch a cache, if nobody does; AdapterError or PlanError where it is not followed."""
        if not isinstance(cache, CanaryCache):
            watch(cache, self._canary)
            self._caches.add(cache)

    def _judge_inputs(self, rows: DenseRows, named: dict[str, Any], before: int, is_new: bool) -> None:
        """before: entries of a row;  is_new: the first forward of a generate() over this cache, or one that its caller
        runs by itself
        """
        fed = fed_by(named, before)
        count = 1 if fed is None else fed.positions.shape[1]
        if is_new:
            rows.written_by(self._weights.number(looks=count > 1 or not before), count)
        rows.go_on(fed, count)

    def _after_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        named = self._by_name(args, kwargs)
        cache, tokens = cache_given(named), named.get("input_ids")
        if self._is_without:
            self._is_without, cache = False, self._made(named, output)
        if isinstance(cache, CanaryCache):
            if tokens is None:
                tokens = torch.full(named["inputs_embeds"].shape[:2], NOT_KNOWN)
            states = states_of(cache)
            cache.kv_rows.fed(tokens, self._before, bool(states))
            if states:
                cache.kv_rows.left(states)

    def _made(self, named: dict[str, Any], output: Any) -> Any:
        """The cache that a forward without one has made, followed from here on: what lies there counts as it lies."""
        cache = cache_in(output)
        if cache is None or isinstance(cache, CanaryCache):
            self._unwatched.skip(f"a forward was given no {self._cache}")
            return None
        try:
            self._watch(cache)
        except (AdapterError, PlanError) as error:  # nobody asked for a cache
            self._unwatched.skip(str(error))
            return None
        self._before = 0
        self._judge_inputs(cache.kv_rows, named, 0, is_new=True)
        return cache

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._parameters, args, strict=False)) | kwargs
