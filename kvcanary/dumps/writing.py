"""Writing: a dump out of a recorder, with nothing in it that the settings keep back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.dumps.container import Packed, json_lines, write_members
from kvcanary.dumps.content import content_of
from kvcanary.dumps.event_schema import ARGUMENTS, CALLS, FORWARDS, by_request, named, plan_part
from kvcanary.dumps.manifest import (
    SETTINGS,
    head_of_manifest,
    reported_certificate,
    reported_findings,
    settings_of,
    shape_of_pool,
    shapes_of_captured,
)
from kvcanary.dumps.pseudonyms import Chains, TokenPseudonyms
from kvcanary.ledger.requests import growth_of
from kvcanary.pools.spans import SPAN_IDS
from kvcanary.recorder.checkpoint import ManagerState, RequestState, room_for_records, take_checkpoint
from kvcanary.recorder.kept_forwards import RecordedForward, RecordedLaunch, RecordedMove
from kvcanary.recorder.recorder import Event, Recorder
from kvcanary.recorder.segment import Damage, Segment
from kvcanary.transfers.async_tracker import LAID_OUT
from kvcanary_kernels.record.layout import Identity, chain_root, make_keys

if TYPE_CHECKING:
    from kvcanary.config import CanaryConfig
    from kvcanary.report.finding import Finding

Roots = tuple[int, ...]
Told = tuple[str, dict[str, Any], Sequence[Damage]]  # an event: its name, its fields, what was damaged just before


class Source(NamedTuple):
    """What a dump is written of. `quarantine`: steps that the engine holds freed pages back; `step`: of now."""

    config: CanaryConfig
    manager_state: ManagerState
    recorder: Recorder
    findings: Sequence[Finding]
    certificate: dict[str, Any]
    quarantine: int
    step: int
    trigger: str


class Admission(NamedTuple):
    """A request that the recording knows: what it means by equal tokens, and all tokens of its time."""

    roots: Roots
    tokens: list[int]


def write_dump(source: Source, path: Path) -> None:
    """Write it whole or not at all. OSError where the file cannot be written."""
    write_members(path, Writer(source).members())


class Writer:
    """One dump in the making."""

    def __init__(self, source: Source) -> None:
        self._source, self._packed = source, Packed()
        self._state, self._ledger = source.manager_state.state, source.manager_state.ledger
        source.recorder.forwards.wait_over()
        self._first, self._events = source.recorder.segments[0].checkpoint, [*_told(source.recorder.segments)]
        self._now = take_checkpoint(
            source.manager_state, source.step, room_for_records(source.manager_state, source.recorder.most_bytes)
        )
        self._seed = secrets.randbits(64)
        self._admissions = list(self._admitted())
        roots = dict.fromkeys([self._roots_in({}), *(admission.roots for admission in self._admissions)])
        self._labels = {root: number for number, root in enumerate(roots)}
        self._is_plain = source.config.dump_content
        sizes = [pool.view.vocab_size for pool in self._state.pools if pool.view.vocab_size is not None]
        sizes += SPAN_IDS.start, SPAN_IDS.stop
        self._pseudonyms = TokenPseudonyms(self._all_tokens(), sizes, self._is_plain)
        self._chains = self._relabelled()

    def members(self) -> dict[str, bytes]:
        """By name the files of the dump."""
        findings = reported_findings(self._source.findings, self._is_plain)
        members = {
            "manifest.json": json.dumps(self._manifest(), indent=1).encode(),
            "findings.jsonl": json_lines(findings),
            "events.jsonl": json_lines(self._reported()),
            "requests.jsonl": json_lines(self._requests()),
            "history.jsonl": json_lines(self._history()),
            "arrays.safetensors": self._packed.tensors(self._arrays()),  # and all that lines have packed
        }
        if self._source.config.dump_content:
            members["content.safetensors"] = content_of(self._state, findings)
        return members

    # what stands for what

    def _admitted(self) -> Iterator[Admission]:
        """Every request of the recording, those of its beginning first."""
        open_ones: dict[str, Admission] = {}
        for request in self._first.requests:
            # of others an event tells
            collected = request.num_tokens - sum(len(step.tokens) for step in request.uncollected)
            open_ones[request.request_id] = Admission(request.roots, request.tokens[:collected].tolist())
            yield open_ones[request.request_id]
        for name, fields, _ in self._events:
            if name == "admit":
                tokens = [int(token) for token in fields["token_ids"]]
                open_ones[fields["request_id"]] = Admission(self._roots_in(fields), tokens)
                yield open_ones[fields["request_id"]]
            elif name == "reroot" and fields["request_id"] in open_ones:
                before = open_ones[fields["request_id"]]
                open_ones[fields["request_id"]] = Admission(self._roots_in(fields), list(before.tokens))
                yield open_ones[fields["request_id"]]
            elif name == "append_all":
                of_each = by_request(fields["counts"], fields["token_ids"])
                for request_id, own in zip(fields["request_ids"], of_each, strict=True):
                    if request_id in open_ones:
                        open_ones[request_id].tokens.extend(own)

    def _roots_in(self, fields: Mapping[str, Any]) -> Roots:
        """By pool, what stands for its role and the identity that a request was admitted with."""
        given = [fields.get(name, "") for name in Identity._fields]
        return tuple(chain_root(self._state.keys, pool.view.root_name, *given) for pool in self._state.pools)

    def _all_tokens(self) -> Iterator[int]:
        for admission in self._admissions:
            yield from admission.tokens
        for name, fields, _ in self._events:
            if name in FORWARDS:
                yield from plan_part(fields, "tokens").tolist()
                yield from fields.get("accepted") or ()
        for checkpoint in (self._first, self._now):
            if checkpoint.records is not None:
                tokens = np.unique(checkpoint.records[:, 0] & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
                yield from tokens.tolist()

    def _relabelled(self) -> list[Chains]:
        """By pool."""
        new = make_keys(self._seed, 1, 1)
        chains = []
        for number, pool in enumerate(self._state.pools):
            own = Chains(self._state.keys, new, self._pseudonyms)
            for roots, label in self._labels.items():
                own.learn_root(roots[number], chain_root(new, pool.view.root_name, salt_of(label)))
            for admission in self._admissions:
                own.learn(admission.roots[number], admission.tokens[pool.view.token_offset :])
            chains.append(own)
        return chains

    # the members

    def _manifest(self) -> dict[str, Any]:
        source, config, first = self._source, self._source.config, self._first
        captured = source.manager_state.checks.captured
        return {
            **head_of_manifest(),
            "trigger": source.trigger,
            "step": source.step,
            "first_step": first.step,
            "device": self._state.records.device.type,
            "config": settings_of(config, SETTINGS),
            "quarantine": source.quarantine,
            "page_size": self._state.page_size,
            "num_pages": len(self._ledger.generations),
            "null_pages": self._ledger.null_pages,
            "pools": [shape_of_pool(pool.view) for pool in self._state.pools],
            **shapes_of_captured(None if captured is None else captured.registry),
            "seed": self._seed,
            "tokens": "as they are" if self._is_plain else "replaced",
            "content": config.dump_content,
            "has_records": first.records is not None,
            "names": {str(uid): name for uid in self._uids() if (name := self._ledger.name(uid)) is not None},
            "start": {
                **{name: getattr(first, name) for name in ("quarantine", "buffers", "budgets", "hurried")},
                "poisoners": [poisoned._asdict() for poisoned in first.poisoners],
            },
            "certificate": reported_certificate(source.certificate),
        }

    def _uids(self) -> list[int]:
        """Requests that a record names."""
        tables = [c.records for c in (self._first, self._now) if c.records is not None]
        if not tables:
            return [request.uid for request in self._ledger.requests.values()]
        return np.unique(np.concatenate([table[:, 2] & np.uint64(0xFFFFFFFF) for table in tables])).tolist()

    def _requests(self) -> Iterator[dict[str, Any]]:
        for when, checkpoint in (("start", self._first), ("now", self._now)):
            for request in checkpoint.requests:
                yield {"when": when, **self._request(request)}

    def _request(self, request: RequestState) -> dict[str, Any]:
        return {
            "request_id": request.request_id,
            "tokens": self._packed.ints(self._pseudonyms.of(request.tokens[: request.num_tokens])),
            "root": self._labels.get(request.roots, -1),
            "pages": self._packed.ints(request.pages),
            "reads": [queue.tolist() for queue in request.reads],
            **request.facts,
            "growth": growth_of(request.steps[: request.num_tokens]),
            "unheard": [[len(step.tokens), step.before, step.committed_len] for step in request.uncollected],
        }

    def _reported(self) -> Iterator[dict[str, Any]]:
        words = {(f.pool, f.slot, f.layer): f for f in self._source.findings if f.part is not None}
        for number, (name, fields, damage) in enumerate(self._events):
            if name in ARGUMENTS:
                fields = fields | {"root": self._labels[self._roots_in(fields)]}
            if name in FORWARDS:
                fields = fields | {"plan": self._plan(fields)}
            reported = {"n": number, "call": name}
            for field, kind in CALLS[name].items():
                value = fields.get(field)
                if value is not None:
                    is_packed = kind.startswith(("ints", "tokens"))
                    value = self._pseudonyms.of(value) if kind.startswith("tokens") else value
                    reported[field] = self._packed.ints(value) if is_packed else value
            if damage:
                reported["damage"] = [
                    _damage(one, words.get((one.pool, one.slot, (*one.layers, None)[0]))) for one in damage
                ]
            yield reported

    def _plan(self, forward: Mapping[str, Any]) -> NDArray[Any]:
        plan = forward["plan"].astype(np.int64)
        tokens = plan_part({**forward, "plan": plan}, "tokens")
        tokens[:] = self._pseudonyms.of(tokens)
        return plan

    def _history(self) -> Iterator[dict[str, Any]]:
        for page in range(len(self._ledger.generations)):
            events = self._ledger.history.of(page)
            if events:
                reported = [[event.kind, event.step, event.request_id, event.place] for event in events]
                yield {"page": page, "events": reported}

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for when, checkpoint in (("start", self._first), ("now", self._now)):
            arrays |= {f"{when}.{name}": values.astype(np.int64) for name, values in checkpoint.pages.items()}
            if checkpoint.records is not None:
                arrays[f"{when}.records"] = self._records(checkpoint.records).view(np.int64)
            arrays[f"{when}.partial"] = checkpoint.partial.view(np.int64)
        arrays["start.judged"] = self._first.judged.astype(np.uint8)
        arrays["start.read_at"] = self._first.read_at
        return arrays

    def _records(self, records: NDArray[Any]) -> NDArray[Any]:
        bases = [pool.base for pool in self._state.pools[1:]]
        parts = np.split(records, bases)
        return np.concatenate([own.of_records(part) for own, part in zip(self._chains, parts, strict=True)])


def salt_of(label: int) -> str:
    """The salt that a replay admits requests of this label with; 0 is theirs that have none, nor an adapter."""
    return f"label {label}" if label else ""


def _told(segments: Iterable[Segment]) -> Iterator[Told]:
    """All events of a recording but those that were launched and that nobody has collected yet."""
    for segment in segments:
        for number, event in enumerate(segment.events):
            damage: Sequence[Damage] = segment.damage.get(number, ())
            for name, *args in _as_reported(event):
                fields = _fields_of(name, args)
                if fields is not None:
                    yield name, fields, damage
                damage = ()


def _as_reported(event: Event) -> Sequence[Event]:
    """A call as a dump has it, of those that a recorder keeps in another form, or as several.

    A forward that judged itself on a device, though no graph holds it, is told as one that the host has judged.
    """
    name, *args = event
    if name in LAID_OUT:
        return LAID_OUT[name](*args)
    if name != "launch":
        return [event]
    launched, number = args
    launch = launched.launches[number]
    is_eager = launch.number is None and launch.forward is not None
    return [("forward", launch.forward) if is_eager else ("launch", launch)]


def _fields_of(name: str, args: Sequence[Any]) -> dict[str, Any] | None:
    """What an event says, by the names of the schema; None: nobody knows it yet."""
    if name == "launch":
        return _launch(args[0])
    if name == "captured_move":
        return _captured_move(args[0])
    return _forward(args[0]) if name == "forward" else named(name, args)


def _forward(forward: RecordedForward) -> dict[str, Any]:
    rows = sorted(forward.wholes)
    wholes = [value for row in rows for value in forward.wholes[row].tolist()]
    own = {"has_lineage": forward.has_lineage or None, "whole_rows": rows, "wholes": wholes}
    return {field: own[field] if field in own else getattr(forward, field) for field in CALLS["forward"]}


def _launch(launch: RecordedLaunch) -> dict[str, Any] | None:
    if launch.forward is None:
        return None
    own = {name: getattr(launch, name) for name in ("number", "reads", "again", "strays", "padding")}
    accepted = None if launch.accepted is None else [*chain.from_iterable(launch.accepted)]
    return _forward(launch.forward) | own | {"counts": launch.written, "accepted": accepted}


def _captured_move(move: RecordedMove) -> dict[str, Any] | None:
    if move.moved is None:
        return None
    src, dst = move.moved
    return {"number": move.number, "pool": move.pool, "src": src, "dst": dst}


def _damage(damage: Damage, word: Finding | None) -> dict[str, Any]:
    """`word`: the finding that names the one word that changed."""
    reported: dict[str, Any] = damage._asdict()
    if word is not None:
        reported["word"] = [word.part, word.head, word.dim, word.byte, word.bit]
    return reported
