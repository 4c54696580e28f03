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
from kvcanary_kernels.record.layout import CHAIN, MASK_32, STEP_SITE, TOKEN_POSITION, read_record
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
                request = finding.writer if finding.code.startswith("W") else finding.reader
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
        lines = [kept[place.number].tolist() for kept in canary.kept]
        ends = [_end(canary, place.number, group) for group in canary.groups]
        tables = [line[: -(-end // g.block_size)] for line, end, g in zip(lines, ends, canary.groups, strict=True)]
        yield SeenRow(place.request, place.number, tables, _tokens(canary, place.number, max(ends)))


def _around(canary: WatchedCanary, number: int, finding: Finding, place: Place) -> Iterator[SeenSlot]:
    group = place.group
    slots, positions = _neighbours(canary, finding, place)
    where = torch.tensor(slots, device=group.records.device)
    records = group.records[where].cpu()
    differs, taken, found = _compared(group, where)
    left = MOST_NAMED
    for entry, slot in enumerate(slots):
        words = records[entry].numpy().view(np.uint64)[:4]
        is_written = bool(int(words[STEP_SITE]) >> 32)
        wrong = differs[:, entry].nonzero()[:, 0].tolist()
        layer = wrong[0] if wrong else 0
        same: tuple[dict[str, Any], ...] = ()
        if wrong and left:
            left -= 1
            same = tuple(_same(canary, group, layer, int(found[layer, entry]), slot))
        names = [name for layers in group.layers for name in layers.names]
        yield SeenSlot(
            finding=number,
            group=group.number,
            slot=slot,
            position=positions[entry],
            words=words if is_written else None,
            writer=canary.writers.get(int(words[2]) & MASK_32) if is_written else None,
            wrong=tuple(names[n] for n in wrong),
            is_taken=bool(taken[entry]),
            recorded=int(_recorded(group, layer, slot)),
            found=int(found[layer, entry]),
            same=same,
        )


def _neighbours(canary: WatchedCanary, finding: Finding, place: Place) -> tuple[list[int], list[int | None]]:
    """Slots around a finding and their positions in its row; those of its block where it has no row."""
    group, size = place.group, place.group.block_size
    num_slots = len(group.records)
    if place.number is not None:
        number, line = place.number, canary.kept[canary.groups.index(group)]
        position = finding.position
        if position is None:
            [blocks] = [line[number].tolist()]
            position = (
                blocks.index(finding.slot // size) * size + finding.slot % size
                if finding.slot // size in blocks
                else None
            )
        if position is not None:
            end = max(_end(canary, number, group), position + 1)
            wanted = torch.arange(max(0, position - AROUND), min(end, position + AROUND + 1), device=line.device)
            slots = table_slots(line[number : number + 1], wanted[None], size)[0].tolist()
            pairs = list(zip(slots, wanted.tolist(), strict=True))
            if finding.slot not in slots:
                pairs.append((finding.slot, None))
            pairs = [pair for pair in pairs if 0 <= pair[0] < num_slots]
            return [slot for slot, _ in pairs], [position for _, position in pairs]
    if not 0 <= finding.slot < num_slots:
        return [], []
    first = finding.slot // size * size
    start = max(first, min(finding.slot - SEEN_BLOCK // 2, first + size - SEEN_BLOCK))
    slots = list(range(start, min(first + size, start + SEEN_BLOCK)))
    return slots, [None] * len(slots)


def _end(canary: WatchedCanary, number: int, group: Group) -> int:
    """Entries of a row, as far as its last block table goes; of one that has ended, those that it had last."""
    width = canary.kept[canary.groups.index(group)].shape[1] * group.block_size
    told = [end for step in canary.recent.steps for _, own, end in step.rows if own == number]
    return min(width, max(int(canary.memory.truth.ends[number]), *told[-1:], 0))


def _compared(group: Group, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of slots [n], on the host: by layer whether the bytes are not as taken; whether any were; what they are."""
    differs, found, taken = [], [], torch.zeros(len(slots), dtype=torch.bool)
    for layers in group.layers:
        own = both_fingerprints(layers.rows, slots, layers.keys)
        is_taken = (layers.stamps[slots] == group.records[slots, CHAIN]).cpu()
        wrong = (own != layers.fingerprints[:, :, slots]).any(0).cpu()
        differs.append(wrong & is_taken)
        found.append(own[0].cpu())
        taken |= is_taken
    return torch.cat(differs), taken, torch.cat(found)


def _recorded(group: Group, layer: int, slot: int) -> int:
    layers, own = _layer_of(group, layer)
    return int(layers.fingerprints[0, own, slot])


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
