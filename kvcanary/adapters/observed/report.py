"""What fired in watched pools: cells of a step become violations, which are told as those of all other pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.inputs import Fed
from kvcanary.adapters.observed.state import Event, Group, Layers, Step
from kvcanary.calls.violation import Violation
from kvcanary.codes import RANK
from kvcanary.provenance.changed_word import describe_change, fitting_changes
from kvcanary.report.watched_evidence import WatchedPool
from kvcanary_kernels.record.layout import MASK_32, REQUEST_GENERATION, read_record
from kvcanary_kernels.watch.reread import LAYERS_PER_ENTRY, SLOTS_PER_ENTRY, both_fingerprints
from kvcanary_kernels.watch.walk import NO_VIOLATION, code_of, table_slots

SHOWN = 8  # slots of one step that were written twice, and are told


def report_step(canary: PagedCanary, step: Step) -> int:
    """Tell of everything that fired in this step, and give its number. KVCorruptionError in mode raise."""
    violations = _leading(_violations(canary, step))
    canary.response.answer(violations, step.number, canary.coverage)
    return len(violations)


def _violations(canary: PagedCanary, step: Step) -> Iterator[Violation]:
    cells = canary.violations_of(step)
    column = 0
    for place, group in enumerate(canary.groups):
        pool = WatchedPool.of(group.layers[0].view, group.number, group.records)
        for kind, violations in ("R", cells["walk"][place]), ("W", cells["write"][place]):
            for row in (violations[: len(step.requests)] != NO_VIOLATION).nonzero()[:, 0].tolist():
                position, code = code_of(int(violations[row]), kind)
                slot = _slot(canary.kept[place], int(step.numbers[row]), position, group)
                violation = Violation(code, pool, slot, position, step.requests[row], step.site, step.number)
                violation.expected, violation.found = {"position": position}, _position_at(group, slot)
                yield violation
        for slot in canary.written_twice(step, group)[:SHOWN]:
            writer = canary.writers.get(int(group.records[slot, REQUEST_GENERATION]) & MASK_32)
            yield Violation("W4", pool, slot, None, writer, step.site, step.number)
        for layers in group.layers:
            looks = [(cells["read"][:, column], step.requests, step.site)]
            looks += [(cells["look"][:, n, column], own, ("release", 0)) for n, own in enumerate(step.reread)]
            for look in looks:
                yield from _content(group, layers, *look, step.number)
            column += 1
    for event in step.events:
        yield from event.violations(step.number) if isinstance(event, Fed) else _of_event(event, step.number)


def _position_at(group: Group, slot: int) -> dict[str, Any]:
    """What the record of a slot says, where somebody has written."""
    held = read_record(group.records, slot) if 0 <= slot < len(group.records) else None
    return {} if held is None or not held.site else {"position": held.position, "chain": f"0x{held.chain:016x}"}


def _content(
    group: Group, layers: Layers, cells: Tensor, requests: Sequence[str], site: tuple[str, int], step: int
) -> Iterator[Violation]:
    """cells: [2, >= rows], as `reread` gives them."""
    for row in (cells[0, : len(requests)] != NO_VIOLATION).nonzero()[:, 0].tolist():
        (position, layer), slot = divmod(int(cells[0, row]), LAYERS_PER_ENTRY), int(cells[1, row]) % SLOTS_PER_ENTRY
        place = {"position": position, "request_id": requests[row], "site": site, "step": step}
        yield _of_bytes("R9", group, layers, slot, (layer,), place)


def _of_event(event: Event, step: int) -> Iterator[Violation]:
    wrong = (event.mismatch != 0).any(1).nonzero()[:, 0].tolist()
    for entry in wrong[:1]:
        bits = [int(word) & (1 << 64) - 1 for word in event.mismatch[entry]]
        seen = tuple(n for n in range(len(event.layers.names)) if bits[n // 64] >> n % 64 & 1)
        slot, message = int(event.slots[entry]), f"{event.what}, {len(wrong)} of {len(event.slots)} slots differ"
        request = event.requests.get(slot // event.group.block_size)
        place = {"position": None, "request_id": request, "site": ("move", 0), "step": step, "message": message}
        yield _of_bytes(event.code, event.group, event.layers, slot, seen, place)


def _of_bytes(
    code: str, group: Group, layers: Layers, slot: int, seen: tuple[int, ...], place: dict[str, Any]
) -> Violation:
    """With every layer that differs now, and the one word that changed if it is one; `seen`: layers that differed."""
    where = torch.tensor([slot], device=layers.fingerprints.device)
    differs = both_fingerprints(layers.rows, where, layers.keys)[:, :, 0] - layers.fingerprints[:, :, slot]
    wrong = tuple(differs[0].nonzero()[:, 0].tolist())
    pool, shown = WatchedPool.of(layers.view, group.number, group.records, layers.keys), wrong or seen
    fits = fitting_changes(pool, slot, wrong[0], *differs[:, wrong[0]].tolist()) if len(wrong) == 1 else []
    notes: tuple[str, ...] = (f"layers {', '.join(layers.names[n] for n in shown[:4])}",)
    if not wrong and code == "R9":
        notes += ("the bytes came back before the host looked",)
    word = describe_change(pool, slot, fits[0]) if len(fits) == 1 else None
    return Violation(code, pool, slot, **place, layers=shown, word=word, notes=notes)


def _slot(lines: Tensor, line: int, position: int, group: Group) -> int:
    place = torch.tensor([[position]], device=lines.device)
    return int(table_slots(lines[line : line + 1], place, group.block_size)[0, 0])


def _leading(violations: Iterable[Violation]) -> list[Violation]:
    """The earliest of each row, and what belongs to none: what follows in a row, or in other pools, follows from it."""
    leading: dict[tuple[str | None, int], Violation] = {}
    for violation in sorted(violations, key=lambda violation: (violation.position or 0, RANK[violation.code])):
        is_of_row = violation.request_id is not None and violation.code != "W4"
        leading.setdefault((violation.request_id, 0 if is_of_row else violation.slot), violation)
    return list(leading.values())
