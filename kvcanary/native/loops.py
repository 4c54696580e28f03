"""Compiled loops over host memory. Each gives bit for bit what a torch reference or a rule next door gives.

Loaded when a manager is built: compiling takes some seconds once, afterwards the loops come from the disk.
"""

from kvcanary.native.device_results import collect_quiet, read_runs, take_quiet
from kvcanary.native.fingerprints import keep_fingerprints, same_heads, sum_heads, sum_slots, sum_values
from kvcanary.native.forward_plan import publish_pages, take_plan
from kvcanary.native.jit import entry
from kvcanary.native.page_states import describe_pages, follow_event, grant_rows, write_pages
from kvcanary.native.pool_bytes import are_finite, find_unwritten, match_slots, poison, put_values
from kvcanary.native.prove import prove_forwards
from kvcanary.native.recording import copy_records, keep_plans
from kvcanary.native.records import are_written, chain_tokens, match_records, move_records, seal_plan, write_records
from kvcanary.native.request_lengths import commit_rows, finalise_runs, launch_runs, write_rows
from kvcanary.native.request_tokens import append_tokens, describe_rows, grow_chain
from kvcanary.native.reread_queue import (
    are_zero,
    end_rows,
    extend_queue,
    list_ends,
    list_slots,
    oldest_read,
    put_slots,
    take_ranges,
    take_slice,
)

__all__ = [
    "append_tokens",
    "are_finite",
    "are_written",
    "are_zero",
    "chain_tokens",
    "collect_quiet",
    "commit_rows",
    "copy_records",
    "describe_pages",
    "describe_rows",
    "end_rows",
    "extend_queue",
    "finalise_runs",
    "find_unwritten",
    "follow_event",
    "grant_rows",
    "grow_chain",
    "keep_fingerprints",
    "keep_plans",
    "launch_runs",
    "list_ends",
    "list_slots",
    "match_records",
    "match_slots",
    "move_records",
    "oldest_read",
    "poison",
    "prove_forwards",
    "publish_pages",
    "put_slots",
    "put_values",
    "read_runs",
    "same_heads",
    "seal_plan",
    "sum_heads",
    "sum_slots",
    "sum_values",
    "take_plan",
    "take_quiet",
    "take_ranges",
    "take_slice",
    "write_pages",
    "write_records",
    "write_rows",
]

globals().update({name: entry(globals()[name]) for name in __all__})
