"""The greatest of each number over all ranks: each sends its table to the first rank, which answers.

That is an all_reduce(MAX) by messages which are expected before they are sent. Gloo's own takes several rounds, over
threads that must wake up; here the first rank, whose tokens are heard, waits for one message of each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

NEUTRAL = -(1 << 63)  # loses every MAX
TO_FIRST, FROM_FIRST = 1, 2  # tags of messages


class Greatest:
    """Of at most `width` numbers of 64 bits, over a gloo group that nothing else uses; one call at a time."""

    def __init__(self, group: dist.ProcessGroup, width: int) -> None:
        self._group, self._is_first = group, dist.get_rank(group) == 0
        self._others = range(1, dist.get_world_size(group)) if self._is_first else range(1)
        self._tables = torch.full((1 + len(self._others), width), NEUTRAL, device="cpu")  # own, then those of others
        self._answer = torch.empty(width, dtype=torch.int64, device="cpu")
        self._numbers, self._greatest = self._tables.numpy(), self._answer.numpy()
        self._sent: list[dist.Work] = []  # that the first rank still answers
        self._expected = self._expect()

    def __call__(self, numbers: Sequence[int], seconds: float) -> list[int]:
        """Of each over all ranks; one that has fewer gives none of the others. RuntimeError on every rank where one
        does not come in time: the first answers the others with NEUTRAL alone then, which no rank may give.
        """
        until = time.monotonic() + seconds
        self._numbers[0, : len(numbers)], self._numbers[0, len(numbers) :] = numbers, NEUTRAL
        if self._is_first:
            self._collect(until)
        else:
            _wait([self._send(self._tables[0], 0, TO_FIRST), *self._expected], until)
            self._greatest[:] = self._numbers[1]
            if (self._greatest == NEUTRAL).all():
                raise RuntimeError("the first rank waited for it")
        self._expected = self._expect()  # before the others can send
        if self._is_first:
            self._sent = [self._send(self._answer, rank, FROM_FIRST) for rank in self._others]
        return self._answer.tolist()[: len(numbers)]

    def _collect(self, until: float) -> None:
        try:
            _wait([*self._sent, *self._expected], until)
        except RuntimeError:
            self._greatest[:] = NEUTRAL
            for rank in self._others:
                with suppress(RuntimeError):  # it may be the one that is lost
                    self._sent.append(self._send(self._answer, rank, FROM_FIRST))
            raise
        self._numbers.max(axis=0, out=self._greatest)

    def _expect(self) -> list[dist.Work]:
        """The messages of the next call."""
        tag, tables = TO_FIRST if self._is_first else FROM_FIRST, self._tables[1:]
        pairs = zip(tables, self._others, strict=True)
        return [_own(dist.irecv(own, group=self._group, group_src=rank, tag=tag)) for own, rank in pairs]

    def _send(self, table: Tensor, rank: int, tag: int) -> dist.Work:
        return _own(dist.isend(table, group=self._group, group_dst=rank, tag=tag))


def _own(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not a member of the group")
    return work


def _wait(works: Iterable[dist.Work], until: float) -> None:
    for work in works:
        work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
