"""`kvcanary explain DUMP`: the story of a finding."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, opened
from kvcanary_tools.engine_options import CONTEXT, json_option


@click.command("explain", context_settings=CONTEXT, short_help="The history and likely causes of a finding.")
@dump_argument
@click.option("--finding", type=int, default=1, show_default=True, metavar="N", help="Which finding, from 1.")
@json_option
def command(dump: str, finding: int, as_json: bool) -> None:
    """The story of a finding: its slot and page back to birth, the likeliest causes with evidence, what to do next.

    \b
      kvcanary explain dumps/step5-R9.kvdump
      kvcanary explain dumps/step5-R9.kvdump --finding 2 --json

    Exit codes: 0 there was nothing to explain, 1 a finding was explained, 2 not a dump.
    """
    from kvcanary.dumps.reading import Dump
    from kvcanary_tools.dumps.explaining import explain, explain_lines
    from kvcanary_tools.dumps.watched import explain_watched, explain_watched_lines

    read = opened(dump)
    if not read.findings:
        console.say("this dump has no finding: inspect tells what is in it")
        return
    if not 1 <= finding <= len(read.findings):
        raise console.UsageFailure(
            f"--finding must be in 1 to {len(read.findings)}, got {finding}", "inspect lists them"
        )
    is_told = isinstance(read, Dump)
    reported = explain(read, finding - 1) if isinstance(read, Dump) else explain_watched(read, finding - 1)
    if as_json:
        console.data_json(reported)
    else:
        for line in explain_lines(reported) if is_told else explain_watched_lines(reported):
            console.data(line)
    raise click.exceptions.Exit(console.EXIT_FINDING)
