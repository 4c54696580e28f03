"""The rows of draft forwards, on a worked example: requests of 7 and 8 tokens, topk 2, three steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spec_engine.attention.paged import PagedAttention
from spec_engine.core import Batch, ForwardBatch
from spec_engine.drafting.drafter import draft_forward
from spec_engine.drafting.layout import branch_positions
from spec_engine.drafting.paging import branch_prefix
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.request_table import RequestTable

LENS, TOPK, NUM_STEPS = (7, 8), 2, 3
PAGES = {
    1: ([*range(1, 8), *range(16, 28)], [*range(8, 16), *range(28, 40)]),
    4: ([1, 2, *range(5, 13)], [3, 4, *range(13, 21)]),
}


class Example:
    """Columns instead of ancestors: both survivors always descend from the branch whose column they take."""

    def __init__(self, page_size: int) -> None:
        self.layout = {"topk": TOPK, "num_steps": NUM_STEPS, "page_size": page_size}
        self.table = RequestTable(2, 44, page_size, torch.device("cpu"))
        rows = [self.table.acquire() for _ in LENS]
        for row, pages in zip(rows, PAGES[page_size], strict=True):
            self.table.append_pages(row, 0, pages)
        self.table.flush()
        requests = tuple(SimpleNamespace(row=row) for row in rows)
        self.batch = Batch(requests, ("A", "B"), torch.tensor(rows), LENS, torch.tensor(LENS), torch.zeros(2))
        positions = branch_positions(self.batch.lens_tensor, **self.layout)
        self.slots = self.table.table[self.batch.rows[:, None, None], positions]

    def forward(self, step: int, whole_pages: bool = False) -> ForwardBatch:
        rows = [
            (self.table.table[request.row], length) for request, length in zip(self.batch.requests, LENS, strict=True)
        ]
        if whole_pages:
            prefixes = [branch_prefix(row, length, **self.layout) for row, length in rows]
        else:
            prefixes = [row[:length].expand(TOPK, -1) for row, length in rows]
        return draft_forward(self.batch, step, prefixes, self.slots[:, :, : step + 1], torch.zeros(2, TOPK).long())

    def passes(self, step: int) -> list:
        forward = self.forward(step, whole_pages=True)
        pool = KVPool("draft", num_layers=1, num_pages=20, page_size=4, kv_heads=1, head_dim=8, token_offset=1,
                      dtype=torch.float32, device=torch.device("cpu"))  # fmt: skip
        [(_, passes)] = PagedAttention(pool, forward, 1, forward.kv_indices, forward.slots, None).groups
        return passes


@pytest.mark.parametrize(
    ("page_size", "slots"),
    [(1, [[16, 19, 28, 31], [17, 20, 29, 32]]), (4, [[11, 27, 52, 56], [20, 28, 53, 57]])],
)
def test_each_forward_writes_one_column_of_every_branch(page_size, slots):
    """Slots by request and branch, at positions that grow by one a step."""
    example = Example(page_size)
    for step, written in enumerate(slots):
        forward = example.forward(step)
        assert forward.slots.tolist() == written
        assert forward.positions.tolist() == [7 + step, 7 + step, 8 + step, 8 + step]


@pytest.mark.parametrize("page_size", [1, 4])
def test_row_starts_do_not_depend_on_the_page_size(page_size):
    """Row (b, k) has S_b + step + 1 entries, all of them in one array of K * sum(S) + bs * K * (step + 1)."""
    example = Example(page_size)
    starts = [example.forward(step).kv_indptr.tolist() for step in range(3)]
    assert starts == [[0, 8, 16, 25, 34], [0, 9, 18, 28, 38], [0, 10, 20, 31, 42]]
    assert [example.forward(step).kv_indices.shape[0] for step in range(3)] == [34, 38, 42]


@pytest.mark.parametrize(("page_size", "row"), [(1, [*range(1, 8), 19, 20]), (4, [*range(4, 11), 27, 28])])
def test_a_token_row_is_the_real_prefix_and_the_branch(page_size, row):
    """Branch 1 of the first request at the second step; holes of the branch's first page are not read."""
    forward = Example(page_size).forward(1)
    assert forward.kv_indices[9:18].tolist() == row


def test_a_row_of_whole_pages_reads_the_copied_tail():
    """The same branch by whole pages: its page begins with copies of the prefix's last three entries."""
    forward = Example(4).forward(1, whole_pages=True)
    assert forward.kv_indices[:9].tolist() == [*range(4, 12), 20]
    assert forward.kv_indices[9:18].tolist() == [4, 5, 6, 7, 24, 25, 26, 27, 28]


def test_a_paged_forward_is_two_passes():
    """Whole pages of the prefix for all branches of a request, then a table and a length a branch."""
    example = Example(4)
    prefix, branch = example.passes(0)
    assert (prefix.lens.tolist(), prefix.num_new, prefix.causal) == ([4, 8], 2, False)
    assert prefix.tables[:, :2].tolist() == [[1, 0], [3, 4]]
    assert not prefix.tables[:, 2:].any()
    assert (branch.lens.tolist(), branch.tables.tolist()) == ([4, 4, 1, 1], [[2, 0], [6, 0], [13, 0], [14, 0]])
    prefix, branch = example.passes(1)
    assert prefix.lens.tolist() == [4, 8]
    assert branch.lens.tolist() == [5, 5, 2, 2]
    assert branch.tables.tolist() == [[2, 5, 0], [6, 7, 0], [13, 0, 0], [14, 0, 0]]
