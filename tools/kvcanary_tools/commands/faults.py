"""`kvcanary faults`: the published bugs that can be brought back, and what must find each."""

from __future__ import annotations

from textwrap import fill

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, json_option

WIDTH = 100


@click.command("faults", context_settings=CONTEXT, short_help="List the published bugs that can be brought back.")
@json_option
def command(as_json: bool) -> None:
    """List the published bugs that --reenact brings back, and what must find each of them.

    \b
      kvcanary generate --prompt 'def f(x):' --topk 1 --reenact draft.parents_dtype

    Exit codes: 0 listed, 2 wrong usage.
    """
    from kvcanary.faults.catalogue import faults

    entries = [fault.as_dict() for fault in faults()]
    if as_json:
        console.data_json({"faults": entries})
        return
    for entry in entries:
        names = ", ".join(entry["bugs"]) or "nowhere, it is a kind of damage"
        state = entry["state"] + (f", {entry['reason']}" if entry["reason"] else "")
        console.data(f"{entry['name']}  ({' '.join(filter(None, (entry['k'], state)))})", bold=True)
        for title in ("story", "applies_to", "expected_code"):
            label = title.removesuffix("_code").replace("_", " ")
            text = fill(entry[title], WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)
            console.data(text)
        console.data(f"  {'published':<12}{names}\n")
