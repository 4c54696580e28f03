"""`kvcanary report DUMP -o report.html`: a dump as one page."""

from __future__ import annotations

from pathlib import Path

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, dump_failures, opened
from kvcanary_tools.engine_options import CONTEXT
from kvcanary_tools.files import OutFile, write_text


@click.command("report", context_settings=CONTEXT, short_help="A dump as one HTML page.")
@dump_argument
@click.option("-o", "--output", required=True, type=OutFile(), metavar="FILE", help="File to write.")
def command(dump: str, output: Path) -> None:
    """One self-contained HTML page: findings with their stories, a map of the pool, the draft tree, the timeline.

    \b
      kvcanary report dumps/step5-R9.kvdump -o report.html

    Exit codes: 0 written, 2 not a dump, or the file cannot be written.
    """
    from kvcanary.dumps.reading import Dump
    from kvcanary_tools.dumps.pages import page_of
    from kvcanary_tools.dumps.watched_pages import page_of_watched

    read = opened(dump)
    with dump_failures():
        page = page_of(read) if isinstance(read, Dump) else page_of_watched(read)
    write_text(output, page)
    console.say(f"{output} written: it needs nothing beside it")
