"""Bisecting: the first bad step, of a recording by replaying it, of a command by running it again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcanary.dumps.reading import Dump
from kvcanary.replay.replayer import replay
from kvcanary_tools.dumps.running import STEP, run


def first_bad(is_bad: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number in [low, high] that is bad, if all behind it are; None where `high` is good."""
    if not is_bad(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle + 1, high)
    return low


def bisect_dump(dump: Dump) -> dict[str, Any]:
    """The first step whose replay finds something, and what; with the last step in which it was known good."""
    step = first_bad(
        lambda until: bool(replay(dump, until).findings), dump.manifest["first_step"], dump.manifest["step"]
    )
    if step is None:
        return {"first_bad_step": None, "last_good_step": None, "finding": None}
    finding = replay(dump, step).findings[0]
    return {"first_bad_step": step, "last_good_step": finding.last_good_step, "finding": finding.to_dict()}


def bisect_command(command: str, low: int, high: int, timeout: float) -> dict[str, Any]:
    """The first step, put where the command says {step}, with which it ends in code 1."""
    runs: dict[int, int] = {}

    def is_bad(step: int) -> bool:
        runs[step] = run(command, {STEP: str(step)}, timeout)
        return runs[step] == 1

    return {"first_bad_step": first_bad(is_bad, low, high), "runs": runs}
