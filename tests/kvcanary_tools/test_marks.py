"""Parts of pages that programs write."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary_tools.pages.marks import put_between

BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"


def test_lines_go_between_their_marks(tmp_path: Path) -> None:
    """What stood there before is gone; a page without marks is refused."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nwhat stood there\n{END}\nbehind\n")
    put_between(page, BEGIN, END, ["one", "two"])
    assert page.read_text() == f"before\n{BEGIN}\none\ntwo\n{END}\nbehind\n"
    page.write_text("no mark")
    with pytest.raises(ValueError, match="must have a line <!-- rows: begin -->"):
        put_between(page, BEGIN, END, [])
