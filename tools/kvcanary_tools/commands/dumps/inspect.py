"""`kvcanary inspect DUMP`: what is in a dump."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, opened
from kvcanary_tools.engine_options import CONTEXT, json_option


@click.command("inspect", context_settings=CONTEXT, short_help="What a dump contains.")
@dump_argument
@json_option
def command(dump: str, as_json: bool) -> None:
    """What is in a dump: when and why it was written, pools, pages, requests, events and findings.

    \b
      kvcanary inspect dumps/step5-R9.kvdump
      kvcanary inspect http://127.0.0.1:8000 --json

    Exit codes: 0 read, 2 not a dump, or is damaged.
    """
    from kvcanary.dumps.reading import Dump
    from kvcanary_tools.dumps.tables import summary, summary_lines
    from kvcanary_tools.dumps.watched import watched_summary, watched_summary_lines

    read = opened(dump)
    is_told = isinstance(read, Dump)
    reported = summary(read) if isinstance(read, Dump) else watched_summary(read)
    if as_json:
        console.data_json(reported)
        return
    for line in summary_lines(reported) if is_told else watched_summary_lines(reported):
        console.data(line)
