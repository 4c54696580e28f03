"""`kvcanary inject`: make every fault in many configurations, and measure what the canary finds."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, expect_embedded_model, usage_failures
from kvcanary_tools.files import JsonFile, OutFile, OutFolder, make_folder, write_text

if TYPE_CHECKING:
    from kvcanary_tools.campaign.configurations import Plan
    from kvcanary_tools.campaign.outcome.account import Account
    from kvcanary_tools.campaign.traffic import Run

FILE = OutFile()
MOST_ROUNDS = 12  # of runs in the place of such in which a fault could not be made


@click.command("inject", context_settings=CONTEXT, short_help="Inject every fault, and measure what is found.")
@click.argument("names", nargs=-1)
@click.option(
    "--config",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    metavar="quick|full",
    help="How many configurations and runs.",
)
@click.option(
    "--runs", type=click.IntRange(min=1), metavar="N", help="Runs with each fault; by default what --config says."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, metavar="S", help="Seed of the first run."
)
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of processes; by default one for each core."
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="here",
    metavar="[ADDRESS]",
    help="Run on the Ray cluster at ADDRESS; without one, on a cluster that is started here. Needs the extra ray.",
)
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the matrix to this file; - is stdout.")
@click.option(
    "--into",
    "record_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Replace these faults' rows in that campaign's JSON, which then lists them; the bars are those of the whole.",
)
@click.option(
    "--junit",
    "junit_file",
    type=FILE,
    metavar="FILE",
    help="Write the matrix as JUnit XML, one test case for each fault.",
)
@click.option(
    "--dumps",
    type=OutFolder(),
    metavar="DIR",
    help="Write a dump into this folder for every faulty run that a check stops.",
)
@click.option("--url", metavar="URL", help="Inject one fault into the server at URL, started with --allow-faults.")
@click.option("--api-key", metavar="KEY", envvar="KVCANARY_API_KEY", help="API key of that server.")
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    config: str,
    runs: int | None,
    seed: int,
    workers: int | None,
    ray: str | None,
    json_file: Path | None,
    record_file: Path | None,
    junit_file: Path | None,
    dumps: str | None,
    url: str | None,
    api_key: str | None,
) -> None:
    """Make faults in a running engine and print the detection matrix: what was found, by which check, how soon.

    NAMES are faults or families (`bits`); none, or `all`, is every fault that is ready. Each runs in several
    configurations: faulty, with its check switched off, as a quiet twin where there is one; and the same traffic runs
    clean.

    \b
      kvcanary inject bits --runs 20
      kvcanary inject all --config full --json matrix.json
      kvcanary inject all --config full --ray ray://head:10001
      kvcanary inject bits.flip --url http://127.0.0.1:8000

    Exit codes: 0 everything was found and nothing else, 1 otherwise, 2 wrong usage, 130 interrupted.
    """
    if url is not None:
        _expect_no_campaign(ctx)
        _inject_there(url, names, api_key)
        return
    from kvcanary_tools.campaign.configurations import PLANS
    from kvcanary_tools.campaign.outcome.account import Account
    from kvcanary_tools.campaign.outcome.report import as_junit, failures, matrix_lines
    from kvcanary_tools.campaign.runner import default_workers
    from kvcanary_tools.runs.reenactment import expect_nothing_armed

    expect_embedded_model()
    expect_nothing_armed()
    console.log_to_stderr(logging.CRITICAL)  # findings are what is wanted here, and the matrix has them
    plan, record = PLANS[config], None if record_file is None else _record(record_file, config)
    planned = _planned(names, config, runs, seed, dumps)
    meta = {"config": config, "seed": seed, "runs": runs, "workers": workers or default_workers()}
    account = Account(JsonFile(json_file), meta)
    _perform_all(account, planned, plan, runs, ray)
    _, totals = account.matrix()
    for line in matrix_lines(totals):
        account.file.say(line)
    for line in failures(account.results):
        console.say(line, fg="red")
    misses = _missed(account, plan, runs, record, record_file)
    for miss in misses:
        console.say(f"missed: {miss}", fg="red")
    account.keep()
    if junit_file is not None:
        write_text(junit_file, as_junit(totals, account.results))
    if not account.is_complete:
        ctx.exit(console.EXIT_INTERRUPTED)
    ctx.exit(console.EXIT_FINDING if misses else console.EXIT_CLEAN)


def _planned(names: tuple[str, ...], config: str, runs: int | None, seed: int, dumps: str | None) -> list[Run]:
    """The runs that were asked for; a usage failure where there is none."""
    from kvcanary_tools.campaign.configurations import PLANS
    from kvcanary_tools.campaign.runner import chosen, runs_of

    with usage_failures():
        planned = runs_of(chosen(names), PLANS[config], runs, seed)
    if not planned:
        raise console.UsageFailure(f"none of {' '.join(names)} is ready in config {config}", "kvcanary faults says why")
    if dumps is None:
        return planned
    make_folder(dumps)
    return [replace(run, mode="raise", dumps=dumps) for run in planned]


def _missed(
    account: Account, plan: Plan, runs: int | None, record: dict[str, Any] | None, record_file: Path | None
) -> list[str]:
    """The bars that are not held: of what was run, or of the record that takes it in."""
    from kvcanary_tools.campaign.outcome.bars import missed
    from kvcanary_tools.campaign.outcome.merging import merged, rows_and_totals

    judged = account.matrix()
    if record_file is not None and record is not None and account.is_complete:
        whole = merged(record, account.as_dict())
        JsonFile(record_file).write(whole)
        judged = rows_and_totals(whole)
    return list(missed(*judged, plan if plan.is_measured and runs is None else None))


def _record(path: Path, config: str) -> dict[str, Any]:
    """A campaign's JSON into which others go."""
    from kvcanary_tools.campaign.outcome.merging import expect_whole

    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        expect_whole(record, config)
    except ValueError as error:
        raise console.UsageFailure(str(error), "name the record of a campaign that ended, and its --config") from error
    return record


def _expect_no_campaign(ctx: click.Context) -> None:
    """A server takes a fault; a campaign has engines of its own."""
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    for option in (one for one in ctx.command.params if one.name in set(given) - {"names", "url", "api_key"}):
        raise console.UsageFailure(
            f"--url strikes once, in a running server, {option.opts[0]} is for campaigns", "leave one of them out"
        )


def _inject_there(url: str, names: tuple[str, ...], api_key: str | None) -> None:
    from kvcanary_tools.remote import arm

    if len(names) != 1:
        raise console.UsageFailure(f"--url takes the name of one fault, got {len(names)}", "kvcanary faults lists them")
    reported = arm(url, names[0], api_key)
    waits = names[0] in reported["waiting"]
    console.data(f"{names[0]} {'strikes as soon as a request runs' if waits else 'is armed'} at {url}")


def _perform_all(account: Account, planned: list[Run], plan: Plan, runs: int | None, ray: str | None) -> None:
    """The runs, and others in the place of those in which their fault could not be made, unless somebody interrupts."""
    from kvcanary_tools.campaign.runner import runs_instead

    rounds, goes_on = 0, True
    while planned and goes_on and rounds <= MOST_ROUNDS:
        goes_on = _perform(account, planned, ray)
        planned = runs_instead(account.results, plan, runs) if plan.is_measured else []
        rounds += 1
    account.is_complete = goes_on


def _perform(account: Account, planned: list[Run], ray: str | None) -> bool:
    """Add their results; whether all are there. With a progress bar on stderr, where that is a terminal."""
    from kvcanary_tools.campaign.on_ray import campaign_on_ray
    from kvcanary_tools.campaign.runner import campaign

    wanted = len(account.results) + len(planned)
    with (
        click.progressbar(length=len(planned), label="runs", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar,
        closing(campaign(planned, account.meta["workers"]) if ray is None else campaign_on_ray(planned, ray)) as coming,
    ):
        try:
            for result in coming:
                account.add(result)
                bar.update(1)
        except KeyboardInterrupt:
            console.say(f"interrupted: {len(account.results)} of {wanted} runs", fg="yellow")
    return len(account.results) == wanted
