"""Contents of prompts that their tokens do not say: images, sounds and videos, which all have the same placeholder ids.

Chains are made of ids, so a block that was computed with another image continues any row of the same text. Records say
who wrote an entry: what stood in that request's prompt up to there is compared with what stands in this one's, when it
begins with entries of others.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import NAMED_WRITERS, PagedCanary
from kvcanary.adapters.observed.state import Event, Group, all_layers
from kvcanary_kernels.record.layout import CHAIN, MASK_32, REQUEST_GENERATION, Identity
from kvcanary_kernels.watch.walk import table_slots

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
        if group.window:
            is_own &= positions > len(chains) - group.window
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
