"""A page's history as lanes over steps: who had it, when it was written and read, and where a check fired."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

ROWS = {"wrote": "written", "moved": "written", "read": "read", "found": "found"}
OWNER = re.compile(r"(?:to|by|row of) (?P<name>'[^']*'|\"[^\"]*\")")
ENDS = re.compile(r"\b(freed|evicted|given up)\b")
MOST_TICKS = 6


def lanes(lines: Sequence[Mapping[str, Any]], last_good: int | None = None) -> dict[str, Any] | None:
    """Places of everything in per cent of the width; None without lines.

    lines:     `step`, `kind` (born, owned, wrote, read, moved, freed, page or found) and `text`, oldest first
    last_good: step in which the bytes were last known good; from there to the finding nobody knows

    ticks: steps with their places.  owners: spans with a name.  rows: by name of the lane its marks.
    doubt: the span between last good and found, None where that is not known
    """
    if not lines:
        return None
    scale = _Scale(min(line["step"] for line in lines), max(line["step"] for line in lines))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in dict.fromkeys(ROWS.values())}
    for line in lines:
        if line["kind"] in ROWS:
            title = f"step {line['step']}: {line['text']}"
            rows[ROWS[line["kind"]]].append({"x": scale.middle(line["step"]), "title": title})
    found = [line["step"] for line in lines if line["kind"] == "found"]
    is_known = last_good is not None and found and scale.first <= last_good < found[-1]
    return {
        "ticks": scale.ticks(),
        "owners": _owners(lines, scale),
        "rows": {name: marks for name, marks in rows.items() if marks},
        "doubt": scale.span(last_good, found[-1]) if is_known and last_good is not None else None,
    }


class _Scale:
    """Steps as places between 0 and 100."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self._width = first, last, 100 / (last - first + 1)

    def middle(self, step: int) -> float:
        return round((step - self.first + 0.5) * self._width, 2)

    def span(self, start: int, end: int) -> dict[str, float]:
        """From the middle of one step to the middle of another."""
        return {"x": self.middle(start), "width": round((end - start) * self._width, 2)}

    def ticks(self) -> list[dict[str, Any]]:
        count = min(self.last - self.first, MOST_TICKS - 1)
        steps = {self.first + round(number * (self.last - self.first) / max(count, 1)) for number in range(count + 1)}
        return [{"step": step, "x": self.middle(step)} for step in sorted(steps)]


def _owners(lines: Sequence[Mapping[str, Any]], scale: _Scale) -> list[dict[str, Any]]:
    """Spans in which somebody had the page."""
    spans: list[tuple[int, int | None, str]] = []
    for line in lines:
        name = OWNER.search(line["text"])
        if line["kind"] == "born":
            spans = _ended(spans, line["step"])
            spans.append((line["step"], None, name["name"][1:-1] if name else ""))
        elif line["kind"] == "freed" or (line["kind"] == "page" and ENDS.search(line["text"])):
            spans = _ended(spans, line["step"])
    return [
        {"name": name, "start": start, "end": end} | scale.span(start, scale.last if end is None else end)
        for start, end, name in spans
    ]


def _ended(spans: list[tuple[int, int | None, str]], step: int) -> list[tuple[int, int | None, str]]:
    """The last span ends here, unless it has ended."""
    if spans and spans[-1][1] is None:
        spans[-1] = (spans[-1][0], step, spans[-1][2])
    return spans
