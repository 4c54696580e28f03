"""Watched writing: the dump of a finding in pools that are only watched: steps as told, and the row around its slot."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from kvcanary.dumps.container import Packed, json_lines, write_members
from kvcanary.dumps.manifest import head_of_manifest, reported_certificate, reported_findings, settings_of
from kvcanary.dumps.pseudonyms import Chains, TokenPseudonyms
from kvcanary.dumps.watched_events import KIND
from kvcanary.pools.launch_site import site_name, unpack_site
from kvcanary_kernels.record.layout import MASK_32, Keys, make_keys

if TYPE_CHECKING:
    from kvcanary.config import CanaryConfig
    from kvcanary.report.finding import Finding


@dataclass(frozen=True, eq=False)
class SeenSlot:
    """What was read of one slot around a finding.

    finding:  number of the finding;  position: in the row that it is read as part of; None: of no row
    words:    [4] uint64, the identity of its record; None: outside the pool, or never written
    wrong:    layers whose bytes are not those that were taken when it was written
    is_taken: whether any were taken under this record
    recorded, found: fingerprint a of the first wrong layer, or of the first, as taken and as it lies there now
    same:     slots of the pool for which the bytes that lie here were written, with request, position and step
    """

    finding: int
    group: int
    slot: int
    position: int | None
    words: NDArray[np.uint64] | None
    writer: str | None
    wrong: tuple[str, ...]
    is_taken: bool
    recorded: int
    found: int
    same: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class SeenRow:
    """A row of which a finding speaks: its block table by group as it was read, and its tokens as far as known."""

    request: str
    number: int
    tables: Sequence[Sequence[int]]
    tokens: Sequence[int]


@dataclass(frozen=True, eq=False)
class WatchedSource:
    """What a dump is written of.

    groups:  shapes, as the manifest has them;  steps: as in `dumps.watched_events`
    keys:    of chains;  content: by name what lies in the slots found, where that may leave
    """

    config: CanaryConfig
    findings: Sequence[Finding]
    certificate: Mapping[str, Any]
    environment: Mapping[str, Any]
    step: int
    device: str
    groups: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    slots: Sequence[SeenSlot]
    rows: Sequence[SeenRow]
    keys: Keys | None = None
    content: Mapping[str, NDArray[Any]] | None = None


def write_watched(source: WatchedSource, path: Path) -> None:
    """Write it whole or not at all. OSError where the file cannot be written."""
    write_members(path, WatchedWriter(source).members())


class WatchedWriter:
    """One dump in the making; token ids, chains and fingerprints leave under names of its own."""

    def __init__(self, source: WatchedSource) -> None:
        self._source, self._packed = source, Packed()
        self._secret = secrets.token_bytes(16)
        own = [int(slot.words[0]) & MASK_32 for slot in source.slots if slot.words is not None]
        tokens = np.array(own, np.uint32).view(np.int32).tolist()
        self._pseudonyms = TokenPseudonyms(
            chain(tokens, *(row.tokens for row in source.rows)), (), source.config.dump_content
        )

    def members(self) -> dict[str, bytes]:
        source = self._source
        members = {
            "manifest.json": json.dumps(self._manifest(), indent=1).encode(),
            "findings.jsonl": json_lines(reported_findings(source.findings, source.config.dump_content)),
            "events.jsonl": json_lines(source.steps),
            "requests.jsonl": json_lines(self._rows()),
            "history.jsonl": json_lines(self._slots()),
        }
        members["arrays.safetensors"] = self._packed.tensors({})
        if source.config.dump_content and source.content is not None:
            members["content.safetensors"] = save(dict(source.content))
        return members

    def _manifest(self) -> dict[str, Any]:
        source, config = self._source, self._source.config
        return {
            **head_of_manifest(),
            "kind": KIND,
            "trigger": "finding",
            "step": source.step,
            "first_step": min([step["step"] for step in source.steps], default=source.step),
            "device": source.device,
            "environment": dict(source.environment),
            "config": settings_of(config, ("mode", "content")),
            "groups": [dict(group) for group in source.groups],
            "tokens": "as they are" if config.dump_content else "replaced",
            "content": config.dump_content and source.content is not None,
            "certificate": reported_certificate(source.certificate),
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        for row in self._source.rows:
            yield {
                "request": row.request,
                "number": row.number,
                "tables": [self._packed.ints(table) for table in row.tables],
                "tokens": self._packed.ints(self._pseudonyms.of(row.tokens)),
            }

    def _slots(self) -> Iterator[dict[str, Any]]:
        seen = self._source.slots
        written = [slot.words for slot in seen if slot.words is not None]
        keys = self._source.keys
        renamed = iter(np.stack(written) if written else ())
        if written and keys is not None:
            new = make_keys(secrets.randbits(64), 1, 1)
            renamed = iter(Chains(keys, new, self._pseudonyms).of_records(np.stack(written)))
        for slot in seen:
            yield {
                "finding": slot.finding,
                "group": slot.group,
                "slot": slot.slot,
                "position": slot.position,
                "record": None if slot.words is None else record_of(next(renamed), slot.writer),
                "wrong": list(slot.wrong),
                "is_taken": slot.is_taken,
                "recorded": self._name(slot.recorded),
                "found": self._name(slot.found),
                "same": list(slot.same),
            }

    def _name(self, fingerprint: int) -> str:
        """Equal for equal fingerprints of one dump, and nothing else: bytes cannot be compared with it."""
        data = (fingerprint & (1 << 64) - 1).to_bytes(8, "little")
        return hashlib.blake2b(data, key=self._secret, digest_size=8).hexdigest()


def record_of(words: NDArray[np.uint64], writer: str | None) -> dict[str, Any]:
    """The identity of a record, plain JSON; words: [4] uint64."""
    first, own_chain, who, when = (int(word) for word in words)
    kind, index, _ = unpack_site(when >> 32)
    token = first & MASK_32
    return {
        "token": token - (1 << 32) if token >> 31 else token,
        "position": first >> 32,
        "chain": f"0x{own_chain:016x}",
        "request": writer,
        "uid": who & MASK_32,
        "step": when & MASK_32,
        "site": site_name(kind, index),
    }
