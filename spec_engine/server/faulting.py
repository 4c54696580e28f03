"""FaultDesk: named faults of the catalogue, armed and disarmed in a running server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvcanary import faults
from spec_engine.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.faults.fault import Armed


class FaultDesk:
    """What is armed now. Used in the engine's thread, between two steps."""

    def __init__(self) -> None:
        self._armed: dict[str, tuple[AbstractContextManager[Armed], Armed]] = {}

    def arm(self, name: str) -> None:
        """UnknownFaultError when the catalogue has none of that name, ConfigError for one that is not ready."""
        from kvcanary.faults.catalogue import find

        fault = find(name)
        if fault.state != "ready":
            raise ConfigError(f"fault {name!r} cannot be armed here: {fault.reason}")
        if name not in self._armed:
            context = faults.arm(name)
            self._armed[name] = context, context.__enter__()

    def disarm(self, name: str) -> None:
        """ConfigError when it is not armed."""
        if name not in self._armed:
            raise ConfigError(f"fault {name!r} is not armed, armed are: {', '.join(self._armed) or 'none'}")
        self._armed.pop(name)[0].__exit__(None, None, None)

    def disarm_all(self) -> None:
        for name in list(self._armed):
            self.disarm(name)

    def status(self) -> list[dict[str, Any]]:
        """Every fault that is armed, with how many values it has changed so far."""
        return [{"name": name, "num_strikes": armed.num_strikes} for name, (_, armed) in self._armed.items()]
