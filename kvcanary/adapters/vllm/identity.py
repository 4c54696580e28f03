"""What tokens of a prompt do not say in vLLM: weights, adapters and salts of a row, and images, sounds and videos.

All contents of a kind have the same placeholder ids, and chains are made of ids, so a block that was computed with
another image continues any row of the same text. Records say who wrote an entry: what stood in that request's prompt
up to there is compared with what stands in this one's, when it begins with entries of others.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import NAMED_WRITERS, PagedCanary
from kvcanary.adapters.observed.state import Event, Group, all_layers
from kvcanary.adapters.vllm.block_pool import SALTS
from kvcanary_kernels.record.layout import CHAIN, MASK_32, REQUEST_GENERATION, Identity
from kvcanary_kernels.watch.walk import first_seen, table_slots

WEIGHT_FILES = (".safetensors", ".bin", ".pt")
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file, and its beginning
UNKNOWN = "entries of prefix hits whose writers' images nobody remembers"
#: Where it begins and ends in the prompt, and the hash by which vLLM keys it.
Content = tuple[int, int, str]
New = tuple[int, str, Sequence[int] | None, int, Identity]


class Hit(NamedTuple):
    """A row that begins with entries of others."""

    request: str
    number: int
    tokens: Sequence[int]
    identity: Identity
    contents: frozenset[Content]


class Contents:
    """Of requests, by the numbers by which records name them."""

    def __init__(self, canary: PagedCanary) -> None:
        self._canary = canary
        self._of: OrderedDict[int, frozenset[Content]] = OrderedDict()
        self._hits: list[Hit] = []
        self._forgotten = 0  # up to this number nobody knows any more who had what

    def came(self, uids: Iterable[int], new: Sequence[New], contents: Sequence[frozenset[Content]]) -> None:
        """Rows begin; as `PagedCanary.admit` takes them, each with what stands in its prompt."""
        for uid, (number, request, tokens, length, identity), own in zip(uids, new, contents, strict=True):
            if own:
                self._of[uid] = own
                if len(self._of) > NAMED_WRITERS:
                    self._forgotten, _ = self._of.popitem(last=False)
            if self._of and length and tokens is not None:
                self._hits.append(Hit(request, number, tokens[:length], identity, own))

    def judge(self, lines_of: Callable[[str, int], Sequence[Tensor]]) -> None:
        """Rows that have come are about to be read; lines_of: by request and row, its lines of all block tables."""
        hits, self._hits = self._hits, []
        for hit in hits:
            chains = self._canary.memory.upload(self._canary.prefixes.every(hit.tokens, hit.identity))
            for group, line in zip(self._canary.groups, lines_of(hit.request, hit.number), strict=True):
                self._judge(hit, group, line, chains)

    def _judge(self, hit: Hit, group: Group, line: Tensor, chains: Tensor) -> None:
        positions = torch.arange(len(chains), device=chains.device)
        slots = table_slots(line[None], positions[None], group.block_size)[0]
        held = group.records[slots.clamp(0, group.records.shape[0] - 1)]
        is_own = (held[:, CHAIN] == chains) & (slots >= group.null_slots) & (slots < group.records.shape[0])
        is_own &= positions >= first_seen(torch.tensor(len(chains)), group.window)
        writers = torch.where(is_own, held[:, REQUEST_GENERATION] & MASK_32, 0).cpu()
        wrong = torch.zeros(len(chains), dtype=torch.bool)
        told: dict[int, str] = {}
        for writer in writers.unique().tolist():
            known = self._of.get(writer, frozenset()) if writer > self._forgotten else self._of.get(writer)
            if known is None:
                self._canary.coverage.skip(UNKNOWN, int((writers == writer).sum()) if writer else 0)
            elif difference := hit.contents ^ known:
                first = min(difference)[0]
                own = (writers == writer) & (torch.arange(len(chains)) >= first)
                wrong |= own
                told |= {int(own.nonzero()[0, 0]): _other(hit.contents, first)} if bool(own.any()) else {}
        if bool(wrong.any()):
            self._tell(hit, group, slots, wrong.to(chains.device), told[min(told)])

    def _tell(self, hit: Hit, group: Group, slots: Tensor, wrong: Tensor, what: str) -> None:
        layers = group.layers[0]
        self._canary.memory.total += wrong.sum()
        mismatch = wrong[:, None] * all_layers(layers)
        row_of = functools.partial(_row_of, hit.request)
        how: dict[str, Any] = {"by_record": False, "row_of": row_of, "site": "prefill", "is_by_position": True}
        self._canary.events.append(Event("R6", what, layers, slots, mismatch, group, {}, **how))


def _row_of(request: str, entry: int, slot: int) -> str:
    """All are of one row."""
    return request


def _other(contents: frozenset[Content], first: int) -> str:
    own = next((f"{key!r} stands in this prompt" for start, _, key in contents if start == first), None)
    why = own or "nothing stands in this prompt"
    return f"entries of a prefix hit were computed with another image or sound from position {first} on, where {why}"


def contents_of(features: Iterable[Any] | None) -> frozenset[Content]:
    """Of vLLM's `mm_features`."""
    places = [(own.mm_position, own.identifier) for own in features or ()]
    return frozenset([(place.offset, place.offset + place.length, str(key)) for place, key in places])


class Identities:
    """Of requests that come now. vLLM keys blocks by the name of an adapter, whatever number it has.

    Rows in flight go on under new weights, as vLLM lets them; what the ones before have cached is no hit any more.
    """

    def __init__(self) -> None:
        self._weights = 0  # changes so far
        self._versions: dict[tuple[str, int, str], str] = {}
        self._salts: dict[str, str] = {}  # digests, by request

    def told(self, output: Any) -> None:
        """What the scheduler says of salts with a step."""
        for name in output.finished_req_ids:
            self._salts.pop(name, None)
        self._salts |= getattr(output, SALTS, {})

    def of(self, request: Any, name: str) -> Identity:
        """request: anything with a `lora_request`; name: its id"""
        weights, lora = str(self._weights) if self._weights else "", request.lora_request
        salt = self._salts.get(name, "")
        if lora is None:
            return Identity(salt, weights=weights)
        lora_name, number, path = (getattr(lora, own, "") for own in ("lora_name", "lora_int_id", "lora_path"))
        key = str(lora_name or lora), int(number or 0), str(path)
        if key not in self._versions:
            self._versions[key] = version_of(key[2])
        return Identity(salt, key[0], self._versions[key], weights)

    def changed(self) -> None:
        """Other weights were loaded."""
        self._weights += 1

    def loaded(self, name: str) -> None:
        """An adapter was loaded, or loaded again in its place: what its files hold is looked at again."""
        self._versions = {key: version for key, version in self._versions.items() if key[0] != name}


def version_of(path: str) -> str:
    """Of the adapter's files, by their sizes and parts of them; the path itself where that is no folder here.

    Copies of the same files are one version; a training step writes all over them.
    """
    files = sorted(own for own in Path(path).rglob("*") if own.suffix in WEIGHT_FILES) if path else []
    if not files:
        return path
    seen = hashlib.blake2b(digest_size=8)
    for own in files:
        size = own.stat().st_size
        seen.update(f"{own.name} {size} ".encode())
        with own.open("rb") as opened:
            for sample in range(SAMPLES + 1):
                opened.seek(sample * max(size - SAMPLE_BYTES, 0) // SAMPLES)
                seen.update(opened.read(SAMPLE_BYTES))
    return seen.hexdigest()
