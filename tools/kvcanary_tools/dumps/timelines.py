"""A timeline of a dump for trace viewers: Perfetto and chrome://tracing read the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcanary.dumps.event_schema import FORWARDS
from kvcanary.dumps.reading import Call, Dump
from kvcanary.dumps.watched_reading import WatchedDump
from kvcanary.pools.launch_site import site_name

STEP_US = 1000  # a step's width: a recording has the order of events, not their times
ENGINE, REQUESTS, PAGES = 1, 2, 3  # processes of the trace
_TAKES = {"on_alloc": 1, "on_alloc_all": 1, "on_free": -1, "on_evict": -1}  # of each of its pages


def timeline(dump: Dump) -> dict[str, Any]:
    """The trace: steps with their forwards, requests by lane, pages in use, findings as marks.

    Times are made up: a step is a millisecond, its events share it evenly.
    """
    return trace_of(dump, [*_names(dump), *_events(dump)])


def trace_of(dump: Dump | WatchedDump, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Events of any dump as a trace, with its findings."""
    return {
        "traceEvents": [*_processes(), *events, *_findings(dump)],
        "displayTimeUnit": "ms",
        "otherData": {"dump": Path(dump.path).name, "times": "made up: the recording has the order alone"},
    }


def _processes() -> Iterator[dict[str, Any]]:
    for number, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (PAGES, "pages")):
        yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": name}}


def _names(dump: Dump) -> Iterator[dict[str, Any]]:
    for number, pool in enumerate(dump.pools, 1):
        yield {"ph": "M", "pid": ENGINE, "tid": number, "name": "thread_name", "args": {"name": f"{pool} pool"}}


def _events(dump: Dump) -> Iterator[dict[str, Any]]:
    pools = {name: number for number, name in enumerate(dump.pools, 1)}
    lanes: dict[str, int] = {}
    in_use = sum(len(request["pages"]) for request in dump.start)
    for step, events in _by_step(dump):
        start, width = step * STEP_US, STEP_US / max(1, len(events))
        yield span("step", f"step {step}", ENGINE, 0, start, STEP_US, {})
        for place, event in enumerate(events):
            at, call = start + place * width, event["call"]
            if call in FORWARDS:
                name, rows = site_name(event["kind"], event["index"]), event["rows"]
                facts = {"rows": rows, "entries": event["entries"], "requests": event["requests"]}
                yield span("forward", name, ENGINE, pools[event["pool"]], at, width, facts)
            for name in _requests_of(event):
                lane = lanes.setdefault(name, len(lanes) + 1)
                yield span("request", call, REQUESTS, lane, at, width, {"request": name})
            in_use += _TAKES.get(call, 0) * len(event.get("pages", ()))
        yield {"ph": "C", "pid": PAGES, "tid": 0, "name": "pages in rows", "ts": start, "args": {"pages": in_use}}
    for name, lane in lanes.items():
        yield {"ph": "M", "pid": REQUESTS, "tid": lane, "name": "thread_name", "args": {"name": name}}


def _findings(dump: Dump | WatchedDump) -> Iterator[dict[str, Any]]:
    for finding in dump.findings:
        name, at = f"{finding['code']} {finding['name']}", finding["step"] * STEP_US + STEP_US - 1
        facts = {key: finding[key] for key in ("pool", "page", "slot", "position")}
        yield {"ph": "i", "s": "g", "pid": ENGINE, "tid": 0, "name": name, "ts": at, "args": facts}


def _requests_of(event: Call) -> Sequence[str]:
    """Whom a call names that is no forward."""
    names: Sequence[str] = event.get("request_ids", ())
    return [event["request_id"]] if "request_id" in event else names


def _by_step(dump: Dump) -> Iterator[tuple[int, list[Call]]]:
    last: tuple[int, list[Call]] | None = None
    for step, event in dump.stepped():
        if last is None or step != last[0]:
            if last is not None:
                yield last
            last = step, []
        last[1].append(event)
    if last is not None:
        yield last


def span(kind: str, name: str, pid: int, tid: int, at: float, width: float, facts: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": at, "dur": width, "args": facts}
