"""ExpectedForwards: who must open their hooks, as the engine has announced them and the numbers of drafts say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from kvcanary.calls.forward import Forward
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.checks.lengths import own_number
from kvcanary.errors import PlanError
from kvcanary.pools.launch_site import SUBSTEP_KINDS, site_name
from kvcanary.records.state import PoolState

Announced = tuple[str, int, str]  # kind, index and pool of a forward
MOST_NAMED = 16  # forwards that a report names as those that have opened


class ExpectedForwards:
    """Forwards that were announced and have not opened their hooks, and the last ones that have.

    due: in the order of their run: the forward, the step in which it was announced, and whose rows it has
    """

    def __init__(self, pools: Mapping[str, PoolState]) -> None:
        """`pools`: by name."""
        self.due: list[tuple[Announced, int, Sequence[str]]] = []
        self._pools, self._known = pools, set[Announced]()
        self._opened: deque[tuple[Announced, int]] = deque(maxlen=MOST_NAMED)
        self._drafted: dict[tuple[str, int], tuple[int, int]] = {}  # see `left_out`

    def announce(self, forwards: Sequence[Announced], step: int, request_ids: Sequence[str]) -> None:
        """These run next. PlanError for a kind or pool that there is not."""
        if not self._known.issuperset(forwards):
            self._learn(forwards)
        self.due += zip(forwards, repeat(step), repeat(request_ids))

    def opened(self, forward: Announced, step: int) -> bool:
        """This one has opened its hooks; whether it was announced."""
        self._opened.append((forward, step))
        for number, (announced, *_) in enumerate(self.due):
            if announced == forward:
                del self.due[number]
                return True
        return False

    def missing(self) -> list[Violation]:
        """H1 for each that is due: it has run without hooks, or not at all. It is due no more."""
        due, self.due = self.due, []
        return [self._without_hooks(*one) for one in due]

    def left_out(self, forward: Forward) -> list[Violation]:
        """H1 for draft forwards that must have run before this one, where the engine announces nothing.

        Those of one loop are numbered from 0 on, by the ancestors that their rows read, behind the same final entries.
        """
        if self._known:
            return []
        numbers, own = range(0), min(forward.index, own_number(forward))
        for request, prefix in zip(forward.requests, forward.prefixes, strict=True):
            place = forward.pool.name, request.uid
            before, following = self._drafted.get(place, (prefix, 0))
            numbers = max(numbers, range(following if before == prefix else 0, own), key=len)
            self._drafted[place] = prefix, own + 1
        lost = [("draft", number, forward.pool.name) for number in numbers]
        return [self._without_hooks(one, forward.step, forward.request_ids) for one in lost]

    def forget(self, uid: int) -> None:
        """The request is over."""
        for name in self._pools if self._drafted else ():
            self._drafted.pop((name, uid), None)

    # helpers

    def _learn(self, forwards: Iterable[Announced]) -> None:
        for forward in forwards:
            kind, _, pool = forward
            if kind not in SUBSTEP_KINDS:
                raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
            if pool not in self._pools:
                raise PlanError(f"pool must be one of {', '.join(self._pools)}, got {pool!r}")
            self._known.add(forward)

    def _without_hooks(self, forward: Announced, step: int, request_ids: Sequence[str]) -> Violation:
        kind, index, pool = forward
        name, *others = request_ids or (None,)
        opened = [_name(one) for one, when in self._opened if when == step]
        violation = Violation("H1", self._pools[pool], NO_SLOT, None, name, (kind, index), step, is_unhooked=True)
        violation.others = tuple(other for other in others if other is not None)
        violation.expected, violation.found = {"opened": _name(forward)}, {"opened": opened or ["nothing"]}
        return violation


def _name(forward: Announced) -> str:
    kind, index, pool = forward
    return f"{site_name(kind, index)} ({pool})"
