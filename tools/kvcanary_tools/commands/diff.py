"""`kvcanary diff A B`: where two recordings part."""

from __future__ import annotations

import json

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import opened
from kvcanary_tools.engine_options import CONTEXT, json_option

WIDTH = 160


@click.command("diff", context_settings=CONTEXT, short_help="Where two recordings part.")
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@json_option
def command(first: str, second: str, as_json: bool) -> None:
    """The first event in which two dumps differ. Token ids are compared by the order of their appearance.

    Exit codes: 0 they are the same, 1 they part, 2 one of them is no dump.
    """
    from kvcanary_tools.dumps.diffing import diff

    told = diff(opened(first), opened(second))
    if as_json:
        console.data_json(told)
    elif told["same"]:
        console.data("the recordings are the same, event by event")
    else:
        console.data(f"they part at step {told['step']}, in {', '.join(told['fields'])}")
        for name in ("first", "second"):
            console.data(f"  {name:<7} {_short(told[name])}")
    raise click.exceptions.Exit(console.EXIT_CLEAN if told["same"] else console.EXIT_FINDING)


def _short(event: object) -> str:
    text = "nothing, it has ended" if event is None else json.dumps(event)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
