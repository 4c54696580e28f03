"""Copies for readers of whole pages: which slots go where."""

import torch

from spec_engine.drafting.paging import ancestor_copies, branch_prefix, tail_copies


def pairs(table: torch.Tensor, lens: list[int], **layout: int) -> list[tuple[int, int]]:
    """(source, destination) of every tail copy; those from null slot to null slot are padding."""
    rows = torch.arange(1, 1 + len(lens))
    source, destination = tail_copies(table, rows, torch.tensor(lens), **layout)
    both = zip(source.flatten().tolist(), destination.flatten().tolist(), strict=True)
    return [pair for pair in both if pair != (0, 0)]


def linear_table(width: int) -> torch.Tensor:
    """A row in which the slot of a position is its number, after the row of padding."""
    return torch.stack((torch.zeros(width, dtype=torch.int64), torch.arange(width)))


def test_the_tail_goes_to_the_start_of_each_other_branch():
    """Six entries of a page of 64 and two branches: slots 64 to 69 are copied to 128 to 133, and nothing else is."""
    copies = pairs(linear_table(400), [70], topk=2, num_steps=3, page_size=64)
    assert copies == [(64 + offset, 128 + offset) for offset in range(6)]


def test_the_tail_goes_to_holes_of_the_layout():
    """A request of 7 tokens on pages of 4: three holes of branch 1 are filled; one of 8 tokens has no tail."""
    first = torch.tensor([*range(4, 12), *range(20, 52)])
    second = torch.tensor([*range(12, 20), *range(52, 84)])
    table = torch.stack((torch.zeros_like(first), first, second))
    assert pairs(table, [7, 8], topk=2, num_steps=3, page_size=4) == [(8, 24), (9, 25), (10, 26)]
    assert pairs(table, [9, 11], topk=2, num_steps=3, page_size=4) == [(20, 24), (52, 60), (53, 61), (54, 62)]


def test_eight_branches_take_seven_copies_of_the_tail():
    """36 entries of a page of 64: 252 slots are copied, to pages 64 apart; at 60 entries the pages are 128 apart."""
    layout = {"topk": 8, "num_steps": 5, "page_size": 64}
    copies = pairs(linear_table(2200), [100], **layout)
    assert len(copies) == 36 * 7
    assert copies[::36] == [(64, 128 + 64 * branch) for branch in range(7)]
    assert pairs(linear_table(2200), [124], **layout)[::60] == [(64, 192 + 128 * branch) for branch in range(7)]


def test_pages_of_one_slot_have_no_tail():
    """There is nothing to copy, and no shape to copy it in."""
    assert pairs(linear_table(40), [7], topk=4, num_steps=2, page_size=1) == []


def test_branches_may_swap_their_ancestors():
    """Survivor 0 descends from branch 1 and the other way round: sources are the parents' columns."""
    slots = torch.tensor([[[11, 20, 21], [27, 28, 29]]])
    source, destination = ancestor_copies(slots, torch.tensor([[1, 0]]), 2)
    assert source.tolist() == [[[27, 28], [11, 20]]]
    assert destination.tolist() == [[[11, 20], [27, 28]]]


def test_two_survivors_may_share_their_ancestors():
    """Both descend from branch 1: its column is read twice, and each branch's own is written once."""
    slots = torch.tensor([[[11, 20, 21], [27, 28, 29]]])
    source, destination = ancestor_copies(slots, torch.tensor([[1, 1]]), 1)
    assert (source.flatten().tolist(), destination.flatten().tolist()) == ([27, 27], [11, 27])


def test_a_branch_reads_the_prefix_with_its_own_tail():
    """Whole pages of the prefix are everybody's; the rest comes from where `tail_copies` puts it."""
    prefix = branch_prefix(torch.arange(400), 70, topk=2, num_steps=3, page_size=64)
    assert prefix.tolist() == [[*range(70)], [*range(64), *range(128, 134)]]
