"""A break: one line of the engine's source as it is imported, put in the place of another."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from kvcanary_tools.breaks.cases import Case

ENGINE = "spec_engine"


class BreakError(RuntimeError):
    """The line that a break replaces is not there, or more than once: the engine's source has changed."""


@dataclass(frozen=True)
class Edit:
    """In one module of the engine, ``old`` stands once and becomes ``new``."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Break:
    """A mistake, and what must come of it in each of its cases.

    what:    the mistake, in words
    ends:    codes of findings, or names of typed errors, in one of which a run with the canary on ends
    off:     names of typed errors in one of which a run without a canary ends; none: the host alone cannot see it
    cause:   family of the first cause of a finding; says: words that stand in its text
    silent:  why nothing needs to be said: the break does no harm, or no check of a KV cache can see it
    harmless: of a silent one, that every token is right
    """

    name: str
    what: str
    edits: Sequence[Edit]
    cases: Sequence[Case]
    ends: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    cause: str | tuple[str, ...] = ()
    says: str = ""
    silent: str = ""
    harmless: bool = True

    def __post_init__(self) -> None:
        if bool(self.ends) == bool(self.silent):
            raise ValueError(f"{self.name} either ends in something or says why it is silent")

    @property
    def causes(self) -> tuple[str, ...]:
        """Families of the first cause that are right."""
        return (self.cause,) if isinstance(self.cause, str) else self.cause


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, edits: Sequence[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        return compile(edited(Path(self.path).read_text(encoding="utf-8"), self._edits), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: Mapping[str, Sequence[Edit]]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _Loader(fullname, spec.origin, self._edits[fullname])
        return spec


def edited(source: str, edits: Sequence[Edit]) -> str:
    """The source with all edits; BreakError where a line is not there exactly once."""
    for edit in edits:
        if (count := source.count(edit.old)) != 1:
            raise BreakError(f"{edit.module} must have this line once, it has it {count} times: {edit.old}")
        source = source.replace(edit.old, edit.new)
    return source


def import_broken(broken: Break | None) -> None:
    """From now on the engine's modules are imported anew, with the break; for a process that ends soon."""
    for name in [name for name in sys.modules if name.split(".")[0] == ENGINE]:
        del sys.modules[name]
    if broken is None:
        return
    edits: dict[str, list[Edit]] = {}
    for edit in broken.edits:
        edits.setdefault(edit.module, []).append(edit)
    sys.meta_path.insert(0, _Finder(edits))
