"""Quiet twins: what looks like a fault, and is none."""

from __future__ import annotations

import pytest

from kvcanary.faults.catalogue import faults, find
from kvcanary_tools.campaign.configurations import FULL, quiet_setup_for
from kvcanary_tools.campaign.runs import perform
from kvcanary_tools.campaign.traffic import QUIET, Run

NAME = "p4-k2-t3"


@pytest.mark.parametrize("fault", [fault for fault in faults() if fault.state == "ready"], ids=lambda fault: fault.name)
def test_every_fault_has_a_twin_or_says_why_not(fault):
    """One way to make it, in some configuration; where no check sees the fault, the faulty run is the quiet one."""
    ways = [fault.quiet is not None, bool(fault.quiet_needs), bool(fault.alone), not fault.is_seen]
    assert sum(ways) == 1
    if fault.has_twin:
        assert any(quiet_setup_for(fault, setup) for setup in FULL.values())


@pytest.mark.parametrize(
    "name",
    [
        "draft.compaction_lost",  # rows that move in another order
        "draft.rewind_by_count",  # a formula that is asked where it does no harm
        "lifetime.locked_page_replaced",  # a hit that is given back
        "order.unresolved_step",  # plans in longer buffers
        "windows.translation_kept",  # the map of a page that nobody has
    ],
)
def test_a_twin_is_made_and_says_nothing(name):
    """It counts as struck, so that a silent run says something."""
    fault = find(name)
    result = perform(Run(name, NAME, quiet_setup_for(fault, FULL[NAME]), 1, QUIET))
    assert (result.struck, result.code) == (True, ""), result.text
