"""`kvcanary soak`: random traffic with random faults for so many minutes; what was injected must be what was found."""

from __future__ import annotations

import logging
import time
from itertools import takewhile
from pathlib import Path

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, expect_embedded_model, usage_failures
from kvcanary_tools.files import JsonFile, OutFile

SHOWN = 10


@click.command("soak", context_settings=CONTEXT, short_help="Run random traffic with random faults for a while.")
@click.argument("names", nargs=-1)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="N",
    help="How long to run.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    metavar="N",
    help="Faults in 100 steps, on average.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, metavar="S", help="Seed of the first engine."
)
@click.option("--json", "json_file", type=OutFile(), metavar="FILE", help="Write the ledger to this file; - is stdout.")
@click.pass_context
def command(
    ctx: click.Context, names: tuple[str, ...], minutes: float, rate: float, seed: int, json_file: Path | None
) -> None:
    """Run engines of random settings, one after the other, under random traffic: requests of any length that come and
    are cancelled at any time. All checks are on, in mode abort; faults strike at the rate that is stated, those of
    NAMES or all, and the ledger of what was injected and what was found must be even.

    \b
      kvcanary soak --minutes 10
      kvcanary soak bits lifetime --minutes 1 --rate 5
      kvcanary soak --minutes 60 --rate 0

    Exit codes: 0 what was injected is what was found, 1 otherwise, 2 wrong usage, 130 interrupted: the ledger is that
    of the engines that have ended.
    """
    from kvcanary_tools.campaign.runner import chosen
    from kvcanary_tools.campaign.soak import Soaked, soak, to_soak
    from kvcanary_tools.runs.reenactment import expect_nothing_armed

    expect_embedded_model()
    expect_nothing_armed()
    console.log_to_stderr(logging.CRITICAL)  # findings are what is wanted here, and the ledger has them
    with usage_failures():
        faults = to_soak(chosen(names))
    if not faults:
        raise console.UsageFailure(f"none of {' '.join(names)} can be made and found", "kvcanary faults says why")
    ledger, end, is_complete = Soaked(), time.monotonic() + 60 * minutes, False
    try:
        for _ in takewhile(lambda _: time.monotonic() < end, soak(ledger, faults, rate, seed)):
            pass
        is_complete = True
    except KeyboardInterrupt:
        console.say("interrupted: what follows is the ledger of the engines that have ended", fg="yellow")
    reported = ledger.as_dict() | {"minutes": minutes, "rate": rate, "seed": seed, "complete": is_complete}
    file = JsonFile(json_file)
    for row in reported["rows"]:
        file.say(f"{row['fault']:<40} {row['injected']:>6} injected {row['found']:>6} found")
    file.say(
        f"{ledger.engines} engines, {ledger.steps} steps, {ledger.tokens} tokens: "
        f"{reported['injected']} injected, {reported['found']} found"
    )
    for wrong in reported["wrong"][:SHOWN]:
        said = wrong["text"].partition("\n")[0] or "nothing fired"
        console.say(f"{wrong['fault'] or 'no fault'}, {wrong['config']}, engine {wrong['seed']}: {said}", fg="red")
    file.write(reported)
    if not is_complete:
        ctx.exit(console.EXIT_INTERRUPTED)
    ctx.exit(console.EXIT_CLEAN if ledger.is_even else console.EXIT_FINDING)
