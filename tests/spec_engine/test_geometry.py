"""Where drafts, windows and copies lie, for every shape of tree at the end of its row: 12,960 configurations, no model.

P in {1, 4, 16, 64} with S mod P in {0, 1, P - 1} are 10 pairs, for P = 1 has one remainder. K in {1, 2, 4, 8} and
T in {1, 2, 3, 5} with every possible N are 648 trees: N is T + 1 alone for a chain, and 2 to K + (T - 1) K^2 + 1 for
K > 1. The host knows each verify, or lags one behind: 10 * 648 * 2 = 12,960. In each, the last verify committed any
number of tokens from 0 to T + 1.
"""

import itertools

import pytest
import torch

from spec_engine.drafting.layout import branch_positions, tail_duplicates
from spec_engine.memory.sizing import draft_alloc_len, pages_for, reserve_len, row_width

PAGE_SIZES, TOPKS, STEPS, LAGS = (1, 4, 16, 64), (1, 2, 4, 8), (1, 2, 3, 5), (0, 1)
SHAPES = list(itertools.product(PAGE_SIZES, TOPKS, STEPS))


def remainders(page_size: int) -> list[int]:
    return sorted({0, 1 % page_size, page_size - 1})


def node_counts(topk: int, num_steps: int) -> range:
    most = topk + (num_steps - 1) * topk**2 + 1
    return range(num_steps + 1, num_steps + 2) if topk == 1 else range(2, most + 1)


def lens_near(page_size: int, remainder: int, num_steps: int) -> torch.Tensor:
    """Committed lengths before a verify and after it, for every number of tokens it can commit: [T + 2] int64."""
    return 3 * page_size + remainder + torch.arange(num_steps + 2)


def align(length: int, page_size: int) -> int:
    return -(-length // page_size) * page_size


def test_there_are_12960_configurations():
    """The grids below leave none out."""
    count = sum(
        len(remainders(page_size)) * len(node_counts(topk, num_steps)) * len(LAGS)
        for page_size, topk, num_steps in SHAPES
    )
    assert count == 12_960


@pytest.mark.parametrize(("page_size", "topk", "num_steps"), SHAPES)
def test_branches_lie_apart_and_behind_the_prefix(page_size, topk, num_steps):
    """Branches are runs of T positions behind a copy of the tail's offset; only branch 0 shares a page, the tail's.

    No page is left out: together with their holes they fill the pages from the tail's on.
    """
    shape = {"topk": topk, "num_steps": num_steps, "page_size": page_size}
    for remainder in remainders(page_size):
        lens = lens_near(page_size, remainder, num_steps)
        for length, branches in zip(lens.tolist(), branch_positions(lens, **shape).tolist(), strict=True):
            starts = [branch[0] for branch in branches]
            assert starts[0] == length
            assert {start % page_size for start in starts} == {length % page_size}
            assert branches == [list(range(start, start + num_steps)) for start in starts]
            pages = [{position // page_size for position in branch} for branch in branches]
            per_branch = align(length % page_size + num_steps, page_size) // page_size
            first = length // page_size
            assert pages == [set(range(first + b * per_branch, first + (b + 1) * per_branch)) for b in range(topk)]


@pytest.mark.parametrize(("page_size", "topk", "num_steps"), SHAPES)
def test_copies_fill_exactly_the_holes(page_size, topk, num_steps):
    """What opens a later branch's first page gets the tail token of the same offset, and nothing else is written."""
    shape = {"topk": topk, "num_steps": num_steps, "page_size": page_size}
    for remainder in remainders(page_size):
        lens = lens_near(page_size, remainder, num_steps)
        sources, destinations = tail_duplicates(lens, **shape)
        rows = zip(lens.tolist(), branch_positions(lens, **shape).tolist(), sources, destinations, strict=True)
        for length, branches, source, destination in rows:
            base = length - length % page_size
            holes = {
                position: base + position % page_size
                for start in (branch[0] for branch in branches[1:])
                for position in range(start - start % page_size, start)
            }
            moved = source != destination
            assert dict(zip(destination[moved].tolist(), source[moved].tolist(), strict=True)) == holes
            assert int(moved.sum()) == len(holes)
            assert all(base <= position < length for position in source[moved].tolist())


@pytest.mark.parametrize(("page_size", "topk", "num_steps"), SHAPES)
def test_everything_lies_inside_what_is_allocated_and_the_row(page_size, topk, num_steps):
    """Whole pages of branches, copies and the verify window end by the allocation, which ends by the row.

    The request is at the very end of its context; a host that lags allocates for the length of before the verify.
    """
    nodes = torch.tensor(node_counts(topk, num_steps))[:, None]
    alloc_lens = [draft_alloc_len(page_size, topk, num_steps, n) for n in nodes.flatten().tolist()]
    for remainder, lag in itertools.product(remainders(page_size), LAGS):
        lens = lens_near(page_size, remainder, num_steps)
        known = lens[:1].expand_as(lens) if lag else lens
        reserves = torch.tensor([reserve_len(alloc_len, num_steps + 1, lag) for alloc_len in alloc_lens])[:, None]
        allocated = pages_for(known, reserves, page_size) * page_size  # [node counts, lengths]
        ends = branch_positions(lens, topk=topk, num_steps=num_steps, page_size=page_size).flatten(1).amax(1) + 1
        assert (-(-ends // page_size) * page_size <= allocated).all()
        for array in tail_duplicates(lens, topk=topk, num_steps=num_steps, page_size=page_size):
            assert (array.flatten(1) < allocated.amin(0)[:, None]).all()
        assert (lens + nodes <= allocated).all()
        assert (allocated <= row_width(known, reserves, page_size)).all()
        doubled = known + 2 * torch.tensor(alloc_lens)[:, None]
        assert (allocated <= -(-doubled // page_size) * page_size).all()


@pytest.mark.parametrize(("page_size", "topk", "num_steps"), SHAPES)
def test_the_estimate_is_what_is_taken(page_size, topk, num_steps):
    """Slots by which aligned lengths grow, as published, are the pages taken: at the first step and after a verify."""
    for num_nodes, lag in itertools.product(node_counts(topk, num_steps), LAGS):
        reserve = reserve_len(draft_alloc_len(page_size, topk, num_steps, num_nodes), num_steps + 1, lag)
        for remainder in remainders(page_size):
            before, *after = lens_near(page_size, remainder, num_steps).tolist()
            owned = before  # slots that hold the prompt, not aligned
            for length in (before, after[0], after[-1]):
                missing = max(0, length + reserve - owned)
                estimate = align(owned + missing, page_size) - align(owned, page_size)
                pages = pages_for(length, reserve, page_size)
                assert (pages - align(owned, page_size) // page_size) * page_size == estimate
                owned = pages * page_size


def test_the_region_ends_by_the_allocation_length_for_any_shape():
    """20,000 seeded shapes and lengths: the last branch's last page ends at most alloc_len slots past S."""
    generator = torch.Generator().manual_seed(14)
    limits = {"page_size": 128, "topk": 16, "num_steps": 12, "num_nodes": 64}
    drawn = torch.stack([torch.randint(1, most + 1, (200,), generator=generator) for most in limits.values()], 1)
    for page_size, topk, num_steps, num_nodes in drawn.tolist():
        lens = torch.randint(1, 100_000, (100,), generator=generator)
        alloc_len = draft_alloc_len(page_size, topk, num_steps, num_nodes)
        ends = branch_positions(lens, topk=topk, num_steps=num_steps, page_size=page_size).flatten(1).amax(1) + 1
        assert (ends <= lens + alloc_len).all()
        if topk > 1:
            assert (-(-ends // page_size) * page_size <= lens + alloc_len).all()
