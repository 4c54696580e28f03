"""What is in a dump: a summary as data, and the same as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvcanary.dumps.event_schema import FORWARDS
from kvcanary.dumps.reading import Dump
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary_tools.console import numbered

Row = Sequence[object]


def summary(dump: Dump) -> dict[str, Any]:
    """Plain JSON, keys are stable."""
    manifest = dump.manifest
    states = Counter(STATE_NAMES.get(int(state), "?") for state in dump.arrays["now.states"].tolist())
    return {
        "dump": str(dump.path),
        **{key: manifest[key] for key in ("version", "kvcanary", "created", "trigger", "step", "first_step", "device")},
        "tokens": manifest["tokens"],
        "content": bool(manifest["content"]),
        "config": manifest["config"],
        "pools": [
            {key: pool[key] for key in ("name", "layers", "num_slots", "slot_bytes", "token_offset", "window")}
            for pool in manifest["pools"]
        ],
        "page_size": manifest["page_size"],
        "pages": dict(states),
        "events": dict(Counter(event["call"] for event in dump.events)),
        "forwards": dict(Counter(event["kind"] for event in dump.events if event["call"] in FORWARDS)),
        "requests": [
            {
                "request_id": request["request_id"],
                "tokens": len(request["tokens"]),
                "committed_len": request["committed_len"],
                "pages": len(request["pages"]),
            }
            for request in dump.now
        ],
        "findings": [
            {key: finding.get(key) for key in ("code", "name", "pool", "page", "slot", "position", "layer", "step")}
            for finding in dump.findings
        ],
        "replayable": bool(manifest["has_records"]),
    }


def summary_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The summary for people."""
    yield f"{facts['dump']}: version {facts['version']}, written by kvcanary {facts['kvcanary']} at {facts['created']}"
    yield f"because of {_WHY.get(facts['trigger'], facts['trigger'])}, steps {facts['first_step']} to {facts['step']}"
    config = facts["config"]
    yield f"mode {config.get('mode')}, content {config.get('content')}, on {facts['device']}"
    content = "with the bytes of the slots found" if facts["content"] else "no bytes of K or V"
    yield f"token ids {facts['tokens']}, {content}; it can{'' if facts['replayable'] else 'not'} be replayed"
    yield ""
    pools = [[p["name"], p["layers"], p["num_slots"], p["slot_bytes"], p["window"] or "all"] for p in facts["pools"]]
    yield from table(("pool", "layers", "slots", "bytes a slot", "sees"), pools)
    yield ""
    yield from table(("state", "pages"), sorted(facts["pages"].items()))
    yield ""
    yield from table(("event", "count"), sorted(facts["events"].items(), key=lambda item: -item[1]))
    yield ""
    requests = [[r["request_id"], r["tokens"], r["committed_len"], r["pages"]] for r in facts["requests"]]
    yield from table(("request", "tokens", "committed", "pages"), requests)
    yield ""
    if not facts["findings"]:
        yield "no finding"
        return
    yield f"{numbered(len(facts['findings']), 'finding')}"
    findings = [
        [f["code"], f["name"], f["pool"], f["page"], f["slot"], f["position"], f["step"]] for f in facts["findings"]
    ]
    yield from table(("code", "what", "pool", "page", "slot", "position", "step"), findings)


_WHY = {"finding": "a finding", "signal": "a signal", "command": "a command"}


def table(heads: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Columns as wide as they must be, numbers to the right."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    widths = [max([len(head), *(len(row[number]) for row in cells)]) for number, head in enumerate(heads)]
    yield "  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip()
    for row, values in zip(cells, rows, strict=True):
        padded = [
            cell.rjust(width) if isinstance(value, int) else cell.ljust(width)
            for cell, value, width in zip(row, values, widths, strict=True)
        ]
        yield "  ".join(padded).rstrip()
