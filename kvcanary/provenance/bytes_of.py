"""Provenance: whose bytes lie in a slot now? First by their name, then by hypotheses that are tested one by one.

A fingerprint is a name: bytes that were written for another slot of the layer are known by it, exactly. What has no
name is compared with what a fault would have left: zeros, poison, K in the place of V, a row that slipped. Those are
inferred. Runs only when something fired, and searches at most SEARCHED_SLOTS slots for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from kvcanary.provenance.slipped_rows import reordered, row_of, span, ways_back
from kvcanary.records.state import PoolState
from kvcanary_kernels.content.poison import poison_words
from kvcanary_kernels.record.layout import MASK_32, TOKEN_POSITION

SEARCHED_SLOTS = 4096
COMPARED_SLOTS = 64  # of those searched, the ones that begin alike
MOST_ANSWERS = 3
NAMED_SLOTS = 4
PARTS = ("K", "V")


@dataclass(frozen=True)
class Provenance:
    """One answer. `kind` is a word for it; `slot` and `layer` say for whom the bytes were written, where known."""

    kind: str
    text: str
    basis: str  # "derived": a fingerprint names them | "inferred": a hypothesis fits
    slot: int | None = None
    layer: int | None = None


@dataclass(frozen=True, eq=False)
class Scene:
    """The row of one slot and layer as it lies there now, and what it may be compared with.

    row:    [words] int32
    search: [n] int64, slots that hypotheses may compare with
    """

    pool: PoolState
    slot: int
    layer: int
    row: Tensor
    search: Tensor

    @property
    def num_parts(self) -> int:
        """K and V; 1 where the rows are latent and have no V."""
        return 2 if len(self.pool.rows.pieces) > 1 and self.pool.view.v else 1

    @cached_property
    def name(self) -> int:
        """Fingerprint a of the bytes that lie here."""
        return int(fingerprints_of_rows(self.pool, self.layer, self.row[None])[0])

    @cached_property
    def first_words(self) -> tuple[Tensor, ...]:
        """By part, [n] int32: the first word of it that lies in each searched slot now."""
        views = [self.pool.rows.parts[part][self.layer][:, :, 0, 0] for part in range(self.num_parts)]
        return tuple(view[self.search // view.shape[1], self.search % view.shape[1]] for view in views)

    def part(self, number: int) -> slice:
        return span(self.pool.rows.pieces[number])


Hypothesis = Callable[[Scene], Provenance | None]


def find_provenance(
    pool: PoolState,
    slot: int,
    layer: int,
    first: Sequence[int] = (),
    hypotheses: Sequence[Hypothesis] | None = None,
) -> tuple[Provenance, ...]:
    """Answers for the bytes of one slot and layer, best first; empty where nothing fits.

    `first`: slots to search first, such as those of the reader's row; then those around the slot
    `hypotheses`: that are tested, in this order; None: all
    """
    if pool.is_gone:
        return ()
    search = torch.tensor(_searched(pool, slot, first), dtype=torch.int64, device=pool.records.device)
    scene = Scene(pool, slot, layer, row_of(pool, layer, slot), search)
    answers: list[Provenance] = []
    for hypothesis in HYPOTHESES if hypotheses is None else hypotheses:
        answer = hypothesis(scene)
        if answer is not None:
            answers.append(answer)
            if answer.basis == "derived" or len(answers) == MOST_ANSWERS:
                break
    return tuple(answers)


def fingerprints_of_rows(pool: PoolState, layer: int, rows: Tensor) -> Tensor:
    """[n] int64: fingerprint a that rows [n, words] int32 have in this layer, wherever they lie."""
    keys = pool.keys.fingerprint_a[layer].to(torch.int64) & MASK_32
    return ((rows.to(torch.int64) & MASK_32) * keys).sum(1) + pool.keys.start_a[layer]


def holds_its_own(pool: PoolState, layer: int, slot: int) -> bool:
    """Whether the slot's bytes of the layer are those that its fingerprint names."""
    fingerprints = fingerprints_of_rows(pool, layer, row_of(pool, layer, slot)[None])
    return bool(fingerprints[0] == pool.content_a[layer, slot])


# the hypotheses


def all_zero(scene: Scene) -> Provenance | None:
    zero = [number for number in range(scene.num_parts) if not scene.row[scene.part(number)].any()]
    if not scene.row.any():
        return _inferred("zero", "all zero")
    return _inferred("zero_part", f"{PARTS[zero[0]]} is all zero") if zero else None


def poisoned(scene: Scene) -> Provenance | None:
    """What a freed page is filled with: nothing was stored since."""
    slots, words = torch.tensor([scene.slot], device=scene.row.device), len(scene.row)
    for nan in (False, True):
        same = scene.row == poison_words(slots, scene.layer * words, words, nan)[0]
        if bool(same.all()):
            return _inferred("poison", "the poison of freed pages: nothing was stored since")
        for number in range(scene.num_parts):
            if bool(same[scene.part(number)].all()):
                return _inferred("poison", f"{PARTS[number]} is the poison of freed pages: it was not stored since")
    return None


def of_another_slot(scene: Scene) -> Provenance | None:
    """By name: the row before or after this one, as when a block slipped by one slot, or of anywhere in the pool."""
    content = scene.pool.content_a[scene.layer]
    for other, where in ((scene.slot - 1, "before"), (scene.slot + 1, "after")):
        if 0 <= other < len(content) and int(content[other]) == scene.name:
            return Provenance("slot", f"the bytes of slot {other}, the one {where} it", "derived", other, scene.layer)
    same = (content == scene.name).nonzero().flatten()
    others = [slot for slot in same[: NAMED_SLOTS + 2].tolist() if slot != scene.slot]
    if not others:
        return None
    others.sort(key=lambda slot: holds_its_own(scene.pool, scene.layer, slot))  # rows that were exchanged go first
    more = len(same) - len(others[:NAMED_SLOTS]) - int((same == scene.slot).any())
    named = ", ".join(str(slot) for slot in others[:NAMED_SLOTS]) + (f" and {more} more" if more else "")
    return Provenance("slot", f"the bytes of slot {named}", "derived", others[0], scene.layer)


def scales_of_another(scene: Scene) -> Provenance | None:
    """What lies beside K and V is one number throughout, or that of the slot before or after."""
    pieces = scene.pool.rows.pieces[scene.num_parts :]
    if not pieces:
        return None
    words = torch.cat([scene.row[span(piece)] for piece in pieces])
    if len(words) > 1 and bool((words == words[0]).all()):
        return _inferred("scale", f"{_names(scene)} hold one number throughout")
    for other in (scene.slot - 1, scene.slot + 1):
        if scene.pool.view.null_slots <= other < scene.pool.view.num_slots:
            row = row_of(scene.pool, scene.layer, other)
            if torch.equal(torch.cat([row[span(piece)] for piece in pieces]), words):
                return _inferred("scale", f"{_names(scene)} are those of slot {other}", other, scene.layer)
    return None


def scales_in_another_order(scene: Scene) -> Provenance | None:
    """What lies beside K and V is its own, exchanged between parts or in another order within one of them."""
    ways = list(reordered(scene.pool, scene.row, scene.num_parts))
    place = _was_written(scene, torch.stack([row for _, row in ways])) if ways else None
    return _inferred("scale_order", ways[place[0]][0]) if place else None


def _names(scene: Scene) -> str:
    return " and ".join(part.name for part in scene.pool.view.parts[scene.num_parts :])


def of_another_layer(scene: Scene) -> Provenance | None:
    """By name, with the keys of every other layer, in the searched slots."""
    pool = scene.pool
    layers = [layer for layer in range(pool.view.num_layers) if layer != scene.layer]
    slots = torch.cat((scene.search, scene.search.new_tensor([scene.slot])))
    for layer in layers:
        name = int(fingerprints_of_rows(pool, layer, scene.row[None])[0])
        found = (pool.content_a[layer, slots] == name).nonzero().flatten()
        if len(found):
            slot = int(slots[found[-1]])
            return _inferred("layer", f"the row of layer {layer}, slot {slot}", slot, layer)
    return None


def exchanged(scene: Scene) -> Provenance | None:
    """K where V was written and V where K was."""
    if scene.num_parts < 2 or scene.pool.rows.pieces[0].words != scene.pool.rows.pieces[1].words:
        return None
    original = scene.row.clone()
    original[scene.part(0)], original[scene.part(1)] = scene.row[scene.part(1)], scene.row[scene.part(0)]
    return _inferred("exchange", "its own K and V, exchanged") if _was_written(scene, original[None]) else None


def part_of_a_slot(scene: Scene) -> Provenance | None:
    """K or V of another slot, or K of one stored as V, or V as K."""
    parts = [scene.row[scene.part(number)] for number in range(scene.num_parts)]
    telling = [bool((part != part[0]).any()) for part in parts]  # one word throughout is nobody's
    if len(parts) > 1 and telling[0] and torch.equal(*parts):
        return _inferred("part", "its K and V are the same: one was stored as the other", scene.slot, scene.layer)
    for here, there in product(range(len(parts)), repeat=2):
        found = _slots_with(scene, parts[here], there, same_part=here == there) if telling[here] else []
        if found:
            stored = "" if here == there else f" stored as {PARTS[here]}"
            text = f"{PARTS[here]} is {PARTS[there]} of slot {found[0]}{stored}"
            return _inferred("part", text, found[0], scene.layer)
    return None


def slipped(scene: Scene) -> Provenance | None:
    """Its own, moved by one head or one element: undone, it is what was written."""
    size = scene.pool.view.k[0].element_size()
    for step, unit in ((scene.pool.view.head_dim * size, "head"), (size, "element")):
        ways = list(ways_back(scene.pool, scene.layer, scene.slot, scene.row, scene.num_parts, step))
        place = _was_written(scene, torch.stack([row for _, row in ways])) if ways else None
        if place:
            what = " and ".join(PARTS[part] for part in ways[place[0]][0])
            return _inferred("shift", f"its own {what}, slipped by one {unit}")
    return None


def not_finite(scene: Scene) -> Provenance | None:
    """NaN or Inf, which no store of a working forward leaves."""
    view = scene.pool.view
    if not view.dtype.is_floating_point:
        return None
    for number in range(scene.num_parts):
        values = scene.row[scene.part(number)].view(torch.uint8).view(view.dtype).to(torch.float64)
        bad = (~torch.isfinite(values)).nonzero().flatten()
        if len(bad):
            place = int(bad[0])
            where = f"{PARTS[number]}, head {place // view.head_dim}, dim {place % view.head_dim}"
            text = f"NaN or Inf in {len(bad)} elements of {PARTS[number]}, the first at {where}"
            return _inferred("not_finite", text)
    return None


#: In the order in which they are tested; a derived answer ends the search.
HYPOTHESES: tuple[Hypothesis, ...] = (
    of_another_slot,
    scales_in_another_order,
    scales_of_another,
    all_zero,
    poisoned,
    exchanged,
    part_of_a_slot,
    of_another_layer,
    slipped,
    not_finite,
)
#: Those that a fingerprint alone answers.
BY_NAME: tuple[Hypothesis, ...] = (of_another_slot,)
#: Of bytes that nobody has written.
UNWRITTEN_HYPOTHESES: tuple[Hypothesis, ...] = (poisoned, not_finite)

# helpers


def _inferred(kind: str, text: str, slot: int | None = None, layer: int | None = None) -> Provenance:
    return Provenance(kind, text, "inferred", slot, layer)


def _searched(pool: PoolState, slot: int, first: Sequence[int]) -> list[int]:
    """The slots given, then those around the slot; never itself nor a null slot."""
    low, high = pool.view.null_slots, pool.view.num_slots
    start = max(low, min(slot - SEARCHED_SLOTS // 2, high - SEARCHED_SLOTS))
    known = dict.fromkeys([*first[:SEARCHED_SLOTS], *range(start, min(start + SEARCHED_SLOTS, high))])
    return [other for other in known if other != slot and low <= other < high][:SEARCHED_SLOTS]


def _slots_with(scene: Scene, words: Tensor, part: int, same_part: bool) -> list[int]:
    """A searched slot whose K or V is these words; slots of the same token may rightly have the same K or V."""
    pool = scene.pool
    if pool.rows.pieces[part].words != len(words):
        return []
    alike = scene.search[(scene.first_words[part] == words[0]).nonzero().flatten()]
    if same_part:
        tokens = pool.records[alike, TOKEN_POSITION] & MASK_32
        alike = alike[tokens != pool.records[scene.slot, TOKEN_POSITION] & MASK_32]
    alike = alike[:COMPARED_SLOTS]
    rows = pool.rows.gather_layer(scene.layer, alike)
    return alike[(rows[:, scene.part(part)] == words).all(1)][:1].tolist()


def _was_written(scene: Scene, rows: Tensor) -> list[int]:
    """Which of these rows [n, words] are the one that the record names, and not what lies there."""
    written = scene.pool.content_a[scene.layer, scene.slot]
    is_written = fingerprints_of_rows(scene.pool, scene.layer, rows) == written
    return (is_written & (rows != scene.row).any(1)).nonzero().flatten().tolist()
