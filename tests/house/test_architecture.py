"""docs/architecture.md and the code that it leads to: rooms, files, and where each code, flag and event is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcanary.codes import CODES
from kvcanary_tools.pages import codes

PACKAGES = ("kvcanary", "spec_engine", "tools/kvcanary_tools", "kernels/kvcanary_kernels")
#: Where a path of the page may begin.
BEGINNINGS = ("", "kvcanary", "kernels/kvcanary_kernels")
FILE = re.compile(r"(?<![\w/.])[\w/]+\.py\b")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "architecture.md").read_text(encoding="utf-8")


def found(root: Path, name: str) -> list[Path]:
    """The files that a path of the page may mean."""
    return [path for beginning in BEGINNINGS if (path := root / beginning / name).is_file()]


def rows_below(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, by row."""
    [text] = re.findall(rf"^### {re.escape(heading)}$(.*?)(?=^#|\Z)", page, re.M | re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


def sources(root: Path, cells: list[str]) -> dict[str, str]:
    """By path, the text of the files that these cells of a row name."""
    return {name: found(root, name)[0].read_text(encoding="utf-8") for name in FILE.findall(" ".join(cells))}


def test_every_file_exists(root: Path, page: str) -> None:
    """A path leads to one file, from the root, from kvcanary or from the kernels."""
    names = set(FILE.findall(page))
    assert len(names) > 50
    assert {name: len(found(root, name)) for name in names} == dict.fromkeys(names, 1)


def test_every_code_has_its_row(page: str) -> None:
    """The table is what the index of checks says: each code stands in one row, with the files that judge it."""
    assert "\n".join((codes.BEGIN, *codes.lines(), codes.END)) in page
    assert sorted(code for row in rows_below(page, "... the check behind a code") for code in row[0].split()) == sorted(
        CODES
    )


def test_every_flag_has_its_row(root: Path, page: str) -> None:
    """The flags are those of the flag's page, and the files that read one take it from the settings."""
    rows = rows_below(page, "... what a flag does")
    flags = re.findall(r"^\| `(--kv-canary[a-z-]*)", (root / "docs" / "flag.md").read_text(encoding="utf-8"), re.M)
    assert sorted(row[0].strip("`") for row in rows) == sorted(flags)
    options = (root / "tools/kvcanary_tools/engine_options.py").read_text(encoding="utf-8")
    for flag, field, readers, actors in rows:
        setting = field.strip("`")
        assert f'{setting}=options["{flag.strip("`-").replace("-", "_")}"]' in options
        wanted = {"mode": "(?:mode|enabled)", "seed": "drawn_seed"}.get(setting, setting)
        for path, text in sources(root, [readers]).items():
            assert re.search(rf"config\.(?:canary\.)?{wanted}\b", text), f"{path} does not read {setting}"
        assert sources(root, [actors])


def test_every_event_has_its_row(root: Path, page: str) -> None:
    """The events are those of their page, each with the file that tells it."""
    reported: dict[str, set[Path]] = {}
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        for name in re.findall(r"_events\.\w+\(\s*\"([\w.]+)\"", path.read_text(encoding="utf-8")):
            reported.setdefault(name, set()).add(path)
    rows = rows_below(page, "... what tells an event")
    assert {name.strip("`"): set(found(root, path.strip("`"))) for name, path in rows} == reported
    events = (root / "docs" / "events.md").read_text(encoding="utf-8")
    assert sorted(reported) == sorted(re.findall(r"^## `(\S+)`", events, re.M))
