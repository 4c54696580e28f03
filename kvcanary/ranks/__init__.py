"""Ranks of one engine: what must be equal on all of them is compared before a step's tokens leave."""

from kvcanary.ranks.agreement import Agreement, Levels, RanksDisagreeError

__all__ = ["Agreement", "Levels", "RanksDisagreeError"]
