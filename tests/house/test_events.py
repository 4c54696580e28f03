"""docs/events.md and the events that the code tells: the same names, levels and keys."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from kvcanary.report.finding import Finding
from spec_engine.memory.pools.window_report import RowDivergence

LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
PACKAGES = ("kvcanary", "spec_engine", "tools/kvcanary_tools", "kernels/kvcanary_kernels")
#: What `**` stands for in a call, by the source of its argument.
UNPACKED = {
    "fields": [field.name for field in dataclasses.fields(Finding)],
    "row.to_json()": [field.name for field in dataclasses.fields(RowDivergence)],
}


def reported(root: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(name, level, keys) of every call that tells an event."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _is_event(node.func):
                    assert isinstance(node.args[0], ast.Constant), (
                        f"{path}:{node.lineno}: an event's name is a constant"
                    )
                    yield str(node.args[0].value), node.func.attr, tuple(_keys(node))


def _is_event(function: ast.expr) -> bool:
    is_level = isinstance(function, ast.Attribute) and function.attr in LEVELS
    return is_level and isinstance(function.value, ast.Name) and function.value.id == "_events"


def _keys(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        yield from [keyword.arg] if keyword.arg else UNPACKED[ast.unparse(keyword.value)]


def documented(root: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By name the level and the keys that the page has."""
    page = (root / "docs" / "events.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        name, level = re.match(r"`(\S+)`\n\nLevel (\w+)\.", section).groups()
        found[name] = level, tuple(re.findall(r"^\| `(\w+)` \|", section, re.M))
    return found


def test_every_event_is_on_the_page(root: Path) -> None:
    """Names, levels and keys of the code are those of the page, no more and no fewer."""
    code = {name: (level, tuple(sorted(keys))) for name, level, keys in reported(root)}
    page = {name: (level, tuple(sorted(keys))) for name, (level, keys) in documented(root).items()}
    assert code == page


def test_a_name_has_one_set_of_keys(root: Path) -> None:
    """An event that is told in two places is the same in both."""
    by_name: dict[str, set[tuple[str, ...]]] = {}
    for name, level, keys in reported(root):
        by_name.setdefault(name, set()).add((level, *sorted(keys)))
    assert all(len(kinds) == 1 for kinds in by_name.values())


def test_events_are_told_by_one_name(root: Path) -> None:
    """A logger is `_events`, made by structlog: then the test above sees all that it tells."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert "get_logger(" not in line or line.startswith("_events = structlog.get_logger("), (
                    f"{path}: {line}"
                )
