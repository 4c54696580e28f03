"""`kvcanary why-slot DUMP SLOT`: what lies in a slot, who put it there, and who reads it."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.dumps.opening import dump_argument, opened
from kvcanary_tools.engine_options import CONTEXT, json_option


@click.command("why-slot", context_settings=CONTEXT, short_help="What is in a slot, and how it came there.")
@dump_argument
@click.argument("slot", type=int)
@click.option("--pool", metavar="NAME", help="Which pool; the first one by default.")
@json_option
def command(dump: str, slot: int, pool: str | None, as_json: bool) -> None:
    """What lies in a slot at the end of a recording, who owns its page, who wrote and read it.

    \b
      kvcanary why-slot dumps/step5-R9.kvdump 21
      kvcanary why-slot dumps/step5-R9.kvdump 21 --pool draft --json

    Exit codes: 0 shown, 2 no such slot, or not a dump.
    """
    from kvcanary.dumps.reading import Dump
    from kvcanary_tools.dumps.story import story_of, truth_of
    from kvcanary_tools.dumps.watched import slot_lines, story_of_slot, truth_of_slot

    read = opened(dump)
    if not read.pools:
        raise console.UsageFailure(f"{dump} is of a cache without slots", f"kvcanary explain {dump} tells what it has")
    name = next(iter(read.pools)) if pool is None else pool
    if name not in read.pools:
        raise console.UsageFailure(f"--pool must be one of {', '.join(read.pools)}, got {name!r}", "inspect lists them")
    most = read.pools[name]["num_slots"]
    if not 0 <= slot < most:
        raise console.UsageFailure(
            f"slot must be in [0, {most}) of pool {name!r}, got {slot}", "inspect lists the pools"
        )
    if isinstance(read, Dump):
        reported = {**truth_of(read, name, slot), "story": [line._asdict() for line in story_of(read, name, slot)]}
    else:
        story = [line._asdict() for line in story_of_slot(read, name, slot)]
        reported = {**truth_of_slot(read, name, slot), "story": story}
    if as_json:
        console.data_json(reported)
        return
    if not isinstance(read, Dump):
        for line in slot_lines(reported):
            console.data(line)
        return
    owner = {None: "nobody's", "shared": "shared"}.get(reported["owner"], f"private to {reported['owner']!r}")
    console.data(f"{name} pool, slot {slot}: page {reported['page']}, offset {reported['offset']}")
    console.data(f"  page      {reported['state']}, {owner}, generation {reported['generation']}")
    console.data(f"  rows      {', '.join(map(repr, reported['rows'])) or 'no live row names it'}")
    written = reported.get("written")
    if written is None:
        console.data("  written   by nobody")
    else:
        old = "" if written["generation"] == reported["generation"] else ", under an earlier grant"
        by = "a request that ended long ago" if written["request"] is None else repr(written["request"])
        console.data(
            f"  written   by {by}, position {written['position']}, {written['site']}, step {written['step']}{old}"
        )
    for line in reported["story"]:
        console.data(f"  step {line['step']:>6}  {line['text']}")
