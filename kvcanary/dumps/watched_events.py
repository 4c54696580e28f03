"""Watched events: the steps of an engine that nobody tells the canary about, and the story of a block out of them.

A step is plain JSON: `step`, `site`, `tokens` (that were fed), `rows` (request, row number and length, entries of this
step included) and `events`, which happened before it: a kind and what is known of it. Blocks are those of block tables.

    granted    request, blocks by group, and the entries that it has already; null: the blocks follow those that it had
    ended, preempted                           request
    copied     group, blocks from, blocks to;  zeroed: group, blocks;  loaded: group, request, blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcanary.pools.launch_site import site_name

GRANTED, ENDED, PREEMPTED = "granted", "ended", "preempted"
COPIED, ZEROED, LOADED = "copied", "zeroed", "loaded"
KIND = "watched"  # in the manifest of such a dump


class Line(NamedTuple):
    """One thing that happened. `kind`: born, wrote, moved, freed or found."""

    step: int
    kind: str
    text: str


def story_of_block(
    steps: Iterable[Mapping[str, Any]],
    group: int,
    block: int,
    block_size: int,
    rows: Mapping[str, Sequence[int]] | None = None,
) -> list[Line]:
    """Everything that happened to a block of a group, oldest first; writes of one request in a row are one line.

    rows: blocks of requests whose block tables were read, where their grants may lie before the first step
    """
    follower = _Follower(group, block, block_size, rows or {})
    lines: list[Line] = []
    for step in steps:
        for event in step["events"]:
            lines += [Line(step["step"], kind, text) for kind, text in follower.happened(*event)]
        lines += follower.wrote(step)
    return _with_spans(lines, follower.spans)


class _Follower:
    """Which rows have the block, and what they write there."""

    def __init__(self, group: int, block: int, size: int, known: Mapping[str, Sequence[int]]) -> None:
        self._group, self._block, self._size = group, block, size
        self._known = known
        self._rows: dict[str, list[int]] = {name: list(blocks) for name, blocks in known.items()}
        self._ends: dict[str, int] = {}
        self._last: tuple[str, str] | None = None
        self.spans: list[list[int]] = []  # of each line of a write: first and last position, last step

    def happened(self, kind: str, *facts: Any) -> Iterator[tuple[str, str]]:
        if kind == GRANTED:
            yield from self._granted(*facts)
        elif kind in (ENDED, PREEMPTED):
            yield from self._left(kind, facts[0])
        elif facts[0] == self._group:
            yield from self._moved(kind, *facts[1:])

    def _granted(self, name: str, granted: Sequence[Sequence[int]], length: int | None) -> Iterator[tuple[str, str]]:
        own = list(granted[self._group]) if self._group < len(granted) else []
        if length is not None:
            self._rows[name], self._ends[name] = own, length
        elif name in self._rows and name not in self._known:
            self._rows[name] += own
        if self._block not in own:
            return
        self._last = None
        place = self._place(name)
        where = "" if place is None else f" for positions {place} to {place + self._size - 1}"
        if length is not None and place is not None and place < length:
            yield "born", f"given to {name!r}{where}, computed before: a prefix hit or a load"
        else:
            yield "born", f"granted to {name!r}{where}"

    def _left(self, kind: str, name: str) -> Iterator[tuple[str, str]]:
        self._ends.pop(name, None)
        if self._block in self._rows.pop(name, ()):
            self._last = None
            yield "freed", f"given up by {name!r}, which {'ended' if kind == ENDED else 'was preempted'}"

    def _moved(self, kind: str, *facts: Any) -> Iterator[tuple[str, str]]:
        if kind == COPIED:
            src, dst = facts
            if self._block in dst:
                yield "moved", f"overwritten with a copy of block {src[dst.index(self._block)]}"
            elif self._block in src:
                yield "moved", f"copied to block {dst[src.index(self._block)]}"
        elif self._block in facts[-1]:
            yield "moved", "zeroed" if kind == ZEROED else f"loaded for {facts[0]!r} from elsewhere"

    def wrote(self, step: Mapping[str, Any]) -> Iterator[Line]:
        """A line of every request that writes here; none where it goes on from its last one."""
        site = site_name(*step["site"])
        for name, _, end in step["rows"]:
            before, self._ends[name] = self._ends.get(name, end), end
            place = self._place(name)
            if place is None:
                continue
            first, last = max(before, place), min(end, place + self._size) - 1
            if first > last:
                continue
            if self._last == (name, site):
                self.spans[-1][1:] = last, step["step"]
            else:
                self._last = name, site
                self.spans.append([first, last, step["step"]])
                yield Line(step["step"], "wrote", f"written by {name!r}, {site}")

    def _place(self, name: str) -> int | None:
        """The first position that a request has in the block."""
        row = self._rows.get(name, ())
        return row.index(self._block) * self._size if self._block in row else None


def _with_spans(lines: Sequence[Line], spans: Sequence[Sequence[int]]) -> list[Line]:
    """Which positions a line of writes is about, and until when."""
    told, left = [], iter(spans)
    for line in lines:
        if line.kind == "wrote":
            first, last, until = next(left)
            which = f"position {first}" if first == last else f"positions {first} to {last}"
            more = "" if until == line.step else f", until step {until}"
            line = line._replace(text=f"{which} {line.text}{more}")
        told.append(line)
    return told
