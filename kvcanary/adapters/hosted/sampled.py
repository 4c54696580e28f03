"""What workers of one engine sampled: each samples for itself, one is heard, and all must have the same (X1).

Workers whose outputs nobody takes compare theirs in a thread, so that the step behind need not begin for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

import structlog

from kvcanary.ranks.agreement import STEP, Agreement, RanksDisagreeError
from kvcanary.ranks.levels import Levels, level

TIMEOUT_SECONDS = 60.0
LEFT = -1  # the number of a step that never comes
_events = structlog.get_logger("kvcanary")


class Sampled(Protocol):
    """What a step gives.

    req_ids: [n]; sampled_token_ids: [n] rows of tokens, empty where none is new; both empty where nothing was sampled
    """

    req_ids: Sequence[str]
    sampled_token_ids: Sequence[Sequence[int]]


class SampledByRanks:
    """Compares what each step gives with the other ranks of its group, in the order of the steps.

    tell: what is done about a difference; called where it was found, and once
    """

    def __init__(self, group: Any, tell: Callable[[RanksDisagreeError], object]) -> None:
        """group: gloo's, of the workers that sample the same; of nobody else. KVCanaryError where it cannot compare."""
        self._agreement, self._tell = Agreement(group, TIMEOUT_SECONDS), tell
        self._later: SimpleQueue[tuple[int, Any]] | None = None
        self._is_over, self._number = False, 0  # of steps that were compared: their own numbers may differ by rank

    def compare(self, step: int, given: Sampled | None) -> None:
        """What `tell` raises, before the tokens leave."""
        if self._is_over:
            return
        self._number += 1
        try:
            self._agreement.check(step, levels_of(given), number=self._number)
        except RanksDisagreeError as error:
            self._is_over = True  # histories differ from here on
            if error.level == STEP and LEFT in error.values:
                _events.warning("kvcanary.ranks_not_compared", reason="a rank has stopped watching", step=step)
                return
            self._tell(error)

    def compare_later(self, step: int, output: Any) -> None:
        """The same of an output that is on its way, and that nobody else asks for; what `tell` raises ends a thread."""
        if self._later is None:
            self._later = SimpleQueue()
            threading.Thread(target=self._run, args=(self._later,), name="kvcanary ranks", daemon=True).start()
        self._later.put((step, output))

    def leave(self) -> None:
        """This rank watches no more: the others are told with their next step, and do not wait for it."""
        if not self._is_over:
            self._is_over = True
            threading.Thread(target=self._say_so, name="kvcanary ranks", daemon=True).start()

    def _say_so(self) -> None:
        with suppress(RanksDisagreeError):
            self._agreement.check(LEFT, {}, number=LEFT)

    def _run(self, later: SimpleQueue[tuple[int, Any]]) -> None:
        while not self._is_over:
            step, output = later.get()
            self.compare(step, output.get_output())


def levels_of(given: Sampled | None) -> Levels:
    """By request, its new tokens."""
    if given is None:
        return {"tokens": level({}, is_private=True)}
    rows = zip(given.req_ids, given.sampled_token_ids, strict=False)  # a step without tokens has no rows
    return {"tokens": level({name: [int(token) for token in row] for name, row in rows}, is_private=True)}
