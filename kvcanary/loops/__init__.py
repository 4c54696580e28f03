"""Compiled loops over host memory. Each gives bit for bit what a torch reference or a rule next door gives.

Loaded when a manager is built: compiling takes some seconds once, afterwards the loops come from the disk.
"""

from kvcanary.loops.lanes import keep_lanes, match_slots, sum_slots, sum_values
from kvcanary.loops.plans import nothing_to_refuse, publish_pages, take_plan
from kvcanary.loops.records import are_written, chain_tokens, match_records, move_records, seal_plan, write_records

__all__ = [
    "are_written",
    "chain_tokens",
    "keep_lanes",
    "match_records",
    "match_slots",
    "move_records",
    "nothing_to_refuse",
    "publish_pages",
    "seal_plan",
    "sum_slots",
    "sum_values",
    "take_plan",
    "write_records",
]
