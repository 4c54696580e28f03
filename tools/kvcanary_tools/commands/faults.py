"""`kvcanary faults`: the bugs and the damage that can be made, what must find each, and the story behind it."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, expect_embedded_model, json_option, usage_failures

if TYPE_CHECKING:
    from kvcanary_tools.campaign.museum import Room

WIDTH = 100


@click.group(
    "faults", context_settings=CONTEXT, invoke_without_command=True, short_help="List the faults, or demonstrate one."
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the published bugs and the kinds of damage that can be made, and what must find each of them.

    \b
      kvcanary faults show draft.position_off_by_one
      kvcanary generate --prompt 'def f(x):' --topk 1 --reenact draft.parents_dtype

    Exit codes: 0 listed, 2 wrong usage.
    """
    if ctx.invoked_subcommand is not None:
        return
    from kvcanary.faults.catalogue import faults
    from kvcanary.faults.published import reached, summary, unreached

    entries = [fault.as_dict() for fault in faults()]
    if as_json:
        published = {"reached": reached(faults()), "unreached": unreached(faults())}
        console.data_json({"faults": entries, "published": published})
        return
    for entry in entries:
        _tell(entry)
    console.data(summary(faults()))


@command.command("show", context_settings=CONTEXT)
@click.argument("name")
@json_option
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Tell the story of one fault, and make it: unheeded, as its users saw it, and then as the canary sees it.

    \b
      kvcanary faults show draft.position_off_by_one

    Exit codes: 0 it ended as the entry says, 1 it did not, 2 wrong usage.
    """
    from kvcanary.faults.catalogue import find
    from kvcanary_tools.campaign.museum import visit
    from kvcanary_tools.runs.reenactment import expect_nothing_armed

    expect_embedded_model()
    expect_nothing_armed()
    console.log_to_stderr()
    with usage_failures():
        fault = find(name)
    room = visit(fault)
    if as_json:
        console.data_json(fault.as_dict() | {"room": None if room is None else room.as_dict()})
    else:
        _tell(fault.as_dict())
        if room is not None:
            _tell_room(room)
    ctx.exit(console.EXIT_CLEAN if room is None or room.is_right else console.EXIT_FINDING)


def _tell(entry: dict[str, Any]) -> None:
    names = ", ".join(entry["bugs"]) or "nowhere, it is a kind of damage"
    state = entry["state"] + (f", {entry['reason']}" if entry["reason"] else "")
    console.data(f"{entry['name']}  ({' '.join(filter(None, (entry['k'], state)))})", bold=True)
    for title in ("story", "applies_to", "expected_code"):
        label = title.removesuffix("_code").replace("_", " ")
        text = fill(entry[title], WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)
        console.data(text)
    if entry["otherwise"]:
        text = fill(entry["otherwise"], WIDTH, initial_indent=f"  {'otherwise':<12}", subsequent_indent=" " * 14)
        console.data(text)
    if entry["alone"]:
        console.data(f"  {'no twin':<12}{entry['alone']}")
    console.data(f"  {'published':<12}{names}\n")


def _tell_room(room: Room) -> None:
    console.data(f"  {'unwatched':<12}{room.effect}")
    console.data(f"  {'found':<12}{room.verdict}\n")
    console.data(room.report)
