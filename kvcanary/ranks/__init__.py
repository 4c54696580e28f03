"""Ranks of one engine: what must be equal on all of them is compared before a step's tokens leave."""

from kvcanary.ranks.agreement import Agreement, RanksDisagreeError
from kvcanary.ranks.copies import Copies, StateSum
from kvcanary.ranks.levels import Level, Levels, level

__all__ = ["Agreement", "Copies", "Level", "Levels", "RanksDisagreeError", "StateSum", "level"]
