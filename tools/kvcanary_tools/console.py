"""How the commands speak: data to stdout, everything else to stderr, errors as a sentence and a hint.

Exit codes: 0 clean, 1 a violation was found, 2 wrong usage, 3 the program itself failed; 70 a server was stopped by a
violation.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import click

EXIT_CLEAN = 0
EXIT_FINDING = 1
EXIT_USAGE = 2
EXIT_FAILURE = 3
EXIT_CORRUPTION = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


class UsageFailure(click.ClickException):
    """What was asked for cannot be done as asked; `hint` is the remedy, one line."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def colour_wanted() -> bool | None:
    """False under NO_COLOR (https://no-color.org: set and not empty); None leaves it to whether it is a terminal."""
    return False if os.environ.get("NO_COLOR") else None


def say(message: str = "", *, newline: bool = True, **style: Any) -> None:
    """To stderr: progress, summaries, reports, errors."""
    click.secho(message, err=True, nl=newline, color=colour_wanted(), **style)


def data(text: str = "", *, newline: bool = True, **style: Any) -> None:
    """To stdout: what was asked for."""
    click.secho(text, nl=newline, color=colour_wanted(), **style)


def data_json(value: Any) -> None:
    data(json.dumps(value, indent=2, ensure_ascii=False))


def log_to_stderr(least: int = logging.NOTSET) -> None:
    """structlog's own default is stdout, where an event of `--kv-canary log` would stand among the data.

    least: level below which nothing is told
    """
    import structlog

    structlog.configure(
        processors=[
            _unless_reported,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and colour_wanted() is None),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def _unless_reported(logger: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Of a finding people have the report, which is printed beside its event."""
    import structlog

    if event.get("event") == "kvcanary.finding":
        raise structlog.DropEvent
    return event


def show_error(error: click.ClickException) -> None:
    """The sentence, a blank line and the hint."""
    say(f"kvcanary: {_sentence(error)}", fg="red")
    say()
    say(f"hint: {_hint(error)}")


def numbered(count: int, noun: str) -> str:
    """`1 finding`, `2 findings`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(num_bytes: float) -> str:
    """A byte count as people read it: `512 B`, `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def _sentence(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"no such option: {error.option_name}"
    message = error.format_message().rstrip(".")
    message = message.replace("valid integer range", "valid integer").replace("valid float range", "valid float")
    word = message.partition(" ")[0]
    is_capitalised = word.isalpha() and word.istitle()  # click's sentences; README.md is a name
    return message[:1].lower() + message[1:] if is_capitalised else message


def _hint(error: click.ClickException) -> str:
    if isinstance(error, UsageFailure):
        return error.hint
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        return f"did you mean {' or '.join(sorted(error.possibilities))}?"
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'kvcanary'} --help lists what there is"
