"""From an object that came back wrong to the one violation that tells of it, in the words that all arrivals have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcanary.calls.violation import Violation
from kvcanary.pools.parts import Part
from kvcanary.provenance.arrival import KINDS, ONE_WORD, Arrival, PoolArrival, Sent, Trip
from kvcanary.provenance.arrival import Origin as SlotOrigin
from kvcanary.provenance.changed_word import ChangedWord, describe_word
from kvcanary.report.watched_evidence import CacheView, WatchedPool
from kvcanary.tier.whose import Came, Change, Origin, Whose, word_change
from kvcanary.transfers.object_seals import NO_LAYER, ObjectSeal, TensorCard

MOST_LINES = 3
SITE = ("load", 0)


class Loaded(NamedTuple):
    """One check: of which tier and object, and how manieth check it is."""

    tier: str
    key: str
    number: int


def violation_of(
    loaded: Loaded, seal: ObjectSeal, came: Sequence[Came], whose: Whose, first: Origin | None
) -> Violation:
    """T1 at the first wrong entry; first: what goes before all that rows say."""
    kinds = Counter(origin.kind for origin in whose.origins.values())
    kind = max(KINDS, key=kinds.__getitem__) if first is None else first.kind
    told = {own: (_sentence(came, whose, own), *_evidence(came, whose, own)) for own in kinds}
    left = f"put {seal.number} of {seal.key!r} left {seal.num_bytes} bytes in {len(seal.cards)} tensors"
    told[kind] = (first.text if first else told[kind][0], *_evidence(came, whose, kind), left)
    tensor, row = _first(whose, kind)
    one = came[tensor]
    card = one.card
    is_word = kind == ONE_WORD and bool(whose.words)
    entry = 4 * whose.words[0].number // card.entry_bytes if is_word else one.entry(row)
    return _violation(
        loaded, seal.cards, card, entry, arrival=_arrival(loaded, kind, kinds, told),
        message=f"key {loaded.key!r}, {card.label}", word=_word(came, whose.words[0]) if is_word else None,
        expected=_sealed(seal, card), found=_found(came, whose, kind), notes=_notes(came, whose),
    )  # fmt: skip


def bare_violation(loaded: Loaded, origin: Origin) -> Violation:
    """T1 of an object of which no bytes were compared."""
    arrival = _arrival(loaded, origin.kind, Counter(), {origin.kind: (origin.text, "no bytes were compared")})
    own = {"message": f"key {loaded.key!r}", "expected": {"key": loaded.key}, "found": {"verdict": origin.kind}}
    return _violation(loaded, (), None, 0, arrival=arrival, **own)


def _violation(
    loaded: Loaded, cards: Sequence[TensorCard], card: TensorCard | None, entry: int, **known: Any
) -> Violation:
    """Of an entry of a tensor: both stand for what pools have."""
    num_layers = 2 + max((own.layer for own in cards), default=0)
    view = CacheView(loaded.tier, num_layers, num_slots=1 if card is None else max(1, 1, *card.shape[:1]))
    layers = () if card is None or card.layer == NO_LAYER else (card.layer,)
    pool = WatchedPool.of(view, loaded.number)
    return Violation("T1", pool, entry, None, loaded.key, SITE, loaded.number, layers, **known)


def _first(whose: Whose, kind: str) -> tuple[int, int]:
    own = [place for place, origin in whose.origins.items() if origin.kind == kind]
    return min(own or whose.origins or [(0, 0)])


def _arrival(loaded: Loaded, kind: str, kinds: Counter[str], told: Mapping[str, tuple[str, ...]]) -> Arrival:
    """One slot stands for the object; told: by kind what happened, and what speaks for it."""
    kinds[kind] = max(1, kinds[kind])
    own = PoolArrival(loaded.tier, (), 1, np.arange(1), {0: SlotOrigin(kind)})
    trip = Trip("check", loaded.number, 1, [(Sent(0, loaded.number, ()), 0, 0)])
    sentences = {own: texts[0] for own, texts in told.items()}
    evidence = {own: texts[1:] for own, texts in told.items()}
    return Arrival(trip, kind, kinds, (own,), (), sentences=sentences, evidence=evidence)


def _sentence(came: Sequence[Came], whose: Whose, kind: str) -> str:
    texts = list(dict.fromkeys(origin.text for origin in whose.origins.values() if origin.kind == kind))
    if kind == ONE_WORD:
        return _one_word(came, whose.words, len([one for one in whose.origins.values() if one.kind == kind]))
    return texts[0] + (f", and {len(texts) - 1} more" if len(texts) > 1 else "")


def _one_word(came: Sequence[Came], words: Sequence[Change], count: int) -> str:
    if count > 1:
        return f"one word changed in each of {count} rows, all else came back as it left"
    one, bits = came[words[0].tensor], words[0].old ^ words[0].new
    what = (
        f"one bit, bit {bits.bit_length() - 1} of word {words[0].number},"
        if bits.bit_count() == 1
        else f"word {words[0].number}"
    )
    return f"{what} of {one.card.label} changed on the way or before it left, all else came back as it left"


def _evidence(came: Sequence[Came], whose: Whose, kind: str) -> tuple[str, ...]:
    own = [place for place, origin in whose.origins.items() if origin.kind == kind]
    if not own:
        return ()
    rows, tensors = sum(one.card.num_rows for one in came), len({tensor for tensor, _ in own})
    return (f"{len(own)} of {rows} rows of bytes, in {tensors} of {len(came)} tensors",)


def _notes(came: Sequence[Came], whose: Whose) -> tuple[str, ...]:
    """What is known of the first wrong rows, and where the changed words stand."""
    texts = dict.fromkeys(origin.text for origin in whose.origins.values() if origin.kind != ONE_WORD)
    return (*list(texts)[:MOST_LINES], *(_where(came[word.tensor], word) for word in whose.words[:MOST_LINES]))


def _where(one: Came, change: Change) -> str:
    """`element [3, 0, 17] of k of layer 5: word 0x3f800000 is 0x3f800100`."""
    count = prod(one.card.shape)
    size = one.card.num_bytes // count if count else 0
    words = f"word {change.number} was 0x{change.old:08x}, it is 0x{change.new:08x}"
    if not size or size * count != one.card.num_bytes:
        return f"{one.card.label}: {words}"
    byte = next(n for n in range(4) if (change.old ^ change.new) >> 8 * n & 0xFF)
    place = [int(index) for index in np.unravel_index((4 * change.number + byte) // size, one.card.shape)]
    return f"element {place} of {one.card.label}: {words}"


def _word(came: Sequence[Came], change: Change) -> ChangedWord | None:
    """As findings have it, of elements whose type torch knows; None where entries are no whole words."""
    one = came[change.tensor]
    dtype = getattr(torch, one.card.dtype, None)
    shape = one.card.shape[1:] if len(one.card.shape) > 1 else one.card.shape
    if not isinstance(dtype, torch.dtype) or dtype.is_complex or not shape or one.card.entry_bytes % 4:
        return None
    if prod(shape) * dtype.itemsize != one.card.entry_bytes:
        return None
    change_of_entry, words = word_change(one, change)
    part = Part(one.card.part, (torch.empty(0, dtype=dtype),), (prod(shape[:-1]), shape[-1]))
    word = describe_word(part, 0, torch.from_numpy(words.copy()), change_of_entry)
    return replace(word, head=word.head % shape[-2] if len(shape) > 1 else 0)


def _sealed(seal: ObjectSeal, card: TensorCard) -> dict[str, Any]:
    return {
        "key": seal.key,
        "put": seal.number,
        "bytes": card.num_bytes,
        "dtype": card.dtype,
        "shape": list(card.shape),
    }


def _found(came: Sequence[Came], whose: Whose, kind: str) -> dict[str, Any]:
    wrong, rows = len(whose.origins), sum(one.card.num_rows for one in came)
    tensors = [came[tensor].card.label for tensor in dict.fromkeys(tensor for tensor, _ in whose.origins)]
    missing = sum(max(0, one.card.num_bytes - one.num_bytes) for one in came)
    return {
        "verdict": kind,
        "rows_wrong": f"{wrong} of {rows}",
        "tensors_wrong": tensors,
        "bytes_missing": missing or None,
    }
