"""Rooms: where code lives, what may import what, and that no two files need each other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

FOLDERS = {
    "kvcanary_kernels": "kernels/kvcanary_kernels",
    "kvcanary": "kvcanary",
    "spec_engine": "spec_engine",
    "kvcanary_tools": "tools/kvcanary_tools",
}
TOP = ("config", "environment", "errors", "codes")
#: Whose doors name what lies behind them: the public names, and the errors that carry findings, for annotations alone.
DOORS = ("kvcanary", "spec_engine", "kvcanary.errors")
#: What an engine imports of kvcanary; and where it brings published bugs back, the catalogue of these.
PUBLIC = (
    "kvcanary",
    "kvcanary.captured",
    "kvcanary.transfers",
    "kvcanary.invariants",
    "kvcanary.faults",
    "kvcanary.ranks",
)
TRACKER = "spec_engine.server.inspection."
MOST_FILES = 15  # of one folder
LONGEST_HALF, LONGEST_OF_TWENTY = 10, 30  # lines: the median of all functions, and the 95th percentile


class Arrow(NamedTuple):
    """One import of a module by another, both of our packages."""

    source: str
    target: str
    is_lazy: bool


@pytest.fixture(scope="module")
def modules(root: Path) -> dict[str, Path]:
    """By dotted name, every file of the four packages."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@pytest.fixture(scope="module")
def arrows(modules: dict[str, Path]) -> list[Arrow]:
    return [arrow for name, path in modules.items() for arrow in arrows_of(name, path.read_text(), modules)]


def arrows_of(name: str, source: str, modules: dict[str, Path]) -> Iterator[Arrow]:
    """Every import, wherever in the file it stands."""
    tree = ast.parse(source)
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in modules else node.module for target in inner]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        for target in targets:
            if target in modules and target != name:
                yield Arrow(name, target, id(node) not in at_once)


@pytest.fixture(scope="module")
def rooms(root: Path) -> list[str]:
    """Those of kvcanary, as docs/architecture.md draws them: each may import those above it and itself."""
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.partition("## The rooms")[2].split("```")[1]
    return ["top", *re.findall(r"^ (\w+)/ ", drawing, re.M), "pytest_plugin"]


def room_of(module: str) -> str:
    """Of a module of kvcanary."""
    below = module.partition(".")[2].partition(".")[0]
    return "top" if not below or below in TOP else below


def cycles(arrows: list[Arrow]) -> list[list[str]]:
    """Groups of modules of which each needs all others."""
    after: dict[str, set[str]] = {}
    for arrow in arrows:
        after.setdefault(arrow.source, set()).add(arrow.target)
    reached = {start: _reached(start, after) for start in after}
    groups = {
        frozenset({other for other in ends if start in reached.get(other, ())}) for start, ends in reached.items()
    }
    return [sorted(group) for group in groups if group]


def _reached(start: str, after: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in after.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def test_every_file_of_kvcanary_lies_in_a_room(modules: dict[str, Path], rooms: list[str]) -> None:
    """A new folder takes its place in the drawing, which has each once and no other."""
    found = {room_of(module) for module in modules if module.partition(".")[0] == "kvcanary"}
    assert sorted(rooms) == sorted(found)


def test_rooms_import_only_what_lies_before_them(arrows: list[Arrow], rooms: list[str]) -> None:
    """Lazily and for annotations too: whoever reads a room needs none of those behind it."""
    wrong = [
        f"{arrow.source} imports {arrow.target}"
        for arrow in arrows
        if arrow.source.startswith("kvcanary.")
        and arrow.target.partition(".")[0] == "kvcanary"
        and not (arrow.source in DOORS and arrow.is_lazy)
        and rooms.index(room_of(arrow.target)) > rooms.index(room_of(arrow.source))
    ]
    assert wrong == []


def test_an_engine_needs_nothing_deeper_than_the_doors(arrows: list[Arrow]) -> None:
    """What lies behind them may change without it; the desk at which faults are armed looks into their catalogue."""
    deeper = [
        f"{arrow.source} imports {arrow.target}"
        for arrow in arrows
        if arrow.source.startswith("spec_engine.")
        and arrow.target.startswith("kvcanary.")
        and arrow.target not in PUBLIC
        and not (arrow.source.startswith(TRACKER) and arrow.target.startswith("kvcanary.faults."))
    ]
    assert deeper == []


def test_no_two_files_need_each_other(arrows: list[Arrow]) -> None:
    """In none of the four packages, not even for annotations."""
    assert cycles([arrow for arrow in arrows if not (arrow.source in DOORS and arrow.is_lazy)]) == []


def test_cycles_are_found() -> None:
    """Of two, of three, and nothing of a line."""
    line = [Arrow("a", "b", False), Arrow("b", "c", True)]
    assert cycles(line) == []
    assert cycles([*line, Arrow("c", "a", True), Arrow("d", "a", False)]) == [["a", "b", "c"]]


@pytest.mark.parametrize("package", FOLDERS)
def test_a_folder_has_few_files(modules: dict[str, Path], package: str) -> None:
    """A folder with more holds two ideas."""
    sizes = Counter(path.parent for name, path in modules.items() if name.partition(".")[0] == package)
    assert {folder.name: size for folder, size in sizes.items() if size > MOST_FILES} == {}


@pytest.mark.parametrize("package", ["kvcanary", "spec_engine", "kvcanary_tools"])
def test_functions_are_short(modules: dict[str, Path], package: str) -> None:
    """Half of them have ten lines at most, 19 of 20 have thirty; kernels, whose tensors are described, have more."""
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for name, path in modules.items()
        if name.partition(".")[0] == package
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    )
    assert median(lengths) <= LONGEST_HALF
    assert lengths[len(lengths) * 95 // 100] <= LONGEST_OF_TWENTY
