"""Where two dumps part: the first event that differs, token ids by the order of their appearance."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from kvcanary.dumps.event_schema import CALLS
from kvcanary.dumps.reading import Call, Dump
from kvcanary.errors import DumpError


def diff(first: Dump, second: Dump, up_to_both: bool = False) -> dict[str, Any]:
    """The first event in which they differ and how; `same` where none does. Recordings are aligned by step.

    `up_to_both`: only steps that both have whole are compared, since one of them goes on. DumpError where there are
    none.
    """
    start, end = (choose(dump.manifest[key] for dump in (first, second)) for choose, key in _SHARED)
    if start > 0 and start >= end:
        raise DumpError(
            f"the recordings of {first.path.name} and {second.path.name} share no step: one begins at step {start}, "
            f"the other ends at step {end}"
        )
    sides = [_Names(dump) for dump in (first, second)]
    events = [
        [
            (step, event)
            for step, event in dump.stepped()
            if (step > start or not start) and (step < end or not up_to_both)
        ]
        for dump in (first, second)
    ]
    before: dict[str, Any] | None = None
    for one, other in zip_longest(*events):
        facts = [None if pair is None else side.facts(*pair) for side, pair in zip(sides, (one, other), strict=True)]
        if facts[0] != facts[1]:
            step = min(pair[0] for pair in (one, other) if pair is not None)
            return {
                "same": False,
                "step": step,
                "before": before,
                "first": facts[0],
                "second": facts[1],
                **_where(facts),
            }
        before = facts[0]
    return {"same": True, "step": None, "before": before, "first": None, "second": None, "fields": []}


_SHARED = ((max, "first_step"), (min, "step"))


def _where(facts: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Which fields of the two events differ."""
    one, other = facts
    if one is None or other is None or one["call"] != other["call"]:
        return {"fields": ["call"]}
    return {"fields": [key for key in one if one[key] != other.get(key)]}


class _Names:
    """Token ids of one dump as numbers in order of appearance: two dumps have two secret bijections."""

    def __init__(self, dump: Dump) -> None:
        self._numbers: dict[int, int] = {}
        for request in dump.start:
            self._of(request["tokens"])

    def facts(self, step: int, event: Call) -> dict[str, Any]:
        facts: dict[str, Any] = {"step": step, "call": event["call"]}
        for field, kind in CALLS[event["call"]].items():
            value = event.get(field)
            if kind == "tokens":
                facts[field] = self._of(value)
            elif field == "plan":
                n, plan = event["entries"], value.tolist()
                facts[field] = [*plan[:n], *self._of(np.array(plan[n : 2 * n])), *plan[2 * n :]]
            else:
                facts[field] = value.tolist() if isinstance(value, np.ndarray) else value
        return facts

    def _of(self, tokens: Any) -> list[int]:
        return [self._numbers.setdefault(int(token), len(self._numbers)) for token in tokens]
