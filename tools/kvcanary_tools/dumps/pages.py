"""A dump as one HTML page that loads nothing: findings with their stories, a map of the pages, the draft tree, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import PackageLoader
from markupsafe import Markup

from kvcanary.codes import CODES, KINDS
from kvcanary.dumps.certifying import certificate_of
from kvcanary.dumps.event_schema import FORWARDS, plan_part
from kvcanary.dumps.reading import Call, Dump
from kvcanary.dumps.watched_reading import WatchedDump
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary.pools.launch_site import site_name
from kvcanary_tools.advice import ADVICE
from kvcanary_tools.dumps.explaining import explain
from kvcanary_tools.dumps.tables import summary
from spec_engine.html.incident import incident
from spec_engine.html.sentences import sentences
from spec_engine.html.templates import CODE, environment, source_of_script

MOST_STORIES = 16
MOST_PAGES = 16384  # of the map
MOST_LANES = 400  # steps of the timeline
COLUMN, LINE = 96, 38  # of a drawn tree


def page_of(dump: Dump) -> str:
    """The page; whatever the dump says is text in it, never markup."""
    stories = [explain(dump, number) for number in range(min(len(dump.findings), MOST_STORIES))]
    return rendered(
        dump,
        summary(dump),
        stories,
        _steps(dump),
        cells=_cells(dump),
        states=list(STATE_NAMES.values()),
        trees=sorted(_trees(dump), key=lambda tree: not tree["found"]),
    )


def rendered(
    dump: Dump | WatchedDump,
    facts: Mapping[str, Any],
    stories: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    **drawn: Any,
) -> str:
    """What the template makes of these; `drawn` has the cells and states of a map, and trees, where there are any."""
    certificate = sentences(certificate_of(dump), len(dump.findings)) if _is_certified(dump) else []
    template = environment(PackageLoader("kvcanary_tools.dumps", "")).get_template("page.html.j2")
    return template.render(
        {"cells": [], "states": [], "trees": []} | drawn,
        summary=facts,
        stories=[_incident(story) for story in stories],
        steps=steps,
        certificate=certificate,
        codes=list(_meanings(_named(dump, [line.text for line in certificate]))),
        source_of_script=Markup(source_of_script()),
    )


def _incident(story: Mapping[str, Any]) -> dict[str, Any]:
    shown = incident(story["finding"], story["story"], story["advice"], story["commands"])
    return shown | {"row": story.get("row"), "answers": story.get("answers")}


def _is_certified(dump: Dump | WatchedDump) -> bool:
    """Dumps of older versions may have no certificate."""
    return bool(dump.manifest.get("certificate"))


def _named(dump: Dump | WatchedDump, texts: Sequence[str]) -> dict[str, str]:
    """Codes that the page names, by finding, evidence or certificate, with the name that a finding gives them."""
    texts = [*texts, *(text for finding in dump.findings for text in finding["evidence"])]
    others = {code: "" for text in texts for code in CODE.findall(text) if code in CODES}
    return others | {finding["code"]: finding["name"] for finding in dump.findings}


def _meanings(codes: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Of each code what it means, and what may follow."""
    for code, name in sorted(codes.items(), key=lambda item: (item[0][0], int(item[0][1:]))):
        kind = next((kind for kind in KINDS.values() if (kind.code, kind.name) == (code, name)), None)
        kind = kind or next((kind for kind in KINDS.values() if kind.code == code), None)
        if kind is not None:
            advice = ADVICE.get(kind.kind)
            yield {
                "code": code,
                "name": kind.name,
                "sentence": kind.sentence,
                "consequence": advice.consequence if advice else "",
                "found": bool(name),
            }


def _cells(dump: Dump) -> list[dict[str, Any]]:
    """One for every page: its state, owner, and whether a finding names it."""
    names, found = dump.manifest["names"], {finding["page"] for finding in dump.findings}
    columns = (dump.arrays[f"now.{name}"].tolist()[:MOST_PAGES] for name in ("states", "owners", "refcounts"))
    return [
        {
            "page": page,
            "state": STATE_NAMES.get(state, "?"),
            "owner": names.get(str(owner), "") if owner >= 0 else "",
            "references": references,
            "found": page in found,
        }
        for page, (state, owner, references) in enumerate(zip(*columns, strict=True))
    ]


def _trees(dump: Dump) -> list[dict[str, Any]]:
    """The draft trees of the last verify that was recorded, of every request in it."""
    forwards = [event for event in dump.events if event["call"] in FORWARDS and event["kind"] == "verify"]
    if not forwards or not forwards[-1]["has_parents"]:
        return []
    event = forwards[-1]
    written, start, trees = plan_part(event, "written").tolist(), 0, []
    found = {finding["slot"] for finding in dump.findings}  # whatever the pool: all have the same pages
    for number, count in enumerate(written):
        nodes = _nodes(event, start, count)
        if nodes:
            trees.append({"request": event["requests"][number // event["width"]]} | _drawn(nodes, found))
        start += count
    return trees


def _drawn(nodes: list[dict[str, Any]], found: set[int]) -> dict[str, Any]:
    """Where the nodes of one tree lie in its picture: a column a depth, a line a leaf, parents amid their children."""
    above: list[dict[str, Any]] = []  # the path to the node, by depth
    lines = 0
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        del above[node["depth"] :]
        node |= {
            "above": above[-1] if above else None,
            "found": node["slot"] in found,
            "x": 20 + COLUMN * node["depth"],
        }
        above.append(node)
        if following is None or following["depth"] <= node["depth"]:
            node["y"] = 10 + LINE * lines
            lines += 1
    for node in reversed(nodes):
        own = [child["y"] for child in nodes if child["above"] is node]
        node["y"] = (own[0] + own[-1]) // 2 if own else node["y"]
    positions = [node["position"] for node in nodes]
    return {
        "nodes": nodes,
        "found": any(node["found"] for node in nodes),
        "first": min(positions),
        "last": max(positions),
        "width": 40 + COLUMN * max(4, *(node["depth"] for node in nodes)),
        "height": LINE * lines + 4,
    }


def _nodes(event: Call, start: int, count: int) -> list[dict[str, Any]]:
    """The nodes of one tree in depth-first order, as deep as they lie below its root."""
    parts = (plan_part(event, name)[start : start + count].tolist() for name in ("slots", "positions", "parents"))
    slots, positions, parents = parts
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent - start if parent >= start and parent - start < node else -1, []).append(node)
    facts, todo = [], [(node, 0) for node in reversed(children.get(-1, []))]
    while todo:
        node, depth = todo.pop()
        facts.append({"node": node, "depth": depth, "slot": slots[node], "position": positions[node]})
        todo += [(child, depth + 1) for child in reversed(children.get(node, []))]
    return facts


def _steps(dump: Dump) -> list[dict[str, Any]]:
    """The last steps, the latest first, each with its forwards, events of pages and findings."""
    steps: dict[int, dict[str, Any]] = {}
    for step, event in dump.stepped():
        facts = steps.setdefault(step, {"step": step, "forwards": [], "events": 0, "found": []})
        if event["call"] in FORWARDS:
            facts["forwards"].append(
                {"site": site_name(event["kind"], event["index"]), "pool": event["pool"], "rows": event["rows"]}
            )
        elif event["call"].startswith("on_"):
            facts["events"] += 1
    for finding in dump.findings:
        if finding["step"] in steps:
            steps[finding["step"]]["found"].append(f"{finding['code']} {finding['name']}")
    return list(steps.values())[-MOST_LANES:][::-1]
