"""Quarantine: freed pages wait for so many steps, and leave in the order in which they came."""

from __future__ import annotations

import numpy as np

from kvcanary.ledger.quarantine import Quarantine


def test_quarantined_pages_leave_in_the_order_in_which_they_came():
    """After so many steps; earlier only while pages are wanted, and never before the least."""
    quarantine = Quarantine()
    quarantine.add(np.array([4, 2]), 1)
    quarantine.add(np.array([3]), 3)
    assert (len(quarantine), list(quarantine)) == (3, [(4, 1), (2, 1), (3, 3)])
    assert quarantine.leave(4, 4).tolist() == []
    assert quarantine.leave(4, 4, wanted=1, least=4).tolist() == []
    assert quarantine.leave(4, 4, wanted=1, least=3).tolist() == [4]
    assert quarantine.leave(5, 4, wanted=1, least=3).tolist() == [2]
    assert quarantine.leave(6, 4).tolist() == []
    assert quarantine.leave(7, 4).tolist() == [3]
    assert not quarantine


def test_pages_of_several_events_leave_a_quarantine_together():
    """All that have waited long enough, and of the next as many as are still wanted."""
    quarantine = Quarantine()
    for step, pages in enumerate(([6, 5], [9], [1, 2, 3])):
        quarantine.add(np.array(pages), step)
    assert quarantine.leave(5, 4, wanted=4, least=1).tolist() == [6, 5, 9, 1]
    assert list(quarantine) == [(2, 2), (3, 2)]
