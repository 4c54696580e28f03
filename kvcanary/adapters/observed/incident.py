"""Incident: what is copied from the device when something fired, of the rows that findings name and of nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvcanary.adapters.observed.memory import Memory
from kvcanary.adapters.observed.recent_steps import RecentSteps
from kvcanary.adapters.observed.state import Group, Layers
from kvcanary.config import CanaryConfig
from kvcanary.dumps.watched_writing import SeenRow, SeenSlot
from kvcanary.report.finding import Finding
from kvcanary_kernels.record.layout import CHAIN, MASK_32, REQUEST_GENERATION, STEP_SITE, TOKEN_POSITION, read_record
from kvcanary_kernels.watch.reread import both_fingerprints
from kvcanary_kernels.watch.walk import table_slots

AROUND = 8  # entries of the row before the slot, and behind it
SEEN_BLOCK = 64  # slots of its block, at most
MOST_FINDINGS = 8  # of one step that are looked at
MOST_NAMED = 8  # wrong entries of one finding whose bytes are looked for in the pool
SAME = 4  # slots that are named for the bytes of one entry
MOST_TOKENS = 1 << 16  # of a row


class WatchedCanary(Protocol):
    """What is asked of a `PagedCanary`."""

    config: CanaryConfig
    memory: Memory
    groups: list[Group]
    kept: list[Tensor]
    writers: OrderedDict[int, str]
    recent: RecentSteps
    step: int

    def known_tokens(self, number: int) -> list[int] | None: ...

    def certificate(self, numbers: Collection[int] = ()) -> dict[str, Any]: ...


class Place(NamedTuple):
    """Where a finding lies: its group, the layers whose pool it names, and the row that it was seen in."""

    group: Group
    layers: Layers
    request: str | None
    number: int | None


def pool_name(canary: WatchedCanary, group: Group, layers: Layers) -> str:
    """What findings call a pool: layers that are alike, and their group where there are several."""
    name = layers.view.name
    return name if len(canary.groups) == 1 else f"group {group.number} {name}"


def place_of(canary: WatchedCanary, finding: Finding) -> Place | None:
    """None for what has no place in a pool."""
    for group in canary.groups:
        for layers in group.layers:
            if pool_name(canary, group, layers) == finding.pool:
                request = finding.writer if finding.code[0] in "WN" else finding.reader
                number = None if request is None else canary.recent.number_of(request)
                return Place(group, layers, request, number)
    return None


def seen_slots(canary: WatchedCanary, findings: Sequence[Finding]) -> Iterator[SeenSlot]:
    """The slots around each of the first findings, in the order of their row or block."""
    for number, finding in enumerate(findings[:MOST_FINDINGS]):
        place = place_of(canary, finding)
        if place is not None:
            yield from _around(canary, number, finding, place)


def seen_rows(canary: WatchedCanary, findings: Sequence[Finding]) -> Iterator[SeenRow]:
    """The rows of which these findings speak, each once."""
    told: set[str] = set()
    for finding in findings[:MOST_FINDINGS]:
        place = place_of(canary, finding)
        if place is None or place.request is None or place.number is None or place.request in told:
            continue
        told.add(place.request)
        tables = [blocks_of(canary, place.number, group) for group in canary.groups]
        end = max(_end(canary, place.number, group) for group in canary.groups)
        yield SeenRow(place.request, place.number, tables, _tokens(canary, place.number, end))


def blocks_of(canary: WatchedCanary, number: int, group: Group) -> list[int]:
    """Of a row, as far as its entries go: what is kept behind them was another's."""
    used = -(-_end(canary, number, group) // group.block_size)
    return canary.kept[canary.groups.index(group)][number, :used].tolist()


def _around(canary: WatchedCanary, number: int, finding: Finding, place: Place) -> Iterator[SeenSlot]:
    group, left = place.group, MOST_NAMED
    pairs = _neighbours(canary, finding, place)
    where = torch.tensor([slot for slot, _ in pairs], dtype=torch.int64, device=group.records.device)
    records = group.records[where].cpu().numpy().view(np.uint64)[:, :4]
    names = [name for layers in group.layers for name in layers.names]
    differs, taken, found, recorded = _compared(group, where)
    for entry, (slot, position) in enumerate(pairs):
        words, wrong = records[entry], differs[:, entry].nonzero()[:, 0].tolist()
        is_written, layer = bool(int(words[STEP_SITE]) >> 32), wrong[0] if wrong else 0
        is_looked_for, left = bool(wrong) and left > 0, left - bool(wrong)
        same = _same(canary, group, layer, int(found[layer, entry]), slot) if is_looked_for else ()
        yield SeenSlot(
            finding=number,
            group=group.number,
            slot=slot,
            position=position,
            words=words if is_written else None,
            writer=canary.writers.get(int(words[REQUEST_GENERATION]) & MASK_32) if is_written else None,
            wrong=tuple(names[n] for n in wrong),
            is_taken=bool(taken[entry]),
            recorded=int(recorded[layer, entry]),
            found=int(found[layer, entry]),
            same=tuple(same),
        )


Pairs = list[tuple[int, int | None]]


def _neighbours(canary: WatchedCanary, finding: Finding, place: Place) -> Pairs:
    """Slots around a finding, each with its position in the row; those of its block where it has no row."""
    if place.number is not None:
        line = canary.kept[canary.groups.index(place.group)][place.number : place.number + 1]
        position = _position(finding, line, place.group.block_size)
        if position is not None:
            return _along(canary, finding, place, line, position)
    return _in_block(finding, place.group)


def _position(finding: Finding, line: Tensor, size: int) -> int | None:
    """Of a finding in the row with this block table [1, width]; None where the table does not lead to it."""
    if finding.position is not None:
        return finding.position
    blocks = line[0].tolist()
    block, offset = divmod(finding.slot, size)
    return blocks.index(block) * size + offset if block in blocks else None


def _along(canary: WatchedCanary, finding: Finding, place: Place, line: Tensor, position: int) -> Pairs:
    """Entries of the row before and behind a position, and the slot that was found where the row leads elsewhere."""
    group, last = place.group, position + AROUND + 1
    end = max(_end(canary, place.number or 0, group), position + 1)
    wanted = torch.arange(max(0, position - AROUND), min(end, last), device=line.device)
    slots = table_slots(line, wanted[None], group.block_size)[0].tolist()
    pairs: Pairs = list(zip(slots, wanted.tolist(), strict=True))
    if finding.slot not in slots:
        pairs.append((finding.slot, None))
    return [pair for pair in pairs if 0 <= pair[0] < len(group.records)]


def _in_block(finding: Finding, group: Group) -> Pairs:
    size, num_slots = group.block_size, len(group.records)
    if not 0 <= finding.slot < num_slots:
        return []
    first = finding.slot // size * size
    start = max(first, min(finding.slot - SEEN_BLOCK // 2, first + size - SEEN_BLOCK))
    return [(slot, None) for slot in range(start, min(first + size, start + SEEN_BLOCK, num_slots))]


def _end(canary: WatchedCanary, number: int, group: Group) -> int:
    """Entries of a row, as far as its last block table goes; of one that has ended, those that it had last."""
    width = canary.kept[canary.groups.index(group)].shape[1] * group.block_size
    told = [end for step in canary.recent.steps for _, own, end in step.rows if own == number]
    return min(width, max(int(canary.memory.truth.ends[number]), *told[-1:], 0))


def _compared(group: Group, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of slots [n], on the host: [layers, n] whether the bytes are not as taken, [n] whether any were taken under the
    record that lies there, and [layers, n] fingerprint a of what lies there and of what was taken.
    """
    differs, found, recorded, taken = [], [], [], torch.zeros(len(slots), dtype=torch.bool)
    for layers in group.layers:
        own, held = both_fingerprints(layers.rows, slots, layers.keys), layers.fingerprints[:, :, slots]
        chains = group.records[slots, CHAIN]
        is_taken = (layers.stamps[slots] == chains) & ((chains != 0) | (held[0] != 0).any(0))  # 0: never
        differs.append(((own != held).any(0) & is_taken).cpu())
        found.append(own[0].cpu())
        recorded.append(held[0].cpu())
        taken |= is_taken.cpu()
    return torch.cat(differs), taken, torch.cat(found), torch.cat(recorded)


def _layer_of(group: Group, number: int) -> tuple[Layers, int]:
    """Of the layers of a group one behind the other."""
    for layers in group.layers:
        if number < len(layers.names):
            return layers, number
        number -= len(layers.names)
    raise IndexError(number)


def _same(canary: WatchedCanary, group: Group, layer: int, fingerprint: int, slot: int) -> Iterator[dict[str, Any]]:
    """Slots for which these bytes were written in this layer."""
    layers, own = _layer_of(group, layer)
    if fingerprint == int(layers.keys.start_a[own]):
        return  # zeros are of nobody
    is_same = layers.fingerprints[0, own] == fingerprint
    for other in is_same.nonzero()[: SAME + 1, 0].tolist():
        held = read_record(group.records, other)
        if other != slot and held.site:
            request = canary.writers.get(held.request)
            yield {"slot": other, "request": request, "position": held.position, "step": held.step}


def _tokens(canary: WatchedCanary, number: int, end: int) -> list[int]:
    """Those that the engine says, where it does; else those of the records that the row leads to."""
    end = min(end, MOST_TOKENS)
    known = canary.known_tokens(number)
    if known is not None:
        return known[:end]
    group, line = canary.groups[0], canary.kept[0]
    positions = torch.arange(end, device=line.device)
    slots = table_slots(line[number : number + 1], positions[None], group.block_size)[0]
    words = group.records[slots.clamp(0, len(group.records) - 1), TOKEN_POSITION].cpu().numpy()
    return (words & MASK_32).astype(np.uint32).view(np.int32).tolist()
