"""For mkdocstrings: lines of a docstring that begin with names and a colon become a list, as they are meant."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

FIELD = re.compile(r"^(\w+(?:, \w+)*):\s+(?=\S)")


class Fields(Extension):
    """An extension of griffe, named in mkdocs.yml."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Every class, method and function once, behind its members."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(docstring: str) -> str:
    """`name: text` and the indented lines below it are an item; all else stays."""
    lines: list[str] = []
    in_list = False
    for line in docstring.splitlines():
        if field := FIELD.match(line):
            lines += [] if in_list else [""]
            lines.append(f"- `{field[1]}`: {line[field.end() :]}")
            in_list = True
        elif in_list and line.startswith(" "):
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", line] if in_list and line else [line]
            in_list = False
    return "\n".join(lines)
