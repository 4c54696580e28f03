"""PageUpdates: the table on the device is what the host has said last."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import pytest
import torch

from kvcanary.ledger.page_states import Pages
from kvcanary.native import loops
from kvcanary.pools.views import PoolView
from kvcanary.records.page_updates import BUFFERS, PageUpdates
from kvcanary.records.state import CanaryState

COLUMNS = 300


def tell(columns: np.ndarray, table: np.ndarray, at: int, room: int) -> None:
    """What the table has in these columns, and the first of them as often as there is room."""
    every = columns.take(np.arange(room), mode="clip")
    every[len(columns) :] = columns[0]
    reported = np.ctypeslib.as_array((ctypes.c_int64 * (room * (1 + len(table)))).from_address(at))
    reported.reshape(-1, room)[:] = np.stack((every, *table[:, every]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_columns_are_as_they_were_told_last(device):
    """Lists of any length, with columns that come twice, more of them than there are buffers and none waited for."""
    table = torch.zeros(3, COLUMNS, dtype=torch.int64, device=device)
    deltas, draws, expected = PageUpdates(table), np.random.default_rng(5), np.zeros((3, COLUMNS), np.int64)
    for _ in range(12 * BUFFERS):
        columns = draws.choice(COLUMNS, draws.choice([1, 3, 16, 17, 200]))
        expected[:, columns] = draws.integers(-9, 9, (3, 1))
        deltas.send(len(columns), partial(tell, columns, expected))
        if draws.random() < 0.1:
            assert table.cpu().tolist() == expected.tolist()
    assert table.cpu().tolist() == expected.tolist()


@pytest.mark.gpu
def test_a_delta_goes_by_itself_where_the_device_is_behind():
    """No buffer is filled again before it was copied."""
    table = torch.zeros(1, COLUMNS, dtype=torch.int64, device="cuda")
    deltas = PageUpdates(table)
    for number in range(3 * BUFFERS):
        if number == BUFFERS:
            torch.cuda._sleep(50_000_000)
        reported = np.full((1, COLUMNS), number + 1)
        deltas.send(2, partial(tell, np.arange(number, number + 2), reported))
    assert table[0, : 3 * BUFFERS].tolist() == list(range(1, 3 * BUFFERS + 1))


def test_what_is_true_of_pages_is_told_column_by_column():
    """Some of them, in any order and twice; the first of them fills what is left."""
    pages = Pages(9, 1)
    pages.advance("granted", np.array([3, 5]), 1, "one", uid=7)
    pages.advance("freed", np.array([3]), 2, "one")
    reported, asked = np.full((5, 6), -9), np.array([5, 3, 5, 8])
    loops.describe_pages(pages.struct_at, asked, reported.ctypes.data, 6)
    every = np.array([5, 3, 5, 8, 5, 5])
    assert reported.tolist() == [
        every.tolist(),
        *(own[every].tolist() for own in (pages.generations, pages.owners, pages.states)),
        [-9] * 6,
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pages_are_published_as_they_are(device):
    """Through lists that the device is told, as in host memory; what has happened is told once."""
    kv = torch.zeros(2, 96, 1, 4, device=device)
    state = CanaryState([PoolView("target", [kv[0]], [kv[1]], 4)], 3)
    pages, state._host_pages = Pages(24, 1), []
    pages.advance("granted", np.arange(2, 21), 1, "one", uid=7)
    pages.wrote(np.array([3, 9]))
    pages.advance("freed", np.array([5, 2]), 2, "one")
    state.publish(pages)
    truth = (state.generations, pages.generations), (state.owners, pages.owners), (state.page_states, pages.states)
    for there, here in truth:
        assert there.tolist() == here.tolist()
    state.generations.zero_()
    state.publish(pages)
    assert not state.generations.any()
