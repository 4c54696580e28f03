"""Records of the paged caches of transformers: what `generate_batch` stores and reads, judged batch by batch.

An entry is named by group and index; its record is the chain of its prefix and its position, its fingerprints are taken
from the values on their way. Everything is judged along the very indices that attention's K and V were read by.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.observed.prefix_hashes import Prefixes
from kvcanary.adapters.transformers.judging import DenseCanary, dense_violation, locate
from kvcanary.adapters.transformers.paged_layout import block_of, group_of, memory_of, shape_of
from kvcanary.adapters.transformers.paged_records import Batch, Group, Part, Row, site_word
from kvcanary.calls.violation import Violation
from kvcanary.config import ROTATION_STEPS
from kvcanary_kernels.record.layout import make_keys


class BatchedCache:
    """The records of one PagedAttentionCache."""

    def __init__(self, cache: Any, canary: DenseCanary) -> None:
        self.cache, self.canary = weakref.proxy(cache), canary
        self.rows: dict[str, Row] = {}
        self.fingerprints: dict[int, Tensor] = {}  # by layer, [2, indices] int64
        self.seen: dict[int, Tensor] = {}  # by layer, [indices] int64, step of the last good re-read
        self.pool_id = canary.new_pool()  # of what has no index
        self.groups = [
            Group(cache, number, window, size, canary.new_pool())
            for number, (window, size) in enumerate(shape_of(cache))
        ]
        self.step = self.num_copies = 0
        self.prefixes = Prefixes(make_keys(canary.seed, 1, 1))
        self._queue: list[tuple[Any, list[Part]]] = []
        self._batch: Batch | None = None

    # what the scheduler does

    def prefix(self, request: str, tokens: Sequence[int], length: int) -> None:
        """The first `length` tokens of a request lie in the cache already."""
        self._begin(request, self.prefixes.every(tokens[:length]))

    def placed(self, request: str, past: int, count: int, batch: Any) -> None:
        """A request comes next in a batch; `batch` is one object a batch."""
        if not self._queue or self._queue[-1][0] is not batch:
            self._queue.append((batch, []))
        self._queue[-1][1].append(Part(request, past, count))
        if past == 0:
            self._begin(request, torch.empty(0, dtype=torch.int64))
        elif request not in self.rows:
            self._begin(request, None)

    def forked(self, parent: str, children: Sequence[str]) -> None:
        for child in children:
            self._begin(child, self.rows[parent].chains if parent in self.rows else None)

    def freed(self, request: str) -> None:
        self.rows.pop(request, None)

    def reset(self) -> None:
        self.rows.clear()
        for group in self.groups:
            group.records.zero_()

    def copied(self, blocks: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> None:
        """Blocks were copied, by group: the records move along, and what arrived is read at once (T1)."""
        violations: list[Violation] = []
        self.num_copies += 1
        for number, (source, target) in blocks.items():
            group = self.groups[number]
            for src, dst in zip(source, target, strict=True):
                old, new = (block_of(self.cache, number, block) for block in (src, dst))
                group.records[new] = group.records[old]
                for layer in group.layers:
                    if layer in self.fingerprints:
                        self.fingerprints[layer][:, new] = self.fingerprints[layer][:, old]
                        violations += self._arrived(layer, group, new)
        self.canary.report(violations, self.step)

    def _begin(self, request: str, chains: Tensor | None) -> None:
        number = self.rows[request].number if request in self.rows else self.canary.new_request(request)
        self.rows[request] = Row(number, chains, self.step)

    def _arrived(self, layer: int, group: Group, where: Tensor) -> Iterator[Violation]:
        where = where[group.chains[where] != 0]
        if self.canary.config.content == "write" or not len(where):
            return
        k, v = (values[where].transpose(0, 1)[None] for values in memory_of(self.cache, layer))
        wrong = (self.canary.fingerprints(layer, k, v)[:, 0] != self.fingerprints[layer][:, where]).any(0)
        self.seen[layer][where[~wrong]] = self.step
        for index in where[wrong].tolist():
            position = int(group.positions_at(torch.tensor(index)))
            sides: dict[str, Any] = {"expected": {}, "found": {"wrong_entries": int(wrong.sum())}}
            yield group.violation("T1", (layer,), index, position, along=(self.pool_id, -self.num_copies), **sides)

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
            violations += self._judge(batch, group, read[group.number].cpu())
        self.canary.report(violations, self.step, self.pool_id)  # by what lies there before this forward writes
        for group in self.groups:
            self._seal(batch, group, write[group.number].cpu(), tokens)

    def skip(self) -> None:
        """A forward of the oldest batch that was placed is not followed: nobody knows its tokens any more."""
        self._batch = None
        for part in self._queue.pop(0)[1] if self._queue else ():
            self._begin(part.request, None)

    @property
    def _along(self) -> tuple[int, int]:
        """The index arrays of this batch."""
        return self.pool_id, self.step

    def _fed(self, number: int, part: Part, tokens: Tensor, positions: Tensor) -> Iterator[Violation]:
        row, request = self.rows[part.request], {"request_id": part.request}
        row.turn += 1
        wanted = torch.arange(part.past, part.past + part.count)
        for entry in (positions != wanted).nonzero()[:1, 0].tolist():
            sides = {"position": int(wanted[entry])}, {"position": int(positions[entry])}
            yield dense_violation("W5", (), number, int(wanted[entry]), part.site, sides, along=self._along, **request)
        if row.chains is None:
            self.canary.coverage.skip("requests whose tokens nobody knows", 1)
            return
        if len(row.chains) < part.past:
            sides = {"length": len(row.chains)}, {"length": part.past}
            yield dense_violation("R10", (), number, len(row.chains), part.site, sides, **request)
            row.chains = None
            return
        row.chains = self.prefixes.every(tokens.tolist(), after=row.chains[: part.past])

    def _judge(self, batch: Batch, group: Group, read: Tensor) -> Iterator[Violation]:
        """What the indices of one group lead to, against the rows whose they are; notes which entries these are."""
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
            held, at = group.chains[indices], group.positions_at(indices)
            positions = torch.arange(part.past - past, part.past)
            self.canary.coverage.slots_checked += past
            for entry in (held != chains[part.past - past : part.past]).nonzero()[:1, 0].tolist():
                code = "R12" if not held[entry] else "R4" if at[entry] != positions[entry] else "R6"
                position, index = int(positions[entry]), int(indices[entry])
                found = {"position": int(at[entry])} if held[entry] else {}
                sides = {"expected": {"position": position}, "found": found, "along": self._along}
                yield group.violation(code, (), index, position, part, **sides)
        batch.part_numbers[group.number], batch.places[group.number] = torch.tensor(part_numbers), torch.tensor(places)
        batch.is_new[group.number] = torch.tensor(new, dtype=torch.bool)

    def _seal(self, batch: Batch, group: Group, write: Tensor, tokens: Tensor) -> None:
        """Record what this forward writes, of long parts what stays in the window."""
        begin, batch.written[group.number] = 0, write
        for part in batch.parts:
            row, count = self.rows[part.request], part.count
            kept = min(count, group.window) if group.window else count
            own, end = slice(begin + count - kept, begin + count), part.past + count
            chains = 0 if row.chains is None else row.chains[end - kept : end]
            by = row.number, self.step, site_word(part)
            group.seal(write[own], torch.arange(end - kept, end), tokens[own], chains, by)
            self.canary.coverage.slots_sealed += kept
            begin += count

    def stored(
        self, layer: int, new: tuple[Tensor, Tensor], given: Sequence[Tensor], read: Tensor, write: Tensor
    ) -> None:
        """A layer stored `new` [1, heads, n, dim] and attention is given `given` [1, heads, m, dim]."""
        batch, canary = self._batch, self.canary
        if batch is None:
            return
        group = self.groups[group_of(self.cache, layer)]
        n = batch.total
        fresh, bad = canary.stored_fingerprints(layer, new[0][:, :, :n], new[1][:, :, :n])
        fresh = fresh[:, 0].cpu()
        held = self.fingerprints.get(layer)
        if held is None:
            held = self.fingerprints[layer] = torch.zeros(2, len(group.records), dtype=torch.int64)
            self.seen[layer] = torch.zeros(len(group.records), dtype=torch.int64)
        violations = [] if bad is None else [_not_finite(batch, layer, group, bad, int(write[bad]))]
        if len(read) and canary.config.content != "write":
            violations += self._reread(batch, layer, group, held, fresh, given, read.cpu())
        where = write.cpu()[:n]
        kept = torch.zeros(n, dtype=torch.bool)
        begin = 0
        for part in batch.parts:
            begin += part.count
            kept[begin - (min(part.count, group.window) if group.window else part.count) : begin] = True
        held[:, where[kept]] = fresh[:, kept]
        self.seen[layer][where[kept]] = self.step
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
        is_new, places, numbers = (own[group.number] for own in (batch.is_new, batch.places, batch.part_numbers))
        wanted = held[:, read[: len(is_new)]].clone()
        wanted[:, is_new] = fresh
        known = torch.tensor([self.rows[part.request].chains is not None for part in batch.parts])[numbers]
        chosen = known
        if self.canary.config.content == "rolling":
            turns = torch.tensor([self.rows[part.request].turn for part in batch.parts])[numbers]
            chosen = known & (is_new | ((places - turns) % ROTATION_STEPS == 0))
        index, differs = self._differing(layer, given, wanted, chosen)
        if len(differs) and len(index) < int(known.sum()):  # one fault is told whole
            index, differs = self._differing(layer, given, wanted, known)
        old = index[~is_new[index]]
        self.seen[layer][read[old[~torch.isin(old, differs)]]] = self.step
        violations, parts_seen, written = [], set(), set(batch.written[group.number].tolist())
        for place in differs.tolist():
            part = batch.parts[int(numbers[place])]
            code, slot = "R12" if bool(is_new[place]) else "R9", int(read[place])
            word, entry = None, [values[:, :, place : place + 1] for values in given]
            if code == "R9" and part.request not in parts_seen:
                differ = self.canary.fingerprints(layer, *entry)[:, 0, 0].cpu() - wanted[:, place]
                word = locate(self.canary, layer, (entry[0], entry[1]), differ)
            parts_seen.add(part.request)
            own: dict[str, Any] = {"word": word, "expected": {}, "found": {"wrong_entries": len(differs)}}
            if code == "R9":
                own["last_good"] = int(self.seen[layer][slot]) or None
            if code == "R12" or slot in written:  # this batch says where it was to be written
                own["along"] = self._along
            violations.append(group.violation(code, (layer,), slot, int(places[place]), part, **own))
        return violations

    def _differing(self, layer: int, given: Sequence[Tensor], wanted: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the entries that were read are looked at, and which of these hold other bytes than [2, n] say."""
        index = chosen.nonzero()[:, 0]
        k, v = (values[:, :, index.to(values.device)] for values in given)
        found = self.canary.fingerprints(layer, k, v)[:, 0].cpu()
        self.canary.coverage.bytes_checked += len(index) * self.canary.entry_bytes
        return index, index[(found != wanted[:, index]).any(0)]


def _not_finite(batch: Batch, layer: int, group: Group, entry: int, index: int) -> Violation:
    """N1 of an entry of this forward."""
    begin = 0
    for part in batch.parts:
        if entry < begin + part.count:
            break
        begin += part.count
    position, sides = part.past + entry - begin, ({"elements": "finite"}, {"layers_not_finite": [layer]})
    return group.violation("N1", (layer,), index, position, part, expected=sides[0], found=sides[1])
