"""FaultPanel: named faults of the catalogue, armed and disarmed in a running server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from kvcanary import faults
from spec_engine.engine import Engine
from spec_engine.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.faults.fault import Armed, Fault
    from kvcanary.faults.target import Target

TargetOf = Callable[[Engine], "Target"]  # the engine as a fault sees it


class FaultPanel:
    """What is armed now. Used in the engine's thread, between two steps.

    A fault in a formula changes values for as long as it is armed. One in the engine's state strikes once, as soon as
    it can, and is armed no more.
    """

    def __init__(self, engine: Engine, target_of: TargetOf | None = None) -> None:
        """``target_of``: without it faults in the engine's state cannot be made."""
        self._engine, self._target_of = engine, target_of
        self._target: Target | None = None
        self._armed: dict[str, tuple[AbstractContextManager[Armed], Armed]] = {}
        self._waiting: dict[str, Fault] = {}
        self._struck: list[str] = []
        self._drills: dict[str, tuple[Fault, Target]] = {}  # by the one request that each may strike

    def arm(self, name: str) -> None:
        """UnknownFaultError when the catalogue has none of that name, ConfigError for one that cannot be made here."""
        from kvcanary.faults.catalogue import find

        fault = find(name)
        if fault.reason:
            raise ConfigError(f"fault {name!r} cannot be made: {fault.reason}")
        if not fault.is_seam:
            self._expect_target(name)
            self._waiting[name] = fault
        elif name not in self._armed:
            context = faults.arm(name)
            self._armed[name] = context, context.__enter__()

    def disarm(self, name: str) -> None:
        """ConfigError when it is not armed."""
        if self._waiting.pop(name, None) is not None:
            return
        if name not in self._armed:
            names = ", ".join([*self._armed, *self._waiting]) or "none"
            raise ConfigError(f"fault {name!r} is not armed, armed are: {names}")
        self._armed.pop(name)[0].__exit__(None, None, None)

    def disarm_all(self) -> None:
        for name in [*self._armed, *self._waiting]:
            self.disarm(name)

    def arm_drill(self, name: str, request_id: str) -> None:
        """Let a fault in the engine's state strike this request, as soon as it can, and no other."""
        from kvcanary.faults.catalogue import find

        self._expect_target(name)
        self._drills[request_id] = find(name), cast("Target", _OneRequest(self._target, request_id))

    def disarm_drill(self, request_id: str) -> bool:
        """Whether it has struck."""
        return self._drills.pop(request_id, None) is None

    def strike(self) -> None:
        """Before a step: the faults that wait for their moment try again."""
        for request_id, (drilled, target) in list(self._drills.items()):
            if drilled.strike is not None and drilled.strike(target):
                del self._drills[request_id]
        for name, fault in list(self._waiting.items()):
            if fault.strike is not None and self._target is not None and fault.strike(self._target):
                del self._waiting[name]
                self._struck.append(name)

    def status(self) -> dict[str, Any]:
        """What is armed, with how many values it has changed, what waits for its moment, and what has struck."""
        armed = [{"name": name, "num_strikes": armed.num_strikes} for name, (_, armed) in self._armed.items()]
        return {"armed": armed, "waiting": list(self._waiting), "struck": list(self._struck)}

    def _expect_target(self, name: str) -> None:
        if self._target_of is None or self._engine.canary is None:
            raise ConfigError(
                f"fault {name!r} changes the engine's state, which takes a canary to be seen, and this server has none",
                "start it with --kv-canary",
            )
        if self._target is None:
            self._target = self._target_of(self._engine)


class _OneRequest:
    """A target in which one request runs, and no other."""

    def __init__(self, target: Target | None, request_id: str) -> None:
        self._target, self._request_id = target, request_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def running(self) -> list[Any]:
        own = [] if self._target is None else self._target.running()
        return [running for running in own if running.request_id == self._request_id]
