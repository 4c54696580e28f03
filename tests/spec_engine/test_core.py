"""What a forward over chains is made of: arrays of several rows, and numbers that go to the device together."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_engine import SamplingParams
from spec_engine.core import Batch, ForwardBatch, chain_forward
from spec_engine.memory.request_table import RequestTable
from spec_engine.request import Request
from spec_engine.scheduling.scheduler import Chunk
from spec_engine.step.transfer import ALIGNMENT, together

CPU = torch.device("cpu")


def forward_of(lens: tuple[int, ...], new_lens: tuple[int, ...], tokens: torch.Tensor | np.ndarray) -> ForwardBatch:
    """Rows of two pages of four slots: row r holds slots 8 r to 8 r + 7."""
    table = RequestTable(len(lens), 8, 4, CPU)
    rows = [table.acquire() for _ in lens]
    for row in rows:
        table.append_pages(row, 0, [2 * row, 2 * row + 1])
    table.flush()
    requests = tuple(SimpleNamespace(row=row) for row in rows)
    ids, nobody = tuple(f"req-{row}" for row in rows), torch.zeros(len(rows), dtype=torch.int64)
    batch = Batch(requests, ids, torch.tensor(rows), lens, torch.tensor(lens), nobody)
    return chain_forward("prefill", 0, batch, table, tokens, new_lens)


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["there", "here"])
def test_rows_of_a_chain_go_on_where_they_are(make):
    """Prefixes of 3 and 0 entries; tokens of the device and of the host alike."""
    forward = forward_of((3, 0), (2, 4), make([7, 8, 9, 10, 11, 12]))
    assert forward.tokens.tolist() == [7, 8, 9, 10, 11, 12]
    assert forward.positions.tolist() == [3, 4, 0, 1, 2, 3]
    assert forward.slots.tolist() == [11, 12, 16, 17, 18, 19]
    assert forward.kv_indices.tolist() == [8, 9, 10, 11, 12, 16, 17, 18, 19]
    assert forward.kv_indptr.tolist() == [0, 5, 9]
    assert forward.q_indptr.tolist() == [0, 2, 6]


def test_whole_rows_write_what_they_read():
    """Nothing stands before the first entries: one array says both."""
    forward = forward_of((0, 0), (4, 2), np.arange(6))
    assert forward.slots is forward.kv_indices
    assert forward.slots.tolist() == [8, 9, 10, 11, 16, 17]
    assert forward.kv_indptr.tolist() == forward.q_indptr.tolist() == [0, 4, 6]


def test_lists_that_go_together_begin_at_aligned_addresses():
    """Lists, arrays and nothing, each as it was."""
    parts = [[1, 2, 3], np.arange(ALIGNMENT), (), [5]]
    there = together(parts, CPU)
    assert [one.tolist() for one in there] == [list(part) for part in parts]
    assert {one.storage_offset() % ALIGNMENT for one in there} == {0}


@pytest.mark.parametrize(("start", "end"), [(0, 3), (1, 4), (2, 6), (4, 6), (3, 3), (6, 6)])
def test_numbers_of_a_request_are_its_tokens(start, end):
    """Of the prompt, of what came out, and across."""
    request = Request("a", [5, 6, 7], SamplingParams(), output_ids=[8, 9, 10])
    assert request.numbers(start, end).tolist() == request.tokens[start:end]
    assert request.num_tokens == 6


def test_a_chunk_knows_what_follows():
    """In the prompt, and behind it; one that ends with all that is known samples."""
    request = Request("a", [5, 6, 7], SamplingParams(), output_ids=[8])
    assert [Chunk(request, 0, end).following for end in (1, 3)] == [6, 8]
    assert [Chunk(request, 0, end).samples for end in (3, 4)] == [False, True]
    assert Chunk(request, 1, 4).tokens == [6, 7, 8]
