"""The first cause of each fault in the running engine: its family, and what speaks for it."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from kvcanary.faults.catalogue import find
from kvcanary_tools.campaign.configurations import QUICK, setup_for
from kvcanary_tools.campaign.runs import perform
from kvcanary_tools.campaign.traffic import Run
from kvcanary_tools.runs import demonstration
from kvcanary_tools.runs.demonstration import flip_bit, swap_pages
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


def assert_sides_differ(text: str) -> None:
    """No finding of a report was found as it is expected."""
    lines = [line.strip().partition(" ") for line in text.splitlines()]
    for (side, _, expected), (_, _, found) in pairwise(lines):
        if side == "expected":
            assert not set(expected.strip().split(", ")) <= set(found.strip().split(", ")), text


@pytest.mark.parametrize(("name", "family"), FAMILIES.items(), ids=FAMILIES)
def test_the_first_cause_is_of_the_fault_s_family(strike, name, family):
    """The cause that goes first names the family in which the fault was made."""
    error = strike(FAULTS[name], **FAULTS[name].settings)
    causes = error.findings[0].causes
    assert causes[0].family == family, error
    assert not any(
        reported.expected and reported.expected.items() <= reported.found.items() for reported in error.findings
    ), error
    assert len({(cause.family, cause.text) for cause in causes}) == len(causes)


#: Faults of the catalogue that a rule of their own tells from their neighbours.
REPORTED = (
    "addressing.chunk_local_position",
    "bits.k_and_v_swapped",
    "bits.nan_row",
    "bits.page_overwritten",
    "bits.row_lost",
    "bits.row_of_another_slot",
    "bits.rows_swapped",
    "bits.zeroed_row",
    "draft.move_untold",
    "draft.rewind_by_count",
    "draft.tail_not_copied",
    "graphs.padding_of_a_replay",
    "graphs.positions_of_before",
    "hooks.forward_without_hooks",
    "identity.page_of_another_prompt",
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


@pytest.mark.parametrize("name", REPORTED)
def test_the_first_cause_is_the_right_one(name):
    """In the engine of the quick campaign, under an even seed, on which the rules were tuned."""
    fault = find(name)
    result = perform(Run(name, "p4-k2-t3", setup_for(fault, QUICK["p4-k2-t3"]), seed=2))
    assert (result.found, result.rank) == (True, 1), result.text
    assert_sides_differ(result.text)


IN_FLIGHT = "the page was given back while work on it was planned or in flight (lifetime, derived)"
MOVED_WRONG = "the move copied other bytes than the plan says, or used its source after that (transfer, inferred)"
OTHER_LAYOUT = "a copy or store with another layout: the wrong part, axis or stride (transfer, inferred)"
NOT_LOADED = "a load failed, still runs or brought less, and its hit was counted (transfer, derived)"
#: First causes of transfers, and of writes that land late, word for word; `#` stands for a number.
SAID = {
    "transfer.load_failed": NOT_LOADED,
    "transfer.read_while_loading": NOT_LOADED,
    "transfer.loaded_in_part": NOT_LOADED,
    "transfer.stored_while_loading": "'store' on stream connector # reads page # before 'load' (stream connector #, "
    "sequence #) is done, which fills page # (order, derived)",
    "transfer.rejected_load_counted": "a load was refused or still runs, and its tokens were counted "
    "(transfer, derived)",
    "transfer.block_counted_in_rows": MOVED_WRONG,
    "transfer.wrong_axis": OTHER_LAYOUT,
    "transfer.strides_ignored": OTHER_LAYOUT,
    "transfer.layer_group_skipped": MOVED_WRONG,
    "transfer.pages_rotated": "misrouted: pages # and # of snapshot # changed places; in the target pool only "
    "(transfer, derived)",
    "transfer.last_page_not_copied": "short: nothing arrived behind offset #: # of # pages hold zeros; in the target "
    "pool only (transfer, derived)",
    "transfer.earlier_parcel": "stale: page # of snapshot # came back with the bytes of page # of snapshot #, an "
    "earlier "
    "one, which left in step #; in the target pool only (transfer, derived)",
    "transfer.heads_permuted": "other layout: heads of K and V are in another order: #, #; in the target pool only "
    "(transfer, inferred)",
    "lifetime.ended_during_a_transfer": IN_FLIGHT,
    "lifetime.old_list_saved": IN_FLIGHT,
    "lifetime.landed_in_a_free_page": "a write into a page after it was freed: a copy or forward was still running "
    "(lifetime, inferred)",
    "lifetime.written_after_the_end": "the page was given back while the row still pointed at it (lifetime, derived)",
}


@pytest.mark.parametrize(("name", "text"), SAID.items(), ids=SAID)
def test_the_first_cause_of_a_transfer_is_said_exactly(name, text):
    """In the words of what was done: a load is no move, and a copy that nobody waited for has its names."""
    fault = find(name)
    result = perform(Run(name, "p4-k2-t3", setup_for(fault, QUICK["p4-k2-t3"]), seed=2))
    first = re.search(r"1\. (.*)", result.text)
    assert first is not None, result.text
    assert re.sub(r"\d+", "#", first[1]) == text


@pytest.mark.parametrize(("fault", "family"), [(flip_bit, "bits"), (swap_pages, "addressing")], ids=["flip", "swap"])
def test_the_demo_s_faults_have_the_right_cause(fault, family):
    """What `kvcanary demo` breaks is explained by one cause, with evidence."""
    (cause,) = demonstration.strike(load_excerpts()[0].prompt, 48, fault).findings[0].causes
    assert cause.family == family
    assert cause.evidence
