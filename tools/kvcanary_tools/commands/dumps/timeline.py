"""`kvcanary timeline DUMP -o trace.json`: a recording for a trace viewer."""

from __future__ import annotations

from pathlib import Path

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, opened
from kvcanary_tools.engine_options import CONTEXT
from kvcanary_tools.files import OutFile, write_text


@click.command("timeline", context_settings=CONTEXT, short_help="A dump as a trace for Perfetto.")
@dump_argument
@click.option("-o", "--output", required=True, type=OutFile(), metavar="FILE", help="File to write.")
def command(dump: str, output: Path) -> None:
    """Steps, forwards, requests, pages and findings as a trace that ui.perfetto.dev and chrome://tracing open.

    \b
      kvcanary timeline dumps/step5-R9.kvdump -o trace.json

    Exit codes: 0 written, 2 not a dump, or the file cannot be written.
    """
    import json

    from kvcanary.dumps.reading import Dump
    from kvcanary_tools.dumps.timelines import timeline
    from kvcanary_tools.dumps.watched_pages import watched_timeline

    read = opened(dump)
    trace = timeline(read) if isinstance(read, Dump) else watched_timeline(read)
    write_text(output, json.dumps(trace, separators=(",", ":")))
    console.say(f"{output} written: open it at ui.perfetto.dev")
