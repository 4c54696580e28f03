"""`kvcanary replay DUMP`: the recorded steps again, through the same checks, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, dump_failures, opened_told
from kvcanary_tools.engine_options import CONTEXT, json_option

if TYPE_CHECKING:
    from kvcanary.dumps.reading import Dump
    from kvcanary.replay.replayer import Outcome


@click.command("replay", context_settings=CONTEXT, short_help="Run the recorded steps again, through the same checks.")
@dump_argument
@click.option("--until", type=int, metavar="STEP", help="Stop after this step.")
@click.option("--check", "code", metavar="CODE", help="Compare findings of this check only, such as R9.")
@json_option
def command(dump: str, until: int | None, code: str | None, as_json: bool) -> None:
    """Run the recorded steps again on the CPU, over stand-in bytes, through the same checks.

    Damage of bytes and records is brought about where the recording saw it; all else follows from the events.

    \b
      kvcanary replay dumps/step5-R9.kvdump
      kvcanary replay dumps/step5-R9.kvdump --until 4 --check R9

    Exit codes: 0 nothing was found, 1 a finding was reached, 2 not a dump, 3 a recorded finding was not reached.
    """
    from kvcanary.codes import CODES
    from kvcanary.replay.replayer import replay

    if code is not None and code.upper() not in CODES:
        raise console.UsageFailure(f"--check must be a code of the canary, got {code!r}", f"one of {' '.join(CODES)}")
    read = opened_told(dump, "replayed")
    first, last = read.manifest["first_step"], read.manifest["step"]
    if until is not None and not first <= until <= last:
        raise console.UsageFailure(
            f"--until must lie in [{first}, {last}], the steps of this dump, got {until}", "inspect tells them"
        )
    with dump_failures():
        outcome = replay(read, until, None if code is None else code.upper())
    reported = _reported(read, outcome)
    if as_json:
        console.data_json(reported)
    else:
        _show(read, reported, outcome)
    if outcome.missing:
        raise click.exceptions.Exit(console.EXIT_FAILURE)
    raise click.exceptions.Exit(console.EXIT_FINDING if outcome.findings else console.EXIT_CLEAN)


def _reported(dump: Dump, outcome: Outcome) -> dict[str, Any]:
    return {
        "dump": str(dump.path),
        "first_step": dump.manifest["first_step"],
        "step": outcome.step,
        "events": outcome.num_events,
        "same": not outcome.missing,
        "first_bad_step": outcome.first_bad_step,
        "findings": [finding.to_dict() for finding in outcome.findings],
        "missing": outcome.missing,
        "errors": outcome.errors,
    }


def _show(dump: Dump, reported: dict[str, Any], outcome: Outcome) -> None:
    from kvcanary.replay.replayer import not_recorded

    events = console.numbered(reported["events"], "event")
    console.data(f"replayed {events}, steps {reported['first_step']} to {reported['step']}")
    for finding in outcome.findings:
        place = f"{finding.pool} pool, slot {finding.slot} (page {finding.page})"
        console.data(f"reached {finding.code} {finding.name}: {place}, step {finding.step}")
    for error in reported["errors"]:
        console.data(f"ended as it did: {error}")
    for missing in reported["missing"]:
        source = not_recorded(dump, missing)
        why = f": it comes from {source}" if source else ""
        console.data(
            f"NOT reached {missing['code']} {missing['name']}, slot {missing['slot']}, step {missing['step']}{why}"
        )
    if not outcome.findings and not outcome.missing:
        console.data("nothing was found")
