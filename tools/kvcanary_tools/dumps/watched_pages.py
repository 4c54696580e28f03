"""The dump of a watched pool as one HTML page, and as a trace: what `report` and `timeline` make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcanary.dumps.watched_events import COPIED, ENDED, GRANTED, LOADED, PREEMPTED, ZEROED
from kvcanary.dumps.watched_reading import WatchedDump
from kvcanary.pools.launch_site import site_name
from kvcanary_tools.dumps.pages import MOST_LANES, MOST_STORIES, rendered
from kvcanary_tools.dumps.timelines import ENGINE, REQUESTS, STEP_US, span, trace_of
from kvcanary_tools.dumps.watched import explain_watched, watched_summary


def page_of_watched(dump: WatchedDump) -> str:
    """The page; whatever the dump says is text in it, never markup."""
    stories = [explain_watched(dump, number) for number in range(min(len(dump.findings), MOST_STORIES))]
    return rendered(dump, watched_summary(dump), stories, _steps(dump))


def _steps(dump: WatchedDump) -> list[dict[str, Any]]:
    """The last steps, the latest first, each with its forward, events of blocks and findings."""
    steps = []
    for step in dump.steps[-MOST_LANES:][::-1]:
        found = [f"{f['code']} {f['name']}" for f in dump.findings if f["step"] == step["step"]]
        forward = {"site": site_name(*step["site"]), "pool": "one", "rows": len(step["rows"])}
        steps.append({"step": step["step"], "forwards": [forward], "events": len(step["events"]), "found": found})
    return steps


def watched_timeline(dump: WatchedDump) -> dict[str, Any]:
    """As `timeline`: steps with their forwards, requests by lane with what happened to them, findings as marks."""
    return trace_of(dump, list(_events(dump)))


def _events(dump: WatchedDump) -> Iterator[dict[str, Any]]:
    lanes: dict[str, int] = {}
    for step in dump.steps:
        start, site = step["step"] * STEP_US, site_name(*step["site"])
        names = [name for name, _, _ in step["rows"]]
        facts = {"rows": len(names), "entries": step["tokens"], "requests": names}
        yield span("step", f"step {step['step']}", ENGINE, 0, start, STEP_US, {})
        yield span("forward", site, ENGINE, 1, start, STEP_US, facts)
        for name, _, end in step["rows"]:
            lane = lanes.setdefault(name, len(lanes) + 1)
            yield span("request", site, REQUESTS, lane, start, STEP_US, {"request": name, "length": end})
        for kind, *about in step["events"]:
            lane = lanes.setdefault(about[0], len(lanes) + 1) if kind in (GRANTED, ENDED, PREEMPTED) else 0
            where = REQUESTS if lane else ENGINE
            yield _mark(kind, where, lane, start, _facts(kind, about))
    for name, lane in lanes.items():
        yield {"ph": "M", "pid": REQUESTS, "tid": lane, "name": "thread_name", "args": {"name": name}}


def _facts(kind: str, about: list[Any]) -> Mapping[str, Any]:
    if kind == GRANTED:
        return {"request": about[0], "blocks": about[1]}
    if kind in (ENDED, PREEMPTED):
        return {"request": about[0]}
    names = {COPIED: ("group", "from", "to"), ZEROED: ("group", "blocks"), LOADED: ("group", "request", "blocks")}
    return dict(zip(names[kind], about, strict=True))


def _mark(name: str, pid: int, tid: int, at: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": at, "args": dict(facts)}
