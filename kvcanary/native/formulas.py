"""Formulas on lengths, each once: called by Python, and compiled for loops."""

from __future__ import annotations


def final_len(committed_len: int, ahead: int, written: int) -> int:
    """Entries of a row that no rejection takes back, and that a forward has written which is no guess.

    ahead: entries that it holds beyond the committed length
    """
    return min(committed_len + ahead, written)
