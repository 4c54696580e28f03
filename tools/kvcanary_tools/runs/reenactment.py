"""A run with one fault in it, a fix undone or the engine's state struck: how it ended, said as a finding."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvcanary import KVCanaryError, faults
from kvcanary.faults.catalogue import find
from kvcanary.faults.fault import READY, Armed, Fault
from kvcanary_tools import console

if TYPE_CHECKING:
    from kvcanary.faults.target import Target
    from kvcanary_tools.campaign.harness import EngineTarget
    from spec_engine import Engine

WARM_STEPS = 3  # before an engine's state is struck


class Reenactment:
    """A fault that acts in the engine which is to be watched.

    armed: of a fix that is undone; where there is none, ``strike`` is made between two steps.
    """

    def __init__(self, fault: Fault | None, armed: Armed | None = None) -> None:
        self.fault, self.armed = fault, armed
        self.target: EngineTarget | None = None

    def watch(self, engine: Engine) -> None:
        """Strike this engine as soon as everybody decodes, a few steps on; UsageFailure where it has no canary."""
        if self.fault is None or self.fault.strike is None:
            return
        if engine.canary is None:
            raise console.UsageFailure(f"{self.fault.name} strikes an engine that has a canary", "add --kv-canary")
        from kvcanary_tools.campaign.engines import setup_of
        from kvcanary_tools.campaign.harness import EngineTarget

        self.target = EngineTarget(engine, setup_of(engine), random.Random(self.fault.name))
        if self.fault.applies(self.target.setup):
            engine.step = _striking(engine.step, self.target, self.fault.strike)  # type: ignore[method-assign]

    @property
    def has_acted(self) -> bool:
        """Whether a value was changed, or the state struck."""
        is_struck = self.target is not None and self.target.strike is not None
        return is_struck or (self.armed is not None and self.armed.num_strikes > 0)

    @property
    def sentence(self) -> str:
        """What came of it, where the run went to its end."""
        if self.fault is None:
            return ""
        look_for = ", or ".join(filter(None, (self.fault.expected, self.fault.otherwise)))
        count = 0 if self.armed is None else self.armed.num_strikes
        if count:
            return f"{self.fault.name} changed {console.numbered(count, 'value')}, look for {look_for}"
        if self.target is not None and self.target.strike is not None:
            return f"{self.fault.name} struck in step {self.target.strike.step}, look for {look_for}"
        return f"{self.fault.name} changed nothing here: it applies to {self.fault.applies_to}"


@contextmanager
def reenacting(name: str | None, as_json: bool) -> Iterator[Reenactment]:
    """Make the fault ``name`` meanwhile. The typed error in which that ends is shown, and ends the command with code 1.

    UnknownFaultError when there is no such fault, UsageFailure for one that waits; a sentence at the end says whether
    it ever acted.
    """
    if not name:
        yield Reenactment(None)
        return
    fault = find(name)
    if fault.state != READY:
        raise console.UsageFailure(f"{name} cannot be made: {fault.reason}", "kvcanary faults lists those that can")
    with faults.arm(name) as armed:
        made = Reenactment(fault, armed)
        try:
            yield made
        except KVCanaryError as error:
            if not made.has_acted:
                raise
            _show(name, error, as_json)
            raise click.exceptions.Exit(console.EXIT_FINDING) from error
    console.say(made.sentence)


def expect_nothing_armed() -> None:
    """UsageFailure where the environment arms a fault: it would be in the twins too, which are there to be without."""
    if name := os.environ.get(faults.ENVIRONMENT):
        raise console.UsageFailure(
            f"{faults.ENVIRONMENT} would arm {name} in every engine, also in those that must be without a fault",
            f"unset {faults.ENVIRONMENT}; this command makes the faults that it is given",
        )


def _striking(
    step: Callable[[], list[Any]], target: EngineTarget, strike: Callable[[Target], bool]
) -> Callable[[], list[Any]]:
    waiting = [strike]

    def struck() -> list[Any]:
        if waiting and target.step > WARM_STEPS and target.is_decoding and waiting[0](target):
            waiting.clear()
        target.is_stepping = True
        try:
            return step()
        finally:
            target.is_stepping = False

    return struck


def _show(name: str, error: KVCanaryError, as_json: bool) -> None:
    if as_json:
        console.data_json({"reenacted": name, "error": type(error).__name__, "message": str(error)})
    else:
        console.say(f"{name} ended in {type(error).__name__}: {error}", fg="yellow")
