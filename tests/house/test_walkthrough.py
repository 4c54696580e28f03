"""The page of a first hour is what its script says: a new user who types the same sees the same."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

from kvcanary_tools.pages import walkthrough


def reported(text: str) -> list[str]:
    """The lines without numbers, ids and the widths that follow from them."""
    text = re.sub(r"0x[0-9a-f]+|\d[\d,.]*", "#", text)
    text = re.sub(r"█+", "█", text)
    return [re.sub(r"[\s─]+", " ", line).strip() for line in text.splitlines() if line.strip()]


def test_the_page_is_what_is_said(root: Path) -> None:
    """Serve, ask, inject, ask again, explain, replay: every line but for numbers, times and ids."""
    shown, said = (root / "docs" / "walkthrough.md").read_text(), "\n".join(walkthrough.page())
    for expected, line in zip_longest(reported(shown), reported(said)):
        assert line == expected
    for word in ("kv_corruption", "length as before", "content changed (R9)", "1. one flipped bit", "reached R9"):
        assert word in said
