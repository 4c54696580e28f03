"""The index of checks: every place is there and speaks of its code, no place is missing, every text is a sentence."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvcanary
from kvcanary.codes import CODES, DEVICE, FED, HOST, KINDS, NOT_FINITE, OBSERVED, Code
from kvcanary_kernels.judge.settle import settle
from kvcanary_tools.advice import ADVICE
from kvcanary_tools.cli import COMMANDS

PACKAGE = Path(kvcanary.__file__).parent
PLACES = [
    (place, kind) for table in (HOST, DEVICE, OBSERVED) for place, kinds in table.items() for kind in kinds.split()
]
#: How a source speaks of a check, where it does not by its code.
WORDS = {
    "A1": r"\bT1\b",
    "H2": r"\bHookOrderError\b",
    "L1": r"\bL1\b|\bPageStateError\b",
    "O1": r"\bO1\b|\bUnorderedAccess\b",
    "U1": r"\bU1\b",
}
#: Files that put what others have judged into a violation.
REPORTERS = {"kvcanary.transfers.async_tracker", "kvcanary.captured.step", "kvcanary.adapters.observed.report"}


@cache
def module_of(name: str) -> ModuleType:
    if name.startswith("kvcanary.adapters.transformers"):
        pytest.importorskip("transformers")
    return import_module(name)


def named(place: str) -> Any:
    """What lies at a place; a Triton kernel as the function that it was."""
    module, _, name = place.partition(":")
    found: Any = module_of(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    return getattr(found, "fn", found)


def mentions(source: str, kind: str) -> bool:
    """R3: by itself, as R3_RECORD_DAMAGED, or in a range such as `R2 to R8`."""
    if re.search(WORDS.get(kind, rf"\b{kind}(_[A-Z]+)*\b"), source):
        return True
    letter, number = kind[0], int(kind[1:])
    ranges = re.findall(rf"\b{letter}(\d+) to {letter}(\d+)\b", source)
    return any(int(first) <= number <= int(last) for first, last in ranges)


@pytest.mark.parametrize("place", [*HOST, *DEVICE, *OBSERVED])
def test_every_place_is_in_the_source(place: str) -> None:
    """Each imports, and is a function, a method, a class or a kernel that is defined in the very module."""
    found = named(place)
    assert inspect.isfunction(found) or inspect.isclass(found)
    assert f"{found.__module__}:{found.__qualname__}" == place


@pytest.mark.parametrize(("place", "kind"), PLACES, ids=lambda value: value.rpartition(".")[2])
def test_every_place_speaks_of_its_code(place: str, kind: str) -> None:
    """The source of the function says the code, so that an index entry that is wrong, or has become wrong, is told."""
    assert mentions(inspect.getsource(named(place)), kind)


def test_a_wrong_entry_would_be_told() -> None:
    """The reader behind that test finds no code in a place that does not judge it."""
    source = inspect.getsource(settle)
    judged = [kind for kind in KINDS if kind in CODES and mentions(source, kind)]
    assert judged == ["W4", "N1", "R12", "R5", "R6"]
    assert mentions("R2 to R8 and R12", "R7")
    assert not mentions("R2 to R8 and R12", "R11")


def codes_made_in(path: Path) -> set[str]:
    """Codes that stand as the first argument of a call: of whatever makes a violation."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    firsts = (call.args[0] for call in calls if call.args)
    return {first.value for first in firsts if isinstance(first, ast.Constant) and first.value in CODES}


@pytest.mark.parametrize("room", ["checks", "scrub", "transfers", "captured", "manager", "adapters"])
def test_no_place_is_missing(room: str) -> None:
    """Every file in which a violation of some code is made is in the index for that code, or only tells of it."""
    own = PACKAGE / room
    made = {
        (str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", "."), code)
        for path in ([own] if own.is_file() else own.rglob("*.py"))
        for code in codes_made_in(path)
    }
    reported = {(place.partition(":")[0], KINDS[kind].code) for place, kind in PLACES}
    assert made
    assert {(module, code) for module, code in made - reported if module not in REPORTERS} == set()


@pytest.mark.parametrize("code", KINDS.values(), ids=list(KINDS))
def test_every_code_has_a_place(code: Code) -> None:
    """Somebody judges it; on the host or on the device, if something feeds it there."""
    assert code.host + code.device
    assert set(code.observed) <= set(OBSERVED)


def test_what_nothing_is_watched_for_is_not_in_the_index_of_watched_caches() -> None:
    """The table of watched caches holds what their adapters feed, and nothing else."""
    pytest.importorskip("transformers")
    fed = import_module("kvcanary.adapters.observed.capabilities").PAGED_FED
    fed |= import_module("kvcanary.adapters.transformers").FED
    fed |= import_module("kvcanary.adapters.vllm.compatibility").FED  # where grants are told
    fed |= import_module("kvcanary.adapters.sglang.compatibility").FED | {"O1", "P1"}  # of some servers
    fed |= {"X1", "X2"}  # of those with several workers
    assert {code.code for code in KINDS.values() if code.observed} == fed


def test_a_second_meaning_has_places_of_its_own() -> None:
    """U1 is judged elsewhere than R9, though its findings have that code."""
    assert (NOT_FINITE.code, NOT_FINITE.kind) == ("R9", "U1")
    assert NOT_FINITE.host == ("kvcanary.scrub.unwritten_tails:UnwrittenTails._fired",)
    assert not set(NOT_FINITE.host + NOT_FINITE.device) & set(CODES["R9"].host + CODES["R9"].device)


def test_second_meanings_follow_their_codes() -> None:
    """All codes in the order in which they speak, T1, R9 and R8 each followed by what else it means."""
    assert [kind for kind in KINDS if kind in CODES] == list(CODES)
    kinds = list(KINDS)
    assert kinds[kinds.index("T1") + 1] == "A1"
    assert kinds[kinds.index("R9") + 1] == "U1"
    assert kinds[kinds.index("R8") + 1] == "E1"
    assert len({code.name for code in KINDS.values()}) == len(KINDS) == len(CODES) + 3
    assert set(CODES) >= FED


def test_every_kind_has_its_advice() -> None:
    """One each, in the same order."""
    assert list(ADVICE) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_advice_is_whole_sentences(kind: str) -> None:
    """Each text begins large, ends with a full stop, and the remedy names a command that there is."""
    for text in ADVICE[kind]:
        assert text == " ".join(text.split())
        for sentence in re.split(r"(?<=\.) ", text):
            assert re.fullmatch(r"[A-Z`].*[^.\s]\.", sentence), sentence
    commands = re.findall(r"`kvcanary ([\w-]+)", ADVICE[kind].remedy)
    assert commands
    assert set(commands) <= set(COMMANDS)
