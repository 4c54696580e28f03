"""The index of what another canary is asked and where it is blind: complete, and every test in it exists."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = {"test", "reason", "pending"}
NUMBERS = {
    "behaviour": [str(number) for number in range(1, 49)],
    "limit": [*map(str, range(1, 19)), "18b", *map(str, range(19, 35)), "34b", *map(str, range(35, 57))],
}
# Behaviours that are not ours; a test answers all others.
WITH_A_REASON = [33, 44]

INDEX: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("index.toml").read_text("utf-8"))
ENTRIES = [
    pytest.param(entry, id=f"{kind}-{number}") for kind, entries in INDEX.items() for number, entry in entries.items()
]


def ids_of(entry: dict[str, Any]) -> list[str]:
    """The tests that an entry names."""
    given = [entry[key] for key in ("test", "so_far") if key in entry]
    return [name for value in given for name in ([value] if isinstance(value, str) else value)]


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of the test functions at the top of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:4] == "test")


def problems(entry: dict[str, Any]) -> list[str]:
    """What is wrong with an entry."""
    answers = ANSWERS & entry.keys()
    found = [] if len(answers) == 1 else [f"needs exactly one of {sorted(ANSWERS)}, has {sorted(answers)}"]
    found += [f"has an unknown key {key!r}" for key in sorted(entry.keys() - ANSWERS - {"what", "so_far"})]
    found += [f"{key} is empty" for key in ("what", *answers) if not entry.get(key)]
    if "so_far" in entry and "pending" not in entry:
        found.append("so_far belongs to pending")
    for name in ids_of(entry):
        file, _, function = name.partition("::")
        if not (ROOT / file).is_file() or function not in functions_of(ROOT / file):
            found.append(f"{name} is no test")
    return found


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_number_has_its_entry(kind):
    """48 behaviours and 58 limits, in order, and no others."""
    assert list(INDEX[kind]) == NUMBERS[kind]
    assert len(NUMBERS["behaviour"]) + len(NUMBERS["limit"]) == 48 + 58


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_has_one_answer_and_its_tests_exist(entry):
    """A test, a reason, or what is pending; and every test that is named is there."""
    assert problems(entry) == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"what": "w"}, "needs exactly one of"),
        (
            {"what": "w", "reason": "r", "test": "tests/peer/test_index.py::test_every_number_has_its_entry"},
            "has ['rea",
        ),
        ({"what": "", "reason": "r"}, "what is empty"),
        ({"what": "w", "reason": ""}, "reason is empty"),
        ({"what": "w", "test": []}, "test is empty"),
        ({"what": "w", "reason": "r", "so_far": []}, "so_far belongs to pending"),
        ({"what": "w", "reason": "r", "note": "n"}, "unknown key 'note'"),
        ({"what": "w", "test": "tests/peer/test_index.py::test_nothing"}, "test_nothing is no test"),
        ({"what": "w", "test": "tests/peer/test_index.py::problems"}, "problems is no test"),
        ({"what": "w", "pending": "p", "so_far": "tests/peer/test_gone.py::test_it"}, "test_gone.py::test_it is no"),
    ],
)
def test_a_bad_entry_is_told(entry, words):
    """Each rule of an entry has a case that breaks it."""
    assert any(words in problem for problem in problems(entry))


def test_behaviours_are_answered_by_tests():
    """All but the few that have a reason."""
    answers = {int(number): ANSWERS & entry.keys() for number, entry in INDEX["behaviour"].items()}
    assert answers == {number: {"reason" if number in WITH_A_REASON else "test"} for number in range(1, 49)}


def test_pending_entries_are_counted(record_property, capsys):
    """What is still to be built is printed, with its numbers."""
    pending: dict[str, list[str]] = {}
    for kind, entries in INDEX.items():
        for number, entry in entries.items():
            if "pending" in entry:
                pending.setdefault(entry["pending"], []).append(f"{kind} {number}")
    record_property("pending", sum(map(len, pending.values())))
    with capsys.disabled():
        for what, numbers in pending.items():
            print(f"\npeer index, pending: {what} ({', '.join(numbers)})", end="")
    assert all(pending.values())
