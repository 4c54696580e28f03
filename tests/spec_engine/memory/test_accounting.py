"""The pool equation closes, and says with all its terms when it does not."""

import pytest

from kvcanary.invariants import PageLeakError, ReferenceCountError
from spec_engine.memory.accounting import PoolAccounting, check_holders
from spec_engine.memory.allocator import PageAllocator


def test_a_worked_batch_closes():
    """100 pages: two requests own 9 each beside the two pages that the tree keeps of their prompts."""
    PoolAccounting(total=100, free=80, quarantined=0, owned=18, protected=2).check()


@pytest.mark.parametrize("term", ["free", "quarantined", "owned", "evictable", "protected"])
@pytest.mark.parametrize(("change", "words"), [(1, "1 counted twice"), (-1, "1 leaked")])
def test_every_term_counts(term, change, words):
    """One page more or less anywhere is a leak, or a page that two count."""
    terms = {"free": 1, "quarantined": 2, "owned": 3, "evictable": 4, "protected": 5}
    PoolAccounting(total=15, **terms).check()
    with pytest.raises(PageLeakError, match=f" != 15 in all: {words}"):
        PoolAccounting(total=15, **terms | {term: terms[term] + change}).check()


def test_pages_in_quarantine_are_a_term_of_their_own():
    """The allocator's free pages are split: those that wait are not counted as free, too."""
    allocator = PageAllocator(6, quarantine=2)
    allocator.free(allocator.allocate(3)[:2])
    assert allocator.accounting(owned=1) == PoolAccounting(total=6, free=3, quarantined=2, owned=1)
    allocator.check_accounting(owned=1)


def test_references_must_be_those_of_rows_and_tree():
    """A page that two rows name and the tree holds has three references."""
    check_holders({1: 3, 2: 1}, rows=[[1, 2], [1]], cached=[1])
    with pytest.raises(ReferenceCountError, match="references of page 1 are 2, rows and prefix tree name it 3 times"):
        check_holders({1: 2, 2: 1}, rows=[[1, 2], [1]], cached=[1])
    with pytest.raises(ReferenceCountError, match="references of page 2 are 0, rows and prefix tree name it 1 times"):
        check_holders({1: 1}, rows=[[1], [2]], cached=[])
