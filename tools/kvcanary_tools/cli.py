"""The console script `kvcanary`: one file per command, loaded when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import FrameType
from typing import Any

import click

import kvcanary
from kvcanary import CanaryConfigError, faults
from kvcanary.environment import expect_known
from kvcanary_tools import console

#: They read dumps, and lie together.
OF_DUMPS = ("explain", "why-slot", "report", "timeline", "replay", "bisect", "diff", "inspect", "certify")
#: They ask servers that run elsewhere, or are about GPUs, and lie together too.
OF_FLEETS = ("fleet", "drill", "probe", "observability")
#: Commands by what they are for, in the order of --help.
TASKS = {
    "Start": ("demo", "doctor"),
    "Watch": ("generate", "serve", "top"),
    "Fleet": OF_FLEETS,
    "Understand": (*OF_DUMPS, "codes"),
    "Test": ("faults", "inject", "soak", "windows"),
    "Measure": ("bench",),
}
COMMANDS = tuple(command for commands in TASKS.values() for command in commands)

EXAMPLE = "kvcanary generate --prompt 'def fibonacci(n):' --max-new-tokens 48 --kv-canary"


class Commands(click.Group):
    """A group that imports a command's file on demand and reports errors in the house's way."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        folder = "commands.dumps" if cmd_name in OF_DUMPS else "commands.fleet" if cmd_name in OF_FLEETS else "commands"
        module = importlib.import_module(f"kvcanary_tools.{folder}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for task, names in TASKS.items():
            with formatter.section(task):
                commands = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in commands if command])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if close := get_close_matches(args[0], COMMANDS, n=2) if args[0] not in COMMANDS else []:
            raise console.UsageFailure(f"no such command {args[0]!r}", f"did you mean {' or '.join(close)}?")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _reader_may_leave():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def main(
        self, args: Sequence[str] | None = None, *positional: Any, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        if not standalone_mode:
            return super().main(args, *positional, standalone_mode=False, **extra)
        interrupts = Interrupts()
        try:
            with interrupts:
                code = super().main(args, *positional, standalone_mode=False, **extra)
        except click.ClickException as error:
            console.show_error(error)
            code = error.exit_code
        except (KeyboardInterrupt, click.Abort):
            code = _interrupted()
        except Exception as error:
            code = _interrupted() if interrupts.came else _failed(error)
        sys.exit(code or console.EXIT_CLEAN)


class Interrupts:
    """KeyboardInterrupt as ever, but that one is remembered which an import swallowed before it failed of it.

    came: whether there was one.
    """

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> None:
        is_ours = threading.current_thread() is threading.main_thread()
        self.is_set = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.is_set:
            signal.signal(signal.SIGINT, self._reported)

    def __exit__(self, *error: object) -> None:
        if self.is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _reported(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.default_int_handler(number, frame)


def _interrupted() -> int:
    console.say("kvcanary: interrupted")
    return console.EXIT_INTERRUPTED


def _failed(error: Exception) -> int:
    traceback.print_exception(error)
    console.say(f"kvcanary: internal error: {error}", fg="red")
    console.say()
    console.say("hint: this is a bug in kvcanary, not a finding; please report it with the lines above")
    return console.EXIT_FAILURE


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`kvcanary demo | head -1` ends quietly, with the code that shells give for a closed pipe, no finding's."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(console.EXIT_PIPE) from None


@click.command(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvcanary.__version__, message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """A KV-cache integrity canary, and the paged tree-drafting engine that it watches.

    \b
      kvcanary generate --prompt 'def fibonacci(n):' --max-new-tokens 48 --kv-canary

    Settings of the canary can be given in the environment, under one name for every command and plug-in:
    KVCANARY_MODE=log, KVCANARY_CONTENT=full.

    Exit codes: 0 clean, 1 a violation was found, 2 wrong usage, 3 kvcanary itself failed.
    """
    if ctx.invoked_subcommand is None:
        console.data(ctx.get_help())
        return
    try:
        expect_known(os.environ)
    except CanaryConfigError as error:
        raise console.UsageFailure(str(error), "kvcanary --help has the scheme, docs/flag.md every name") from None
    if name := os.environ.get(faults.ENVIRONMENT):
        _expect_known(name)


def _expect_known(fault: str) -> None:
    """What the environment wants re-enacted is in the catalogue: said before an engine starts, and not by each."""
    from kvcanary.faults.catalogue import UnknownFaultError, find

    try:
        find(fault)
    except UnknownFaultError as error:
        raise console.UsageFailure(f"{faults.ENVIRONMENT}: {error}", error.hint) from None
