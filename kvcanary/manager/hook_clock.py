"""HookClock: the host time that passes inside the canary's hooks, by the clock around each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary.manager.manager import CanaryManager
    from kvcanary.manager.substep import SubstepCanary, WarmupSubstep

READS = frozenset({"certificate", "dump", "page_map"})  # an engine's step does not wait for them


class HookClock:
    """Wraps every public method of a manager, and the substeps that it hands out; ``seconds`` is their sum.

    A hook that calls another counts once. On a device it is the time of launching, not of what was launched.
    It stands in this package so that the call sites in histories stay the engine's.
    """

    def __init__(self, manager: CanaryManager) -> None:
        self.seconds = 0.0
        self._is_inside = False
        self._manager = manager
        hooks = inspect.getmembers(manager, inspect.isroutine)
        self._own = dict(vars(manager))  # of which some are methods of a part
        self._names = [name for name, _ in hooks if not name.startswith("_") and name not in READS]
        for name in self._names:
            setattr(manager, name, self._timed(getattr(manager, name)))
        forward = manager.forward

        def timed_forward(*where: Any, **settings: Any) -> Any:
            return _TimedSubstep(forward(*where, **settings), self._timed)

        manager.forward = timed_forward  # type: ignore[assignment]

    def remove(self) -> None:
        """The manager is as it was."""
        for name in self._names:
            if name in self._own:
                setattr(self._manager, name, self._own[name])
            else:
                delattr(self._manager, name)

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **settings: Any) -> Any:
            if self._is_inside:
                return hook(*arguments, **settings)
            self._is_inside, started = True, perf_counter()
            try:
                return hook(*arguments, **settings)
            finally:
                self.seconds += perf_counter() - started
                self._is_inside = False

        return timed


class _TimedSubstep:
    """The hooks of one forward, each under the clock."""

    __slots__ = ("close", "open", "put", "store")

    def __init__(self, substep: SubstepCanary | WarmupSubstep, timed: Callable[..., Any]) -> None:
        for hook in self.__slots__:
            setattr(self, hook, timed(getattr(substep, hook)))
