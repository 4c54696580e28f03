"""`kvcanary certify DUMP`: what was checked until a dump was written, and what was not."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, dump_failures, opened
from kvcanary_tools.engine_options import CONTEXT, json_option


@click.command("certify", context_settings=CONTEXT, short_help="What a run has checked, and what it has not.")
@dump_argument
@json_option
def command(dump: str, as_json: bool) -> None:
    """The coverage certificate of the run that wrote a dump, up to that moment.

    A clean run's certificate says what would have been found. Ask a running engine for a dump with SIGUSR1.

    \b
      kvcanary certify dumps/step5-R9.kvdump
      kvcanary certify http://127.0.0.1:8000 --json

    Exit codes: 0 nothing was found, 1 the dump has findings, 2 not a dump.
    """
    from kvcanary.dumps.certifying import certificate_of
    from kvcanary_tools.certificate import certificate_lines

    with dump_failures():
        reported = certificate_of(opened(dump))
    if as_json:
        console.data_json(reported)
    else:
        for line in certificate_lines(reported):
            console.data(line)
    raise click.exceptions.Exit(console.EXIT_FINDING if reported["findings"] else console.EXIT_CLEAN)
