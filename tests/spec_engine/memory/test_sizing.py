"""The sizing formulas, against worked numbers and by brute force."""

import pytest
import torch

from spec_engine.drafting.layout import branch_positions
from spec_engine.memory.sizing import (
    draft_alloc_len,
    pages_for,
    pages_per_branch,
    reserve_len,
    row_width,
    step_pages,
    worst_case_step_pages,
)

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
    """The reserve is one step, one verify more when the host lags, one entry more where the draft pool is ahead."""
    assert reserve_len(16, 4, lag=0) == 16
    assert reserve_len(16, 4, lag=1) == 20
    assert reserve_len(16, 4, lag=1, ahead=1) == 21
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


@pytest.mark.parametrize(
    ("page_size", "allocated", "committed", "reserve", "expected"),
    [(4, 8, 10, 4, 16), (4, 4, 8, 4, 12), (4, 32, 10, 4, 32), (1, 7, 9, 3, 12), (8, 8, 8, 17, 32)],
)
def test_allocated_lengths_after_a_step_match_worked_numbers(page_size, allocated, committed, reserve, expected):
    """A request owns whole pages, enough for its committed length and its reserve, and never fewer than before."""
    num_pages = allocated // page_size
    after = num_pages + step_pages(committed, num_pages, reserve, page_size)
    assert after * page_size == expected


def test_step_pages_match_two_iterations_of_a_worked_batch():
    """Page size 4, lengths 7 and 8 with 2 pages each, reserve 32: 8 pages each; then 0 behind a lag and 1 without."""
    committed, owned = torch.tensor([7, 8]), torch.tensor([2, 2])
    taken = step_pages(committed, owned, 32, 4)
    assert taken.tolist() == [8, 8]
    assert step_pages(committed, owned + taken, 32, 4).tolist() == [0, 0]
    assert step_pages(torch.tensor([9, 11]), owned + taken, 32, 4).tolist() == [1, 1]


def test_a_large_tree_with_large_pages_matches_worked_numbers():
    """Page size 64, topk 8, five steps: branches begin at 100, 164, ... and a request in decoding owns 18 pages."""
    positions = branch_positions(torch.tensor([100, 124]), topk=8, num_steps=5, page_size=64)
    assert positions[0, :, 0].tolist() == list(range(100, 549, 64))
    assert positions[1, :, 0].tolist() == [64 + 128 * branch + 60 for branch in range(8)]
    assert pages_for(100, reserve_len(1024, 6, lag=0), 64) == 18
    assert pages_for(100, 2048, 64) == 34  # with the doubled reserve


def test_the_plain_estimate_counts_the_requests_whose_last_page_is_full():
    """Without drafting a page is taken by those whose committed length is a multiple of the page size."""
    lens = torch.arange(0, 40)
    taken = step_pages(lens, pages_for(lens, 0, 4), reserve_len(1, 1, lag=0), 4)
    assert torch.equal(taken, (lens % 4 == 0).long())


@pytest.mark.parametrize(("page_size", "topk", "num_steps", "nodes"), GRID)
def test_estimates_are_what_requests_take_and_below_the_bounds(page_size, topk, num_steps, nodes):
    """Page for page, from any earlier length: sync <= overlap <= doubled reserve <= worst case."""
    nodes = max(nodes, num_steps + 1) if topk == 1 else nodes
    alloc_len = draft_alloc_len(page_size, topk, num_steps, nodes)
    before = torch.arange(0, 2 * page_size)[:, None]
    after = before + torch.arange(0, num_steps + 2)
    owned = torch.ceil((before + alloc_len) / page_size).long()
    sync = step_pages(after, owned, reserve_len(alloc_len, num_steps + 1, lag=0), page_size)
    first_columns = owned[:, :, None] * page_size + torch.arange(0, alloc_len + num_steps + 1, page_size)
    assert torch.equal(sync, (first_columns < (after + alloc_len)[:, :, None]).sum(-1))  # of pages not owned yet
    overlap = step_pages(after, owned, reserve_len(alloc_len, num_steps + 1, lag=1), page_size)
    doubled = step_pages(after, owned, 2 * alloc_len, page_size)
    assert bool(((sync <= overlap) & (overlap <= doubled)).all())
    assert int(doubled.max()) <= worst_case_step_pages(1, 2 * alloc_len, page_size)


def test_the_worst_case_charges_requests_that_own_their_pages():
    """Three requests that need nothing are charged nine pages each: what made the estimate retract needlessly."""
    assert worst_case_step_pages(3, 32, 4) == 27
    assert 3 * step_pages(7, 10, 32, 4) == 0
