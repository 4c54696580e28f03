"""A run with one fix undone: how it ended, said as a finding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvcanary import faults
from kvcanary.invariants import InvariantError
from kvcanary_tools import console


@contextmanager
def reenacting(name: str | None, as_json: bool) -> Iterator[None]:
    """Undo the fix ``name`` meanwhile. The typed error in which that ends is shown, and ends the command with code 1.

    UnknownFaultError when there is no such fault, UsageFailure when it undoes no fix; a sentence when the run never
    came to its formula.
    """
    if not name:
        yield
        return
    with faults.arm(name) as armed:
        if not armed.fault.is_seam:
            raise console.UsageFailure(
                f"--reenact undoes one fix, and {name} strikes the state of a running engine instead",
                f"kvcanary faults show {name}",
            )
        try:
            yield
        except InvariantError as error:
            _show(name, error, as_json)
            raise click.exceptions.Exit(console.EXIT_FINDING) from error
    if not armed.num_strikes:
        console.say(f"{name} changed nothing here: it applies to {armed.fault.applies_to}")
    else:
        console.say(f"{name} changed {console.numbered(armed.num_strikes, 'value')}, look for {armed.fault.expected}")


def _show(name: str, error: InvariantError, as_json: bool) -> None:
    if as_json:
        console.data_json({"reenacted": name, "error": type(error).__name__, "message": str(error)})
    else:
        console.say(f"{name} ended in {type(error).__name__}: {error}", fg="yellow")
