"""Other layouts: bytes that came back whole, by another axis, order or stride; undone, and proved by fingerprints.

Tried at the first few slots that nothing else explains; an answer holds for all of these, or is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvcanary.pools.slot_maps import Ints
from kvcanary.provenance.bytes_of import find_provenance, fingerprints_of_rows
from kvcanary.provenance.slipped_rows import span
from kvcanary_kernels.record.layout import MASK_32

if TYPE_CHECKING:
    from kvcanary.provenance.arrival import ArrivedSlots

LAYOUT, REORDERED, ELSEWHERE = "layout", "reordered", "elsewhere"
SAMPLE = 8  # slots at which an answer must hold
COMPARED = 4096  # slots among which a part is looked for
FEW_HEADS = 5  # of which every order is tried
MISSING = ("zero_part", "poison", "scale")  # answers of `find_provenance` to what a part holds that did not come


@dataclass(frozen=True)
class Guess:
    """kind: LAYOUT; REORDERED, of slots and layers; ELSEWHERE, the bytes of another slot."""

    kind: str
    text: str


@dataclass(frozen=True, eq=False)
class _Scene:
    """Slots of one layer that hold bytes without a name.

    sample: [n] numbers among the compared slots;  rows: [n, words] int64 as they lie there
    lacks:  [n] what fingerprint a lacks to be the expected one
    """

    arrived_slots: ArrivedSlots
    layer: int
    page_size: int
    sample: Ints
    rows: Tensor
    lacks: Ints

    @property
    def num_parts(self) -> int:
        return len(self.arrived_slots.pool.rows.pieces)

    def keys(self, part: int) -> Tensor:
        """[words] int64, of a part."""
        pool = self.arrived_slots.pool
        return pool.keys.fingerprint_a[self.layer, span(pool.rows.pieces[part])].cpu().to(torch.int64) & MASK_32

    def part(self, rows: Tensor, part: int) -> Tensor:
        return rows[:, span(self.arrived_slots.pool.rows.pieces[part])]

    def adds(self, rows: Tensor, *parts: int) -> Ints:
        """[n] int64: what these parts of rows [n, words] add to fingerprint a."""
        return np.sum([(self.part(rows, part) * self.keys(part)).sum(1).numpy() for part in parts], axis=0)

    def name(self, part: int) -> str:
        return self.arrived_slots.pool.view.parts[part].name


def other_layout(arrived_slots: ArrivedSlots, layer: int, numbers: Ints, page_size: int) -> Guess | None:
    """What explains the bytes of these compared slots in this layer; None: nothing that is known."""
    sample = numbers[:SAMPLE]
    lacks = arrived_slots.expected[0][layer, sample] - arrived_slots.found[0][layer, sample]
    rows = _rows(arrived_slots, layer, arrived_slots.slots[sample])
    scene = _Scene(arrived_slots, layer, page_size, sample, rows, lacks)
    looks = (_of_other_layers, _part_elsewhere, _by_another_axis, _heads, _page_axes, _named)
    return next((guess for look in looks if (guess := look(scene)) is not None), None)


def first_places(known: Ints, wanted: Ints) -> tuple[Ints, Ints]:
    """Which of `wanted` [n] are in `known` [m], and the first place of each there."""
    order = np.argsort(known, kind="stable")
    at = np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)
    which = np.flatnonzero(known[order[at]] == wanted)
    return which, order[at[which]]


def _rows(arrived_slots: ArrivedSlots, layer: int, slots: Ints) -> Tensor:
    """[n, words] int64 of unsigned words, on the host."""
    where = torch.from_numpy(slots).to(arrived_slots.pool.records.device)
    return arrived_slots.pool.rows.gather_layer(layer, where).cpu().to(torch.int64) & MASK_32


def _of_other_layers(scene: _Scene) -> Guess | None:
    """Rows of another layer, of the same slots or of others."""
    arrived_slots, pool = scene.arrived_slots, scene.arrived_slots.pool
    origins: dict[int, tuple[int, int]] = {}
    rows = scene.rows.to(torch.int32).to(pool.records.device)
    for layer in range(pool.view.num_layers):
        if layer != scene.layer and len(origins) < len(scene.sample):
            fingerprints = fingerprints_of_rows(pool, layer, rows).cpu().numpy()
            which, places = first_places(np.where(arrived_slots.current, arrived_slots.known[layer], 0), fingerprints)
            origins |= {
                n: (layer, p) for n, p in zip(which.tolist(), places.tolist(), strict=True) if arrived_slots.current[p]
            }
    if len(origins) < len(scene.sample):
        return None
    own = arrived_slots.places[scene.sample].tolist()
    layers = {layer for layer, _ in origins.values()}
    if len(layers) == 1 and [origins[n][1] for n in range(len(own))] == own:
        return Guess(LAYOUT, f"layer {scene.layer} holds layer {layers.pop()} of the same slots")
    layer, place = origins[0]
    return Guess(
        REORDERED,
        f"layers and slots are in another order: layer {scene.layer}, slot {own[0]} of the transfer holds "
        f"layer {layer}, slot {place}",
    )


def _part_elsewhere(scene: _Scene) -> Guess | None:
    """One part alone, or all extras, are those of another slot that came back with it."""
    compared, view = _compared(scene), scene.arrived_slots.pool.view
    extras = tuple(range(2 if view.v else 1, scene.num_parts))
    for parts in [*((part,) for part in range(scene.num_parts)), *([extras] if len(extras) > 1 else [])]:
        which, places = first_places(scene.adds(compared, *parts), scene.adds(scene.rows, *parts) + scene.lacks)
        if len(which) == len(scene.sample):
            here, there = (scene.arrived_slots.places[[scene.sample[0], places[0]]] // scene.page_size).tolist()
            those, lies = ("that", "lies") if len(parts) == 1 else ("those", "lie")
            names = " and ".join(map(scene.name, parts))
            return Guess(ELSEWHERE, f"{names} alone: {those} of page {here} {lies} in page {there}")
    return None


def _by_another_axis(scene: _Scene) -> Guess | None:
    """K and V, of these slots or others, each where the other should be."""
    pieces = scene.arrived_slots.pool.rows.pieces
    if scene.num_parts < 2 or pieces[0].words != pieces[1].words or not scene.arrived_slots.pool.view.v:
        return None
    compared, keys = _compared(scene), [scene.keys(part) for part in (0, 1)]
    as_k, as_v = (
        np.concatenate([(scene.part(compared, part) * key).sum(1).numpy() for part in (0, 1)]) for key in keys
    )
    found = []
    for wanted in scene.lacks + scene.adds(scene.rows, 0, 1):
        which, places = first_places(as_v, wanted - as_k)
        if not len(which):
            return None
        found.append((int(which[0]), int(places[0])))
    if any(v == k + len(compared) for k, v in found):
        return None  # the whole row lies in another slot, which says nothing of what lies here
    many, sample = len(compared), scene.sample.tolist()
    if all((k, v) == (many + n, n) for (k, v), n in zip(found, sample, strict=True)):
        return Guess(LAYOUT, "K and V are exchanged")
    k, v = ((place // many, scene.arrived_slots.places[place % many] // scene.page_size) for place in found[0])
    page = scene.arrived_slots.places[sample[0]] // scene.page_size
    return Guess(
        LAYOUT,
        f"K and V lie along another axis: K of page {page} is in the {'KV'[k[0]]} of page {k[1]}, "
        f"its V in the {'KV'[v[0]]} of page {v[1]}",
    )


def _heads(scene: _Scene) -> Guess | None:
    """Heads in another order, of K, of V or of all parts that have as many."""
    parts = scene.arrived_slots.pool.view.parts
    sums: dict[int, Ints] = {}  # by part [orders, n]: what each order would add
    heads = parts[0].heads
    orders = np.array(list(orders_of(heads)), np.int64).reshape(-1, heads)
    for number, part in enumerate(parts):
        keys = scene.keys(number)
        if part.heads == heads and len(keys) % heads == 0 and len(orders):
            rows = scene.part(scene.rows, number).unflatten(1, (heads, -1))
            table = (rows[:, :, None] * keys.view(heads, -1)).sum(-1).numpy()  # [n, head that lies, head whose keys]
            lie = np.arange(heads)
            sums[number] = np.stack([table[:, lie, order].sum(1) - table[:, lie, lie].sum(1) for order in orders])
    for chosen in (*[(number,) for number in sums], tuple(sums)):
        if chosen:
            fits = (np.sum([sums[number] for number in chosen], axis=0) == scene.lacks).all(1)
            if fits.any():
                order, names = orders[fits.argmax()].tolist(), " and ".join(scene.name(n) for n in chosen)
                return Guess(LAYOUT, f"heads of {names} are in another order: {', '.join(map(str, order[:16]))}")
    return None


def orders_of(heads: int) -> Iterator[tuple[int, ...]]:
    """Orders that a copy may make of heads or layers, but the right one: all of few; else shifts, swaps, strides."""
    right = tuple(range(heads))
    if heads <= FEW_HEADS:
        yield from (order for order in permutations(right) if order != right)
        return
    yield from (right[shift:] + right[:shift] for shift in range(1, heads))
    yield right[::-1]
    for stride in (stride for stride in range(2, heads) if heads % stride == 0):
        yield tuple(head for first in range(stride) for head in right[first::stride])
        yield tuple(head for first in range(0, heads, stride) for head in right[first : first + stride][::-1])
    for a in right:
        for b in right[a + 1 :]:
            yield (*right[:a], b, *right[a + 1 : b], a, *right[b + 1 :])


def _page_axes(scene: _Scene) -> Guess | None:
    """Heads and slots of a page exchanged: HND read as NHD, or the other way round."""
    arrived_slots, size = scene.arrived_slots, scene.page_size
    first = int(scene.sample[0])
    page = arrived_slots.places[first] // size
    own = np.flatnonzero(arrived_slots.places // size == page)
    slots = arrived_slots.slots[own]
    if size == 1 or (slots % size != arrived_slots.places[own] % size).any() or len(set((slots // size).tolist())) > 1:
        return None
    rows = _rows(arrived_slots, scene.layer, int(slots[0]) // size * size + np.arange(size))
    wanted = arrived_slots.expected[0][scene.layer, own]
    parts = arrived_slots.pool.view.parts
    if any(len(scene.keys(number)) % part.heads for number, part in enumerate(parts)):
        return None
    by_head = [scene.part(rows, number).unflatten(1, (part.heads, -1)) for number, part in enumerate(parts)]
    for turn in (turned, turned_back):
        undone = torch.cat([turn(values) if values.shape[1] > 1 else values.flatten(1) for values in by_head], dim=1)
        words = undone[slots % size].to(torch.int32).to(arrived_slots.pool.records.device)
        if (fingerprints_of_rows(arrived_slots.pool, scene.layer, words).cpu().numpy() == wanted).all():
            text = f"heads and slots of page {page} are exchanged: HND was read as NHD, or NHD as HND"
            return Guess(LAYOUT, text)
    return None


def turned(values: Tensor) -> Tensor:
    """[slots, heads, words] that lie as [heads, slots, words], as [slots, heads * words]."""
    slots, heads, words = values.shape
    return values.reshape(heads, slots, words).transpose(0, 1).flatten(1)


def turned_back(values: Tensor) -> Tensor:
    """The other way round."""
    return values.transpose(0, 1).reshape(len(values), -1)


def _named(scene: _Scene) -> Guess | None:
    """Anything else that explains the bytes of one slot."""
    arrived_slots, slot = scene.arrived_slots, int(scene.arrived_slots.slots[scene.sample[0]])
    answers = find_provenance(arrived_slots.pool, slot, scene.layer, first=arrived_slots.slots.tolist())
    if not answers:
        return None
    answer = answers[0]
    if answer.kind == "slot":
        return Guess(ELSEWHERE, f"{answer.text}, which nobody asked for")
    missing = ": a part is missing" if answer.kind in MISSING else ""
    return None if answer.kind == "not_finite" else Guess(LAYOUT, f"{answer.text}{missing}")


def _compared(scene: _Scene) -> Tensor:
    """[m, words] int64: rows of all slots that came back, or of so many."""
    return _rows(scene.arrived_slots, scene.layer, scene.arrived_slots.slots[:COMPARED])
