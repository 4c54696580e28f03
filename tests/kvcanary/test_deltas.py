"""Deltas: the table on the device is what the host has said last."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcanary.deltas import BUFFERS, Deltas

COLUMNS = 300


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_columns_are_as_they_were_told_last(device):
    """Lists of any length, with columns that come twice, more of them than there are buffers and none waited for."""
    table = torch.zeros(3, COLUMNS, dtype=torch.int64, device=device)
    deltas, draws, expected = Deltas(table), np.random.default_rng(5), np.zeros((3, COLUMNS), np.int64)
    for _ in range(12 * BUFFERS):
        columns = draws.choice(COLUMNS, draws.choice([0, 1, 3, 16, 17, 200]))
        expected[:, columns] = draws.integers(-9, 9, (3, 1))
        deltas.send(columns, *(np.ascontiguousarray(row[columns]) for row in expected))
        if draws.random() < 0.1:
            assert table.cpu().tolist() == expected.tolist()
    assert table.cpu().tolist() == expected.tolist()


@pytest.mark.gpu
def test_a_delta_goes_by_itself_where_the_device_is_behind():
    """No buffer is filled again before it was copied."""
    table = torch.zeros(1, COLUMNS, dtype=torch.int64, device="cuda")
    deltas = Deltas(table)
    for number in range(3 * BUFFERS):
        if number == BUFFERS:
            torch.cuda._sleep(50_000_000)
        deltas.send(np.arange(number, number + 2), np.full(2, number + 1))
    assert table[0, : 3 * BUFFERS].tolist() == list(range(1, 3 * BUFFERS + 1))
