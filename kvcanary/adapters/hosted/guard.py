"""Where hooks of ours fail inside somebody else's engine: in mode log no request ends for it.

What a hook stands around is run all the same, once; the canary of that pool stops, and says so in its log, its
certificate and its metrics. What the engine itself raises passes as it is, and so does everything in other modes.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import structlog

REMEDY = "the engine goes on unwatched: report this, and restart it to watch it again"
_events = structlog.get_logger("kvcanary")


class Guard:
    """Stands around the hooks of one canary.

    is_serving: requests may be under way; before that, what cannot be attached ends the start in every mode
    stopped:    why nothing is watched any more; empty as long as something is
    """

    def __init__(
        self,
        host: str,
        mode: str,
        on_stop: Callable[[str], object] = bool,
        parts: Sequence[Guard] = (),
        rank: int = 0,
        pool: str = "all",
    ) -> None:
        """parts: guards that stop with this one; rank, pool: whose canary it is, in the event"""
        self.host, self.rank, self.pool, self._on_stop, self._parts = host, rank, pool, on_stop, parts
        self._is_lenient, self.is_serving, self.stopped = mode == "log", False, ""

    def around(self, wrapper: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        """What calls `wrapper(method, ...)`; where that fails, it gives what `method` gave, or gives now."""

        @functools.wraps(method)
        def around(*args: Any, **kwargs: Any) -> Any:
            if self.stopped:
                return method(*args, **kwargs)
            if not self._is_lenient or not self.is_serving:
                return wrapper(method, *args, **kwargs)
            given: list[Any] = []
            raised: BaseException | None = None

            def once(*args: Any, **kwargs: Any) -> Any:
                nonlocal raised
                try:
                    given.append(method(*args, **kwargs))
                except BaseException as error:
                    raised = error
                    raise
                return given[-1]

            try:
                return wrapper(once, *args, **kwargs)
            except Exception as error:
                if error is raised:
                    raise
                self.stop(error, getattr(method, "__name__", repr(method)))
            return given[-1] if given else method(*args, **kwargs)

        return around

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(...)`, all of it ours; None where it fails, or nothing is watched any more."""
        if self.stopped:
            return None
        if not self._is_lenient or not self.is_serving:
            return function(*args)
        try:
            return function(*args)
        except Exception as error:
            self.stop(error, getattr(function, "__name__", repr(function)))
        return None

    def stop(self, error: Exception, where: str) -> None:
        """Nothing is watched any more; it is told once."""
        if self.stopped:
            return
        for part in self._parts:
            part.give_up(f"{type(error).__name__} in {where}: {error}")
        self.give_up(f"{type(error).__name__} in {where}: {error}")
        _events.error(
            "kvcanary.stopped", host=self.host, rank=self.rank, pool=self.pool, reason=self.stopped, remedy=REMEDY,
            exception="".join(traceback.format_exception(error)),  # as text: local values would show prompts
        )  # fmt: skip

    def give_up(self, reason: str) -> None:
        """The same, told by somebody else."""
        if not self.stopped:
            self.stopped = reason
            self._on_stop(reason)
