"""Page tables and passes over them, each by itself."""

import torch

from spec_engine.attention.page_pass import PagePass, branch_tables, merge, page_tables, visible_tables

COLUMNS = torch.tensor([[11, 20, 21], [27, 28, 29], [52, 53, 54], [56, 57, 58]])  # two requests, topk 2, pages of 4


def test_a_branch_table_names_each_page_once():
    """Pages of the columns so far, in order, padded with the null page to one more than the columns."""
    assert branch_tables(COLUMNS, 1, 4).tolist() == [[2, 0], [6, 0], [13, 0], [14, 0]]
    assert branch_tables(COLUMNS, 2, 4).tolist() == [[2, 5, 0], [6, 7, 0], [13, 0, 0], [14, 0, 0]]


def test_later_columns_do_not_enter_a_branch_table():
    """A page that a branch reaches at a later step is not in the table of this one (sgl-project/sglang#27360)."""
    slots = torch.tensor([[7, 8, 12, 16, 20]])
    assert branch_tables(slots, 1, 4).tolist() == [[1, 0]]
    assert torch.equal(branch_tables(slots, 2, 4), branch_tables(slots[:, :2], 2, 4))


def test_a_page_table_is_every_page_of_a_row():
    """Rows of any length, the last page begun or full; past a row's end lies the null page."""
    rows = torch.tensor([8, 9, 10, 11, 20, 21, 4, 5, 6, 7, 16, 17, 18, 19, 28])
    starts, lens = torch.tensor([0, 6, 0]), torch.tensor([6, 9, 0])
    assert page_tables(rows, starts, lens, 4, 3).tolist() == [[2, 5, 0], [1, 4, 7], [0, 0, 0]]


def test_a_node_sees_the_first_entries_of_its_table():
    """What a node of the tree may see comes first and in order, what it may not comes after."""
    mask = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool)
    tables, lens = visible_tables(torch.tensor([[9, 4, 7, 5]]), mask)
    assert lens.tolist() == [1, 2, 2, 3]
    assert tables.tolist() == [[9, 4, 7, 5], [9, 4, 7, 5], [9, 7, 4, 5], [9, 7, 5, 4]]


def test_merged_passes_are_one_pass_over_the_union():
    """Cut a row of pages anywhere, also at its start: the merged parts are the whole."""
    torch.manual_seed(0)
    kv, q = torch.randn(64, 2, 2, 8, dtype=torch.float64), torch.randn(6, 2, 3, 8, dtype=torch.float64)
    tables, lens = torch.tensor([[3, 9, 4, 12], [7, 1, 8, 2]]), torch.tensor([15, 14])
    whole = PagePass(tables, lens, 3, 4).run(kv, q)
    for cut in range(4):
        first = PagePass(tables[:, :cut], torch.tensor([4 * cut] * 2), 3, 4).run(kv, q)
        second = PagePass(tables[:, cut:], lens - 4 * cut, 3, 4).run(kv, q)
        torch.testing.assert_close(merge([first, second]), whole[0], rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_has_no_weight():
    """A pass over nothing gives zeros and minus infinity, not NaN, whatever lies in the pages."""
    kv, q = torch.full((8, 2, 1, 8), torch.nan), torch.randn(1, 1, 2, 8)
    output, lse = PagePass(torch.tensor([[1]]), torch.tensor([0]), 1, 4).run(kv, q)
    assert not output.any()
    assert lse.tolist() == [[[-torch.inf, -torch.inf]]]
