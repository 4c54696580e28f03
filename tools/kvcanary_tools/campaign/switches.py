"""Switching a host check off: meanwhile nobody raises its error, so that what else would find a fault is seen."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcanary import invariants
from kvcanary.codes import CODES

PACKAGES = ("kvcanary", "spec_engine")
Check = Callable[..., None]


@contextmanager
def switched_off(error: str) -> Iterator[None]:
    """Every always-on check that raises the error of this name does nothing meanwhile, wherever it is called.

    Modules that are imported meanwhile take what does nothing, and get the check as well when this ends.
    """
    checks = {name: getattr(invariants, name) for name in checks_of(error)}
    for name, check in checks.items():
        _replace(name, check, _nothing)
    try:
        yield
    finally:
        for name, check in checks.items():
            _replace(name, _nothing, check)


def _replace(name: str, check: Check, by: Check) -> None:
    """In every module of the packages that has it under this name."""
    for module in [module for path, module in sys.modules.items() if path.partition(".")[0] in PACKAGES]:
        if vars(module).get(name) is check:
            setattr(module, name, by)


def can_switch_off(expected: str) -> bool:
    """Whether what speaks so is a check of its own: errors of the ledger itself are not, it could not go on."""
    return expected in CODES or bool(checks_of(expected))


def checks_of(error: str) -> set[str]:
    """The functions of kvcanary.invariants that raise it."""
    checks = [value for value in vars(invariants).values() if inspect.isfunction(value)]
    return {
        check.__name__
        for check in checks
        for node in ast.walk(ast.parse(inspect.getsource(check)))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) == error
    }


def _nothing(*args: object, **named: object) -> None:
    """The check that is switched off."""
