"""Records of paged caches: by group of layers, what every index should hold and who wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.transformers.paged_layout import block_size_of, layers_of
from kvcanary.calls.violation import Violation
from kvcanary.pools.launch_site import pack_site
from kvcanary.records.state import PoolState
from kvcanary.report.watched_evidence import CacheView, WatchedPool
from kvcanary_kernels.record.layout import CHAIN, COLUMNS, REQUEST_GENERATION, STEP_SITE, TOKEN_POSITION


@dataclass
class Row:
    """One request, by its number in records, and the chain of every prefix of its tokens; None: nobody knows them.

    turn: grows by one with each forward that it is in, from the step in which it began; which of its entries a rolling
          check reads goes by that
    """

    number: int
    chains: Tensor | None
    turn: int


@dataclass
class Part:
    """A request's part of one batch: `count` tokens behind `past` entries."""

    request: str
    past: int
    count: int

    @property
    def site(self) -> tuple[str, int]:
        if not self.past:
            return "prefill", 0
        return ("decode" if self.count == 1 else "extend"), 0


@dataclass
class Batch:
    """What the running forward reads and writes.

    part_numbers, places, is_new: by group, [n] of the entries that are read: number of their part, position, and
                           whether this forward writes them
    written:               by group, the indices that are written
    total:                 tokens that are fed
    """

    parts: list[Part]
    part_numbers: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Tensor] = field(default_factory=dict)
    is_new: dict[int, Tensor] = field(default_factory=dict)
    written: dict[int, Tensor] = field(default_factory=dict)
    total: int = 0


class Group:
    """Layers that share indices.

    window:  0: they read all
    records: [indices, 8] int64 as record/layout.py has them, with the columns that are used here: chain, token and
             position, request, step and site; chain 0: nothing was written
    """

    def __init__(self, cache: Any, number: int, window: int, size: int, pool_id: int) -> None:
        self.number, self.window = number, window
        self.records = torch.zeros(size, COLUMNS, dtype=torch.int64)
        self.block_size = block_size_of(cache, number)
        self.layers = layers_of(cache, number)
        view = CacheView(f"group {number}", len(self.layers), size, self.block_size, window=window or None)
        self.pool: PoolState = WatchedPool.of(view, pool_id, self.records)

    @property
    def chains(self) -> Tensor:
        """[indices] int64"""
        return self.records[:, CHAIN]

    def positions_at(self, indices: Tensor) -> Tensor:
        return self.records[indices, TOKEN_POSITION] >> 32

    def seal(
        self, where: Tensor, positions: Tensor, tokens: Tensor, chains: Tensor | int, by: tuple[int, int, int]
    ) -> None:
        """Entries are about to be written at these indices; `by`: number of the request, step and site."""
        request, step, site = by
        self.records[where, TOKEN_POSITION] = positions << 32 | tokens
        self.records[where, CHAIN] = chains
        self.records[where, REQUEST_GENERATION] = request
        self.records[where, STEP_SITE] = site << 32 | step

    def violation(
        self,
        code: str,
        layers: tuple[int, ...],
        index: int,
        position: int,
        part: Part | None = None,
        **known: Any,
    ) -> Violation:
        """One check that fired at an index; without a part: of a move."""
        site, request = ("move", 0) if part is None else part.site, None if part is None else part.request
        notes = (self.where(index),)
        return Violation(code, self.pool, index, position, request, site, 0, layers=layers, notes=notes, **known)

    def where(self, index: int) -> str:
        """In words, with what a report's headline leaves out."""
        window = f"a window of {self.window}" if self.window else "no window"
        place = f"index {index} is offset {index % self.block_size} of block {index // self.block_size}"
        return f"{place} in group {self.number}: {_few('layer', self.layers)} with {window}"


def site_word(part: Part) -> int:
    """As records hold it."""
    return pack_site(*part.site)


def _few(name: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:4])
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"{name}{'s' if len(numbers) > 1 else ''} {shown}{more}"
