"""`kvcanary windows`: where the map of a sliding-window pool says something else than its books."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.console import UsageFailure, numbered
from kvcanary_tools.engine_options import (
    ENGINE_CONTEXT,
    Whole,
    engine_config,
    engine_options,
    json_option,
    reenact_option,
    sampling_options,
    sampling_params,
    usage_failures,
)

if TYPE_CHECKING:
    from kvcanary_tools.runs.windows import WindowRun
    from spec_engine.memory.pools.window_report import RowDivergence

HEADINGS = ("request", "step", "committed", "sees from", "slots", "diverges", "agrees before", "last agreed")


@click.command("windows", context_settings=ENGINE_CONTEXT, short_help="Check the page map of sliding-window layers.")
@click.option("--prompt", type=Whole(), multiple=True, metavar="TEXT", help="Text to complete, or ids without --model.")
@click.option(
    "--window", type=click.IntRange(2), default=16, show_default=True, metavar="N", help="Window of the random model."
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="STEPS",
    help="Steps between reports.",
)
@engine_options
@sampling_options
@reenact_option
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Complete prompts on a model with sliding windows, and compare the window pool's map with its books as it runs.

    \b
      kvcanary windows --max-new-tokens 40
      kvcanary windows --model DIR --prompt 'def fibonacci(n):' --json

    For the embedded model, which has no window, a random one stands in, every other layer of which has one; its
    prompts are token ids.
    Of each row: the slots of its window through the map, positions that lead nowhere, whose page was given back too
    early or that lead elsewhere, and until when all agreed. A divergence is a spec_engine.window_divergence event too.

    Exit codes: 0 no divergence, 1 a divergence or a finding, 2 wrong usage.
    """
    config, params = engine_config(options), sampling_params(options)
    is_random = options["model"] == "embedded"  # which has no window
    _check_prompts(options["prompt"], is_random)

    from kvcanary_tools.runs.reenactment import reenacting
    from kvcanary_tools.runs.windows import random_engine, random_prompts, watch
    from spec_engine import Engine

    console.log_to_stderr()
    with usage_failures(), reenacting(options["reenact"], as_json) as reenacted:
        engine = random_engine(config, options["window"]) if is_random else Engine(config)
        reenacted.watch(engine)
        prompts = options["prompt"] or random_prompts(options["window"])
        run = watch(engine, prompts, params, options["every"])
    if as_json:
        console.data_json(run.as_dict())
    else:
        _show(run)
    ctx.exit(console.EXIT_CLEAN if run.is_clean else console.EXIT_FINDING)


def _check_prompts(prompts: Sequence[str], is_random: bool) -> None:
    if not is_random and not prompts:
        raise UsageFailure("windows needs a prompt beside --model, got none", "pass --prompt TEXT")
    strange = [prompt for prompt in prompts if not all(word.isdecimal() for word in prompt.split())]
    if is_random and strange:
        raise UsageFailure(
            f"prompts of the random model must be token ids, got {strange[0]!r}",
            "write ids such as '5 17 3', or --model",
        )


def _show(run: WindowRun) -> None:
    from kvcanary_tools.certificate import certificate_line

    own, total = run.layers
    console.data(f"window of {run.window} positions in {own} of {total} layers, pages of {run.page_size} slots")
    rows = [_cells(step, row) for step, row in run.rows.values()]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for cells in (HEADINGS, *rows):
        console.data("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    if run.stopped is not None:
        console.say(run.stopped, fg="yellow")
    counts = f"{numbered(run.num_reports, 'report')} in {numbered(run.num_steps, 'step')}"
    diverged = numbered(len(run.divergences), "row")
    console.say(f"{counts}: {f'{diverged} diverged' if run.divergences else 'map and books agree'}")
    if run.certificate is not None:
        console.say(certificate_line(run.certificate))


def _cells(step: int, row: RowDivergence) -> tuple[str, ...]:
    kinds = {"unmapped": row.unmapped, "evicted": row.evicted, "wrong": row.wrong}
    diverges = "; ".join(f"{kind} {_runs(places)}" for kind, places in kinds.items() if places)
    agreed = "never" if row.last_agreed_step is None else f"step {row.last_agreed_step}"
    return (
        row.request_id,
        str(step),
        str(row.committed_len),
        str(row.first_position),
        _runs(row.window_slots),
        diverges or "nowhere",
        str(row.agreed_len),
        "now" if row.is_clean else agreed,
    )


def _runs(values: Sequence[int]) -> str:
    """`4-7,12`: values that follow each other as one run."""
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in _bounds(values))


def _bounds(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    if not values:
        return
    breaks = [place for place, (one, other) in enumerate(pairwise(values), 1) if other != one + 1]
    for start, end in pairwise([0, *breaks, len(values)]):
        yield values[start], values[end - 1]
