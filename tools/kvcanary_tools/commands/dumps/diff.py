"""`kvcanary diff A B`: where two runs part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_failures, is_url, opened_told
from kvcanary_tools.engine_options import CONTEXT, json_option

if TYPE_CHECKING:
    from kvcanary.dumps.reading import Dump

WIDTH = 160
EXAMPLE = "kvcanary diff A.kvdump B.kvdump, or diff --cmd 'run --dump {dump}' --cmd 'run --other --dump {dump}'"


@click.command("diff", context_settings=CONTEXT, short_help="The first event in which two runs differ.")
@click.argument("runs", nargs=-1, metavar="[A B]")
@click.option(
    "--cmd", "lines", multiple=True, metavar="COMMAND", help="A command to run; it must write its dump to {dump}."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="With --cmd: time limit of one run.",
)
@json_option
def command(runs: tuple[str, ...], lines: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """The first event in which two runs differ. Token ids are compared by the order of their appearance.

    A run is a dump, the URL of a server that was started with --debug (KVCANARY_API_KEY is its key), or a command.
    Of servers, which go on, the steps that both have recorded are compared.

    \b
      kvcanary diff before.kvdump http://127.0.0.1:8000
      kvcanary diff --cmd 'kvcanary generate --prompt x --kv-canary --dump {dump}' \\
                    --cmd 'kvcanary generate --prompt x --kv-canary --topk 1 --dump {dump}'

    Exit codes: 0 the runs are the same, 1 they differ, 2 wrong usage, or one of them is not a dump.
    """
    from kvcanary_tools.dumps.diffing import diff

    if len(runs) + len(lines) != 2:
        raise console.UsageFailure(f"diff compares two runs, got {len(runs) + len(lines)}", EXAMPLE)
    first, second = [*(opened_told(run, "compared") for run in runs), *(_run(line, timeout) for line in lines)]
    with dump_failures():
        reported = diff(first, second, up_to_both=any(map(is_url, runs)))
    if as_json:
        console.data_json(reported)
    elif reported["same"]:
        console.data("the runs are the same, event by event")
    else:
        console.data(f"they differ first at step {reported['step']}, in {', '.join(reported['fields'])}")
        for name in ("first", "second"):
            console.data(f"  {name:<7} {_short(reported[name])}")
    raise click.exceptions.Exit(console.EXIT_CLEAN if reported["same"] else console.EXIT_FINDING)


def _run(line: str, timeout: float) -> Dump:
    """The dump of a command's run."""
    from subprocess import TimeoutExpired
    from tempfile import TemporaryDirectory

    from kvcanary_tools.dumps.running import DUMP, run

    if DUMP not in line:
        raise console.UsageFailure(f"--cmd needs {DUMP} in the command, got {line!r}", EXAMPLE)
    with TemporaryDirectory() as folder:
        path = f"{folder}/run.kvdump"
        try:
            run(line, {DUMP: path}, timeout)
        except (OSError, RuntimeError, ValueError, TimeoutExpired) as error:
            raise console.UsageFailure(str(error), "run the command by hand first") from None
        return opened_told(path, "compared")


def _short(event: object) -> str:
    text = "nothing, it has ended" if event is None else json.dumps(event)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
