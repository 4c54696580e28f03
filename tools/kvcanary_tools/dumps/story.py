"""The story of a slot: what happened to it and to its page, from the page's birth on, out of a dump."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcanary.dumps.event_schema import FORWARDS, by_request, plan_part
from kvcanary.dumps.reading import Call, Dump
from kvcanary.ledger.page_history import phrase
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary.pools.launch_site import site_name, unpack_site
from kvcanary_kernels.record.layout import MASK_32, NO_OWNER, SHARED_OWNER


class Line(NamedTuple):
    """One thing that happened. `kind`: born, owned, wrote, read, moved, freed or found."""

    step: int
    kind: str
    text: str


def story_of(dump: Dump, pool: str, slot: int) -> list[Line]:
    """Everything that the dump knows of a slot and its page, oldest first; reads in a row are told once."""
    page = slot // dump.manifest["page_size"]
    own = _Follower(dump, pool, slot, page)
    events = [(event["n"], line) for step, event in dump.stepped() for line in own.lines(step, event)]
    numbers = {_head(line): number for number, line in events} | {
        (step, f"page {page} committed by {name!r}"): event["n"]
        for step, event in dump.stepped()
        for name in _committed(event)
    }
    history = _placed(dump.history.get(page, ()), page, numbers)
    known = {_head(line) for _, line in history}
    lines = history + [(number, line) for number, line in events if _head(line) not in known]
    judged = _judged(dump)
    for finding in dump.findings:
        if finding["pool"] == pool and finding["slot"] == slot:
            text = f"{finding['code']} {finding['name']}: {finding['sentence']}"
            step = finding["step"]
            lines.append((judged.get(step, len(dump.events)), Line(step, "found", text)))
    return [line for _, line in sorted(lines, key=lambda placed: (placed[1].step, placed[0]))]


def _committed(event: Call) -> Sequence[str]:
    """Requests whose entries became final with this event."""
    if event["call"] == "commit_all":
        names: list[str] = event["request_ids"]
        return names
    return [event["request_id"]] if event["call"] == "commit" else []


def _judged(dump: Dump) -> dict[int, int]:
    """By step, the event in which the engine heard what was found in it; whoever ends then ends behind it."""
    collected = {event["step"]: event["n"] for event in dump.events if event["call"] in ("collect", "hear")}
    return {step: event["n"] for step, event in dump.stepped() if event["call"] == "check"} | collected


def _placed(
    history: Sequence[Sequence[Any]], page: int, events: Mapping[tuple[int, str], int]
) -> list[tuple[int, Line]]:
    """What is remembered of a page, each with the number of the event that it was, or that it followed in its step.

    -1: nothing of it was recorded before in this step
    """
    placed: list[tuple[int, Line]] = []
    for kind, step, request, place in history:
        is_birth = kind in ("granted", "set aside", "copied")
        line = Line(step, "born" if is_birth else "page", _page_event(page, kind, request, place))
        before = placed[-1][0] if placed and placed[-1][1].step == step else -1
        placed.append((events.get(_head(line), before), line))
    return placed


def _head(line: Line) -> tuple[int, str]:
    """What is the same in history and events: all but the place in the code."""
    return line.step, line.text.split(" (")[0]


def truth_of(dump: Dump, pool: str, slot: int) -> dict[str, Any]:
    """What is true of a slot at the end of the recording."""
    page = slot // dump.manifest["page_size"]
    owner = int(dump.arrays["now.owners"][page]) if page < dump.manifest["num_pages"] else NO_OWNER
    names = dump.manifest["names"]
    facts: dict[str, Any] = {
        "pool": pool,
        "slot": slot,
        "page": page,
        "offset": slot % dump.manifest["page_size"],
        "state": STATE_NAMES.get(int(dump.arrays["now.states"][page]), "?"),
        "owner": {NO_OWNER: None, SHARED_OWNER: "shared"}.get(owner, names.get(str(owner), owner)),
        "generation": int(dump.arrays["now.generations"][page]),
        "references": int(dump.arrays["now.refcounts"][page]),
        "rows": [request["request_id"] for request in dump.now if page in request["pages"]],
    }
    records = dump.arrays.get("now.records")
    if records is not None:
        words = records[dump.bases[pool] + slot].view(np.uint64)
        site = int(words[3] >> np.uint64(32))
        if site:
            kind, index, _ = unpack_site(site)
            uid = int(words[2]) & MASK_32
            facts["written"] = {
                "position": int(words[0] >> np.uint64(32)),
                "request": names.get(str(uid)),
                "generation": int(words[2] >> np.uint64(32)),
                "step": int(words[3]) & MASK_32,
                "site": site_name(kind, index),
            }
    return facts


class _Follower:
    """Which events concern one slot."""

    def __init__(self, dump: Dump, pool: str, slot: int, page: int) -> None:
        self._dump, self._pool, self._slot, self._page = dump, pool, slot, page
        self._rows = {request["request_id"]: request["pages"].tolist() for request in dump.start}
        self._readers: set[str] = set()

    def lines(self, step: int, event: Call) -> Iterator[Line]:
        call = event["call"]
        if call in FORWARDS and event["pool"] == self._pool:
            yield from self._forward(step, event)
        elif call in ("on_move", "captured_move") and self._pool in (event["pool"], event.get("to")):
            yield from self._moved(step, event)
        elif call == "on_alloc_all":
            own = by_request(event["counts"], event["pages"])
            for name, pages in zip(event["request_ids"], own, strict=True):
                alone = {"call": "on_alloc", "request_id": name, "pages": np.array(pages, np.int64)}
                yield from self.lines(step, alone)
        elif "pages" in event and call.startswith("on_"):
            self._follow(call, event)
            if self._page in event["pages"]:
                what, by = _WORDS.get(call, (call, "")), event.get("request_id")
                yield Line(step, what[1] or "page", f"page {self._page} {what[0]}" + (f" {by!r}" if by else ""))
        elif call == "on_copy" and self._page in (event["page"], event["copy"]):
            taken = (
                f"page {event['copy']} takes the place of page {event['page']} in the row of {event['request_id']!r}"
            )
            yield Line(step, "page", f"{taken}; its bytes follow by a move")

    def _follow(self, call: str, event: Call) -> None:
        row = self._rows.setdefault(event.get("child_id") or event.get("request_id", ""), [])
        if call in ("on_alloc", "on_acquire", "on_fork"):
            row += event["pages"].tolist()
        elif call == "on_free":
            gone = set(event["pages"].tolist())
            row[:] = [page for page in row if page not in gone]

    def _forward(self, step: int, event: Call) -> Iterator[Line]:
        where, positions = np.flatnonzero(plan_part(event, "slots") == self._slot), plan_part(event, "positions")
        site = site_name(event["kind"], event["index"])
        for entry in where.tolist():
            self._readers.clear()
            row = _row_of(event, entry)
            writer = event["requests"][row // event["width"]]
            position = int(positions[entry])
            yield Line(step, "wrote", f"slot {self._slot} written by {writer!r} at position {position}, {site}")
        for number, request in enumerate(event["requests"]):
            if request not in self._readers and self._reads(event, number, request):
                self._readers.add(request)
                yield Line(step, "read", f"slot {self._slot} first read by {request!r} after that, {site}")

    def _reads(self, event: Call, number: int, request: str) -> bool:
        """Whether the row's prefix has the slot, as granted or as the row names it."""
        size, prefix = self._dump.manifest["page_size"], int(plan_part(event, "prefixes")[number])
        row = self._rows.get(request, [])
        if self._page in row and row.index(self._page) * size + self._slot % size < prefix:
            return True
        return number * event["width"] in event["whole_rows"] and self._slot in event["wholes"]

    def _moved(self, step: int, event: Call) -> Iterator[Line]:
        for name, ours, other, word in (
            ("src", event["src"], event["dst"], "moved to"),
            ("dst", event["dst"], event["src"], "overwritten with what lay in"),
        ):
            for place in np.flatnonzero(ours == self._slot).tolist():
                if int(other[place]) != self._slot:
                    kind = "moved" if name == "src" else "wrote"
                    yield Line(step, kind, f"slot {self._slot} {word} slot {int(other[place])}, a declared move")


def _row_of(event: Call, entry: int) -> int:
    """The row that writes this entry."""
    ends = np.cumsum(plan_part(event, "written"))
    return int(np.searchsorted(ends, entry, side="right"))


def _page_event(page: int, kind: str, request: str | None, place: Any) -> str:
    return f"page {page} {phrase(kind, request)}" + (f" ({place})" if place else "")


_WORDS = {
    "on_alloc": ("granted to", "born"),
    "on_free": ("freed by", ""),
    "on_share": ("published by", ""),
    "on_acquire": ("acquired by", ""),
    "on_fork": ("forked by", ""),
    "on_evict": ("evicted", ""),
    "on_load_begin": ("marked loading by", ""),
    "on_load_end": ("loaded by", ""),
    "on_load_fail": ("marked load-failed by", ""),
    "on_restore": ("restored by", ""),
    "on_offload": ("put away", ""),
    "on_swap_out": ("sent to the host", ""),
    "on_swap_in": ("brought back from the host", ""),
}
