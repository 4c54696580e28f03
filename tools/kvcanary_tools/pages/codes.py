"""Which files judge a code: ``python -m kvcanary_tools.pages.codes`` writes the table of docs/architecture.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvcanary.codes import CODES, KINDS
from kvcanary_tools.pages.marks import put_between
from kvcanary_tools.places import SIDES, find_place, judges

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
BEGIN, END = "<!-- codes: begin -->", "<!-- codes: end -->"


def lines() -> Iterator[str]:
    """The table as Markdown, by letter and number; codes that the same files judge share a row."""
    yield "| code | host | device | pools that are only watched |"
    yield "|---|---|---|---|"
    rows: dict[tuple[str, ...], list[str]] = {}
    for code in sorted(CODES, key=lambda code: (code[0], int(code[1:]))):
        rows.setdefault(tuple(_files(code, side) for side in SIDES), []).append(code)
    for cells, codes in rows.items():
        yield f"| {' '.join(codes)} | {' | '.join(cells)} |"


def _files(code: str, side: str) -> str:
    """Of everything that the code means, each file once."""
    places = [place for kind in KINDS.values() if kind.code == code for place in judges(side, kind.kind)]
    paths = dict.fromkeys(Path(*Path(find_place(place).path).parts[1:]).as_posix() for place in places)
    return ", ".join(f"`{path}`" for path in paths)


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
