"""Files that a command writes: refused before it works where they cannot be written, and never there by half."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvcanary_tools import console

STDOUT = "-"
HINT, FOLDER_HINT = "name a file in a folder of yours", "name a folder of yours"


class OutFile(click.Path):
    """An option's value: a file in a folder that is there, as a Path; or -, which is stdout."""

    name = "file"

    def __init__(self, resolve_path: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=True, path_type=Path, resolve_path=resolve_path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(super().convert(value, param, ctx))
        if str(path) != STDOUT and not path.absolute().parent.is_dir():
            raise console.UsageFailure(f"{path} cannot be written: {path.parent} is no folder", HINT)
        return path


class OutFolder(click.Path):
    """An option's value: a folder that is there, or can be made when there is something to write into it."""

    name = "folder"

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(super().convert(value, param, ctx))
        wanted = Path(path).absolute()
        there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
        if not there.is_dir():
            raise console.UsageFailure(f"{path} cannot be written into: {there} is no folder", FOLDER_HINT)
        if not os.access(there, os.W_OK | os.X_OK):
            raise console.UsageFailure(f"{path} cannot be written into: {there} is not yours to write", FOLDER_HINT)
        return path


def make_folder(path: str) -> None:
    """A usage failure where it cannot be made."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise console.UsageFailure(f"{path} cannot be made: {error.strerror}", FOLDER_HINT) from None


def write_text(path: Path, text: str) -> None:
    """The whole text, or what was there before, - being stdout; a usage failure where the file cannot be written.

    Characters that UTF-8 has not, as of arguments that were no text, are written as escapes.
    """
    if str(path) == STDOUT:
        console.data(text, newline=False)
        return
    part = path.with_name(path.name + ".part")  # who is killed meanwhile leaves what was there
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise console.UsageFailure(f"{path} cannot be written: {error.strerror}", HINT) from None


@dataclass(frozen=True)
class JsonFile:
    """What `--json FILE` names: None, a file, or - for stdout, where nothing else is said then."""

    path: Path | None

    @property
    def is_stdout(self) -> bool:
        return self.path is not None and str(self.path) == STDOUT

    @property
    def say(self) -> Callable[..., None]:
        """How people are told: on stdout, unless the JSON is there."""
        return console.say if self.is_stdout else console.data

    def write(self, value: dict[str, Any]) -> None:
        """One indented object, a row of a table on a line of its own; nothing where no file is named."""
        if self.path is not None:
            write_text(self.path, lines_of(value) + "\n")


def lines_of(value: Any, depth: int = 0) -> str:
    """JSON, indented; a list of objects is a table, with a row on each line, and one of plain values is a line."""
    begin, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict) and value:
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {lines_of(part, depth + 1)}" for key, part in value.items()]
        return "{" + begin + f",{begin}".join(parts) + end + "}"
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in value]
        return "[" + begin + f",{begin}".join(rows) + end + "]"
    if isinstance(value, list) and not any(isinstance(part, list | dict) for part in value):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, indent=1, ensure_ascii=False).replace("\n", end)
