"""Whose bytes came back: every wrong row by its name first, then as one changed word, then by another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.provenance.arrival import MISROUTED, ONE_WORD, OTHER_LAYOUT, SHORT, STALE, UNKNOWN
from kvcanary.provenance.changed_word import WordChange, single_words
from kvcanary.tier.layouts import layout_that_explains
from kvcanary.tier.row_sums import RowSums, padded
from kvcanary.tier.tensors import Flat
from kvcanary.transfers.object_seals import Longs, ObjectSeal, TensorCard
from kvcanary_kernels.record.layout import MASK_32

MOST_LOOKED = 4096  # wrong rows of which one changed word is looked for
MOST_WORDS = 64
LEAST_ZEROS = 64  # at the end of a row, that are no chance


class Change(NamedTuple):
    """The one word of a row that changed; `number`: of the word within its tensor."""

    tensor: int
    number: int
    old: int
    new: int


class Origin(NamedTuple):
    """Of a wrong row: what kind of wrong, and in words what lies there."""

    kind: str
    text: str = ""


@dataclass(eq=False)
class Came:
    """What came back for one tensor of a seal.

    fingerprints: [2, rows] of as many whole rows as there are bytes for;  wrong: numbers of rows that are not right
    num_bytes: that came;  text: what is wrong with its shape or type, empty where nothing is
    """

    card: TensorCard
    sealed: Longs
    flat: Flat | None
    fingerprints: Longs
    text: str = ""
    wrong: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return 0 if self.flat is None else self.flat.num_bytes

    def entry(self, row: int) -> int:
        """The entry of the first dimension in which a row begins."""
        return row * self.card.row_bytes // self.card.entry_bytes

    def place(self, row: int) -> str:
        """`entry 3 of k of layer 5`."""
        has_entries = len(self.card.shape) > 1
        return f"{f'entry {self.entry(row)} of ' if has_entries else ''}{self.card.label}"

    def data(self, first: int, end: int) -> np.ndarray:
        """These bytes, on the host."""
        data = self.flat.data[first:end] if self.flat is not None else np.empty(0, np.uint8)
        return data.cpu().numpy() if isinstance(data, Tensor) else data


class Whose:
    """One object that came back wrong; every step answers for rows that the steps before it could not name.

    origins: by tensor and row;  words: changed ones that were located
    """

    def __init__(
        self,
        sums: RowSums,
        seal: ObjectSeal,
        came: Sequence[Came],
        surplus: Sequence[Flat],
        others: Sequence[ObjectSeal],
    ) -> None:
        """surplus: what came back for no tensor of the seal;  others: put lately"""
        self._sums, self._seal, self._came, self._surplus, self._others = sums, seal, came, surplus, others
        self.origins: dict[tuple[int, int], Origin] = {}
        self.words: list[Change] = []
        for look in (
            self._wholly_of_another,
            self._short,
            self._own,
            self._of_others,
            self._one_word,
            self._layouts,
            self._unknown,
        ):
            look()
        for tensor, one in enumerate(came):
            if one.text and (tensor, 0) not in self.origins:
                self.origins[tensor, 0] = Origin(OTHER_LAYOUT, one.text)

    def _left(self) -> list[tuple[int, int]]:
        wrong = ((tensor, row) for tensor, one in enumerate(self._came) for row in one.wrong)
        return [place for place in wrong if place not in self.origins]

    def _name(self, tensor: int, row: int) -> tuple[int, int] | None:
        """Fingerprints a and b of a row as it came; None: it did not."""
        found = self._came[tensor].fingerprints
        return (int(found[0, row]), int(found[1, row])) if row < found.shape[1] else None

    def _short(self) -> None:
        """Bytes that are missing, or zeros in their place."""
        zeros = self._sums.start, 0
        for tensor, row in self._left():
            name, one = self._name(tensor, row), self._came[tensor]
            if name is None:
                self.origins[tensor, row] = Origin(SHORT, _missing(one))
            elif name == zeros:
                self.origins[tensor, row] = Origin(SHORT, f"nothing arrived in {one.place(row)}: it holds zeros")

    def _own(self) -> None:
        """Bytes of another row, entry or tensor of the same object."""
        names = _names(self._seal)
        for tensor, row in self._left():
            found = names.get(self._name(tensor, row) or (0, 0), ())
            for other, place in found[:1]:
                here, there = self._came[tensor], self._came[other]
                if other != tensor and place == row:
                    kind, text = OTHER_LAYOUT, f"{here.card.label} holds the bytes of {there.card.label}"
                else:
                    kind, text = MISROUTED, f"{here.place(row)} came back with the bytes of {there.place(place)}"
                self.origins[tensor, row] = Origin(kind, text)

    def _of_others(self) -> None:
        """Bytes of what was put lately: of the same key before, or of another one."""
        for seal in self._others:
            left = self._left()
            mine = np.array([name[0] for place in left if (name := self._name(*place))], np.int64)
            if not len(mine) or not any(np.isin(mine, one[0]).any() for one in seal.fingerprints):
                continue
            names = {} if seal.holds_what(self._seal) else _names(seal)
            for tensor, row in left:
                if found := names.get(self._name(tensor, row) or (0, 0)):
                    self.origins[tensor, row] = self._of_other(seal, self._came[tensor].place(row), *found[0])

    def _wholly_of_another(self) -> None:
        """All bytes of a tensor are those of another one that was put lately, however these were cut into rows."""
        for tensor, one in enumerate(self._came):
            if one.wrong and one.flat is not None and (found := self._twin(one.flat)):
                origin = self._of_other(found[0], one.card.label, found[1], None)
                self.origins |= dict.fromkeys(((tensor, row) for row in one.wrong), origin)
        twin = next(filter(None, map(self._twin, self._surplus)), None)
        for tensor, one in enumerate(self._came):
            if twin is not None and one.flat is None:
                origin = self._of_other(twin[0], one.card.label, twin[1], None)
                self.origins |= dict.fromkeys(((tensor, row) for row in one.wrong), origin)

    def _twin(self, flat: Flat) -> tuple[ObjectSeal, int] | None:
        cut: dict[int, Longs] = {}
        for seal in self._others:
            for number, card in enumerate(seal.cards):
                if card.num_bytes == flat.num_bytes and card.num_bytes and not seal.holds_what(self._seal):
                    if card.row_bytes not in cut:
                        cut[card.row_bytes] = self._sums.of(flat, card.row_bytes)
                    if np.array_equal(cut[card.row_bytes], seal.fingerprints[number]):
                        return seal, number
        return None

    def _of_other(self, seal: ObjectSeal, here: str, tensor: int, row: int | None) -> Origin:
        if seal.key == self._seal.key:
            text = (
                f"{here} came back as put {seal.number} of {seal.key!r} left it, and put {self._seal.number} followed"
            )
            return Origin(STALE, text)
        there = Came(seal.cards[tensor], seal.fingerprints[tensor], None, seal.fingerprints[tensor])
        named = there.card.label if row is None else there.place(row)
        return Origin(MISROUTED, f"{here} came back with the bytes of {named} of key {seal.key!r}")

    def _one_word(self) -> None:
        """Fingerprint a names a word that would explain it, fingerprint b confirms it."""
        for tensor, row in self._left()[:MOST_LOOKED]:
            one, size = self._came[tensor], self._came[tensor].card.row_bytes
            data = padded(one.data(row * size, (row + 1) * size), size)
            words = torch.from_numpy(np.array(data).view(np.int32)[None])
            differs = torch.from_numpy(one.fingerprints[:, [row]] - one.sealed[:, [row]])
            number, changed, adds = single_words(self._sums.keys(size // 4), 0, words, differs[0])
            if int(number) < 0 or int(adds) != int(differs[1]):
                continue
            new = int(words[0, int(number)]) & MASK_32
            self.origins[tensor, row] = Origin(ONE_WORD, one.place(row))
            if len(self.words) < MOST_WORDS:
                self.words.append(Change(tensor, row * size // 4 + int(number), new - int(changed), new))

    def _layouts(self) -> None:
        """One answer a tensor, where undoing it gives what had left."""
        for tensor in dict.fromkeys(tensor for tensor, _ in self._left()):
            one, rows = self._came[tensor], [row for other, row in self._left() if other == tensor]
            if one.num_bytes != one.card.num_bytes:
                continue
            data = one.data(0, one.num_bytes)
            text = layout_that_explains(self._sums, one.card, one.sealed, data, rows)
            if text:
                self.origins |= dict.fromkeys(
                    ((tensor, row) for row in rows), Origin(OTHER_LAYOUT, f"{one.card.label}: {text}")
                )

    def _unknown(self) -> None:
        """Rows that end with zeros, as those of a file that was not written to its end; and all others."""
        for tensor, row in self._left():
            one, size = self._came[tensor], self._came[tensor].card.row_bytes
            data = one.data(row * size, min((row + 1) * size, one.card.num_bytes))
            held = np.flatnonzero(data)
            zeros = len(data) - (int(held[-1]) + 1 if len(held) else 0)
            if zeros >= LEAST_ZEROS:
                text = f"{one.place(row)} ends with {zeros} bytes of zeros"
                self.origins[tensor, row] = Origin(SHORT, text)
            else:
                text = f"the bytes of {one.place(row)} are those of nothing that is known"
                self.origins[tensor, row] = Origin(UNKNOWN, text)


def word_change(one: Came, change: Change) -> tuple[WordChange, np.ndarray]:
    """A changed word counted from the beginning of its entry, and the words of the entry."""
    size = one.card.entry_bytes
    entry = 4 * change.number // size
    words = np.ascontiguousarray(one.data(entry * size, (entry + 1) * size)).view(np.int32)
    return WordChange(0, change.number - entry * size // 4, change.old, change.new), words


def _names(seal: ObjectSeal) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By name, tensors and rows of a seal that have it."""
    names: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for tensor, fingerprints in enumerate(seal.fingerprints):
        for row, name in enumerate(zip(*fingerprints.tolist(), strict=True)):
            names.setdefault(name, []).append((tensor, row))
    return names


def _missing(one: Came) -> str:
    if one.flat is None:
        return f"{one.card.label} did not come back"
    return f"{one.num_bytes} of {one.card.num_bytes} bytes of {one.card.label} came back"
