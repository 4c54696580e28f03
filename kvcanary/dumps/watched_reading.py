"""Watched reading: the dump of a pool that was only watched, from a file that may be anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvcanary.codes import CODES
from kvcanary.dumps.container import MemberReader, expect_whole, parse_json, read_arrays, read_members
from kvcanary.dumps.reading import MOST_POOLS, MOST_SLOTS, Dump, read_dump
from kvcanary.dumps.watched_events import COPIED, ENDED, GRANTED, KIND, LOADED, PREEMPTED, ZEROED

_INT64 = 1 << 63
_TEXTS = ("kvcanary", "created", "trigger", "device", "tokens")
#: Of what a command reads of a finding: the type of each field.
_OF_FINDING: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "sentence", "pool"), str),
    **dict.fromkeys(("page", "slot", "offset", "step", "first_bad_step", "incident"), int),
    **dict.fromkeys(("causes", "history", "evidence", "readers", "layers", "site", "bytes_of"), list),
    **dict.fromkeys(("expected", "found"), dict),
    **dict.fromkeys(("position", "layer", "head", "dim", "bit", "byte", "write_step"), (int, type(None))),
    **dict.fromkeys(("reader", "writer", "part"), (str, type(None))),
}


@dataclass(frozen=True, eq=False)
class WatchedDump:
    """What such a dump says.

    manifest: what, when, where, of which groups and pools, under which settings
    findings: as their events have them
    steps:    as in `dumps.watched_events`, oldest first
    slots:    what lay around each finding, as `SeenSlot`, plain JSON, its record a dict
    rows:     by request, number, `tables` by group, and `tokens`
    """

    path: Path | str
    manifest: dict[str, Any]
    findings: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    slots: list[dict[str, Any]]
    rows: dict[str, dict[str, Any]]

    @cached_property
    def pools(self) -> dict[str, dict[str, Any]]:
        """By name, each with the number of its group, and its sizes."""
        return {
            pool["name"]: pool | {"of_group": group} for group in self.manifest["groups"] for pool in group["pools"]
        }

    def group_of(self, pool: str) -> dict[str, Any]:
        group: dict[str, Any] = self.pools[pool]["of_group"]
        return group


def read_any(path: Path | str) -> Dump | WatchedDump:
    """A dump of either kind. DumpError, one sentence, where it is no dump that this version can read."""
    path = Path(path)
    members = read_members(path)
    manifest = parse_json(path, "manifest.json", members["manifest.json"])
    if manifest.get("kind") != KIND:
        return read_dump(path)
    with expect_whole(path):
        return _Reader(path, members, manifest).dump()


class _Reader(MemberReader):
    def __init__(self, path: Path, members: Mapping[str, bytes], manifest: dict[str, Any]) -> None:
        super().__init__(path, members)
        self._manifest = manifest
        self._ints = read_arrays(path, members["arrays.safetensors"])["ints"]

    def dump(self) -> WatchedDump:
        self._check_manifest()
        rows = [self._row(line) for line in self._lines("requests.jsonl")]
        return WatchedDump(
            self._path,
            self._manifest,
            [self._finding(line) for line in self._lines("findings.jsonl")],
            [self._step(line) for line in self._lines("events.jsonl")],
            [self._slot(line) for line in self._lines("history.jsonl")],
            {row["request"]: row for row in rows},
        )

    def _check_manifest(self) -> None:
        manifest = self._manifest
        for key in _TEXTS:
            self._name(manifest[key])
        for key in ("step", "first_step"):
            self._int(manifest[key], 0)
        for key in ("config", "environment", "certificate"):
            self._expect(isinstance(manifest[key], dict), f"{key} is no object")
        for value in manifest["environment"].values():
            self._expect(isinstance(value, str | int), "an environment is no text")
        self._expect(isinstance(manifest["content"], bool), "content is no flag")
        groups = manifest["groups"]
        self._expect(isinstance(groups, list) and len(groups) <= MOST_POOLS, "it has no list of groups")
        for group in groups:
            for key, low, high in (
                ("number", 0, MOST_POOLS),
                ("block_size", 1, MOST_SLOTS),
                ("window", -_INT64, _INT64),
            ):
                self._int(group[key], low, high)
            self._int(group["num_slots"], 1, MOST_SLOTS)
            for pool in group["pools"]:
                self._name(pool["name"])
                self._int(pool["layers"], 1, MOST_SLOTS)
                self._int(pool["slot_bytes"], 1, _INT64)
                for name in pool["layer_names"]:
                    self._name(name)

    def _finding(self, line: Any) -> dict[str, Any]:
        self._expect(line.get("code") in CODES, f"a finding has code {str(line.get('code'))[:20]!r}")
        for key, kind in _OF_FINDING.items():
            self._expect(isinstance(line[key], kind), f"{key} of a finding is {str(line[key])[:40]!r}")
        for cause in line["causes"]:
            self._expect(all(isinstance(cause[key], str) for key in ("family", "text", "basis")), "a cause is no text")
        self._site(line["site"])
        return dict(line)

    def _step(self, line: Any) -> dict[str, Any]:
        self._int(line["step"], 0)
        self._int(line["tokens"], 0)
        self._site(line["site"])
        for name, number, end in line["rows"]:
            self._name(name)
            self._int(number, 0)
            self._int(end, 0)
        for kind, *facts in line["events"]:
            self._event(kind, facts)
        return dict(line)

    def _event(self, kind: Any, facts: Sequence[Any]) -> None:
        if kind == GRANTED:
            name, blocks, length = facts
            self._name(name)
            for own in blocks:
                self._blocks(own)
            self._expect(length is None or self._int(length, 0) >= 0, "a length is none")
        elif kind in (ENDED, PREEMPTED):
            [name] = facts
            self._name(name)
        elif kind == COPIED:
            group, src, dst = facts
            self._int(group, 0)
            self._expect(len(self._blocks(src)) == len(self._blocks(dst)), "a copy has no two sides")
        else:
            self._expect(kind in (ZEROED, LOADED), f"an event is {str(kind)[:40]!r}, which nobody knows")
            self._int(facts[0], 0)
            self._blocks(facts[-1])
            if kind == LOADED:
                self._name(facts[1])

    def _slot(self, line: Any) -> dict[str, Any]:
        for key in ("finding", "group", "slot"):
            self._int(line[key], 0)
        for key in ("recorded", "found"):
            self._name(line[key])
        self._expect(line["position"] is None or self._int(line["position"], 0) >= 0, "a position is none")
        self._expect(isinstance(line["is_taken"], bool), "is_taken is no flag")
        for name in line["wrong"]:
            self._name(name)
        for held in ([] if line["record"] is None else [line["record"]]) + line["same"]:
            for key in ("position", "step"):
                self._int(held[key], 0)
            self._expect(held["request"] is None or bool(self._name(held["request"])), "a request has no name")
        return dict(line)

    def _row(self, line: Any) -> dict[str, Any]:
        self._name(line["request"])
        self._int(line["number"], 0)
        tables = [self._array(ref).tolist() for ref in line["tables"]]
        return dict(line) | {"tables": tables, "tokens": self._array(line["tokens"]).tolist()}

    def _array(self, ref: Any) -> Any:
        start, length = (self._int(number, 0) for number in ref)
        ints = self._ints
        fits = ints.dtype == np.int64 and ints.ndim == 1 and start + length <= len(ints)
        self._expect(fits, f"integers lie at {start}, {length} of them, where there are none")
        return ints[start : start + length]

    def _blocks(self, blocks: Any) -> Sequence[int]:
        for block in blocks:
            self._int(block, 0)
        return list(blocks)

    def _site(self, site: Any) -> None:
        kind, index = site
        self._name(kind)
        self._int(index, 0, 256)

    def _int(self, value: Any, low: int = -_INT64, high: int = _INT64) -> int:
        is_int = isinstance(value, int) and not isinstance(value, bool) and low <= value < high
        self._expect(is_int, f"{str(value)[:40]} is no number from {low} on")
        return int(value)
