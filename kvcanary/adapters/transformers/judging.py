"""Judging dense caches: looks at bytes and rows become hits, hits findings, and the mode decides what these do."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.capabilities import expect_watching
from kvcanary.calls.coverage import Coverage
from kvcanary.codes import CODES
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, KVCorruptionError, PlanError
from kvcanary.pools.parts import Part
from kvcanary.provenance.changed_word import ChangedWord, describe_word, fitting_words
from kvcanary.records.fingerprints import lanes_of_words
from kvcanary.report.certificate import certificate
from kvcanary.report.finding import Cause, Finding, FindingLog, tell
from kvcanary.report.render import Report
from kvcanary_kernels.content.fingerprint import TEMPORARY_BYTES
from kvcanary_kernels.record.layout import MAX_LAYERS, Keys, make_keys, seed_id
from kvcanary_kernels.record.rows import WORD_BYTES

Site = tuple[str, int]
POOL = "cache"
NOT_KNOWN = -1  # in the place of a token id
#: What a dense cache can feed: it has no pages, no owners and no plans.
DENSE_FED = frozenset({"R4", "R6", "R9", "R10", "R12", "T1"})
_FAMILIES = {
    "R4": ("windows", "the tensor is shifted against the positions that it is read as"),
    "R6": ("identity", "rows were not reordered, or otherwise than the sequences"),
    "R9": ("transfer", "somebody wrote into the cache and declared nothing"),
    "R10": ("lengths", "entries were not appended or not removed, or counted in the wrong unit"),
    "R12": ("addressing", "the layer did not store what it was given, or stored it elsewhere"),
    "T1": ("transfer", "rows were not moved as declared"),
    "W5": ("addressing", "positions are not those that follow in the row"),
}


class Look(NamedTuple):
    """Positions [low, high) of k and v [batch, heads, n, dim], of which entry 0 is position `first`.

    before: positions at and behind it were stored by this very forward
    """

    layer: int
    k: Tensor
    v: Tensor
    first: int
    low: int
    high: int
    before: int
    site: Site


@dataclass(frozen=True)
class DenseHit:
    """One check that fired: at the first wrong position of a row in one layer, or in no layer (tokens).

    request, slot: whose row it is and which index of a paged cache; None where rows have no names, tensors no indices
    """

    code: str
    layers: tuple[int, ...]
    row: int
    position: int
    site: Site
    last_good: int | None = None
    word: ChangedWord | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    request: str | None = None
    slot: int | None = None

    @property
    def reader(self) -> str:
        return f"row {self.row}" if self.request is None else self.request


class DenseCanary:
    """What all caches of one attachment share: settings, keys, counters and findings. A copy of a cache keeps it."""

    def __init__(self, config: CanaryConfig) -> None:
        expect_watching(config, "one row of a running generate")
        self.config, self.coverage, self.log = config, Coverage(), FindingLog()
        self.num_layers = 4  # that keys are made for at once
        self.entry_bytes = 1  # of one row, position and layer, as last seen
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.fed = DENSE_FED
        self._keys: dict[int, Keys] = {}
        self._incidents: dict[tuple[str, str, int], int] = {}
        self._stacked: dict[int, tuple[Keys, Tensor, list[int], list[int]]] = {}

    def __deepcopy__(self, memo: Any) -> DenseCanary:
        return self

    def lanes(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """[2, batch, n] int64: both content lanes of the entries of k and v [batch, heads, n, dim]."""
        keys = self._keys_of(layer, k, v)
        if _is_dense(k, v):
            lanes = torch.empty(2, k.shape[0], k.shape[2], dtype=torch.int64)
            if lanes.numel():
                own = self._loop_keys(keys, layer)
                self._loops.sum_heads(_heads_of(k), _heads_of(v), k.shape[2], *own, lanes.view(2, -1).numpy())
            return lanes
        rows = words_of(k, v)
        lanes = rows.new_empty((2, len(rows)), dtype=torch.int64)
        chunk = max(1, TEMPORARY_BYTES // (rows.shape[1] * 8))
        for first in range(0, len(rows), chunk):
            where = slice(first, first + chunk)
            lanes[0, where], lanes[1, where] = lanes_of_words(keys, layer, rows[where])
        return lanes.view(2, k.shape[0], k.shape[2])

    def holds(self, layer: int, k: Tensor, v: Tensor, lanes: Tensor) -> bool:
        """Whether the lanes of the entries of k and v [batch, heads, n, dim] are these [2, batch, n], all of them."""
        if not (_is_dense(k, v) and lanes.is_cpu and lanes.stride(2) == 1):
            return torch.equal(self.lanes(layer, k, v).to(lanes.device), lanes)
        keys = self._loop_keys(self._keys_of(layer, k, v), layer)
        side, row, _ = lanes.stride()
        place = lanes.data_ptr(), side * lanes.itemsize, row * lanes.itemsize
        return self._loops.same_heads(_heads_of(k), _heads_of(v), k.shape[0], k.shape[2], *keys, *place)

    def _keys_of(self, layer: int, k: Tensor, v: Tensor) -> Keys:
        self.entry_bytes = k.shape[1] * k.shape[3] * k.itemsize + v.shape[1] * v.shape[3] * v.itemsize
        return self.keys(layer, self.entry_bytes // WORD_BYTES, k.device)

    def _loop_keys(self, keys: Keys, layer: int) -> tuple[int, int]:
        """Where the keys [2, words] int32 of a layer lie, as compiled loops read them, and lane a of no bytes."""
        held = self._stacked.get(keys.words_per_row)
        if held is None or held[0] is not keys:
            stacked = torch.stack([keys.lane_a, keys.lane_b], 1)
            places = [own.data_ptr() for own in stacked], keys.start_a.tolist()
            held = self._stacked[keys.words_per_row] = keys, stacked, *places
        return held[2][layer], held[3][layer]

    @cached_property
    def _loops(self) -> Any:
        """Compiled when bytes in host memory are first summed."""
        from kvcanary.native import loops

        return loops

    def keys(self, layer: int, words: int, device: torch.device) -> Keys:
        """Those of rows of this size; made when one is first seen, for more layers where there turn out to be more."""
        keys = self._keys.get(words)
        if keys is None or keys.num_layers <= layer:
            if layer >= MAX_LAYERS:
                raise AdapterError(f"a cache may have {MAX_LAYERS} layers, got one with number {layer}")
            num_layers = min(MAX_LAYERS, max(1 << layer.bit_length(), self.num_layers))
            keys = self._keys[words] = make_keys(self.seed, num_layers, words, device)
        return keys

    def report(self, hits: Sequence[DenseHit], step: int) -> None:
        """Tell of each fault once. KVCorruptionError in mode raise."""
        hits = [hit for hit in _joined(hits) if hit.code not in self.config.disable]
        if not hits:
            return
        stops = self.config.mode == "raise"
        action = "raised KVCorruptionError; no token of this step leaves" if stops else "logged; generation goes on"
        for hit in hits:
            self.coverage.fired[hit.code] = self.coverage.fired.get(hit.code, 0) + 1
        findings = [_finding(hit, step, self._number(hit), action) for hit in hits]
        told = [finding for finding in findings if self.log.add(finding)]
        if stops:
            raise KVCorruptionError(findings, Report(tuple(findings), action, self.coverage.counters()))
        for finding in told:
            tell(finding)

    def certificate(self, live_bytes: int = 0) -> dict[str, Any]:
        """What was checked, what was not and why; the same keys as that of an engine's canary."""
        groups = [group.to_dict() for group in self.log.groups.values()]
        fed = self.fed - {"R4", "T1"} if self.config.content == "write" else self.fed
        return certificate(self.config, self.coverage, live_bytes, seed_id(self.seed), groups, fed)

    def _number(self, hit: DenseHit) -> int:
        return self._incidents.setdefault((hit.code, hit.reader, hit.position), len(self._incidents) + 1)


def _is_dense(k: Tensor, v: Tensor) -> bool:
    """Whether compiled loops can read them."""
    return k.is_cpu and k.stride(3) == v.stride(3) == 1


def _heads_of(values: Tensor) -> NDArray[np.int64]:
    """HEADS (native/layout.py) of values [batch, heads, n, dim]."""
    size, (batch, head, entry, _), (_, heads, _, dim) = values.itemsize, values.stride(), values.shape
    if dim * size % WORD_BYTES:
        raise PlanError(f"heads must be whole 32-bit words, got {dim} elements of {size} B")
    fields = values.data_ptr(), batch * size, head * size, entry * size, dim * size // WORD_BYTES, heads
    return np.array(fields, np.int64)


def words_of(k: Tensor, v: Tensor) -> Tensor:
    """[batch * n, words] int32: the K row, then the V row, of the entries of k and v [batch, heads, n, dim]."""
    parts = []
    for name, tensor in (("K", k), ("V", v)):
        rows = tensor.detach().transpose(1, 2).flatten(2).flatten(0, 1).contiguous()
        if rows.shape[1] * rows.element_size() % WORD_BYTES:
            raise PlanError(
                f"rows of {name} must be whole 32-bit words, got {rows.shape[1]} elements of {rows.element_size()} B"
            )
        parts.append(rows.view(torch.int32))
    return torch.cat(parts, 1)


def judge_look(canary: DenseCanary, look: Look, lanes: Tensor, seen: Tensor, step: int) -> list[DenseHit]:
    """R4, R6, R9, R12 or T1 of the first wrong entry of each row; `seen` of those that are right is brought up to now.

    lanes: [2, batch, length] int64, what this layer should hold; seen: [length] int64
    """
    where = slice(look.low - look.first, look.high - look.first)
    k, v = look.k[:, :, where], look.v[:, :, where]
    wanted, count = lanes[:, :, look.low : look.high], k.shape[0] * k.shape[2]
    is_right = canary.holds(look.layer, k, v, wanted)
    canary.coverage.bytes_checked += count * canary.entry_bytes
    if is_right:
        if look.low < look.before:  # what was stored just now is seen already
            seen[look.low : look.high] = step
        return []
    found = canary.lanes(look.layer, k, v).to(lanes.device)
    wrong = (found != wanted).any(0)
    seen[look.low : look.high][~wrong.any(0)] = step
    hits = []
    for row in wrong.any(1).nonzero().flatten().tolist():
        place = int(wrong[row].nonzero()[0])
        entry = k[row : row + 1, :, place : place + 1], v[row : row + 1, :, place : place + 1]
        hit = _changed(canary, look, lanes, row, look.low + place, found[:, row, place], entry, int(wrong[row].sum()))
        hits.append(hit if hit.code == "R12" else replace(hit, last_good=int(seen[hit.position])))
    return hits


def judge_tokens(known: Tensor, wanted: Tensor, site: Site, show_tokens: bool) -> list[DenseHit]:
    """R10 and R6: rows of the cache against those that the model is called for; both [batch, n] int64 on the host."""
    if known.shape != wanted.shape:
        position = min(known.shape[1], wanted.shape[1])
        sides = [{"rows": len(side), "length": side.shape[1]} for side in (wanted, known)]
        return [DenseHit("R10", (), 0, position, site, None, None, sides[0], sides[1])]
    hits = []
    differs = (known != wanted) & (known != NOT_KNOWN)
    for row in differs.any(1).nonzero().flatten().tolist():
        position = int(differs[row].nonzero()[0])
        whose = (known[row] == wanted).all(1).nonzero().flatten().tolist()
        found: dict[str, Any] = {"first_different_position": position, "row": whose[0] if whose else None}
        expected: dict[str, Any] = {"row": row}
        if show_tokens:
            expected["token"], found["token"] = int(wanted[row, position]), int(known[row, position])
        hits.append(DenseHit("R6", (), row, position, site, None, None, expected, found))
    return hits


def judge_fed(lengths: Mapping[int, int], length: int, site: Site) -> list[DenseHit]:
    """R12 of every layer that did not store what the forward was fed; `lengths` by layer."""
    short = tuple(layer for layer, own in lengths.items() if own < length)
    if not short and lengths:
        return []
    position = min(lengths.values(), default=0)
    sides = {"length": length}, {"length": position}
    return [DenseHit("R12", short, 0, position, site, None, None, *sides)]


def wrong_length(layer: int, expected: int, found: int, site: Site) -> DenseHit:
    """R10: a layer has other entries than it was told to append or to give up."""
    return DenseHit("R10", (layer,), 0, min(expected, found), site, None, None, {"length": expected}, {"length": found})


def _changed(
    canary: DenseCanary,
    look: Look,
    lanes: Tensor,
    row: int,
    position: int,
    found: Tensor,
    entry: tuple[Tensor, Tensor],
    count: int,
) -> DenseHit:
    """The hit of one entry whose lanes [2] are others: by their name another entry of this layer, or changed bytes."""
    same = (lanes == found[:, None, None]).all(0).nonzero().tolist()
    named = min(same, key=lambda place: (place[1] != position, place[0] != row), default=None)
    wanted = {"lane_a": _hex(lanes[0, row, position]), "row": row, "position": position}
    have: dict[str, Any] = {"lane_a": _hex(found[0]), "wrong_entries": count}
    if named is not None:
        have |= {"row": named[0], "position": named[1]}
    word = None
    if look.site[0] == "move":
        code = "T1"
    elif position >= look.before:
        code = "R12"
    elif named is not None:
        code = "R6" if named[0] != row else "R4"
    else:
        code, word = "R9", locate(canary, look.layer, entry, found - lanes[:, row, position])
    return DenseHit(code, (look.layer,), row, position, look.site, None, word, wanted, have)


def locate(canary: DenseCanary, layer: int, entry: tuple[Tensor, Tensor], differs: Tensor) -> ChangedWord | None:
    """The one word of an entry that changed; None unless exactly one explains both lanes."""
    row = words_of(*entry)[0]
    fits = fitting_words(canary.keys(layer, len(row), row.device), layer, row, *differs.tolist())
    if len(fits) != 1:
        return None
    first = 0
    for name, tensor in zip("KV", entry, strict=True):
        words = tensor.numel() * tensor.element_size() // WORD_BYTES
        if fits[0].number < first + words:
            part = Part(name, (tensor,), (tensor.shape[1], tensor.shape[3]))
            return describe_word(part, first, row[first : first + words], fits[0])
        first += words
    return None


def _joined(hits: Sequence[DenseHit]) -> list[DenseHit]:
    """Layers in which the same fired at the same place are one hit; the rest of a row follows its first wrong entry."""
    first: dict[tuple[str, int, int], DenseHit] = {}
    for hit in sorted(hits, key=lambda hit: (hit.position, hit.layers)):
        told = first.setdefault((hit.code, hit.row, hit.position), hit)
        if told is not hit:
            layers = tuple(sorted({*told.layers, *hit.layers}))
            first[hit.code, hit.row, hit.position] = replace(told, layers=layers, word=None)
    return list(first.values())


def _finding(hit: DenseHit, step: int, incident: int, action: str) -> Finding:
    """A row of the batch takes the page's place in the report, the position in the row that of the slot."""
    word, (family, text) = hit.word, _FAMILIES[hit.code]
    cause = Cause(family, text, "inferred")
    if word is not None and word.bit is not None:
        cause = Cause("bits", f"one flipped bit: bit {word.bit} of one element, nothing else changed", "derived")
    expected, found = dict(hit.expected), dict(hit.found)
    if word is not None:
        expected |= {"value": str(word.old_value), "bits": f"0x{word.old:0{2 * word.size}x}"}
        found |= {"value": str(word.new_value), "bits": f"0x{word.new:0{2 * word.size}x}"}
    return Finding(
        code=hit.code,
        name=CODES[hit.code].name,
        sentence=CODES[hit.code].sentence,
        pool=POOL,
        page=hit.row,
        slot=hit.position if hit.slot is None else hit.slot,
        offset=hit.position,
        position=hit.position,
        layer=hit.layers[0] if hit.layers else None,
        layers=hit.layers,
        part=word.part if word else None,
        head=word.head if word else None,
        dim=word.dim if word else None,
        byte=word.byte if word else None,
        bit=word.bit if word else None,
        site=hit.site,
        step=step,
        reader=hit.reader,
        writer=None,
        write_step=None,
        write_site=None,
        undeclared=hit.code in ("R9", "T1"),
        owner=None,
        expected=expected,
        found=found,
        bytes_of=(),
        last_good_step=hit.last_good,
        first_bad_step=step,
        history=(f"row {hit.row} of the batch",),
        readers=(hit.reader,),
        exposed_tokens=0 if hit.last_good is None else max(0, step - hit.last_good - 1),
        causes=(cause,),
        evidence=(),
        incident=incident,
        action=action,
    )


def _hex(value: Tensor) -> str:
    return f"0x{int(value) & (1 << 64) - 1:016x}"
