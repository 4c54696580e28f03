"""First child and next sibling, against a tree worked out by hand and against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_engine.drafting.retrieve import retrieve_links


def test_the_worked_example():
    """A bush of two branches, one of them longer, and a chain."""
    next_token, next_sibling = retrieve_links(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    assert next_token.tolist() == [[1, 3, -1, -1], [1, 2, 3, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, -1], [-1, -1, -1, -1]]


def test_a_node_that_no_parent_lists_has_no_sibling():
    """Orphans share -1, and a node may name a later one as its parent: neither makes a list."""
    next_token, next_sibling = retrieve_links(torch.tensor([[-1, 3, -1, 0, 3]]))
    assert next_token.tolist() == [[3, -1, -1, 4, -1]]
    assert next_sibling.tolist() == [[-1, -1, -1, -1, -1]]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 9), min_size=1, max_size=9))
def test_lists_hold_every_child_in_ascending_order(parents):
    """Following the links from each node gives exactly its sound children, whatever the parents are."""
    [next_token], [next_sibling] = (links.tolist() for links in retrieve_links(torch.tensor([parents])))
    for node in range(len(parents)):
        children, child = [], next_token[node]
        while child >= 0 and len(children) < len(parents):
            children.append(child)
            child = next_sibling[child]
        assert children == [later for later in range(node + 1, len(parents)) if parents[later] == node]
