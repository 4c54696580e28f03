"""The part of a page between two marks, which a program writes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def put_between(page: Path, begin: str, end: str, text: Iterable[str]) -> None:
    """Write these lines between two marks of a page; ValueError for a page without these."""
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"{page} must have a line {begin} and, behind it, a line {end}")
    page.write_text("\n".join((before + begin, *text, end + after)), encoding="utf-8")
