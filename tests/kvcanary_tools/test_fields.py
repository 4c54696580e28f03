"""Docstrings in the reference: their fields are a list."""

from __future__ import annotations

from kvcanary_tools.pages.fields import as_list

DOCSTRING = """What it is.

size:   of a page
rows, columns: of the table,
        counted from 0
Behind them: text goes on.
"""


def test_fields_become_a_list() -> None:
    """One item each, with the lines that belong to it; what stands before and behind stays."""
    assert as_list(DOCSTRING).splitlines() == [
        "What it is.",
        "",
        "",
        "- `size`: of a page",
        "- `rows, columns`: of the table,",
        "    counted from 0",
        "",
        "Behind them: text goes on.",
    ]


def test_a_docstring_without_fields_stays() -> None:
    """Also one whose sentences have colons in them."""
    text = "Compare them: all or none.\n\nErrors: none"
    assert as_list("Compare them: all or none.") == "Compare them: all or none."
    assert as_list(text).startswith("Compare them: all or none.\n")
