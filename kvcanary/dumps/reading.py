"""Reading: a dump from a file that may be anything; what is handed out has the types and sizes that it should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcanary.codes import CODES, UNWRITTEN
from kvcanary.dumps.container import MOST_NAME, MemberReader, expect_whole, parse_json, read_arrays, read_members
from kvcanary.dumps.event_schema import CALLS, FORWARDS, OF_SEVERAL, plan_part
from kvcanary.dumps.manifest import SHARE_SETTINGS
from kvcanary.native.layout import plan_layout
from kvcanary.pools.launch_site import SUBSTEP_KINDS
from kvcanary.pools.shares import MAX_LAYER_NUMBER
from kvcanary.recorder.checkpoint import PAGE_ARRAYS
from kvcanary.recorder.recorder import PUBLIC_WORDS
from kvcanary_kernels.record.layout import MASK_32, MAX_LAYERS

Call = dict[str, Any]
MOST_POOLS = 64
MOST_SLOTS = 1 << 24
MOST_ROW_ELEMENTS = 1 << 20
MOST_CAPTURED = 256  # forwards, buckets times kinds and indices
MOST_CAPTURED_ENTRIES = 1 << 20
_INT64 = 1 << 63
#: Numbers of a manifest, of each pool and of each captured forward: the least, and the first that is too large.
_SIZES = {
    **dict.fromkeys(("step", "first_step", "quarantine"), (0, _INT64)),
    **dict.fromkeys(("page_size", "num_pages", "null_pages"), (1, MOST_SLOTS)),
    "seed": (0, 1 << 64),
}
_POOL_SIZES = {
    **dict.fromkeys(("num_slots", "null_slots"), (1, MOST_SLOTS)),
    **dict.fromkeys(("token_offset", "ahead"), (0, MOST_NAME)),
    "layers": (1, MAX_LAYERS + 1),
    "slot_bytes": (1, 1 << 40),
}
_FORWARD_SIZES = {
    **dict.fromkeys(("index", "ancestors"), (0, 256)),
    **dict.fromkeys(("rows", "entries"), (1, MOST_CAPTURED_ENTRIES)),
    "indices": (1, MOST_SLOTS),
    "width": (1, MOST_NAME),
    "depth": (0, MOST_NAME),
}
#: What older dumps do not name: of a captured forward, and of a request.
_NEW_OF_FORWARD = dict.fromkeys(("has_roots", "has_lineage", "judges_bytes"), False)
_NEW_OF_REQUEST: dict[str, Any] = {"is_damaged": False, "unheard": []}
_NONE: NDArray[Any] = np.empty(0, np.int64)
DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1}
DTYPES |= {"uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1}


@dataclass(frozen=True, eq=False)
class Dump:
    """What a dump says.

    path:     of the file, or the URL that gave it
    manifest: what, when, of which pools, under which settings
    findings: as their events have them
    events:   in order, by the fields of `CALLS`, integers as arrays; `n` counts them, `damage` came just before
    start, now: the live requests at the beginning of the recording and at its end
    history:  by page its newest events, (kind, step, request, place)
    arrays:   by name, `start.NAME` and `now.NAME`
    """

    path: Path | str
    manifest: dict[str, Any]
    findings: list[dict[str, Any]]
    events: list[Call]
    start: list[dict[str, Any]]
    now: list[dict[str, Any]]
    history: dict[int, list[list[Any]]]
    arrays: dict[str, NDArray[Any]]

    @cached_property
    def pools(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {pool["name"]: pool for pool in self.manifest["pools"]}

    @cached_property
    def bases(self) -> dict[str, int]:
        """By pool, the row of its slot 0 in the records of all."""
        sizes = (pool["num_slots"] for pool in self.pools.values())
        return dict(zip(self.pools, accumulate(sizes, initial=0), strict=False))

    def stepped(self) -> Iterator[tuple[int, Call]]:
        """Every event with the step in which it happened."""
        step = self.manifest["first_step"]
        for event in self.events:
            if event["call"] == "begin_step":
                step = event["step"]
            yield step, event


def read_dump(path: Path | str) -> Dump:
    """DumpError, one sentence, where it is no dump that this version can read."""
    path = Path(path)
    members = read_members(path)
    with expect_whole(path):
        return _Reader(path, members).dump()


class _Reader(MemberReader):
    def __init__(self, path: Path, members: Mapping[str, bytes]) -> None:
        super().__init__(path, members)
        self._arrays = read_arrays(path, members["arrays.safetensors"])
        self._ints = self._arrays.get("ints", _NONE)

    def dump(self) -> Dump:
        manifest = self._manifest()
        requests = [self._request(line, manifest) for line in self._lines("requests.jsonl")]
        self._check_arrays(manifest)
        return Dump(
            self._path,
            manifest,
            [self._finding(line) for line in self._lines("findings.jsonl")],
            [self._event(line, number, manifest) for number, line in enumerate(self._lines("events.jsonl"))],
            [request for request in requests if request["when"] == "start"],
            [request for request in requests if request["when"] == "now"],
            {
                self._int(line["page"], "page"): self._page_events(line["events"])
                for line in self._lines("history.jsonl")
            },
            self._arrays,
        )

    def _manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = parse_json(self._path, "manifest.json", self._members["manifest.json"])
        self._sizes(manifest, _SIZES)
        pools = manifest["pools"]
        self._expect(isinstance(pools, list) and 0 < len(pools) <= MOST_POOLS, "it has no list of pools")
        for pool in pools:
            self._pool(pool)
        names = [pool["name"] for pool in pools]
        for key, check in (("captured", self._captured), ("captured_moves", self._captured_move)):
            self._expect(isinstance(manifest[key], list) and len(manifest[key]) <= MOST_CAPTURED, f"{key} is no list")
            for one in manifest[key]:
                self._expect(one["pool"] in names, "what is captured is of no pool")
                check(one)
        if manifest.setdefault("seats", None) is not None:  # which older dumps do not name
            sizes = [self._int(size, "seats") for size in manifest["seats"]]
            self._expect(len(sizes) == 2 and all(0 < size < MOST_CAPTURED_ENTRIES for size in sizes), "seats are none")
        for key in ("config", "start", "certificate", "names"):
            self._expect(isinstance(manifest[key], dict), f"{key} is no object")
        for key in ("trigger", "created", "kvcanary", "device", "tokens"):
            self._expect(isinstance(manifest[key], str), f"{key} is no text")
        return manifest

    def _pool(self, pool: Any) -> None:
        self._sizes(pool, _POOL_SIZES, " of a pool")
        self._share(pool)
        for key in ("vocab_size", "window", "map_slots"):
            self._expect(pool[key] is None or 0 < self._int(pool[key], key) < _INT64, f"{key} is {pool[key]}")
        self._expect(pool["map_slots"] is None or pool["map_slots"] <= MOST_SLOTS, "a slot map is too long")
        for key in ("name", "root_name", "group"):
            self._name(pool[key])
        self._expect(isinstance(pool["parts"], list) and 0 < len(pool["parts"]) <= MOST_POOLS, "a pool has no parts")
        for part in pool["parts"]:
            self._name(part["name"])
            shape = [self._int(size, "a shape") for size in part["shape"]]
            self._expect(len(shape) <= 3 and all(size > 0 for size in shape), f"a part has shape {shape[:4]}")
            self._expect(np.prod(shape, dtype=object) <= MOST_ROW_ELEMENTS, f"a part has shape {shape}")
            self._expect(part["dtype"] in DTYPES, f"elements are {part['dtype']!r}")

    def _share(self, pool: Any) -> None:
        pool |= SHARE_SETTINGS | pool
        self._sizes(pool, dict.fromkeys(("first_head", "whole_heads"), (0, MOST_ROW_ELEMENTS + 1)), " of a pool")
        numbers = [self._int(number, "a layer's number") for number in pool["layer_numbers"]]
        fits = not numbers or len(numbers) == len(set(numbers)) == pool["layers"]
        self._expect(fits and all(0 <= n <= MAX_LAYER_NUMBER for n in numbers), f"layers are numbered {numbers[:8]}")

    def _captured(self, one: Any) -> None:
        nodes = {} if one["nodes"] is None else {"nodes": (1, MOST_NAME)}
        self._sizes(one, _FORWARD_SIZES | nodes, " of a captured forward")
        fits = one["kind"] in SUBSTEP_KINDS and one["rows"] % one["width"] == 0
        fits &= one["nodes"] is None or one["rows"] * one["nodes"] ** 2 <= MOST_SLOTS
        self._expect(fits and one["rows"] * one["ancestors"] <= MOST_SLOTS, "a captured forward has no such sizes")
        one |= _NEW_OF_FORWARD | one
        for key in ("has_parents", "has_truths", *_NEW_OF_FORWARD):
            self._expect(isinstance(one[key], bool), f"{key} of a captured forward is no flag")

    def _captured_move(self, one: Any) -> None:
        self._expect(1 <= self._int(one["size"], "size") < MOST_CAPTURED_ENTRIES, f"a move is of {one['size']} entries")

    def _check_arrays(self, manifest: dict[str, Any]) -> None:
        total = sum(pool["num_slots"] for pool in manifest["pools"])
        wanted: dict[str, tuple[int, ...]] = {
            f"{when}.{name}": (manifest["num_pages"],) for when in ("start", "now") for name in PAGE_ARRAYS
        }
        wanted |= {"start.judged": (total,), "start.read_at": (manifest["num_pages"],)}
        are_wanted = {"start.records": manifest["has_records"] is True, "now.records": "now.records" in self._arrays}
        wanted |= {name: (total, 4) for name, is_wanted in are_wanted.items() if is_wanted}
        for name, shape in wanted.items():
            array = self._arrays.get(name)
            kind = np.uint8 if name == "start.judged" else np.int64
            fits = array is not None and array.shape == shape and array.dtype == kind
            self._expect(fits, f"array {name} is not {list(shape)} {np.dtype(kind)}")
        for when in ("start", "now"):
            partial = self._arrays.get(f"{when}.partial", _NONE)
            is_table = partial.ndim == 2 and partial.shape[1] == 3 and partial.dtype == np.int64
            self._expect(is_table, f"array {when}.partial is no table")
            rows = partial[:, 0]
            self._expect(bool(((rows >= 0) & (rows < total)).all()), f"array {when}.partial names no slots")

    # one line each

    def _request(self, line: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
        line, num_pools = _NEW_OF_REQUEST | line, len(manifest["pools"])
        self._name(line["request_id"])
        for key in ("root", "committed_len", "final_pages", "commit_step"):
            self._int(line[key], key)
        self._expect(
            line["owned_len"] is None or self._int(line["owned_len"], "owned_len") >= 0, "a length is negative"
        )
        for key, width in (("row_lens", 0), ("judged", 3)):
            self._expect(len(line[key]) == num_pools, f"{key} has not one entry a pool")
            self._table(line[key], width)
        self._expect(len(line["reads"]) == num_pools, "reads has not one queue a pool")
        for queue in line["reads"]:
            self._table(queue, 3)
        self._table(line["growth"], 2)
        self._table(line["unheard"], 3)
        return line | {"tokens": self._array(line["tokens"]), "pages": self._array(line["pages"])}

    def _event(self, line: dict[str, Any], number: int, manifest: dict[str, Any]) -> Call:
        call = line.get("call")
        self._expect(
            isinstance(call, str) and call in CALLS, f"event {number} is {str(call)[:40]!r}, which nobody knows"
        )
        event: Call = {"n": number, "call": call}
        for field, kind in CALLS[str(call)].items():
            value = line.get(field)
            if value is None:
                self._expect(kind.endswith("?"), f"event {number}, {call}, has no {field}")
                continue
            event[field] = self._field(kind.rstrip("?"), value, f"{field} of event {number}")
        if call in FORWARDS:
            self._forward(event, manifest)
        if call in OF_SEVERAL:
            (field, what), counts = OF_SEVERAL[call], event["counts"]
            fits = len(counts) == len(event["request_ids"]) and bool((counts >= 0).all())
            self._expect(fits and counts.sum() == len(event[field]), f"{what} are not those of requests")
        if call == "launch":
            self._launch(event, manifest)
        if call == "captured_move":
            self._move(event, manifest)
        if "damage" in line:
            event["damage"] = [self._damage(entry, manifest) for entry in line["damage"]]
        return event

    def _field(self, kind: str, value: Any, what: str) -> Any:
        if kind in ("ints", "tokens"):
            return self._array(value)
        if kind == "int":
            return self._int(value, what, 1 << MAX_LAYERS)
        if kind == "flag":
            self._expect(isinstance(value, bool), f"{what} is no flag")
            return value
        if kind == "names":
            return [self._name(name) for name in value]
        return self._name(value)

    def _forward(self, event: Call, manifest: dict[str, Any]) -> None:
        """The plan has the size that its numbers say, and the rows lie in what there is of them."""
        names = [pool["name"] for pool in manifest["pools"]]
        n, rows, requests = event["entries"], event["rows"], len(event["requests"])
        self._expect(event["pool"] in names and event["kind"] in SUBSTEP_KINDS, "a forward is of no pool, or no kind")
        self._expect(n >= 0 and rows == requests * event["width"] and event["width"] > 0, "a forward has no rows")
        self._expect(len(event["plan"]) == plan_layout(n, rows, requests).who, "a plan has not the length it says")
        self._expect(0 <= event["index"] < 256, f"a forward has index {event['index']}")
        mask = event.get("mask")
        if mask is not None:
            shape = event.get("mask_shape", ())
            self._expect(len(shape) == 3 and 0 <= np.prod(shape, dtype=object) <= 8 * len(mask), "a mask has no shape")

    def _launch(self, event: Call, manifest: dict[str, Any]) -> None:
        """It fits into the buffers that it ran over."""
        captured = manifest["captured"]
        self._expect(0 <= event["number"] < len(captured), f"launch {event['number']} is of no captured forward")
        own = captured[event["number"]]
        n, rows = event["entries"], event["rows"]
        fits = all(event[key] == own[key] for key in ("pool", "kind", "index", "width", "has_parents"))
        fits &= event.get("has_lineage", False) == own["has_lineage"]
        fits &= n <= own["entries"] and rows <= own["rows"] and len(event["counts"]) == len(event["requests"])
        reads = plan_part(event, "bounds")
        fits &= reads[0] == 0 and bool((np.diff(reads) >= 0).all()) and reads[-1] <= own["indices"]
        mask = event.get("mask_shape")
        fits &= (mask is None) == (own["nodes"] is None)
        fits &= mask is None or mask.tolist() == [len(event["requests"]), own["nodes"], own["nodes"]]
        accepted, seats = event.get("accepted"), manifest["seats"]
        if accepted is not None:
            counts = event["counts"]
            fits &= seats is not None and bool(((counts >= 0) & (counts <= seats[1])).all()) and rows <= seats[0]
            fits &= int(counts.sum()) == len(accepted)
        self._expect(fits, "a launch does not fit into its captured forward")
        for name in ("strays", "padding"):
            triples = event[name]
            self._expect(len(triples) % 3 == 0, f"{name} are no triples")
            self._expect(bool((triples[::3] < own["rows"]).all()), f"{name} are of no row")

    def _move(self, event: Call, manifest: dict[str, Any]) -> None:
        moves = manifest["captured_moves"]
        fits = 0 <= event["number"] < len(moves) and moves[event["number"]]["pool"] == event["pool"]
        fits = fits and len(event["src"]) == len(event["dst"]) <= moves[event["number"]]["size"]
        self._expect(fits, "a move does not fit into what was captured")

    def _damage(self, entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
        pool = next((pool for pool in manifest["pools"] if pool["name"] == entry["pool"]), None)
        self._expect(pool is not None and entry["code"] in (*CODES, UNWRITTEN), "damage is of no pool, or no check")
        slot, layers = self._int(entry["slot"], "slot"), [self._int(layer, "layer") for layer in entry["layers"]]
        fits = pool is not None and 0 <= slot < pool["num_slots"] and all(0 <= one < pool["layers"] for one in layers)
        self._expect(fits, f"slot {slot} is damaged, which is none")
        self._int(entry["halves"], "halves")
        words = [self._int(word, "a word") for word in entry["words"]]
        fits = len(words) in (0, len(PUBLIC_WORDS)) and all(0 <= word <= MASK_32 for word in words)
        self._expect(fits and isinstance(entry["fingerprint"], bool), "damage has no such words")
        return entry | {"slot": slot, "layers": layers}

    def _finding(self, line: dict[str, Any]) -> dict[str, Any]:
        self._expect(line.get("code") in CODES, f"a finding has code {str(line.get('code'))[:20]!r}")
        for key in ("name", "sentence", "pool"):
            self._expect(isinstance(line[key], str), f"{key} of a finding is no text")
        for key in ("page", "slot", "step", "first_bad_step", "incident"):
            self._int(line[key], key)
        for key in ("causes", "history", "evidence", "readers", "layers", "site"):
            self._expect(isinstance(line[key], list), f"{key} of a finding is no list")
        for cause in line["causes"]:
            self._expect(all(isinstance(cause[key], str) for key in ("family", "text", "basis")), "a cause is no text")
        return line

    def _page_events(self, events: Any) -> list[list[Any]]:
        for kind, step, _request, _place in events:
            self._expect(isinstance(kind, str), "an event of a page has no kind")
            self._int(step, "step")
        return list(events)

    # values

    def _sizes(self, of: dict[str, Any], ranges: Mapping[str, tuple[int, int]], what: str = "") -> None:
        for key, (low, high) in ranges.items():
            self._expect(low <= self._int(of[key], key, max(high, _INT64)) < high, f"{key}{what} is {of[key]}")

    def _array(self, ref: Any) -> NDArray[Any]:
        start, length = (self._int(number, "a place of integers") for number in ref)
        fits = self._ints.dtype == np.int64 and self._ints.ndim == 1
        fits = fits and 0 <= start <= start + length <= len(self._ints)
        self._expect(fits, f"integers lie at {start}, {length} of them, where there are none")
        return self._ints[start : start + length]

    def _table(self, lines: Any, width: int) -> None:
        for line in lines:
            values = line if width else [line]
            self._expect(len(values) == (width or 1), "a table has lines of other lengths")
            for value in values:
                self._int(int(value), "a number")

    def _int(self, value: Any, what: str, high: int = _INT64) -> int:
        is_int = isinstance(value, int) and not isinstance(value, bool) and -high <= value < high
        self._expect(is_int, f"{what} is {str(value)[:40]}, no integer of that size")
        return int(value)
