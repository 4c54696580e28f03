"""Work that is asynchronous: two pieces of it on one page or host buffer, of which the second waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from kvcanary.faults.helpers.reach import any_reader
from kvcanary.faults.target import Target


class Work(NamedTuple):
    """A piece of asynchronous work on a page or a host buffer."""

    what: str
    stream: str
    writes: bool = False


def _overlap(
    target: Target, first: Work, second: Work, buffer: str = "", others: Sequence[str] = (), in_order: bool = False
) -> None:
    """Two pieces of work on one page of a running request, or on a host buffer, of which the second waits for nothing.

    others: streams that do wait;  in_order: the second one's does too, and both come to their end
    """
    reader = any_reader(target)
    page, async_tracker, code = target.rng.choice(reader.pages), target.canary.async_tracker, "" if in_order else None
    place = {"slot": -1} if buffer else {"pool": "target", "slot": page * target.setup.page_size}
    target.record(code=code, **place)
    issued = []
    for work in (first, second):
        touched: list[int | str] = [buffer or page]
        issued.append(async_tracker.issue(work.what, work.stream, **{"writes" if work.writes else "reads": touched}))
        for stream in (*others, *((second.stream,) if in_order else ())):
            async_tracker.waits(stream, issued[0])
    for op in issued if in_order else ():
        async_tracker.complete(op)


def unordered(first: Work, second: Work, buffer: str = "", others: Sequence[str] = ()) -> dict[str, Any]:
    """How such a fault is made, and its quiet twin: the same work, in order."""
    made = partial(_overlap, first=first, second=second, buffer=buffer, others=others)
    return {"strike": made, "quiet": partial(made, in_order=True)}
