"""Arrivals: bytes that came back and are not those that left. Whose are they? Asked once a transfer that failed.

Each slot and layer has a fingerprint, which is a name: it is looked up among those of the snapshot itself, of snapshots
that left before, of zeros, of poison, and of what lay in the slot before. What has no name is tried for one changed
word, and for another layout. The answer for most slots is the transfer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.pools.slot_maps import Ints
from kvcanary.provenance.arrival import (
    KINDS,
    MISROUTED,
    ONE_WORD,
    OTHER_LAYOUT,
    SHORT,
    STALE,
    UNKNOWN,
    Arrival,
    ArrivedSlots,
    Origin,
    PoolArrival,
    Trip,
)
from kvcanary.provenance.bytes_of import fingerprints_of_rows
from kvcanary.provenance.changed_word import ChangedWord, WordChange, describe_change, part_of_word, single_words
from kvcanary.provenance.other_layouts import ELSEWHERE, REORDERED, first_places, other_layout
from kvcanary.records.state import PoolState
from kvcanary.transfers.recent_snapshots import RecentSnapshots
from kvcanary.transfers.stale_snapshots import Outdated
from kvcanary_kernels.content.poison import poison_words
from kvcanary_kernels.record.layout import MASK_32

ZERO, POISON, BEFORE = "zeros", "the poison of freed pages", "what lay there before"
WORD_SLOTS = 4096  # in which one changed word is looked for
MOST_WORDS = 64  # that are described
POISON_SAMPLE = 64  # slots that are compared with poison before all are
POISON_SLOTS = 4096  # and all, up to so many


def judge(
    trip: Trip,
    arrived_slots: Mapping[str, ArrivedSlots | None],
    recent: RecentSnapshots,
    poisoned: NDArray[np.bool_],
    outdated: Sequence[Outdated] = (),
) -> Arrival:
    """Whose bytes came back, by pool; None: those of the snapshot. `outdated`: entries of which it has older ones.

    Every pool's fingerprints are those of the snapshot by now.
    poisoned: by page of the trip, whether its poison vouched for it when it was granted: nothing that had lain there
    before lies there now.
    """
    words: dict[tuple[int, int], ChangedWord] = {}
    pools, intact = [], []
    for name, one in arrived_slots.items():
        if one is None:
            intact.append(name)
            continue
        was_filled = poisoned[one.places // trip.page_size]
        pools.append(_Comparison(trip, one, recent, was_filled, words).arrival())
    for pool, place, _, _, step in outdated:
        _add_outdated(trip, pools, intact, pool, place, step)
    kinds = Counter(origin.kind for pool in pools for origin in pool.origins.values())
    kind = max(KINDS, key=kinds.__getitem__)  # the first of those with most
    known = len(recent.last), recent.num_forgotten
    return Arrival(trip, kind, kinds, tuple(pools), tuple(intact), words, *known)


class _Comparison:
    """One pool; every step answers for slots that the steps before it could not name."""

    def __init__(
        self,
        trip: Trip,
        arrived_slots: ArrivedSlots,
        recent: RecentSnapshots,
        was_filled: NDArray[np.bool_],
        words: dict[tuple[int, int], ChangedWord],
    ) -> None:
        self._trip, self._arrived_slots, self._recent = trip, arrived_slots, recent
        self._was_filled, self._words = was_filled, words
        self._differs = arrived_slots.differs
        self._wrong = np.flatnonzero(self._differs.any(0))
        self._layer = self._differs.argmax(0)  # [n] the first wrong layer of each, and fingerprint a there
        in_layer = self._layer, np.arange(len(self._layer))
        self._found, self._before = arrived_slots.found[0][in_layer], arrived_slots.before[in_layer]
        self._origins: dict[int, Origin] = {}  # by number among those compared

    def arrival(self) -> PoolArrival:
        pool, layers = self._arrived_slots.pool, np.flatnonzero(self._differs.any(1))
        for look in (self._nothing, self._by_name, self._one_word, self._layout):
            if len(left := self._left()):
                look(left)
        for n in self._left().tolist():
            self._origins[n] = Origin(UNKNOWN)
        origins = {int(self._arrived_slots.places[n]): self._origins[n] for n in self._wrong.tolist()}
        return PoolArrival(pool.name, tuple(layers.tolist()), pool.view.num_layers, self._arrived_slots.places, origins)

    def _left(self) -> Ints:
        return np.array([n for n in self._wrong.tolist() if n not in self._origins], np.int64)

    def _nothing(self, left: Ints) -> None:
        """Zeros, whose fingerprint is its start, or poison."""
        starts = self._arrived_slots.pool.keys.start_a.cpu().numpy()
        self._explain(left[self._found[left] == starts[self._layer[left]]], Origin(SHORT, detail=ZERO))
        left = self._left()
        if len(left) and self._is_poison(left[:POISON_SAMPLE]).any():
            left = left[:POISON_SLOTS]
            self._explain(left[self._is_poison(left)], Origin(SHORT, detail=POISON))

    def _is_poison(self, numbers: Ints) -> NDArray[np.bool_]:
        pool, same = self._arrived_slots.pool, np.zeros(len(numbers), np.bool_)
        words, layers = pool.rows.words_per_row, self._layer[numbers]
        for layer in np.unique(layers).tolist():
            own = layers == layer
            slots = torch.from_numpy(self._arrived_slots.slots[numbers[own]]).to(pool.records.device)
            for nan in (False, True):
                pattern = poison_words(slots, layer * words, words, nan)
                same[own] |= fingerprints_of_rows(pool, layer, pattern).cpu().numpy() == self._found[numbers[own]]
        return same

    def _by_name(self, left: Ints) -> None:
        """Bytes that lay there before, or those of a snapshot that is remembered, this one or another.

        Where all that another snapshot, or another page, could explain lay there before, nothing arrived.
        """
        # what the canary knew before lies there now, and no poison came between
        lay_there = {*left[(self._found[left] == self._before[left]) & ~self._was_filled[left]].tolist()}
        named = self._named(left)
        has_arrived = not lay_there.issuperset(named)
        for n in left.tolist():
            if n in named and (has_arrived or n not in lay_there):
                self._origins[n] = named[n]
            elif n in lay_there:
                self._origins[n] = Origin(SHORT, detail=BEFORE)

    def _named(self, left: Ints) -> dict[int, Origin]:
        """First of the slots that came back, then of the snapshots that left last."""
        trip, size, pool_id = self._trip, self._trip.page_size, self._arrived_slots.pool.pool_id
        own = {sent for sent, _, _ in trip.pages}
        oldest, named = min((sent.peer, sent.number) for sent in own), dict[int, Origin]()
        for n, place in self._matches(left, self._arrived_slots.known, self._arrived_slots.current):
            sent, page, _ = trip.pages[place // size]
            named[n] = Origin(MISROUTED, sent, page * size + place % size)
        for sent_snapshot in sorted(self._recent.last, key=lambda one: one.sent not in own):
            left = np.array([n for n in left.tolist() if n not in named], np.int64)
            fingerprints, sent = sent_snapshot.pools.get(pool_id), sent_snapshot.sent
            if fingerprints is not None and len(left):
                is_older = sent.peer == oldest[0] and sent.number < oldest[1]
                kind = STALE if sent not in own and is_older else MISROUTED
                for n, place in self._matches(left, fingerprints.fingerprint_a.numpy(), fingerprints.current):
                    named[n] = Origin(kind, sent, place)
        return named

    def _matches(self, numbers: Ints, known: Ints, current: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Which of these hold the bytes of a known slot [layers, m] in their first wrong layer, and which slot's."""
        matches: list[tuple[int, int]] = []
        for layer in np.unique(self._layer[numbers]).tolist():
            own = numbers[self._layer[numbers] == layer]
            which, places = first_places(np.where(current, known[layer], 0), self._found[own])
            is_written = current[places]
            matches += zip(own[which][is_written].tolist(), places[is_written].tolist(), strict=True)
        return matches

    def _one_word(self, left: Ints) -> None:
        """One word in each layer that differs: fingerprint a names them, fingerprint b says whether they are all."""
        arrived_slots, left = self._arrived_slots, left[:WORD_SLOTS]
        lacks_b = arrived_slots.found[1][left] - arrived_slots.expected[1][left]
        changes: dict[int, list[WordChange]] = {n: [] for n in left.tolist()}
        is_one = np.ones(len(left), np.bool_)
        for layer in np.flatnonzero(self._differs[:, left].any(1)).tolist():
            own = np.flatnonzero(self._differs[layer, left])
            numbers, news, changed, adds = self._words_of(layer, left[own])
            is_one[own] &= numbers >= 0
            lacks_b[own] -= adds
            for n, *word in zip(left[own].tolist(), *(a.tolist() for a in (numbers, news, changed)), strict=True):
                changes[n].append(WordChange(layer, word[0], word[1] - word[2], word[1]))
        for n in left[is_one & (lacks_b == 0)].tolist():
            self._name_words(n, changes[n])

    def _words_of(self, layer: int, numbers: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Of these slots in a layer [n]: number of the word, its bits, what it changed by, what fingerprint b lacks."""
        arrived_slots, pool = self._arrived_slots, self._arrived_slots.pool
        slots = torch.from_numpy(arrived_slots.slots[numbers]).to(pool.records.device)
        rows = pool.rows.gather_layer(layer, slots)
        differs = arrived_slots.found[0][layer, numbers] - arrived_slots.expected[0][layer, numbers]
        which, changed, adds = single_words(pool.keys, layer, rows, torch.from_numpy(differs).to(rows.device))
        news = rows.gather(1, which.clamp(min=0)[:, None])[:, 0].to(torch.int64) & MASK_32
        return which.cpu().numpy(), news.cpu().numpy(), changed.cpu().numpy(), adds.cpu().numpy()

    def _name_words(self, n: int, changes: Sequence[WordChange]) -> None:
        pool, slot = self._arrived_slots.pool, int(self._arrived_slots.slots[n])
        parts = dict.fromkeys(part_of_word(pool, change.number)[0].name for change in changes)
        self._origins[n] = Origin(ONE_WORD, detail=" and ".join(parts))
        if len(changes) == 1 and len(self._words) < MOST_WORDS:
            self._words[pool.pool_id, slot] = describe_change(pool, slot, changes[0])

    def _layout(self, left: Ints) -> None:
        """One answer for all that are left, tried at the first of them."""
        layer = int(self._layer[left[0]])
        own = left[self._layer[left] == layer]
        guess = other_layout(self._arrived_slots, layer, own, self._trip.page_size)
        if guess is not None:
            if guess.kind == REORDERED:
                left = self._wrong  # slots that found their own layer are of the same order
            self._explain(left, Origin(MISROUTED if guess.kind == ELSEWHERE else OTHER_LAYOUT, detail=guess.text))

    def _explain(self, numbers: Ints, origin: Origin) -> None:
        self._origins |= dict.fromkeys(numbers.tolist(), origin)


def _add_outdated(
    trip: Trip, pools: list[PoolArrival], intact: list[str], pool: PoolState, place: int, step: int
) -> None:
    """An entry came back as it was saved, and it was written again since, in this step."""
    if pool.name in intact:
        intact.remove(pool.name)
        layers = tuple(range(pool.view.num_layers))
        every = np.arange(len(trip.pages) * trip.page_size)
        pools.append(PoolArrival(pool.name, layers, len(layers), every, {}))
    own = next(one for one in pools if one.name == pool.name)
    sent, page, _ = trip.pages[place // trip.page_size]
    number = page * trip.page_size + place % trip.page_size
    own.origins.setdefault(place, Origin(STALE, sent, number, detail=f"written again in step {step}"))
