"""Records of the paged caches of transformers: what `generate_batch` stores and reads, judged batch by batch.

An entry is named by group and index; its record is the chain of its prefix and its position, its fingerprints are taken
from the values on their way. Everything is judged along the very indices that attention's K and V were read by.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.observed.prefix_hashes import Prefixes
from kvcanary.adapters.transformers.judging import DenseCanary, Sides, dense_violation, locate
from kvcanary.adapters.transformers.paged_layout import block_of, group_of, layers_of, memory_of, shape_of
from kvcanary.calls.violation import Violation
from kvcanary.config import ROTATION_STEPS
from kvcanary_kernels.record.layout import make_keys


@dataclass
class Row:
    """One request: the chain of every prefix of its tokens; None where nobody knows them."""

    chains: Tensor | None


@dataclass
class Part:
    """A request's part of one batch."""

    request: str
    past: int
    count: int


@dataclass
class Group:
    """Layers that share indices.

    chains, positions: [indices] int64, of the entry that was written there last; chain 0: none
    """

    number: int
    window: int
    chains: Tensor
    positions: Tensor


@dataclass
class Batch:
    """What the running forward reads and writes.

    part_numbers, places, is_new: by group, [n] of the entries that are read: number of their part, position, and
                           whether this forward writes them
    total:                 tokens that are fed
    """

    parts: list[Part]
    part_numbers: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Tensor] = field(default_factory=dict)
    is_new: dict[int, Tensor] = field(default_factory=dict)
    total: int = 0


class BatchedCache:
    """The records of one PagedAttentionCache."""

    def __init__(self, cache: Any, canary: DenseCanary) -> None:
        self.cache, self.canary = weakref.proxy(cache), canary
        self.rows: dict[str, Row] = {}
        self.fingerprints: dict[int, Tensor] = {}
        self.groups = [Group(n, window, *_empty(size, 2)) for n, (window, size) in enumerate(shape_of(cache))]
        self.step = 0
        self.prefixes = Prefixes(make_keys(canary.seed, 1, 1))
        self._queue: list[tuple[Any, list[Part]]] = []
        self._batch: Batch | None = None

    # what the scheduler does

    def prefix(self, request: str, tokens: Sequence[int], length: int) -> None:
        """The first `length` tokens of a request lie in the cache already."""
        self.rows[request] = Row(self.prefixes.every(tokens[:length]))

    def placed(self, request: str, past: int, count: int, batch: Any) -> None:
        """A request comes next in a batch; `batch` is one object a batch."""
        if not self._queue or self._queue[-1][0] is not batch:
            self._queue.append((batch, []))
        self._queue[-1][1].append(Part(request, past, count))
        if past == 0:
            self.rows[request] = Row(torch.empty(0, dtype=torch.int64))
        self.rows.setdefault(request, Row(None))

    def forked(self, parent: str, children: Sequence[str]) -> None:
        for child in children:
            self.rows[child] = Row(self.rows[parent].chains if parent in self.rows else None)

    def freed(self, request: str) -> None:
        self.rows.pop(request, None)

    def reset(self) -> None:
        self.rows.clear()
        for group in self.groups:
            group.chains.zero_()

    def copied(self, blocks: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> None:
        """Blocks were copied, by group: the records move along, and what arrived is read at once (T1)."""
        violations: list[Violation] = []
        for number, (source, target) in blocks.items():
            group = self.groups[number]
            for src, dst in zip(source, target, strict=True):
                old, new = (block_of(self.cache, number, block) for block in (src, dst))
                group.chains[new], group.positions[new] = group.chains[old], group.positions[old]
                for layer in layers_of(self.cache, number):
                    if layer in self.fingerprints:
                        self.fingerprints[layer][:, new] = self.fingerprints[layer][:, old]
                        violations += self._arrived(layer, group, new)
        self.canary.report(violations, self.step)

    def _arrived(self, layer: int, group: Group, where: Tensor) -> Iterator[Violation]:
        where = where[group.chains[where] != 0]
        if self.canary.config.content == "write" or not len(where):
            return
        k, v = (values[where].transpose(0, 1)[None] for values in memory_of(self.cache, layer))
        wrong = (self.canary.fingerprints(layer, k, v)[:, 0] != self.fingerprints[layer][:, where]).any(0)
        for entry in wrong.nonzero()[:1, 0].tolist():
            slot = int(where[entry])
            position = int(group.positions[slot])
            sides: Sides = {}, {"wrong_entries": int(wrong.sum())}
            yield dense_violation("T1", (layer,), 0, position, ("move", 0), sides, slot=slot)

    # one forward

    def before(self, tokens: Tensor, positions: Tensor, read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
        """A forward is about to run on the oldest batch that was placed: judge its reads, seal what it writes."""
        if not self._queue:
            self._batch = None
            self.canary.coverage.skip("batches that nobody placed", 1)
            return
        _, parts = self._queue.pop(0)
        self.step += 1
        self.canary.coverage.forwards += 1
        self.canary.coverage.unproved_stores += 1  # what is read shows where it went
        batch = self._batch = Batch(parts, total=sum(part.count for part in parts))
        tokens, positions = tokens.flatten().cpu(), positions.flatten().cpu()
        violations: list[Violation] = []
        offsets = torch.tensor([0, *(part.count for part in parts)]).cumsum(0).tolist()
        for number, part in enumerate(parts):
            own = slice(offsets[number], offsets[number + 1])
            violations += self._fed(number, part, tokens[own], positions[own])
        for group in self.groups:
            violations += self._judge(batch, group, read[group.number].cpu(), write[group.number].cpu(), offsets)
        self.canary.report(violations, self.step)

    def skip(self) -> None:
        """A forward of the oldest batch that was placed is not followed: nobody knows its tokens any more."""
        self._batch = None
        for part in self._queue.pop(0)[1] if self._queue else ():
            self.rows[part.request] = Row(None)

    def _fed(self, number: int, part: Part, tokens: Tensor, positions: Tensor) -> Iterator[Violation]:
        row = self.rows[part.request]
        wanted = torch.arange(part.past, part.past + part.count)
        wrong = (positions != wanted).nonzero()[:1, 0].tolist()
        for entry in wrong:
            sides = {"position": int(wanted[entry])}, {"position": int(positions[entry])}
            yield dense_violation("W5", (), number, int(wanted[entry]), _site(part), sides, request_id=part.request)
        if row.chains is None:
            self.canary.coverage.skip("requests whose tokens nobody knows", 1)
            return
        if len(row.chains) < part.past:
            sides = {"length": len(row.chains)}, {"length": part.past}
            yield dense_violation("R10", (), number, len(row.chains), _site(part), sides, request_id=part.request)
            row.chains = None
            return
        row.chains = self.prefixes.every(tokens.tolist(), after=row.chains[: part.past])

    def _judge(
        self, batch: Batch, group: Group, read: Tensor, write: Tensor, offsets: Sequence[int]
    ) -> Iterator[Violation]:
        counts = [min(part.past, group.window - 1) if group.window else part.past for part in batch.parts]
        place = 0
        part_numbers: list[int] = []
        places: list[int] = []
        new: list[bool] = []
        for number, (part, past) in enumerate(zip(batch.parts, counts, strict=True)):
            n = past + part.count
            part_numbers += [number] * n
            places += range(part.past - past, part.past + part.count)
            new += [False] * past + [True] * part.count
            indices, chains = read[place : place + past] if len(read) else read, self.rows[part.request].chains
            place += n
            if not len(read) or chains is None:
                continue
            held, at = group.chains[indices], group.positions[indices]
            positions = torch.arange(part.past - past, part.past)
            self.canary.coverage.slots_checked += past
            wrong = (held != chains[part.past - past : part.past]).nonzero()[:1, 0].tolist()
            for entry in wrong:
                code = "R12" if not held[entry] else "R4" if at[entry] != positions[entry] else "R6"
                sides = {"position": int(positions[entry])}, {"position": int(at[entry])} if held[entry] else {}
                own = {"request_id": part.request, "slot": int(indices[entry])}
                yield dense_violation(code, (), number, int(positions[entry]), _site(part), sides, **own)
        batch.part_numbers[group.number], batch.places[group.number] = torch.tensor(part_numbers), torch.tensor(places)
        batch.is_new[group.number] = torch.tensor(new, dtype=torch.bool)
        for part, begin in zip(batch.parts, offsets, strict=False):
            chains, count = self.rows[part.request].chains, part.count
            kept = min(count, group.window) if group.window else count
            where = write[begin + count - kept : begin + count]
            group.positions[where] = torch.arange(part.past + count - kept, part.past + count)
            group.chains[where] = 0 if chains is None else chains[part.past + count - kept : part.past + count]
            self.canary.coverage.slots_sealed += kept

    def stored(
        self, layer: int, new: tuple[Tensor, Tensor], given: Sequence[Tensor], read: Tensor, write: Tensor
    ) -> None:
        """A layer stored `new` [1, heads, n, dim] and attention is given `given` [1, heads, m, dim]."""
        batch, canary = self._batch, self.canary
        if batch is None:
            return
        group = self.groups[group_of(self.cache, layer)]
        n = batch.total
        fresh = canary.fingerprints(layer, new[0][:, :, :n], new[1][:, :, :n])[:, 0].cpu()
        held = self.fingerprints.get(layer)
        if held is None:
            held = self.fingerprints[layer] = torch.zeros(2, len(group.chains), dtype=torch.int64)
        violations = []
        if len(read) and canary.config.content != "write":
            violations = self._reread(batch, layer, group, held, fresh, given, read.cpu())
        where = write.cpu()[:n]
        kept = torch.zeros(n, dtype=torch.bool)
        begin = 0
        for part in batch.parts:
            begin += part.count
            kept[begin - (min(part.count, group.window) if group.window else part.count) : begin] = True
        held[:, where[kept]] = fresh[:, kept]
        canary.report(violations, self.step)

    def _reread(
        self,
        batch: Batch,
        layer: int,
        group: Group,
        held: Tensor,
        fresh: Tensor,
        given: Sequence[Tensor],
        read: Tensor,
    ) -> list[Violation]:
        canary, is_new = self.canary, batch.is_new[group.number]
        wanted = held[:, read[: len(is_new)]].clone()
        wanted[:, is_new] = fresh
        places = batch.places[group.number]
        chosen = torch.ones(len(is_new), dtype=torch.bool)
        if canary.config.content == "rolling":
            chosen = is_new | (places % ROTATION_STEPS == self.step % ROTATION_STEPS)
        known = torch.tensor([self.rows[part.request].chains is not None for part in batch.parts])
        index = (chosen & known[batch.part_numbers[group.number]]).nonzero()[:, 0]
        k, v = (values[:, :, index.to(values.device)] for values in given)
        found = canary.fingerprints(layer, k, v)[:, 0].cpu()
        canary.coverage.bytes_checked += len(index) * canary.entry_bytes
        wrong = (found != wanted[:, index]).any(0)
        violations = []
        for number in batch.part_numbers[group.number][index[wrong]].unique().tolist():
            entry = int((wrong & (batch.part_numbers[group.number][index] == number)).nonzero()[0])
            place, part = int(index[entry]), batch.parts[number]
            code = "R12" if bool(is_new[place]) else "R9"
            word = None
            if code == "R9":
                found_here = k[:, :, entry : entry + 1], v[:, :, entry : entry + 1]
                word = locate(canary, layer, found_here, found[:, entry] - wanted[:, place])
            own = {"request_id": part.request, "slot": int(read[place]), "word": word}
            sides: Sides = {}, {"wrong_entries": int(wrong.sum())}
            violations.append(dense_violation(code, (layer,), number, int(places[place]), _site(part), sides, **own))
        return violations


def _empty(size: int, count: int) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.int64) for _ in range(count)]


def _site(part: Part) -> tuple[str, int]:
    if not part.past:
        return "prefill", 0
    return ("decode" if part.count == 1 else "extend"), 0
