"""Positions: the position that each row of a dense cache goes on at, against `position_ids` of every forward (W5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_POSITION = -1  # nobody can say where the row goes on
TEXT_AND_VISION = 4  # axes of positions of which the first counts text as if there was nothing else


class Fed(NamedTuple):
    """What a forward is fed, [batch, n] on the host.

    is_real: what the mask hides is padding, which positions count or do not
    counted: positions where what the mask shows now is counted: it may hide entries of which earlier ones did not know
             that they are padding, as those behind the end of a row; None without a mask of whole rows
    """

    positions: Tensor
    is_real: Tensor
    counted: Tensor | None = None


class WrongPosition(NamedTuple):
    """The first of a row: its entry among those that are fed, and the two positions."""

    row: int
    entry: int
    wanted: int
    found: int


def fed_by(named: Mapping[str, Any], before: int) -> Fed | None:
    """Of the arguments of a forward behind `before` entries; None where the axes of positions do not count text alone.

    Padding is what a mask [batch, before + n] leaves out. Without `position_ids` models count from the cache's length.
    """
    fed = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
    if fed is None:
        return None
    (batch, count), given, mask = fed.shape[:2], named.get("position_ids"), named.get("attention_mask")
    is_real, counted = torch.ones(batch, count, dtype=torch.bool), None
    if isinstance(mask, Tensor) and mask.shape == (batch, before + count):
        shown = mask.cpu() != 0
        is_real, counted = shown[:, before:], (shown.cumsum(1) - 1)[:, before:]
    if given is None:
        positions = torch.arange(before, before + count).expand(batch, count)
        padded = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
        return None if padded else Fed(positions, is_real)
    if given.dim() == 3 and given.shape[0] == TEXT_AND_VISION:
        given = given[0]
    if given.dim() == 1:
        given = given[None]
    if given.dim() != 2 or given.shape[1] != count or given.shape[0] not in (1, batch):
        return None
    return Fed(given.cpu().expand(batch, count), is_real, counted)


class RowPositions:
    """By row [batch] the next position, NO_POSITION where a first forward did not count in a line; None: all so."""

    def __init__(self) -> None:
        self._next: Tensor | None = None

    def follow(self, fed: Fed | None) -> list[WrongPosition]:
        """What each row is fed goes on where it ended: the first entry of each that does not.

        Rows that nobody has followed yet begin anywhere: only what is fed from then on is judged.
        """
        if fed is None or (self._next is not None and len(self._next) != len(fed.positions)):
            self._next = None
            return []
        known = torch.full((len(fed.positions),), NO_POSITION) if self._next is None else self._next
        line = torch.arange(fed.positions.shape[1])
        if bool((known >= 0).all()) and bool(fed.is_real.all()) and torch.equal(fed.positions, known[:, None] + line):
            self._next = known + len(line)
            return []
        self._next, wrong = known.clone(), list[WrongPosition]()
        for row, start in enumerate(known.tolist()):
            entries = fed.is_real[row].nonzero().flatten()
            if not len(entries) and start < 0:
                continue
            own, every = fed.positions[row, entries], fed.positions[row, entries[0] if start < 0 else 0 :]
            first = int(own[0]) if start < 0 else start
            if torch.equal(every, first + line[: len(every)]):  # what the mask hides is counted, too
                self._next[row] = first + len(every)
                continue
            differs = (own != first + line[: len(own)]).nonzero().flatten()
            if fed.counted is not None and torch.equal(own, fed.counted[row, entries]):
                differs = differs[:0]
            if len(differs) and start >= 0:
                place = int(differs[0])
                wrong.append(WrongPosition(row, int(entries[place]), first + place, int(own[place])))
            if len(own):
                self._next[row] = NO_POSITION if len(differs) and start < 0 else int(own[-1]) + 1
        return wrong

    def cropped(self, count: int, length: int) -> None:
        """So many entries are gone, of all that are no padding; `length` are left."""
        if self._next is not None:
            self._next = torch.where(self._next >= count, self._next - count, NO_POSITION) if length else None

    def selected(self, rows: Tensor) -> None:
        """Row i is what row `rows[i]` was."""
        if self._next is not None:
            self._next = self._next.index_select(0, rows.cpu())

    def forget(self) -> None:
        self._next = None
