"""Explaining a finding: its story, its ranked causes with what speaks for them, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from kvcanary.dumps.reading import Dump
from kvcanary.pools.launch_site import site_name
from kvcanary_tools.dumps.story import story_of, truth_of

#: What to look at next, by the family of the first cause.
NEXT = {
    "bounds": "compare the id with the pool's size where the index array is built: an off-by-one, or a padding mark",
    "addressing": "print the index array and the page table of this forward; where they first differ is the bug",
    "lengths": "follow the length of this request through the step: raised, rolled back, and in which unit",
    "draft": "compare the tree's parents, positions and mask of this forward with the layout that the drafter made",
    "windows": "compare the slot map of the window with its books: engine.window_report()",
    "graphs": "run the same batch without graphs; if the finding goes, look at what the capture has frozen",
    "lifetime": "look at the two lines of the page's history before the finding: the free came early, or the use late",
    "order": "look for the copy or the forward that runs on another stream and waits for no event",
    "identity": "compare what keys the prefix cache and the rows: tokens, salt and adapter",
    "transfer": "compare source and destination of the last copy of this page, byte by byte",
    "scales": "look at the scale that was in force when this slot was written, and now",
    "uninitialised": "look for the layer that did not store, or for the write that went elsewhere",
    "ranks": "compare the plans of the ranks for this step",
    "bits": "run the machine's memory test; if the bit is the same again elsewhere, suspect a stray write",
    "hooks": "check that every forward is opened, stored and closed, under a number of its own, in graphs as well",
}
#: The same of `graphs` where nothing was replayed.
PADDED = (
    "compare the padding of this batch with its live rows: how many there are, and which slots and positions they name"
)


#: The same where bytes came back wrong, by what the transfer did to them.
NEXT_OF_TRANSFERS = {
    "one word": "compare the bytes before they leave, where they wait, and when they are back; where the word first "
    "differs is the fault, be it memory, a cable or a stray write",
    "misrouted": "print the pages that were saved, the places between, and the pages that were loaded, each in its "
    "order: the lists differ in order, or begin at different pages",
    "short": "compare the bytes that were copied with those of the snapshot: pages, layers and pools; look for a copy "
    "that was cut, failed or was skipped, and for an error that nobody read",
    "stale": "look at when the place of this snapshot held the other one, and whether the last copy to it had ended "
    "before it was read",
    "other layout": "compare the layout on both sides: NHD or HND, order of heads, K before V, layers before tokens, "
    "and which parts travel",
    "unknown": "compare source, waiting copy and destination of the first wrong slot byte by byte; then look at who "
    "else may write where the bytes waited",
}


def explain(dump: Dump, number: int) -> dict[str, Any]:
    """The story of one finding, plain JSON; IndexError where there is none of that number."""
    finding = dump.findings[number]
    is_place = finding["pool"] in dump.pools and 0 <= finding["slot"] < dump.pools[finding["pool"]]["num_slots"]
    advice = advice_of(finding, any(event["call"] == "launch" for event in dump.events))
    commands = list(_commands(dump, finding))
    return {
        "finding": finding,
        "now": truth_of(dump, finding["pool"], finding["slot"]) if is_place else None,
        "story": [line._asdict() for line in story_of(dump, finding["pool"], finding["slot"])] if is_place else [],
        "causes": finding["causes"],
        "advice": advice,
        "commands": commands,
        "next": [*advice, *map(command_line, commands)],
    }


def explain_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    finding = facts["finding"]
    place = f"{finding['pool']} pool, slot {finding['slot']} (page {finding['page']})"
    if finding["slot"] < 0 and "resource" in finding["found"]:
        place = finding["found"]["resource"]
    yield f"{finding['name']} ({finding['code']}): {place}, step {finding['step']}, {site_name(*finding['site'])}"
    yield f"  {finding['sentence']}"
    if finding["readers"]:
        yield f"  touches {', '.join(finding['readers'])}; {finding.get('exposed_tokens', 0)} tokens exposed"
    yield ""
    yield "what happened"
    yield from (f"  step {line['step']:>6}  {line['text']}" for line in facts["story"])
    if not facts["story"]:
        yield "  the finding has no place in a pool"
    yield from why_and_next(facts, "also fired: ")


def why_and_next(facts: Mapping[str, Any], besides: str = "") -> Iterator[str]:
    """The causes, what else speaks for them (`besides` before each line), and what to do."""
    yield ""
    yield "why, likeliest first"
    for rank, cause in enumerate(facts["causes"], 1):
        yield f"  {rank}. {cause['text']} ({cause['family']}, {cause['basis']})"
        yield from (f"     {text}" for text in cause.get("evidence", ()))
    yield from (f"     {besides}{text}" for text in facts["finding"]["evidence"])
    yield ""
    yield "next"
    yield from (f"  - {text}" for text in facts["next"])


def advice_of(finding: Mapping[str, Any], is_replayed: bool) -> list[str]:
    """What to look at, by what was found, or else by the family of the first cause; is_replayed: by CUDA graphs."""
    family, found = next((cause["family"] for cause in finding["causes"]), None), finding["found"]
    if family == "transfer" and found.get("verdict") in NEXT_OF_TRANSFERS:
        return [NEXT_OF_TRANSFERS[found["verdict"]]]
    if family == "order" and "waiting" in finding["expected"]:
        due = finding["expected"]
        return [f"let {due['waiting']} wait for the event of {due.get('behind')} before {found.get('reader')}"]
    if family not in NEXT:
        return []
    return [PADDED if family == "graphs" and not is_replayed else NEXT[family]]


def command_line(command: Mapping[str, str]) -> str:
    return f"{command['command']} {command['purpose']}"


def _commands(dump: Dump, finding: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """What to type next, ready to be pasted into a shell, and what it does."""
    path, slot = shlex.quote(str(dump.path)), f"{finding['slot']} --pool {shlex.quote(finding['pool'])}"
    yield {"command": f"kvcanary replay {path}", "purpose": "runs these steps again on this machine"}
    if finding["slot"] >= 0:
        yield {"command": f"kvcanary why-slot {path} {slot}", "purpose": "tells what lies there now"}
