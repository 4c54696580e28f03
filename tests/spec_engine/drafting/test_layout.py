"""Branch positions, against numbers worked out by hand."""

import torch

from spec_engine.drafting.layout import branch_positions


def positions(lens, page_size):
    return branch_positions(torch.tensor(lens), topk=2, num_steps=3, page_size=page_size).tolist()


def test_branches_of_one_slot_pages_lie_densely():
    """With P = 1 branch b begins at S + b T."""
    assert positions([7, 8], 1) == [[[7, 8, 9], [10, 11, 12]], [[8, 9, 10], [11, 12, 13]]]


def test_branches_of_larger_pages_begin_at_the_prefix_tail_offset():
    """With P = 4 a branch whose first page starts with 3 tail tokens needs two pages, one with none needs one."""
    assert positions([7, 8], 4) == [[[7, 8, 9], [15, 16, 17]], [[8, 9, 10], [12, 13, 14]]]
    assert positions([9, 11], 4) == [[[9, 10, 11], [13, 14, 15]], [[11, 12, 13], [19, 20, 21]]]
