"""Agreement: one small all-reduce a step says whether all ranks have the same; the slow questions come only if not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from kvcanary.errors import KVCanaryError

T = TypeVar("T")


class RanksDisagreeError(KVCanaryError, RuntimeError):
    """Ranks of one engine do not have the same step, or one did not report it: no token of it may leave.

    step: in which;  level: what differs, "" where a rank did not report
    request_id, position: the first that differs, None where it is no request's;  values: there, by rank
    minority: ranks that differ from most; all of them where no majority is
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        level: str = "",
        request_id: str | None = None,
        position: int | None = None,
        values: Sequence[object] = (),
        minority: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.step, self.level, self.request_id, self.position = step, level, request_id, position
        self.values, self.minority = tuple(values), tuple(minority)


#: By level, by request ("" for what is no request's): the numbers that every rank must have.
Levels = Mapping[str, Mapping[str, Sequence[int]]]


class Agreement:
    """Compares levels over a process group of host tensors (gloo), which nothing else may use.

    KVCanaryError at once where the group's MAX of integers is none (XPU's xccl sums, sgl-project/sglang#31895).
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 60.0) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._last_agreed: int | None = None
        self._error: RanksDisagreeError | None = None
        rank = dist.get_rank(group)
        greatest = self._greatest([rank, ~rank], step=-1)
        if greatest != [dist.get_world_size(group) - 1, -1]:
            raise KVCanaryError(f"all_reduce(MAX) of ranks must give the last and ~0, got {greatest}: use a gloo group")

    def check(self, step: int, levels: Levels) -> None:
        """RanksDisagreeError on every rank where one has other numbers, or does not come within the timeout.

        From then on always: ranks that differ once have other histories.
        """
        if self._error is not None:
            raise self._error
        try:
            self._compare(step, levels)
        except RanksDisagreeError as error:
            self._error = error
            raise
        self._last_agreed = step

    def _compare(self, step: int, levels: Levels) -> None:
        digests = [digest(numbers) for numbers in levels.values()]
        greatest = self._greatest([one for number in digests for one in (number, ~number)], step)
        pairs = zip(levels, greatest[::2], greatest[1::2], strict=True)
        differing = [level for level, most, least in pairs if most != ~least]
        if differing:
            raise self._explained(step, differing[0], levels[differing[0]])

    def _greatest(self, numbers: list[int], step: int) -> list[int]:
        table = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            work = dist.all_reduce(table, dist.ReduceOp.MAX, group=self._group, async_op=True)
            work.wait(self._timeout)
        except RuntimeError as error:
            agreed = "none" if self._last_agreed is None else self._last_agreed
            message = f"a rank did not report for step {step}; last agreed: {agreed} ({error})"
            raise RanksDisagreeError(message, step=step) from error
        return table.tolist()

    def _explained(self, step: int, level: str, own: Mapping[str, Sequence[int]]) -> RanksDisagreeError:
        """Asks all ranks for digests by request, then for the numbers of the first that differs."""
        theirs = self._all({name: digest({name: numbers}) for name, numbers in own.items()})
        names = dict.fromkeys(name for one in theirs for name in one)
        name = next((name for name in names if len({one.get(name) for one in theirs}) > 1), None)
        if name is None:
            return _error(step, level, None, None, [tuple(one) for one in theirs])
        rows = self._all(None if name not in own else tuple(own[name]))
        position = first_difference(rows)
        return _error(step, level, name or None, position, [_number(row, position) for row in rows])

    def _all(self, own: T) -> list[T]:
        gathered: list[T] = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered


def digest(numbers: Mapping[str, Sequence[int]]) -> int:
    """63 bits of names and their numbers, in their order."""
    text = repr([(name, list(row)) for name, row in numbers.items()])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


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
    """Ranks that have another value than more than half of them; all where there is no such majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [rank for rank, one in enumerate(values) if one != value]


def _error(
    step: int, level: str, request_id: str | None, position: int | None, values: Sequence[Hashable]
) -> RanksDisagreeError:
    minority = minority_of(values)
    place = "" if request_id is None else f" of request {request_id}"
    place += "" if position is None else f", number {position}"
    said = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
    who = "no majority" if len(minority) == len(values) else f"alone: rank {', '.join(map(str, minority))}"
    return RanksDisagreeError(
        f"ranks must have the same {level} in step {step}, they differ{place}: {said}; {who}",
        step=step,
        level=level,
        request_id=request_id,
        position=position,
        values=values,
        minority=minority,
    )
