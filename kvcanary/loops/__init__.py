"""Compiled loops over host memory. Each gives bit for bit what a torch reference or a rule next door gives.

Loaded when a manager is built: compiling takes some seconds once, afterwards the loops come from the disk.
"""

from kvcanary.loops.lanes import keep_lanes, match_slots, sum_slots, sum_values
from kvcanary.loops.plans import nothing_to_refuse, take_plan

__all__ = ["keep_lanes", "match_slots", "nothing_to_refuse", "sum_slots", "sum_values", "take_plan"]
