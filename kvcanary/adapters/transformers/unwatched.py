"""Unwatched: a model of which nothing can be watched is refused, and forwards that nobody watches are told at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import structlog
from transformers.cache_utils import Cache

from kvcanary.calls.coverage import Coverage
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, CanaryNotRunningError, PlanError

#: What forwards call the cache that they are given, by release of transformers.
CACHES = ("past_key_values", "cache", "cache_params")
_events = structlog.get_logger("kvcanary")


def cache_argument(model: Any) -> str:
    """The name under which a model takes its cache; AdapterError where it takes none that is known here.

    A wrapper that passes on what it does not name is taken for one that knows.
    """
    name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    known = [own for own in CACHES if own in parameters]
    passes = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if known:
        return known[0]
    if passes and "use_cache" not in parameters:
        return CACHES[0]
    raise AdapterError(
        f"forward of {name} must take its cache as {' or '.join(CACHES)}, it takes {', '.join(parameters)}: "
        "nothing of such a model can be watched yet, run it without a canary"
    )


def cache_given(named: Mapping[str, Any]) -> Any:
    """The cache that a forward is given, also under a name that its release only still accepts; None without one."""
    return next((named[name] for name in CACHES if named.get(name) is not None), None)


def cache_in(output: Any) -> Any:
    """The decoder's cache that a forward gives back, by whatever name, or in a tuple; None without one."""
    every = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((own for own in every if isinstance(own, Cache)), None)


class Unwatched:
    """Forwards of one model whose caches nobody watches: counted, told once, an error where a generate() had no other.

    num_forwards: with and without a cache that is watched
    """

    def __init__(self, model: Any, config: CanaryConfig, coverage: Coverage) -> None:
        self._model, self._config, self._coverage = type(model).__name__, config, coverage
        self._is_reported = False
        self.num_forwards = 0

    def skip(self, reason: str) -> None:
        """One more, and why."""
        self._coverage.skip("forwards without a cache that is watched", 1)
        if not self._is_reported:
            self._is_reported = True
            _events.error("kvcanary.not_watching", model=self._model, reason=reason)

    def refuse(self, error: AdapterError | PlanError) -> None:
        """A cache that is not followed: the error in mode raise, else the model goes on without."""
        if self._config.mode == "raise":
            raise error
        self.skip(str(error))

    def ended(self, method: str, num_forwards: int, num_entries: int) -> None:
        """A call of this method is over that began after so many forwards, and has written and read so many entries.

        CanaryNotRunningError in mode raise where nothing was watched.
        """
        if num_entries:
            return
        ran = self.num_forwards - num_forwards
        reason, remedy = f"{method}() of {self._model} ran no forward of this model", "attach to the one that it runs"
        if ran:
            reason = f"{method}() of {self._model} ran {ran} forwards, and no cache of theirs is watched"
            remedy = "let it use its cache"
        if self._config.mode == "raise":
            raise CanaryNotRunningError(f"{reason}: {remedy}, or detach() the canary")
        self._is_reported = True
        _events.error("kvcanary.not_watching", model=self._model, reason=reason)
