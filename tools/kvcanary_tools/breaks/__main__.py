"""`python -m kvcanary_tools.breaks`: break lines of the engine one at a time, and judge what comes of each."""

from __future__ import annotations

import random

import click

from kvcanary_tools import console
from kvcanary_tools.bench.common import machine
from kvcanary_tools.breaks import table
from kvcanary_tools.breaks.catalogue import BREAKS
from kvcanary_tools.breaks.running import run
from kvcanary_tools.breaks.verdict import complaints, is_cause_right
from kvcanary_tools.engine_options import CONTEXT
from kvcanary_tools.files import JsonFile, OutFile


@click.command(context_settings=CONTEXT)
@click.argument("names", nargs=-1, metavar="[BREAK]...")
@click.option("--list", "lists", is_flag=True, help="Print the breaks and what each is; run none.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Run N of them, drawn by --seed.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--json", "json_file", type=OutFile(), metavar="FILE", help="Write all runs there; - is stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    lists: bool,
    sample: int | None,
    seed: int,
    workers: int,
    json_file: str | None,
) -> None:
    """Break lines of the engine one at a time: without a canary, and with one that reads all or some bytes again.

    Exit codes: 0 each break ended as its entry says, 1 otherwise, 2 wrong usage.
    """
    if lists:
        for name, broken in BREAKS.items():
            click.echo(f"{name:34} {broken.what}")
        return
    chosen = _chosen(names, sample, seed)
    file, rows, wrong = JsonFile(json_file), [], []
    for own in run(chosen, workers):
        rows += own
        wrong += (found := complaints(own))
        console.say(f"{own[0].name:34} {'; '.join(dict.fromkeys(row.ends or 'nothing' for row in own))}")
        for text in found:
            console.say(f"  {text}")
    reported = table.summary(rows)
    for what, count in reported.items():
        file.say(f"{what}: {count}")
    for row in rows:
        if is_cause_right(row) is False:
            file.say(f"cause of {row.name}, canary {row.canary}: {row.cause}, {row.says}")
    file.write(
        {"machine": machine(), "summary": reported, "complaints": wrong, "rows": [row.as_dict() for row in rows]}
    )
    ctx.exit(int(bool(wrong)))


def _chosen(names: tuple[str, ...], sample: int | None, seed: int) -> list[str]:
    if unknown := [name for name in names if name not in BREAKS]:
        raise click.UsageError(f"no break is called {unknown[0]!r}: --list prints them all")
    chosen = list(names or BREAKS)
    return chosen if sample is None else random.Random(seed).sample(chosen, min(sample, len(chosen)))


if __name__ == "__main__":
    command(prog_name="python -m kvcanary_tools.breaks")
