"""Branch positions and prefix-tail copies, against numbers worked out by hand."""

import pytest
import torch

from spec_engine.drafting.layout import branch_positions, tail_duplicates


def positions(lens, page_size):
    return branch_positions(torch.tensor(lens), topk=2, num_steps=3, page_size=page_size).tolist()


def copies(length, topk, num_steps, page_size):
    """{source: destinations} of one request, entries that move nothing left out."""
    pairs = tail_duplicates(torch.tensor([length]), topk=topk, num_steps=num_steps, page_size=page_size)
    found = {}
    for source, destination in zip(*(part.flatten().tolist() for part in pairs), strict=True):
        if source != destination:
            found.setdefault(source, []).append(destination)
    return found


def test_branches_of_one_slot_pages_lie_densely():
    """With P = 1 branch b begins at S + b T."""
    assert positions([7, 8], 1) == [[[7, 8, 9], [10, 11, 12]], [[8, 9, 10], [11, 12, 13]]]


def test_branches_of_larger_pages_begin_at_the_prefix_tail_offset():
    """With P = 4 a branch whose first page starts with 3 tail tokens needs two pages, one with none needs one."""
    assert positions([7, 8], 4) == [[[7, 8, 9], [15, 16, 17]], [[8, 9, 10], [12, 13, 14]]]
    assert positions([9, 11], 4) == [[[9, 10, 11], [13, 14, 15]], [[11, 12, 13], [19, 20, 21]]]


def test_wide_branches_begin_a_page_or_two_apart():
    """P = 64, K = 8, T = 5: 36 tail tokens leave room for a branch on one page, 60 do not."""
    starts = branch_positions(torch.tensor([100, 124]), topk=8, num_steps=5, page_size=64)[:, :, 0]
    assert starts.tolist() == [[100 + 64 * b for b in range(8)], [124 + 128 * b for b in range(8)]]


@pytest.mark.parametrize(
    ("page_size", "rows", "expected"),
    [
        (
            1,
            [[*range(1, 8), *range(16, 28)], [*range(8, 16), *range(28, 40)]],
            [[16, 19, 28, 31], [17, 20, 29, 32], [18, 21, 30, 33]],
        ),
        (
            4,
            [[*range(4, 12), *range(20, 52)], [*range(12, 20), *range(52, 84)]],
            [[11, 27, 52, 56], [20, 28, 53, 57], [21, 29, 54, 58]],
        ),
    ],
)
def test_slots_of_each_draft_step_match_the_worked_rows(page_size, rows, expected):
    """Two requests of 7 and 8 tokens, K = 2, T = 3: read through their rows, each step writes these four slots."""
    slots = [torch.tensor(row)[torch.tensor(own)] for row, own in zip(rows, positions([7, 8], page_size), strict=True)]
    assert torch.stack(slots).permute(2, 0, 1).flatten(1).tolist() == expected


def test_the_prefix_tail_fills_the_holes_of_later_branches():
    """P = 4: three tail tokens go to branch 1 of the first request, none of the second; they move with S."""
    assert copies(7, 2, 3, 4) == {4: [12], 5: [13], 6: [14]}
    assert copies(8, 2, 3, 4) == {}
    assert copies(9, 2, 3, 4) == {8: [12]}
    assert copies(11, 2, 3, 4) == {8: [16], 9: [17], 10: [18]}


def test_a_tail_of_six_tokens_moves_one_page_on():
    """P = 64, K = 2, tail 6: positions 64..69 are copied to 128..133; the rest of that page is the branch's own."""
    assert copies(70, 2, 5, 64) == {64 + j: [128 + j] for j in range(6)}


def test_each_later_branch_gets_its_own_copy_of_the_tail():
    """P = 64, K = 8, S = 100: 36 tokens for seven branches, 252 copies."""
    found = copies(100, 8, 5, 64)
    assert sum(map(len, found.values())) == 252
    assert found[99] == [99 + 64 * b for b in range(1, 8)]


@pytest.mark.parametrize(("topk", "page_size"), [(1, 4), (4, 1)])
def test_one_branch_or_one_slot_pages_have_no_holes(topk, page_size):
    """Without later branches, or without page tails, nothing is copied."""
    assert copies(7, topk, 3, page_size) == {}
