"""Agreement: one small exchange a step says whether all ranks have the same; the slow questions come only if not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import TypeVar

import torch.distributed as dist

from kvcanary.errors import KVCanaryError
from kvcanary.ranks.greatest import NEUTRAL, Greatest
from kvcanary.ranks.levels import X1, Level, Levels, Rows, digest

T = TypeVar("T")
MOST_LEVELS = 64  # of one call: messages have this width always, whatever a rank compares
STEP = "step"
PHASES = 8  # that a step has at most


class RanksDisagreeError(KVCanaryError, RuntimeError):
    """Ranks of one engine do not have the same step, or one did not report it: no token of it may leave.

    code:     X1: they decided otherwise; X2: they hold other bits
    step:     in which;  level: what differs, "" where a rank did not report
    name:     the request (of X2 the layer) in which it first differs, None where there is none
    position: the first number of it that differs, None where that is not known;  values: there, by rank
    minority: ranks that differ from most; none where there is no majority
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        code: str = X1,
        level: str = "",
        name: str | None = None,
        position: int | None = None,
        values: Sequence[object] = (),
        minority: Sequence[int] = (),
        is_private: bool = False,
    ) -> None:
        super().__init__(message)
        self.step, self.code, self.level, self.name, self.position = step, code, level, name, position
        self.values, self.minority, self.is_private = tuple(values), tuple(minority), is_private


class Agreement:
    """Compares levels over a process group of host tensors (gloo), which nothing else may use.

    The group's own reductions are not used: some sum where MAX is asked for (XPU's xccl, sgl-project/sglang#31895).
    KVCanaryError at once where the greatest over ranks is another than it must be.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 60.0) -> None:
        self._group, self._seconds, self._over_ranks = group, timeout, Greatest(group, 2 * MOST_LEVELS)
        self._one_at_a_time = Lock()  # who stops watching says so from a thread of its own
        self._last_agreed: int | None = None
        self._error: RanksDisagreeError | None = None
        self._unequal = set[str]()  # levels of X2 that were told
        rank = dist.get_rank(group)
        greatest = self._greatest([rank, ~rank], step=-1)
        if greatest != [self.num_ranks - 1, -1]:
            raise KVCanaryError(f"the greatest over ranks must be the last and ~0, got {greatest}: use a gloo group")

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size(self._group)

    def check(self, step: int, levels: Levels, phase: int = 0, number: int | None = None) -> None:
        """RanksDisagreeError on every rank where one has other numbers, or does not come within the timeout.

        levels: of the same names on all ranks that are in the same `phase` of the same step; that is compared first
        number: what is compared of the step, where ranks may number it otherwise
        After an X1 always: ranks that decided otherwise once have other histories. An X2 is told once for each level.
        """
        if self._error is not None:
            raise self._error
        try:
            left = {name: own for name, own in levels.items() if name not in self._unequal}
            with self._one_at_a_time:
                self._compare(step, {STEP: _numbered(step if number is None else number, phase)} | left)
        except RanksDisagreeError as error:
            if error.code == X1:
                self._error = error
            self._unequal.add(error.level)
            raise
        self._last_agreed = step

    def _compare(self, step: int, levels: Levels) -> None:
        if len(levels) > MOST_LEVELS:
            raise KVCanaryError(f"levels must be at most {MOST_LEVELS - 1}, got {len(levels) - 1}: join some of them")
        sides = [(NEUTRAL, NEUTRAL) if own.digest is None else (own.digest, ~own.digest) for own in levels.values()]
        greatest = self._greatest([side for pair in sides for side in pair], step)
        pairs = zip(levels, greatest[::2], greatest[1::2], strict=True)
        differing = [name for name, most, least in pairs if most != ~least and most != NEUTRAL]
        if differing:
            raise self._explained(step, differing[0], levels[differing[0]])

    def _greatest(self, numbers: list[int], step: int) -> list[int]:
        try:
            return self._over_ranks(numbers, self._seconds)
        except RuntimeError as error:
            agreed = "none" if self._last_agreed is None else self._last_agreed
            message = f"a rank did not report for step {step}; last agreed: {agreed} ({error})"
            raise RanksDisagreeError(message, step=step) from error

    def _explained(self, step: int, name: str, own: Level) -> RanksDisagreeError:
        """Asks all ranks for digests by request or layer, then for the numbers of the first that differs."""
        rows: Rows | None = None if own.digest is None else own.rows()
        theirs = self._all(None if rows is None else {key: digest({key: row}) for key, row in rows.items()})
        asked = [one for one in theirs if one is not None]
        keys = dict.fromkeys(key for one in asked for key in one)
        first = next((key for key in keys if len({one.get(key) for one in asked}) > 1), None)
        place: int | None = None
        if first is None:
            values: list[Hashable] = [None if one is None else tuple(one) for one in theirs]
        else:
            numbers = self._all(None if rows is None or first not in rows else tuple(rows[first]))
            place = first_difference([row for row, one in zip(numbers, theirs, strict=True) if one is not None])
            values = [_number(row, place) for row in numbers]
        holders = [rank for rank, one in enumerate(theirs) if one is not None]
        return _error(step, name, own, first or None, place, values, holders)

    def _all(self, own: T) -> list[T]:
        gathered: list[T] = [own] * self.num_ranks
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered


def _numbered(number: int, phase: int) -> Level:
    """Of which step and phase the other levels are; its digest need not be hashed."""
    return Level((PHASES * number + phase) % (1 << 63), lambda: {"": [number, phase]})


def first_difference(rows: Sequence[Sequence[int] | None]) -> int | None:
    """The first position at which rows differ or one ends; None where a rank has no such row."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        return None
    shortest = min(map(len, present))
    return next((at for at in range(shortest) if len({row[at] for row in present}) > 1), shortest)


def _number(row: tuple[int, ...] | None, position: int | None) -> Hashable:
    """What a rank has there: None past its end and where it has no such row, the row where no position is meant."""
    if row is None or position is None:
        return row
    return row[position] if position < len(row) else None


def minority_of(values: Sequence[Hashable]) -> list[int]:
    """Numbers of those that have another value than more than half of them; none where there is no such majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return []
    return [number for number, one in enumerate(values) if one != value]


def _error(
    step: int, name: str, own: Level, key: str | None, place: int | None, values: Sequence[Hashable], holders: list[int]
) -> RanksDisagreeError:
    minority = [holders[number] for number in minority_of([values[rank] for rank in holders])]
    where = "" if key is None else f" of {key}"
    where += "" if place is None else f", number {place}"
    said = "" if own.is_private else ": " + ", ".join(f"rank {rank} {values[rank]}" for rank in holders)
    who = f"alone: rank {', '.join(map(str, minority))}" if minority else "no majority"
    return RanksDisagreeError(
        f"ranks must have the same {name} in step {step}, they differ{where}{said}; {who}",
        step=step,
        code=own.code,
        level=name,
        name=key,
        position=place,
        values=values,
        minority=minority,
        is_private=own.is_private,
    )
