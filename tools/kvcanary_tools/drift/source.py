"""Source: classes, functions and their parameters in an unpacked release, by parsing: neither it nor torch is imported.

It says what `kvcanary.adapters.compatibility` finds by importing, as far as source text shows it: dataclasses have
their fields as parameters, and objects have what any method of the class or its bases assigns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from kvcanary.adapters.compatibility import Needed, fault_of

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """A definition and the module that it stands in."""

    module: str
    node: Definition


class Source:
    """A release: `folder` holds its packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parsed = lru_cache(None)(self._parse)

    def faults(self, needs: tuple[Needed, ...]) -> list[str]:
        """What is gone or has other parameters than these, one sentence each."""
        return [sentence for need in needs if (sentence := self._fault(need))]

    def lacks(self, needs: tuple[Needed, ...]) -> list[str]:
        """Optional attributes that this release does not have, as `Class.attribute`."""
        found = [(need, self.find(need.name)) for need in needs if need.optional]
        return [
            f"{need.name.partition(':')[2]}.{name}"
            for need, own in found
            if own is not None
            for name in need.optional
            if name not in self.attributes(own)
        ]

    def find(self, name: str) -> Found | None:
        """What `package.module:Class.method` names."""
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        found = self._named(module, first)
        for part in rest:
            found = None if found is None else self._member(found, part)
        return found

    def parameters(self, found: Found) -> tuple[str, ...]:
        """As `inspect.signature` gives their names: of a class those of its constructor, without self."""
        if not isinstance(found.node, ast.ClassDef):
            return _arguments(found.node)
        if _is_dataclass(found.node) and not any(own.name == "__init__" for own in _functions(found.node)):
            return tuple(dict.fromkeys(name for cls in reversed(self.mro(found)) for name in _fields(cls.node)))
        init = self._member(found, "__init__")
        return () if init is None else _arguments(init.node)[1:]

    def attributes(self, found: Found) -> frozenset[str]:
        """What objects of a class have: fields, methods, and what any method assigns to an attribute."""
        names: set[str] = set()
        for cls in self.mro(found):
            for node in ast.walk(cls.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr)
            for node in cls.node.body if isinstance(cls.node, ast.ClassDef) else ():
                names.update(_bound(node))
        return frozenset(names)

    def mro(self, found: Found) -> list[Found]:
        """The class and its bases as far as they are in this release, nearest first."""
        order, waiting = [], [found]
        while waiting:
            cls = waiting.pop(0)
            if cls not in order and isinstance(cls.node, ast.ClassDef):
                order.append(cls)
                names = [base.id for base in cls.node.bases if isinstance(base, ast.Name)]
                waiting += [base for name in names if (base := self._named(cls.module, name)) is not None]
        return order

    def _fault(self, need: Needed) -> str:
        found = self.find(need.name)
        if found is None:
            return f"{need.name} is gone"
        parameters = self.parameters(found) if need.parameters or need.among else ()
        return fault_of(need, parameters, self.attributes(found) if need.attributes else ())

    def _member(self, found: Found, name: str) -> Found | None:
        for cls in self.mro(found):
            for node in ast.iter_child_nodes(cls.node):
                if isinstance(node, Definition) and node.name == name:
                    return Found(cls.module, node)
        return None

    def _named(self, module: str, name: str) -> Found | None:
        """A definition of a module, or what it imports by that name from another module of the release."""
        for node in self._parsed(module):
            if isinstance(node, Definition) and node.name == name:
                return Found(module, node)
        for node in self._parsed(module):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._named(_absolute(node, module, self._is_package(module)), alias.name)
        return None

    def _is_package(self, module: str) -> bool:
        return (self.folder / Path(*module.split(".")) / "__init__.py").is_file()

    def _parse(self, module: str) -> tuple[ast.stmt, ...]:
        """The statements of a module that are run when it is imported; none where it is not in this release."""
        place = self.folder / Path(*module.split("."))
        path = place / "__init__.py" if self._is_package(module) else place.with_suffix(".py")
        if not path.is_file():
            return ()
        return tuple(_flat(ast.parse(path.read_text(encoding="utf-8")).body))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            yield from _flat([*node.finalbody, *(own for handler in node.handlers for own in handler.body)])


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _arguments(node: Definition) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef):
        return ()
    own = node.args
    every = [*own.posonlyargs, *own.args, own.vararg, *own.kwonlyargs, own.kwarg]
    return tuple(argument.arg for argument in every if argument is not None)


def _functions(node: ast.ClassDef) -> list[Definition]:
    return [own for own in node.body if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef)]


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = [own.func if isinstance(own, ast.Call) else own for own in node.decorator_list]
    return any("dataclass" in (name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")) for name in names)


def _fields(node: Definition) -> Iterator[str]:
    """Fields of a dataclass that its constructor takes."""
    for own in node.body:
        if isinstance(own, ast.AnnAssign) and isinstance(own.target, ast.Name):
            text = ast.unparse(own.annotation)
            is_given = not (own.value is not None and "init=False" in ast.unparse(own.value).replace(" ", ""))
            if is_given and not text.startswith(("ClassVar", "typing.ClassVar")):
                yield own.target.id


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a class body binds."""
    if isinstance(node, Definition):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    yield from (target.id for target in targets if isinstance(target, ast.Name))
