"""Opening a dump for a command: a sentence and exit code 2 where it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcanary.errors import DumpError
from kvcanary_tools import console

if TYPE_CHECKING:
    from kvcanary.dumps.reading import Dump
    from kvcanary.dumps.watched_reading import WatchedDump

dump_argument: Callable[[Any], Any] = click.argument("dump", metavar="DUMP", type=click.Path())
HINT = "a dump is what --kv-canary-dump DIR writes at a finding, a file that ends in .kvdump"


@contextmanager
def dump_failures() -> Iterator[None]:
    """What cannot be read, or replayed, is wrong usage."""
    try:
        yield
    except DumpError as error:
        raise console.UsageFailure(str(error), HINT) from None


def opened(path: str) -> Dump | WatchedDump:
    """The dump that a command was given: a file, or what a running server at this URL has recorded by now."""
    from kvcanary.dumps.watched_reading import read_any

    with dump_failures():
        return read_any(path) if not is_url(path) else _fetched(path)


def opened_told(path: str, what: str) -> Dump:
    """The same for a command that needs all events; `what` it does with them."""
    from kvcanary.dumps.reading import Dump

    dump = opened(path)
    if not isinstance(dump, Dump):
        raise console.UsageFailure(
            f"{path} cannot be {what}: its pool was only watched, so that it has steps but not all events of pages",
            f"kvcanary explain {path} tells what it has",
        )
    return dump


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _fetched(url: str) -> Dump:
    from tempfile import TemporaryDirectory

    from kvcanary.dumps.reading import read_dump
    from kvcanary_tools.remote import fetch_dump

    with TemporaryDirectory() as folder:
        path = Path(folder) / "running.kvdump"
        path.write_bytes(fetch_dump(url, os.environ.get("KVCANARY_API_KEY")))
        return replace(read_dump(path), path=url)
