"""One incident as a template shows it: place, both sides, lanes of the page, causes, and what to type next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spec_engine.html.bits import compared
from spec_engine.html.lanes import lanes

AT_STEP = re.compile(r"(?:step (?P<early>\d+): )?(?P<text>.*?)(?: at step (?P<late>\d+)(?P<place> .*)?)?")
BIRTHS = ("granted to", "granted as", "set aside", "given to")
PLACE = ("layer", "part", "head", "dim", "bit")


def incident(
    finding: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]] = (),
    advice: Sequence[str] = (),
    commands: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Facts of one finding, as `Finding.to_dict` has it.

    lines:    its story: `step`, `kind`, `text`; without one the history that the finding has
    commands: `command` and `purpose` of what can be typed next
    """
    story = list(lines) or history_lines(finding)
    return {
        "finding": finding,
        "place": [(name, value) for name, value in _place(finding) if value is not None],
        "sides": compared(finding["expected"], finding["found"]),
        "lanes": lanes(story, finding["last_good_step"]),
        "story": story,
        "causes": finding["causes"],
        "advice": advice,
        "commands": commands,
    }


def history_lines(finding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The history that a finding has of its page, with the write and the finding itself, oldest first."""
    lines = [line for text in finding["history"] if (line := _line(text)) is not None]
    if finding["write_step"] is not None and not any(line["kind"] == "wrote" for line in lines):
        text = f"slot {finding['slot']} written by {finding['writer']!r}, {finding['write_site'][0]}"
        lines.append({"step": finding["write_step"], "kind": "wrote", "text": text})
    text = f"{finding['code']} {finding['name']}: {finding['sentence']}"
    lines.append({"step": finding["step"], "kind": "found", "text": text})
    return sorted(lines, key=lambda line: line["step"])


def _line(text: str) -> dict[str, Any] | None:
    """`granted to 'a' at step 1 (file.py:8)` or `step 1: block 2 granted to 'a'`; None where it names no step."""
    parts = AT_STEP.fullmatch(text)
    step = parts and (parts["early"] or parts["late"])
    if parts is None or step is None:
        return None
    kind = "born" if any(word in parts["text"] for word in BIRTHS) else "page"
    kind = "wrote" if "written by" in parts["text"] else kind
    return {"step": int(step), "kind": kind, "text": parts["text"] + (parts["place"] or "")}


def _place(finding: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """From the widest to the narrowest: pool, page, slot, and where they are known layer, part, head, dim, bit."""
    is_slot = finding["slot"] >= 0
    layers = ", ".join(map(str, finding["layers"][:4])) + (" ..." if len(finding["layers"]) > 4 else "")
    narrow = {name: finding[name] for name in PLACE} | {"layer": layers or None}
    return [
        ("pool", finding["pool"]),
        ("page", finding["page"] if is_slot else None),
        ("slot", finding["slot"] if is_slot else None),
        ("position", finding["position"]),
        *narrow.items(),
        ("step", f"{finding['step']}, {finding['site'][0]}"),
        ("request", finding["reader"] or finding["writer"]),
    ]
