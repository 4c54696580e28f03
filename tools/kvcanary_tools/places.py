"""Places in the source, `module:qualified name`, as file and line: read from the text, so that nothing is imported."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """A function, a method or a class.

    path: of its file, from where its package lies;  line: of its `def` or `class`;  name: as `Class.method`
    """

    path: str
    line: int
    name: str


def find_place(dotted: str) -> Place:
    """LookupError where there is no such module, or nothing of this name in it."""
    module, _, name = dotted.partition(":")
    root, path = _file_of(module)
    body: list[ast.stmt] = _parsed(root / path).body
    line = 0
    for part in name.split("."):
        found = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == part]
        if not found:
            raise LookupError(f"{path} has no {name!r}")
        body, line = found[-1].body, found[-1].lineno
    return Place(str(path), line, name)


def _file_of(module: str) -> tuple[Path, Path]:
    """Where the package lies, and the module's file from there."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no package {package!r}")
    root, own = Path(spec.origin).parent.parent, Path(package, *inner)
    for path in (own.with_suffix(".py"), own / "__init__.py"):
        if (root / path).is_file():
            return root, path
    raise LookupError(f"there is no module {module!r}")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
