"""The sizing formulas, against worked numbers and by brute force."""

import pytest
import torch

from spec_engine.drafting.layout import branch_positions
from spec_engine.memory.sizing import draft_alloc_len, pages_for, pages_per_branch, reserve_len, row_width

GRID = [
    (page_size, topk, num_steps, nodes)
    for page_size in (1, 4, 16, 64)
    for topk in (1, 2, 4, 8)
    for num_steps in (1, 2, 3, 5)
    for nodes in (2, 4, 16)
]


@pytest.mark.parametrize(
    ("page_size", "topk", "num_steps", "nodes", "expected"),
    [(1, 2, 3, 4, 6), (4, 2, 3, 4, 16), (64, 8, 5, 32, 1024), (64, 1, 3, 4, 4), (1, 1, 5, 6, 6)],
)
def test_draft_alloc_len_matches_worked_numbers(page_size, topk, num_steps, nodes, expected):
    """The slots past S of one drafting step are those of the worked examples."""
    assert draft_alloc_len(page_size, topk, num_steps, nodes) == expected


def test_reserve_and_row_width_match_worked_numbers():
    """The reserve is one step, plus one verify when the host lags; a row holds context, reserve and rounding."""
    assert reserve_len(16, 4, lag=0) == 16
    assert reserve_len(16, 4, lag=1) == 20
    assert row_width(100, 16, 4) == 119


def test_pages_for_covers_the_reserve():
    """Pages are rounded up once, over the whole length."""
    assert [pages_for(length, 16, 4) for length in (0, 1, 7, 8, 9)] == [4, 5, 6, 6, 7]


@pytest.mark.parametrize(("page_size", "topk", "num_steps", "nodes"), GRID)
def test_every_branch_lies_inside_the_allocation_and_apart_from_the_others(page_size, topk, num_steps, nodes):
    """For every S mod P, branches are disjoint, behind the prefix, and their pages inside what is allocated."""
    alloc_len = draft_alloc_len(page_size, topk, num_steps, nodes)
    lens = torch.arange(1, 2 * page_size + 2)
    positions = branch_positions(lens, topk=topk, num_steps=num_steps, page_size=page_size)
    for length, region in zip(lens.tolist(), positions, strict=True):
        flat = region.flatten().tolist()
        assert len(set(flat)) == topk * num_steps
        assert min(flat) == length
        pages = pages_per_branch(length % page_size, num_steps, page_size)
        end = length - length % page_size + topk * pages * page_size
        assert max(flat) < end
        assert end <= pages_for(length, alloc_len, page_size) * page_size
