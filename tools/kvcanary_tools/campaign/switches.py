"""Switching a host check off: meanwhile nobody raises its error, so that what else would find a fault is seen."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from kvcanary import invariants
from kvcanary.codes import CODES

PACKAGES = ("kvcanary", "spec_engine")


@contextmanager
def switched_off(error: str) -> Iterator[None]:
    """Every always-on check that raises the error of this name does nothing meanwhile, wherever it is called."""
    checks = {name: getattr(invariants, name) for name in checks_of(error)}
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]:
            for name, check in checks.items():
                if vars(module).get(name) is check:
                    stack.enter_context(patch.object(module, name, _nothing))
        yield


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
