"""What `kvcanary top` sees of a server, and how it draws it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvcanary_tools.console import UsageFailure, numbered
from kvcanary_tools.remote import server_at
from spec_engine.html.sentences import sentences
from spec_engine.server.labels import TARGET

TIMEOUT_SECONDS = 10
TONES = {"good": "green", "bad": "bold red", "limit": "bright_black", "plain": ""}  # of sentences
SHOWN_REQUESTS, SHOWN_FINDINGS = 12, 6
STATE_STYLES = {
    "COMMITTED": "green", "SHARED": "yellow", "WRITTEN": "cyan", "RESERVED": "blue", "QUARANTINED": "magenta",
    "HELD": "cyan", "FREE": "bright_black",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """One look: metrics by name and labels, and the debug state, None where it may not be seen."""

    url: str
    when: float
    metrics: dict[str, dict[tuple[tuple[str, str], ...], float]]
    state: dict[str, Any] | None = None

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 where there is none."""
        return self.metrics.get(name, {}).get(tuple(sorted(labels.items())), 0.0)

    def total(self, name: str) -> float:
        return sum(self.metrics.get(name, {}).values())

    @property
    def num_findings(self) -> int:
        return int(self.total("kvcanary_findings_total"))


def look(url: str, api_key: str | None = None) -> Look:
    """Ask a server. UsageFailure where nobody answers, or somebody else."""
    url = server_at(url)
    text = _fetch(f"{url}/metrics", api_key)
    metrics: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                own = sorted((name, value) for name, value in sample.labels.items() if name not in TARGET)
                metrics.setdefault(sample.name, {})[tuple(own)] = sample.value
    except ValueError:
        metrics = {}
    if "spec_engine_steps_total" not in metrics:
        raise UsageFailure(f"{url} is no server of kvcanary", "kvcanary serve says its URL when it starts")
    state = None
    if api_key is not None:
        try:
            state = json.loads(_fetch(f"{url}/debug/kvcanary/state", api_key))
        except UsageFailure:
            state = None  # no --debug, or another key: the metrics are there all the same
    return Look(url, time.monotonic(), metrics, state)


def show_once(first: Look) -> None:
    Console(no_color=bool(os.environ.get("NO_COLOR"))).print(draw(first, None))


def show_live(first: Look, again: Callable[[], Look], interval: float) -> None:
    """Redraw until Ctrl-C; a server that does not answer is waited for."""
    screen = Console(no_color=bool(os.environ.get("NO_COLOR")))
    with Live(draw(first, None), console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
        before = first
        while True:
            time.sleep(interval)
            try:
                now = again()
            except UsageFailure as failure:
                live.update(Text(f"{failure.message}; waiting for it", style="red"), refresh=True)
                continue
            live.update(draw(now, before), refresh=True)
            before = now


def draw(now: Look, before: Look | None) -> RenderableType:
    """One screen, without parts that would be empty; rates need the look before."""
    requests, findings = ([], []) if now.state is None else (now.state["requests"], now.state["findings"])
    parts: list[RenderableType] = [_head(now), _figures(now, before)]
    if findings:
        parts.append(_findings(findings))
    elif now.num_findings:
        parts.append(_counted(now))
    parts.append(_pages(now))
    if requests:
        parts.append(_requests(requests))
    if _mode(now)["mode"] != "off":
        parts.append(_certificate(now))
    return Group(*parts)


def _head(now: Look) -> Text:
    mode = _mode(now)
    text = Text.assemble(("kvcanary top", "bold yellow"), f"  {now.url}  canary {mode['mode']} {mode['content']}  ")
    if mode["mode"] == "off":
        return text.append("not watched", "bright_black")
    if not now.num_findings:
        return text.append("no findings", "green")
    found = numbered(now.num_findings, "finding")
    return text.append(found if now.state is None else f"{found} of {_incidents(now.state['findings'])}", "bold red")


def _mode(now: Look) -> dict[str, str]:
    return next((dict(labels) for labels in now.metrics.get("kvcanary_mode", {})), {"mode": "?", "content": "?"})


def _incidents(findings: list[dict[str, Any]]) -> str:
    return numbered(len({finding["incident"] for finding in findings}), "incident")


def _figures(now: Look, before: Look | None) -> Columns:
    def rate(name: str) -> str:
        if before is None or now.when <= before.when:
            return "-"
        return f"{(now.total(name) - before.total(name)) / (now.when - before.when):,.0f}"

    overhead = now.value("kvcanary_overhead_ratio")
    cells = [
        ("tokens/s", rate("spec_engine_emitted_tokens_total")),
        ("steps/s", rate("spec_engine_steps_total")),
        ("accepted length", f"{now.value('spec_engine_accepted_length'):.2f}"),
        ("running", f"{now.value('spec_engine_requests_running'):.0f}"),
        ("waiting", f"{now.value('spec_engine_requests_waiting'):.0f}"),
        ("canary's share", f"{100 * overhead / (1 + overhead):.1f} %"),
    ]
    return Columns([Text.assemble((name, "bright_black"), "\n", (value, "bold")) for name, value in cells], (0, 3))


def _pages(now: Look) -> RenderableType:
    """The pool as one bar by state, by the canary's map or, without it, by the allocator's sums."""
    if now.state is not None:
        pages = now.state["pages"]
        states = pages["state"][pages["null_pages"] :]
        counts = Counter(pages["states"][state] for state in states)
    else:
        names = {"free": "FREE", "quarantined": "QUARANTINED", "owned": "HELD", "evictable": "SHARED"}
        named = {dict(labels)["state"]: value for labels, value in now.metrics.get("spec_engine_pages", {}).items()}
        counts = Counter()
        for name, value in named.items():
            counts[names.get(name, "SHARED")] += int(value)
    total, width = max(sum(counts.values()), 1), 64
    bar = Text()
    for state in sorted(counts, key=lambda name: (name == "FREE", name)):
        cells = round(width * counts[state] / total) or (counts[state] > 0)
        bar.append("█" * cells, STATE_STYLES.get(state, "white"))
    legend = Text()
    for state in sorted(counts, key=lambda name: (name == "FREE", name)):
        legend.append("■ ", STATE_STYLES.get(state, "white")).append(f"{state.lower()} {counts[state]:,}   ")
    return Panel(Group(bar, legend), title="pages", title_align="left", border_style="bright_black")


def _requests(requests: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in ("request", "state", "prompt", "output", "of", "pages"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right")
    table.add_column("")
    for request in requests[:SHOWN_REQUESTS]:
        done, most = request["output_len"], request["max_new_tokens"]
        figures = (request["prompt_len"], done, most, len(request["pages"]))
        bar = ProgressBar(most, done, width=20, complete_style="green", finished_style="green")
        table.add_row(request["request_id"], request["state"], *map(str, figures), bar)
    if len(requests) > SHOWN_REQUESTS:
        table.add_row(f"and {len(requests) - SHOWN_REQUESTS} more")
    return Panel(table, title="requests", title_align="left", border_style="bright_black")


def _findings(findings: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings[-SHOWN_FINDINGS:][::-1]:
        layer = "" if finding["layer"] is None else f", layer {finding['layer']}"
        place = f"{finding['pool']} pool, slot {finding['slot']} (page {finding['page']}){layer}"
        when = f"step {finding['step']}, {finding['site'][0]}"
        table.add_row(Text(finding["code"], "bold red"), finding["name"], when, place, finding["action"])
    return Panel(table, title=_incidents(findings), title_align="left", border_style="red")


def _certificate(now: Look) -> RenderableType:
    """In sentences: the server's own where its state may be seen, else those that its metrics allow."""
    told = _by_metrics(now) if now.state is None else now.state["sentences"]
    lines = [
        Text.assemble(("○ " if tone == "limit" else "● ", TONES[tone] or "bright_black"), (text, TONES[tone]))
        for tone, text in told
    ]
    return Panel(Group(*lines), title="certificate", title_align="left", border_style="bright_black")


def _by_metrics(now: Look) -> list[tuple[str, str]]:
    counters = ("forwards", "slots_checked", "bytes_checked", "finite_bytes_checked", "freed_unread_bytes")
    known: dict[str, Any] = {name: int(now.total(f"kvcanary_{name}_total")) for name in counters}
    known["max_unread_steps"] = int(now.value("kvcanary_max_unread_steps"))
    unchecked = {
        dict(labels)["reason"]: int(count) for labels, count in now.metrics.get("kvcanary_unchecked_total", {}).items()
    }
    return [(tone, text) for tone, text in sentences(known | {"classes": [], "unchecked": unchecked}, now.num_findings)]


def _counted(now: Look) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    for labels, count in now.metrics["kvcanary_findings_total"].items():
        named = dict(labels)
        table.add_row(Text(named["code"], "bold red"), named["site"], f"{count:,.0f}")
    return Panel(table, title="findings by code and site", title_align="left", border_style="red")


def _fetch(url: str, api_key: str | None) -> str:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as answer:
            return answer.read().decode()
    except HTTPError as error:
        raise UsageFailure(f"{url} answers {error.code} {error.reason}", "is it a server of kvcanary?") from error
    except (URLError, OSError, HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", error)
        raise UsageFailure(f"nobody answers at {url}: {reason}", "start one with kvcanary serve") from error
