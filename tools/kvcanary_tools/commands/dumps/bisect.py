"""`kvcanary bisect DUMP|--cmd COMMAND`: the first bad step."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_failures, opened_told
from kvcanary_tools.engine_options import CONTEXT, json_option


@click.command("bisect", context_settings=CONTEXT, short_help="The first bad step of a dump or command.")
@click.argument("dump", required=False, type=click.Path())
@click.option(
    "--cmd",
    "line",
    metavar="COMMAND",
    help="Run this command instead, with {step} replaced by the step tried; exit code 0: good, 1: bad.",
)
@click.option("--low", type=int, default=1, show_default=True, metavar="STEP", help="With --cmd: the first step tried.")
@click.option("--high", type=int, metavar="STEP", help="With --cmd: a step that is bad.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="With --cmd: time limit of one run.",
)
@json_option
def command(dump: str | None, line: str | None, low: int, high: int | None, timeout: float, as_json: bool) -> None:
    """The first step at which a recording, or a command, goes bad.

    \b
      kvcanary bisect dumps/step5-R9.kvdump
      kvcanary bisect --cmd './run --steps {step}' --high 400

    Exit codes: 0 no step is bad, 1 the first bad step was found, 2 wrong usage.
    """
    from kvcanary_tools.dumps.bisecting import bisect_dump

    if (dump is None) == (line is None):
        raise console.UsageFailure("bisect needs a dump or --cmd, one of them", "kvcanary bisect DUMP")
    if dump is not None:
        with dump_failures():
            reported = bisect_dump(opened_told(dump, "bisected"))
    else:
        reported = _run(str(line), low, high, timeout)
    step = reported["first_bad_step"]
    if as_json:
        console.data_json(reported)
    elif step is None:
        console.data("no step is bad")
    else:
        finding = reported.get("finding")
        what = "" if finding is None else f": {finding['code']} {finding['name']}, slot {finding['slot']}"
        good = reported.get("last_good_step")
        console.data(
            f"step {step} is the first bad one{what}" + ("" if good is None else f"; last good at step {good}")
        )
    raise click.exceptions.Exit(console.EXIT_CLEAN if step is None else console.EXIT_FINDING)


def _run(line: str, low: int, high: int | None, timeout: float) -> dict[str, object]:
    from subprocess import TimeoutExpired

    from kvcanary_tools.dumps.bisecting import bisect_command

    if "{step}" not in line or high is None or high < low:
        raise console.UsageFailure(
            "--cmd needs {step} in the command, and --high at or above --low",
            "kvcanary bisect --cmd 'run {step}' --high 64",
        )
    try:
        return bisect_command(line, low, high, timeout)
    except (OSError, RuntimeError, ValueError, TimeoutExpired) as error:
        raise console.UsageFailure(str(error), "run the command by hand first") from None
