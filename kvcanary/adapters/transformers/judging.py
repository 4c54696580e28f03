"""Judging dense caches: re-reads of bytes and rows become violations, which are told as those of all pools."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.observed.capabilities import expect_watching
from kvcanary.adapters.observed.incident_dumps import IncidentDumps, source_without_slots
from kvcanary.adapters.transformers.needs import TESTED
from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation import Violation
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, PlanError
from kvcanary.native.layout import FORMAT
from kvcanary.pools.parts import Part
from kvcanary.provenance.changed_word import ChangedWord, describe_word, fitting_words
from kvcanary.records.fingerprints import fingerprints_of_words
from kvcanary.report.certificate import certificate
from kvcanary.report.describe import Describer
from kvcanary.report.respond import Response
from kvcanary.report.watched_evidence import CacheView, WatchedEvidence, WatchedPool
from kvcanary_kernels.content.fingerprint import TEMPORARY_BYTES
from kvcanary_kernels.record.formats import format_of, lanes_of_parts, words_not_finite
from kvcanary_kernels.record.layout import MAX_LAYERS, Keys, make_keys, seed_id
from kvcanary_kernels.record.rows import WORD_BYTES

Site = tuple[str, int]
Sides = tuple[dict[str, Any], dict[str, Any]]
POOL = "cache"
NOWHERE = WatchedPool.of(CacheView(POOL, 1))  # until it is told of whose cache it is
UPDATE = "update"  # who wrote, in a dense cache: rows have no requests there
MOST_WRITERS = 1 << 16  # requests whose names are kept for reports
NOT_KNOWN = -1  # in the place of a token id
#: What a dense cache can feed: it has no pages, no owners and no plans.
DENSE_FED = frozenset({"R4", "R6", "R9", "R10", "R12", "T1", "N1", "W5"})
NO_FORMS = np.zeros((2, FORMAT.size), np.int64)  # nobody asks whether what is summed is finite


class Reread(NamedTuple):
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


def dense_violation(
    code: str, layers: tuple[int, ...], row: int, position: int, site: Site, sides: Sides, **known: Any
) -> Violation:
    """One check that fired: at the first wrong position of a row in one layer, or in no layer (tokens).

    sides: what was expected and found;  known: request_id and slot of a paged cache, and what else a violation has
    """
    own: dict[str, Any] = {
        "request_id": f"row {row}",
        "slot": position,
        "expected": sides[0],
        "found": sides[1],
    } | known
    return Violation(code, NOWHERE, position=position, site=site, step=0, layers=layers, row_number=row, **own)


class DenseCanary:
    """What all caches of one attachment share: settings, keys, counters and findings. A copy of a cache keeps it."""

    def __init__(self, config: CanaryConfig, closed: Mapping[str, str] | None = None) -> None:
        """`closed`: by path of needs.py, what is gone of its names."""
        expect_watching(config, "one row of a running generate")
        config.expect_names_in_memory("transformers")
        self.config, self.coverage, self.closed = config, Coverage(), dict(closed or {})
        self.guard = Guard("transformers", config.mode, self._stopped)
        self.guard.is_serving = True
        self.dumps = IncidentDumps(config, functools.partial(source_without_slots, weakref.proxy(self)))
        self.dumps.environment = {"engine": "transformers", "version": version("transformers")}
        self.writers = {0: UPDATE}  # by the number of a request in records, its name
        self._num_requests = self._num_pools = 0
        self._response = Response(config, Describer(WatchedEvidence(self.writers).read), dump=self.dumps.on_finding)
        self.log = self._response.log
        self.layers_seen = 1
        self.num_layers = 4  # that keys are made for at once
        self.entry_bytes = 1  # of one row, position and layer, as last seen
        self.seed = config.drawn_seed()
        self.fed = DENSE_FED
        self._keys: dict[int, Keys] = {}
        self._stacked: dict[int, tuple[Keys, Tensor, list[int], list[int]]] = {}

    def __deepcopy__(self, memo: Any) -> DenseCanary:
        return self

    def _stopped(self, reason: str) -> None:
        self.coverage.skip(f"stopped watching: {reason}", 1)

    def fingerprints(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """[2, batch, n] int64: both fingerprints of the entries of k and v [batch, heads, n, dim]."""
        return self._summed(layer, k, v, NO_FORMS)[0]

    def stored_fingerprints(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, int | None]:
        """The same of what is stored, and in the same reading the first of the entries [batch * n] that is not finite
        (N1); None: all are, or nobody asks.
        """
        forms = NO_FORMS if "N1" in self.config.disable else _forms(k.dtype, v.dtype)
        fingerprints, first = self._summed(layer, k, v, forms)
        return fingerprints, first - 1 if first else None

    def _summed(self, layer: int, k: Tensor, v: Tensor, forms: NDArray[np.int64]) -> tuple[Tensor, int]:
        """forms: [2, FORMAT] of K and V; with them 1 + the first entry that is not finite, or 0."""
        keys, first_bad = self._keys_of(layer, k, v), 0
        if _is_dense(k, v):
            fingerprints = torch.empty(2, k.shape[0], k.shape[2], dtype=torch.int64)
            if fingerprints.numel():
                own = k.shape[2], *self._loop_keys(keys, layer), fingerprints.view(2, -1).numpy(), forms
                first_bad = self._loops.sum_heads(_heads_of(k), _heads_of(v), *own)
            return fingerprints, first_bad
        rows = words_of(k, v)
        fingerprints = rows.new_empty((2, len(rows)), dtype=torch.int64)
        chunk = max(1, TEMPORARY_BYTES // (rows.shape[1] * 8))
        for first in range(0, len(rows), chunk):
            where = slice(first, first + chunk)
            fingerprints[0, where], fingerprints[1, where] = fingerprints_of_words(keys, layer, rows[where])
            if forms.any() and not first_bad:
                parts = tuple((own.dtype, own[0, :, 0].nbytes // WORD_BYTES) for own in (k, v))
                bad = words_not_finite(rows[where], _lanes(parts, rows.device)).any(1).nonzero()[:1, 0].tolist()
                first_bad = first + bad[0] + 1 if bad else 0
        return fingerprints.view(2, k.shape[0], k.shape[2]), first_bad

    def holds(self, layer: int, k: Tensor, v: Tensor, fingerprints: Tensor) -> bool:
        """Whether the fingerprints of the entries of k and v [batch, heads, n, dim] are these [2, batch, n], all of
        them.
        """
        if not (_is_dense(k, v) and fingerprints.is_cpu and fingerprints.stride(2) == 1):
            return torch.equal(self.fingerprints(layer, k, v).to(fingerprints.device), fingerprints)
        keys = self._loop_keys(self._keys_of(layer, k, v), layer)
        side, row, _ = fingerprints.stride()
        place = fingerprints.data_ptr(), side * fingerprints.itemsize, row * fingerprints.itemsize
        return self._loops.same_heads(_heads_of(k), _heads_of(v), k.shape[0], k.shape[2], *keys, *place)

    def _keys_of(self, layer: int, k: Tensor, v: Tensor) -> Keys:
        self.layers_seen = max(self.layers_seen, layer + 1)
        self.entry_bytes = k.shape[1] * k.shape[3] * k.itemsize + v.shape[1] * v.shape[3] * v.itemsize
        return self.keys(layer, self.entry_bytes // WORD_BYTES, k.device)

    def _loop_keys(self, keys: Keys, layer: int) -> tuple[int, int]:
        """Where the keys [2, words] int32 of a layer lie, as compiled loops read them, and fingerprint a of no
        bytes.
        """
        held = self._stacked.get(keys.words_per_row)
        if held is None or held[0] is not keys:
            stacked = torch.stack([keys.fingerprint_a, keys.fingerprint_b], 1)
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

    def new_pool(self) -> int:
        """The number of a pool: a place that was damaged in one cache is no known place in another."""
        self._num_pools += 1
        return self._num_pools

    def new_request(self, name: str) -> int:
        """Its number in records."""
        self._num_requests += 1
        self.writers[self._num_requests] = name
        if len(self.writers) > MOST_WRITERS:
            del self.writers[self._num_requests - MOST_WRITERS + 1]
        return self._num_requests

    def report(
        self, violations: Sequence[Violation], step: int, pool_id: int = 0, records: Tensor | None = None
    ) -> None:
        """Tell of each fault once. KVCorruptionError in mode raise.

        pool_id, records: of the cache whose violations name no pool; records [positions, 8] say which forward wrote
        """
        if not violations or self.guard.stopped:
            return
        pool = WatchedPool.of(CacheView(POOL, self.layers_seen), pool_id, records)
        for violation in violations:
            violation.step = step
            if violation.pool is NOWHERE:
                violation.pool = pool
        self._response.answer(_joined(violations), step, self.coverage)

    def certificate(self, live_bytes: int = 0) -> dict[str, Any]:
        """What was checked, what was not and why; the same keys as that of an engine's canary."""
        fed = self.fed - {"R4", "T1"} if self.config.content == "write" else self.fed
        made = certificate(self.config, self.coverage, live_bytes, seed_id(self.seed), self.log, fed)
        return made | ({"closed_paths": dict(self.closed)} if self.closed else {})

    def closed_error(self, path: str) -> AdapterError:
        """Why this path cannot be watched in this release."""
        return AdapterError(
            f"{path} is not watched: {self.closed[path]}; install a release of {TESTED[0]} to {TESTED[-1]}"
        )


_lanes = lru_cache(maxsize=16)(lanes_of_parts)


@lru_cache(maxsize=16)
def _forms(*dtypes: torch.dtype) -> NDArray[np.int64]:
    """[2, FORMAT] of K and V."""
    return np.array([format_of(dtype) for dtype in dtypes], np.int64)


def judge_stored(first: int | None, layer: int, count: int, before: int, site: Site) -> list[Violation]:
    """N1 of the first of the entries [batch, count] that is not finite; `before`: entries of each row before them."""
    if first is None:
        return []
    row, place = divmod(first, count)
    sides = {"elements": "finite"}, {"layers_not_finite": [layer]}
    return [dense_violation("N1", (layer,), row, before + place, site, sides)]


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


def judge_reread(canary: DenseCanary, reread: Reread, fingerprints: Tensor, seen: Tensor, step: int) -> list[Violation]:
    """R4, R6, R9, R12 or T1 of the first wrong entry of each row; `seen` of those that are right is brought up to now.

    fingerprints: [2, batch, length] int64, what this layer should hold; seen: [length] int64
    """
    where = slice(reread.low - reread.first, reread.high - reread.first)
    k, v = reread.k[:, :, where], reread.v[:, :, where]
    wanted, count = fingerprints[:, :, reread.low : reread.high], k.shape[0] * k.shape[2]
    is_right = canary.holds(reread.layer, k, v, wanted)
    canary.coverage.bytes_checked += count * canary.entry_bytes
    if is_right:
        if reread.low < reread.before:  # what was stored just now is seen already
            seen[reread.low : reread.high] = step
        return []
    found = canary.fingerprints(reread.layer, k, v).to(fingerprints.device)
    wrong = (found != wanted).any(0)
    seen[reread.low : reread.high][~wrong.any(0)] = step
    violations = []
    for row in wrong.any(1).nonzero().flatten().tolist():
        place = int(wrong[row].nonzero()[0])
        entry = k[row : row + 1, :, place : place + 1], v[row : row + 1, :, place : place + 1]
        violation = _changed(
            canary, reread, fingerprints, row, reread.low + place, found[:, row, place], entry, int(wrong[row].sum())
        )
        violation.last_good = None if violation.code == "R12" else int(seen[reread.low + place])
        violations.append(violation)
    return violations


def judge_tokens(known: Tensor, wanted: Tensor, site: Site, show_tokens: bool) -> list[Violation]:
    """R10 and R6: rows of the cache against those that the model is called for; both [batch, n] int64 on the host,
    NOT_KNOWN where nobody says.
    """
    if known.shape != wanted.shape:
        position = min(known.shape[1], wanted.shape[1])
        rows, entries = ({"rows": len(side), "length": side.shape[1]} for side in (wanted, known))
        return [dense_violation("R10", (), 0, position, site, (rows, entries))]
    violations = []
    differs = (known != wanted) & (known != NOT_KNOWN) & (wanted != NOT_KNOWN)
    for row in differs.any(1).nonzero().flatten().tolist():
        position = int(differs[row].nonzero()[0])
        rows_of_it = (known[row] == wanted).all(1).nonzero().flatten().tolist()
        found: dict[str, Any] = {"first_different_position": position, "row": rows_of_it[0] if rows_of_it else None}
        expected: dict[str, Any] = {"row": row}
        if show_tokens:
            expected["token"], found["token"] = int(wanted[row, position]), int(known[row, position])
        violations.append(dense_violation("R6", (), row, position, site, (expected, found)))
    return violations


def judge_fed(lengths: Mapping[int, int], length: int, site: Site) -> list[Violation]:
    """R12 of every layer that did not store what the forward was fed; `lengths` by layer."""
    short = tuple(layer for layer, own in lengths.items() if own < length)
    if not short and lengths:
        return []
    position = min(lengths.values(), default=0)
    sides = {"length": length}, {"length": position}
    return [dense_violation("R12", short, 0, position, site, sides)]


def wrong_length(layer: int, expected: int, found: int, site: Site) -> Violation:
    """R10: a layer has other entries than it was told to append or to give up."""
    return dense_violation("R10", (layer,), 0, min(expected, found), site, ({"length": expected}, {"length": found}))


def _changed(
    canary: DenseCanary,
    reread: Reread,
    fingerprints: Tensor,
    row: int,
    position: int,
    found: Tensor,
    entry: tuple[Tensor, Tensor],
    count: int,
) -> Violation:
    """The violation of one entry whose fingerprints [2] are others: by their name another entry of this layer, or
    changed bytes.
    """
    same = (fingerprints == found[:, None, None]).all(0).nonzero().tolist()
    named = min(same, key=lambda place: (place[1] != position, place[0] != row), default=None)
    wanted = {"lane_a": _hex(fingerprints[0, row, position]), "row": row, "position": position}
    have: dict[str, Any] = {"lane_a": _hex(found[0]), "wrong_entries": count}
    if named is not None:
        have |= {"row": named[0], "position": named[1]}
    word = None
    if reread.site[0] == "move":
        code = "T1"
    elif position >= reread.before:
        code = "R12"
    elif named is not None:
        code = "R6" if named[0] != row else "R4"
    else:
        code, word = "R9", locate(canary, reread.layer, entry, found - fingerprints[:, row, position])
    return dense_violation(code, (reread.layer,), row, position, reread.site, (wanted, have), word=word)


def locate(canary: DenseCanary, layer: int, entry: tuple[Tensor, Tensor], differs: Tensor) -> ChangedWord | None:
    """The one word of an entry that changed; None unless exactly one explains both fingerprints."""
    row = words_of(*entry)[0]
    fits = fitting_words(canary.keys(layer, len(row), row.device), layer, row, *differs.tolist())
    if len(fits) != 1:
        return None
    words = entry[0].numel() * entry[0].element_size() // WORD_BYTES  # of K, which comes first
    name, tensor, first, end = ("K", entry[0], 0, words) if fits[0].number < words else ("V", entry[1], words, len(row))
    return describe_word(Part(name, (tensor,), (tensor.shape[1], tensor.shape[3])), first, row[first:end], fits[0])


def _joined(violations: Sequence[Violation]) -> list[Violation]:
    """Layers in which the same fired at the same place are one violation, and so are the rows that read it; the rest of
    a row follows its first wrong entry.
    """
    first: dict[tuple[object, ...], Violation] = {}
    for violation in sorted(violations, key=lambda violation: (violation.position or 0, violation.layers)):
        kept = first.setdefault((violation.code, *violation.place), violation)
        if kept is violation:
            continue
        if violation.layers != kept.layers:
            kept.layers, kept.word = tuple(sorted({*kept.layers, *violation.layers})), None
        name = violation.request_id
        if name is not None and name not in (kept.request_id, *kept.others):
            kept.others += (name,)
    return list(first.values())


def _hex(value: Tensor) -> str:
    return f"0x{int(value) & (1 << 64) - 1:016x}"
