"""Telling of hits in watched pools: cells of a step become findings, and the mode decides what these do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Event, Group, Layers, Step
from kvcanary.codes import CODES
from kvcanary.errors import KVCorruptionError
from kvcanary.pools.launch_site import unpack_site
from kvcanary.provenance.changed_word import ChangedWord, describe_word, fitting_words
from kvcanary.report.finding import Cause, Finding
from kvcanary.report.render import Report
from kvcanary_kernels.record.layout import CHAIN, MASK_32, REQUEST_GENERATION, STEP_SITE, TOKEN_POSITION
from kvcanary_kernels.watch.reread import LAYERS_PER_ENTRY, SLOTS_PER_ENTRY, both_lanes
from kvcanary_kernels.watch.walk import NO_HIT, code_of, table_slots

SHOWN = 8  # findings of one step that are told whole
_CAUSES = {
    "R1": ("bounds", "the block table names a block that the pool does not have"),
    "R2": ("graphs", "a live row reads the null block"),
    "R3": ("bits", "somebody wrote into the canary's own memory"),
    "R4": ("addressing", "the block table, or the slot that was written, is not that of this position"),
    "R5": ("identity", "the block holds a continuation of another prefix"),
    "R6": ("identity", "the row is another request's, from the first block on"),
    "R9": ("transfer", "somebody wrote into the pool and declared nothing"),
    "R10": ("lengths", "the row grew or shrank without a forward that would explain it"),
    "R12": ("uninitialised", "the block was never filled, or loaded and not told of"),
    "T1": ("transfer", "what was declared to be there did not arrive"),
    "W1": ("bounds", "the slot mapping names a slot that the pool does not have, or padding's"),
    "W4": ("addressing", "two entries of one forward have one slot"),
    "W5": ("addressing", "the slot mapping is not what the block table says"),
    "W6": ("identity", "the token that was fed is not the one that the request has there"),
}


@dataclass(frozen=True)
class Hit:
    """One check that fired, with the place where the host can look further."""

    code: str
    request: str | None
    position: int | None
    slot: int
    group: Group
    layers: tuple[int, ...] = ()
    pool: Layers | None = None
    site: tuple[str, int] = ("decode", 0)
    what: str = ""
    evidence: tuple[str, ...] = ()
    found: dict[str, Any] = field(default_factory=dict)


def settle(canary: PagedCanary, step: Step) -> int:
    """Tell of everything that fired in this step, and give its number. KVCorruptionError in mode raise."""
    all_hits = _joined(_hits(canary, step))
    hits = [hit for hit in all_hits if hit.code not in canary.config.disable]
    if not hits:
        return len(all_hits)
    stops = canary.config.mode == "raise"
    action = "raised KVCorruptionError; no token of this step leaves" if stops else "logged; serving goes on"
    for hit in hits:
        canary.coverage.fired[hit.code] = canary.coverage.fired.get(hit.code, 0) + 1
    findings = [_finding(canary, hit, step, action) for hit in hits]
    told = [finding for finding in findings if canary.log.add(finding)][:SHOWN]
    if stops:
        raise KVCorruptionError(findings, Report(tuple(findings), action, canary.coverage.counters()))
    for finding in told:
        canary.tell(finding)
    return len(all_hits)


def _hits(canary: PagedCanary, step: Step) -> Iterator[Hit]:
    cells = canary.hits_of(step)
    column = 0
    for place, group in enumerate(canary.groups):
        for kind, hits in ("R", cells["walk"][place]), ("W", cells["write"][place]):
            for row in (hits[: len(step.requests)] != NO_HIT).nonzero()[:, 0].tolist():
                position, code = code_of(int(hits[row]), kind)
                slot = _slot(canary.kept[place], int(step.numbers[row]), position, group)
                yield Hit(code, step.requests[row], position, slot, group, site=step.site)
        for slot in canary.written_twice(step, group)[:SHOWN]:
            yield Hit("W4", None, None, slot, group, site=step.site)
        for layers in group.layers:
            yield from _content(group, layers, cells["read"][:, column], step.requests, step.site)
            for number, requests in enumerate(step.looked):
                yield from _content(group, layers, cells["look"][:, number, column], requests, ("release", 0))
            column += 1
    for event in step.events:
        yield from _of_event(event)


def _content(
    group: Group, layers: Layers, cells: Tensor, requests: Sequence[str], site: tuple[str, int]
) -> Iterator[Hit]:
    """cells: [2, >= rows], as `reread` gives them."""
    for row in (cells[0, : len(requests)] != NO_HIT).nonzero()[:, 0].tolist():
        (position, layer), slot = divmod(int(cells[0, row]), LAYERS_PER_ENTRY), int(cells[1, row]) % SLOTS_PER_ENTRY
        yield Hit("R9", requests[row], position, slot, group, (layer,), layers, site)


def _of_event(event: Event) -> Iterator[Hit]:
    wrong = (event.mismatch != 0).any(1).nonzero()[:, 0].tolist()
    for entry in wrong[:1]:
        bits = [int(word) & (1 << 64) - 1 for word in event.mismatch[entry]]
        layers = tuple(n for n in range(len(event.layers.names)) if bits[n // 64] >> n % 64 & 1)
        slot = int(event.slots[entry])
        request = event.requests.get(slot // event.group.block_size)
        yield Hit(
            event.code, request, None, slot, event.group, layers, event.layers, ("move", 0), event.what,
            evidence=(f"{len(wrong)} of {len(event.slots)} slots differ",),
        )  # fmt: skip


def _slot(lines: Tensor, line: int, position: int, group: Group) -> int:
    place = torch.tensor([[position]], device=lines.device)
    return int(table_slots(lines[line : line + 1], place, group.block_size)[0, 0])


def _joined(hits: Iterator[Hit]) -> list[Hit]:
    """The same at the same place in another group or pool of layers is one hit; a row's earliest position leads."""
    first: dict[tuple[str, str | None, int | None, int], Hit] = {}
    for hit in hits:
        first.setdefault((hit.code, hit.request, hit.position, hit.slot), hit)
    leading: dict[tuple[str | None, int], Hit] = {}
    ranks = list(CODES)
    for hit in sorted(first.values(), key=lambda hit: (hit.position or 0, ranks.index(hit.code))):
        leading.setdefault((hit.request, hit.slot if hit.request is None else 0), hit)
    return list(leading.values())


def _finding(canary: PagedCanary, hit: Hit, step: Step, action: str) -> Finding:
    group, word = hit.group, None
    is_inside = 0 <= hit.slot < group.records.shape[0]
    held = group.records[hit.slot].tolist() if is_inside else [0] * 8
    layers, found = hit.layers, dict(hit.found)
    expected: dict[str, Any] = {"position": hit.position}
    if hit.pool is not None and is_inside:
        layers, word, found["lane_a"] = _bytes_of(hit.pool, hit)
    if is_inside and held[STEP_SITE]:
        found |= {"position": held[TOKEN_POSITION] >> 32 & MASK_32, "chain": f"0x{held[CHAIN] & (1 << 64) - 1:016x}"}
    if canary.config.show_tokens and is_inside:
        found["token"] = held[TOKEN_POSITION] & MASK_32
    family, text = _CAUSES[hit.code]
    cause = Cause(family, text, "inferred")
    if word is not None:
        expected |= {"value": str(word.old_value), "bits": f"0x{word.old:0{2 * word.size}x}"}
        found |= {"value": str(word.new_value), "bits": f"0x{word.new:0{2 * word.size}x}"}
        if word.bit is not None:
            cause = Cause("bits", f"one flipped bit: bit {word.bit} of one element, nothing else changed", "derived")
    kind, index, _ = unpack_site(held[STEP_SITE] >> 32)
    last_writer = canary.writers.get(held[REQUEST_GENERATION] & MASK_32) if held[STEP_SITE] else None
    pool = hit.pool or group.layers[0]
    return Finding(
        code=hit.code,
        name=CODES[hit.code].name,
        sentence=CODES[hit.code].sentence,
        pool=pool.view.name,
        page=hit.slot // group.block_size,
        slot=hit.slot,
        offset=hit.slot % group.block_size,
        position=hit.position,
        layer=layers[0] if layers else None,
        layers=layers,
        part=word.part if word else None,
        head=word.head if word else None,
        dim=word.dim if word else None,
        byte=word.byte if word else None,
        bit=word.bit if word else None,
        site=hit.site,
        step=step.number,
        reader=hit.request if hit.code[0] in "RT" else None,
        writer=hit.request if hit.code.startswith("W") and hit.request is not None else last_writer,
        write_step=held[STEP_SITE] & MASK_32 if held[STEP_SITE] else None,
        write_site=(kind, index) if held[STEP_SITE] else None,
        undeclared=hit.code in ("R9", "T1"),
        owner=None,
        expected=expected,
        found=found,
        bytes_of=(),
        last_good_step=None,
        first_bad_step=step.number,
        history=("nobody tells this canary of grants and frees",),
        readers=(hit.request,) if hit.request is not None else (),
        exposed_tokens=0,
        causes=(cause,),
        evidence=(*hit.evidence, *((f"layers {', '.join(pool.names[n] for n in layers[:4])}",) if layers else ())),
        incident=canary.incidents.setdefault((hit.code, hit.request, hit.slot), len(canary.incidents) + 1),
        action=action if not hit.what else f"{action} ({hit.what})",
    )


def _bytes_of(layers: Layers, hit: Hit) -> tuple[tuple[int, ...], ChangedWord | None, str]:
    """Every layer that differs now, the one word that changed if it is one, and lane a of the first layer."""
    slot = torch.tensor([hit.slot], device=layers.lanes.device)
    differs = both_lanes(layers.rows, slot, layers.keys)[:, :, 0] - layers.lanes[:, :, hit.slot]
    wrong = differs[0].nonzero()[:, 0].tolist()
    if not wrong:
        return hit.layers, None, "as it was taken: bytes came back before the host looked"
    lane = f"0x{int(layers.lanes[0, wrong[0], hit.slot] + differs[0, wrong[0]]) & (1 << 64) - 1:016x}"
    word = None
    if len(wrong) == 1:
        row = layers.rows.gather_layer(wrong[0], slot)[0]
        fits = fitting_words(layers.keys, wrong[0], row, *differs[:, wrong[0]].tolist())
        if len(fits) == 1:
            pairs = zip(layers.view.parts, layers.rows.pieces, strict=True)
            part, piece = next(pair for pair in pairs if fits[0].number < pair[1].first + pair[1].words)
            word = describe_word(part, piece.first, row[piece.first : piece.first + piece.words], fits[0])
    return tuple(wrong), word, lane
