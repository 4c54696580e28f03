"""Compiled loops over host memory. Each gives bit for bit what a torch reference or a rule next door gives.

Loaded when a manager is built: compiling takes some seconds once, afterwards the loops come from the disk.
"""

from kvcanary.loops.finite import are_finite, find_unwritten
from kvcanary.loops.heard import hear_runs, land_quiet, take_quiet
from kvcanary.loops.known import append_tokens, grow_chain, tell_rows
from kvcanary.loops.lanes import keep_lanes, same_heads, sum_heads, sum_slots, sum_values
from kvcanary.loops.looks import are_zero, list_ends, list_slots, tell_slots
from kvcanary.loops.memory import entry
from kvcanary.loops.pages import follow_event, grant_rows, tell_pages, write_pages
from kvcanary.loops.plans import publish_pages, take_plan
from kvcanary.loops.poison import poison
from kvcanary.loops.queues import end_rows, extend_queue, oldest_look, take_ranges, take_slice
from kvcanary.loops.recording import copy_records, keep_plans
from kvcanary.loops.records import (
    are_written,
    chain_tokens,
    match_records,
    move_records,
    seal_plan,
    write_records,
)
from kvcanary.loops.rows import commit_rows, land_runs, launch_runs, write_rows
from kvcanary.loops.settle import settle_forwards
from kvcanary.loops.store import match_slots, put_values

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
