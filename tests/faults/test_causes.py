"""The first cause of each fault in the running engine: its family, and what speaks for it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kvcanary.faults.catalogue import find
from kvcanary_tools import demonstration
from kvcanary_tools.campaign.configurations import QUICK, setup_for
from kvcanary_tools.campaign.runs import perform
from kvcanary_tools.campaign.traffic import Run
from kvcanary_tools.demonstration import flip_bit, swap_pages
from spec_engine.models.embedded import load_excerpts

FAULTS = {
    param.values[0].__name__: param.values[0]
    for param in runpy.run_path(str(Path(__file__).with_name("test_each_check.py")))["FAULTS"]
}
FAMILIES = {
    "read_slot_out_of_range": "bounds",
    "read_null_slot": "graphs",
    "damage_record": "bits",
    "damage_fingerprint": "bits",
    "exchange_pages": "addressing",
    "read_a_cousin_for_an_ancestor": "draft",
    "feed_another_token": "order",
    "read_a_page_that_nobody_owns": "uninitialised",
    "exchange_one_slot_between_requests": "addressing",
    "read_the_neighbours_row": "identity",
    "flip_a_bit": "bits",
    "read_an_unwritten_slot": "uninitialised",
    "lose_the_stores_of_a_layer": "uninitialised",
    "write_out_of_range": "bounds",
    "write_a_slot_twice": "draft",
    "write_at_wrong_positions": "draft",
    "believe_a_shorter_row": "lengths",
    "read_what_a_later_step_has_written": "order",
    "see_a_node_that_is_no_ancestor": "draft",
}


@pytest.mark.parametrize(("name", "family"), FAMILIES.items(), ids=FAMILIES)
def test_the_first_cause_is_of_the_fault_s_family(strike, name, family):
    """The cause that goes first names the family in which the fault was made."""
    error = strike(FAULTS[name], **FAULTS[name].settings)
    causes = error.findings[0].causes
    assert causes[0].family == family, error
    assert len({(cause.family, cause.text) for cause in causes}) == len(causes)


#: Faults of the catalogue that a rule of their own tells from their neighbours.
TOLD = (
    "addressing.chunk_local_position",
    "bits.k_and_v_swapped",
    "bits.nan_row",
    "bits.page_overwritten",
    "bits.row_lost",
    "bits.row_of_another_slot",
    "bits.rows_swapped",
    "bits.zeroed_row",
    "draft.rewind_by_count",
    "graphs.padding_of_a_replay",
    "graphs.positions_of_before",
    "hooks.forward_without_hooks",
    "lengths.past_the_chunk",
    "lifetime.old_list_saved",
    "lifetime.written_after_publishing",
    "scales.by_shape",
    "scales.reset",
    "split.stale_entry",
    "transfer.load_failed",
    "transfer.rejected_load_counted",
    "uninitialised.nan_recycled",
    "windows.ring_too_short",
    "windows.translation_kept",
    "windows.untranslated",
)


@pytest.mark.parametrize("name", TOLD)
def test_the_first_cause_is_the_right_one(name):
    """In the engine of the quick campaign, under an even seed, on which the rules were tuned."""
    fault = find(name)
    result = perform(Run(name, "p4-k2-t3", setup_for(fault, QUICK["p4-k2-t3"]), seed=2))
    assert (result.found, result.rank) == (True, 1), result.text


@pytest.mark.parametrize(("fault", "family"), [(flip_bit, "bits"), (swap_pages, "addressing")], ids=["flip", "swap"])
def test_the_demo_s_faults_have_the_right_cause(fault, family):
    """What `kvcanary demo` breaks is explained by one cause, with evidence."""
    (cause,) = demonstration.strike(load_excerpts()[0].prompt, 48, fault).findings[0].causes
    assert cause.family == family
    assert cause.evidence
