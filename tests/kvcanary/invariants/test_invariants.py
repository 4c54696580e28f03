"""Every always-on check: the broken rule is raised in these words, its clean twin passes, also under `python -O`."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcanary import KVCanaryError, invariants
from kvcanary.invariants import InvariantError


class Case(NamedTuple):
    """One check with arguments that break its rule, and with arguments that just do not."""

    check: Callable[..., None]
    broken: tuple
    clean: tuple
    error: type[InvariantError]
    words: str


FILES = sorted((Path(__file__).parent / "cases").glob("*.py"))
BY_MODULE = {path.stem: [Case(*entry) for entry in runpy.run_path(str(path))["CASES"]] for path in FILES}
CASES = [entry for entries in BY_MODULE.values() for entry in entries]
NAMES = [f"{entry.check.__name__}-{number}" for number, entry in enumerate(CASES)]


@pytest.mark.parametrize("entry", CASES, ids=NAMES)
def test_a_broken_rule_is_raised_in_these_words(entry):
    """Both sides of the equation, whose it is and the settings stand in the message, and the type is the rule's."""
    with pytest.raises(InvariantError) as caught:
        entry.check(*entry.broken)
    assert type(caught.value) is entry.error
    assert str(caught.value) == entry.words
    assert isinstance(caught.value, KVCanaryError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("entry", CASES, ids=NAMES)
def test_its_clean_twin_passes(entry):
    """The same check at the edge of what is allowed says nothing."""
    assert entry.check(*entry.clean) is None


@pytest.mark.parametrize("name", BY_MODULE)
def test_every_check_of_a_module_has_a_case(name):
    """No check is without its words here, and all are named by the package too."""
    module = import_module(f"kvcanary.invariants.{name}")
    own = {check for check, value in vars(module).items() if inspect.isfunction(value)}
    assert {entry.check.__name__ for entry in BY_MODULE[name]} == own
    assert own <= set(vars(invariants))


def test_every_check_and_every_error_has_a_case():
    """No check and no type of the package is without its words here."""
    checks = {name for name in vars(invariants) if name.startswith("check_")}
    errors = {v for v in vars(invariants).values() if inspect.isclass(v) and issubclass(v, InvariantError)}
    assert {entry.check.__name__ for entry in CASES} == checks
    assert {entry.error for entry in CASES} == errors - {InvariantError}


def test_no_message_ends_with_a_full_stop():
    """One sentence, and its numbers last."""
    assert [entry.words for entry in CASES if re.search(r"[.\s]$", entry.words)] == []


def raised(cases: list[Case]) -> list[str]:
    """The words of the errors that these cases raise."""
    found = []
    for entry in cases:
        try:
            entry.check(*entry.broken)
        except InvariantError as error:
            found.append(str(error))
    return found


def test_checks_are_on_without_asserts():
    """`python -O` drops every assert, and no check: the same words come out of such an interpreter."""
    script = (
        "import runpy\nassert False, 'this interpreter keeps asserts'\n"
        f"test = runpy.run_path({__file__!r})\nprint(*test['raised'](test['CASES']), sep='\\n')"
    )
    child = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines() == [entry.words for entry in CASES]
