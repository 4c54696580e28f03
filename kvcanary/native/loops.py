"""Compiled loops over host memory. Each gives bit for bit what a torch reference or a rule next door gives.

Loaded when a manager is built: compiling takes some seconds once, afterwards the loops come from the disk.
"""

from kvcanary.native.device_results import hear_runs, land_quiet, take_quiet
from kvcanary.native.fingerprints import keep_lanes, same_heads, sum_heads, sum_slots, sum_values
from kvcanary.native.forward_plan import publish_pages, take_plan
from kvcanary.native.jit import entry
from kvcanary.native.page_states import follow_event, grant_rows, tell_pages, write_pages
from kvcanary.native.pool_bytes import are_finite, find_unwritten, match_slots, poison, put_values
from kvcanary.native.prove import settle_forwards
from kvcanary.native.recording import copy_records, keep_plans
from kvcanary.native.records import are_written, chain_tokens, match_records, move_records, seal_plan, write_records
from kvcanary.native.request_lengths import commit_rows, land_runs, launch_runs, write_rows
from kvcanary.native.request_tokens import append_tokens, grow_chain, tell_rows
from kvcanary.native.reread_queue import (
    are_zero,
    end_rows,
    extend_queue,
    list_ends,
    list_slots,
    oldest_look,
    take_ranges,
    take_slice,
    tell_slots,
)

__all__ = [
    "append_tokens",
    "are_finite",
    "are_written",
    "are_zero",
    "chain_tokens",
    "commit_rows",
    "copy_records",
    "end_rows",
    "extend_queue",
    "find_unwritten",
    "follow_event",
    "grant_rows",
    "grow_chain",
    "hear_runs",
    "keep_lanes",
    "keep_plans",
    "land_quiet",
    "land_runs",
    "launch_runs",
    "list_ends",
    "list_slots",
    "match_records",
    "match_slots",
    "move_records",
    "oldest_look",
    "poison",
    "publish_pages",
    "put_values",
    "same_heads",
    "seal_plan",
    "settle_forwards",
    "sum_heads",
    "sum_slots",
    "sum_values",
    "take_plan",
    "take_quiet",
    "take_ranges",
    "take_slice",
    "tell_pages",
    "tell_rows",
    "tell_slots",
    "write_pages",
    "write_records",
    "write_rows",
]

globals().update({name: entry(globals()[name]) for name in __all__})
