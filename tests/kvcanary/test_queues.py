"""Queue of re-reads: which bytes of a row wait longest, one by one and for many rows at once."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from kvcanary.config import share_of
from kvcanary.ledger.ledger import Ledger
from kvcanary.ledger.requests import Batch
from kvcanary.ledger.reread_queue import ReadQueue
from kvcanary.native import loops
from kvcanary.native.layout import ALL, ITS_SHARE, SLICE, TAKEN
from kvcanary.pools.views import PoolView
from kvcanary.records.state import CanaryState
from kvcanary_kernels.record.layout import make_keys


def test_a_read_queue_has_fewer_ranges_than_an_answer_has_tokens():
    """What was looked at in one step and lies side by side is one range; every position is there, once."""
    queue, longest = ReadQueue(), 0
    for step in range(2000):
        queue.extend_to(100 + step, step)
        if step % 8 == 0:
            queue.take(share_of(queue.length, 8), step)
        longest = max(longest, len(queue.oldest_first()))
    assert 120 < longest < 2099 / 3
    assert sorted(position for start, end, _ in queue.oldest_first() for position in range(start, end)) == [
        *range(2099)
    ]


def test_a_read_queue_gives_what_waits_longest():
    """In whole or in part, each once a step unless asked again; cleared it starts anew."""
    queue = ReadQueue()
    queue.extend_to(4, 1)
    queue.extend_to(4, 2)
    queue.extend_to(6, 3)
    assert (queue.oldest_first(), queue.oldest(), queue.length) == (((0, 4, 1), (4, 6, 3)), 1, 6)
    assert queue.take(5, 5) == [(0, 4, 1), (4, 5, 3)]
    assert queue.oldest_first() == ((5, 6, 3), (0, 5, 5))
    assert queue.take(9, 5) == [(5, 6, 3)]
    assert queue.take(9, 5) == []
    assert queue.take(2, 5, again=True) == [(0, 2, 5)]
    queue.clear()
    assert (queue.length, queue.oldest_first(), queue.oldest()) == (0, (), None)


@pytest.mark.parametrize("window", [None, 7])
def test_a_slice_of_many_rows_is_what_each_queue_gives(window):
    """Oldest re-read first and as many as asked for, whatever was taken before; what a window has left is no slot."""
    draws, size, view = np.random.default_rng(3), 4, torch.zeros(200, 1, 4)
    pool = CanaryState([PoolView("target", [view], [view.clone()], size, null_slots=size, window=window)], 3).pools[0]
    ledger = Ledger(50, size, 1, make_keys(7, 1, 4), [("target", 0)])
    for number, name in enumerate("abc"):
        ledger.admit(name, range(60), 0)
        ledger.grant(name, range(1 + 16 * number, 17 + 16 * number), 0)
    requests = list(ledger.requests.values())
    batch, twins = Batch(requests), [ReadQueue() for _ in requests]
    slots, taken, said = np.empty(500, np.int64), np.empty((500, TAKEN.size), np.int64), np.empty(SLICE.size, np.int64)
    for step in range(1, 120):
        for request in requests:
            request.committed_len = min(60, request.committed_len + int(draws.integers(0, 3)))
            request.row_lens, request.commit_step = [request.committed_len], step
        counts = array("q", draws.choice([0, 1, 5, ITS_SHARE, ALL], len(requests)).tolist())
        reported = *batch.loop_arguments, pool.struct_at, counts.buffer_info()[0], 8, step, step, False
        while loops.take_slice(*reported, slots, taken, said.ctypes.data):
            batch.make_room([0] * len(batch))
        expected_slots, expected_ranges = list[int](), list[list[int]]()
        for number, (request, twin, count) in enumerate(zip(requests, twins, counts, strict=True)):
            length, row = request.committed_len, np.frombuffer(request.row, np.int64)
            twin.extend_to(length, step)
            first = 0 if window is None else max(0, length + 1 - window)
            for start, end, read in twin.take(share_of(length, 8) if count == ITS_SHARE else min(count, length), step):
                if end > first:
                    expected_ranges.append([number, max(start, first), end, read])
                    expected_slots += row[max(start, first) : end].tolist()
        assert slots[: said[SLICE.slots]].tolist() == expected_slots
        assert taken[: said[SLICE.ranges]].tolist() == expected_ranges
        assert said[SLICE.wait] == max((step - read for *_, read in expected_ranges), default=0)
        assert [request.reads[0].oldest_first() for request in requests] == [twin.oldest_first() for twin in twins]
