"""The greatest of each number over all ranks: an all_reduce(MAX) in the fewest rounds of messages.

In each round a rank sends the greatest that it knows to another, twice as far away as in the round before, and takes
what comes from as far behind (dissemination: Hensgen, Finkel, Manber 1988). What is heard twice changes no maximum, so
any number of ranks will do; between two, one message each way crosses. Messages are expected before they are sent.
Gloo's own reduction takes several rounds, over threads that must wake up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import cycle

import numpy as np
import torch
import torch.distributed as dist

NEUTRAL = -(1 << 63)  # loses every MAX


class Greatest:
    """Of at most `width` numbers of 64 bits, over a gloo group that nothing else uses; one call at a time."""

    def __init__(self, group: dist.ProcessGroup, width: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._rounds = group, range((size - 1).bit_length())
        self._to = [(rank + (1 << k)) % size for k in self._rounds]
        self._from = [(rank - (1 << k)) % size for k in self._rounds]
        known = torch.full((2, len(self._rounds) + 1, width + 1), NEUTRAL, device="cpu")  # when a round begins; at last
        heard = torch.full((len(self._rounds), width + 1), NEUTRAL, device="cpu")  # in a round
        # two of them in turns: whoever ends the second call has heard that all have ended the first
        self._turns = cycle([(list(rows.numpy()), [[row] for row in rows]) for rows in known])
        self._heard, self._places = list(heard.numpy()), [[row] for row in heard]
        self._sent = deque[dist.Work](maxlen=2 * len(self._rounds))
        self._expected = [self._expect(k) for k in self._rounds]

    def __call__(self, numbers: Sequence[int], seconds: float) -> list[int]:
        """Of each over all ranks; one that has fewer gives none of the others. RuntimeError on every rank where one
        does not come in time, which ends it: who has waited for it says so to those who wait for others.
        """
        left, lost = timedelta(seconds=seconds), ""
        known, messages = next(self._turns)  # behind the numbers: 1 where a rank is lost
        known[0][: len(numbers)], known[0][len(numbers) :], known[0][-1] = numbers, NEUTRAL, 0
        for k in self._rounds:
            try:
                self._sent.append(self._group.send(messages[k], self._to[k], k))
                self._hear(k, left)
            except RuntimeError as error:
                lost = lost or str(error)
            np.maximum(known[k], self._heard[k], out=known[k + 1])
            if lost:
                left, known[k + 1][-1] = timedelta(milliseconds=1), 1
            else:
                self._expected[k] = self._expect(k)
        if known[-1][-1]:
            raise RuntimeError(lost or "another rank waited for it")
        greatest: list[int] = known[-1][: len(numbers)].tolist()
        return greatest

    def _hear(self, k: int, left: timedelta) -> None:
        work = self._expected[k]
        if work is None:
            raise RuntimeError("it has ended")
        work.wait(left)

    def _expect(self, k: int) -> dist.Work | None:
        """The next call's message; None: whoever sends it has ended, which matters to that call alone."""
        try:
            return self._group.recv(self._places[k], self._from[k], k)
        except RuntimeError:
            return None
