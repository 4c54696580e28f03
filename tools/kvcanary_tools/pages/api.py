"""The public names: ``python -m kvcanary_tools.pages.api`` writes the tables of docs/api.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcanary_tools.pages.marks import put_between

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"
MODULES = ("kvcanary", "kvcanary.testing")


def lines() -> Iterator[str]:
    """A table for each module, as Markdown: what its `__all__` has, in the order of the alphabet."""
    for module in MODULES:
        offered = import_module(module)
        yield from (f"## `{module}`", "", "| name | what it is |", "|---|---|")
        for name in sorted(offered.__all__, key=str.lower):
            yield f"| `{_signature(name, getattr(offered, name))}` | {_sentence(getattr(offered, name))} |"
        yield ""


def _signature(name: str, value: Any) -> str:
    """Of a function its parameters; of anything else its name."""
    return f"{name}({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else name


def _sentence(value: Any) -> str:
    """The first paragraph of the docstring; of a constant its value."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"`{value!r}`"
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
