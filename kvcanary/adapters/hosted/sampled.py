"""What workers of one engine sampled: each samples for itself, one is heard, and all must have the same (X1).

Where each also schedules for itself, so must be what they are about to run; where several hold the same K and V, so
must be these bits (X2). Workers whose outputs nobody takes compare theirs in a thread, so that the step behind need not
begin for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import structlog
import torch.distributed as dist

from kvcanary.adapters.hosted.copies import StoredCopies
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.ranks.agreement import STEP, Agreement, RanksDisagreeError
from kvcanary.ranks.levels import X1, X2, Level, Levels, digest

TIMEOUT_SECONDS = 60.0
LEFT = -1  # the number of a step that never comes
GIVEN = 0  # the phase of a step in which its tokens are there
_events = structlog.get_logger("kvcanary")


class Sampled(Protocol):
    """What a step gives.

    req_ids: [n]; sampled_token_ids: [n] rows of tokens, empty where none is new; both empty where nothing was sampled
    """

    req_ids: Sequence[str]
    sampled_token_ids: Sequence[Sequence[int]]


def new_group(ranks: Sequence[int], config: CanaryConfig) -> Any:
    """A gloo group that nobody else uses, of ranks that sample the same; each of them comes here at the same time.

    None where nothing is compared: some have no turn, or X1 is disabled. AdapterError where one does not come.
    """
    if config.share < 1 or "X1" in config.disable or not dist.is_initialized():
        return None
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    try:
        return dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
    except RuntimeError as error:
        raise AdapterError(
            f"ranks {', '.join(map(str, ranks))} must each attach a canary within {TIMEOUT_SECONDS:.0f} seconds, which "
            f"compares them; attach it in all of them, or set KVCANARY_DISABLE=X1 ({error})"
        ) from error


def of_one_seed(config: CanaryConfig, group: Any) -> CanaryConfig:
    """These settings, with the seed of the group's first rank, so that equal bytes have equal fingerprints on all."""
    if group is None:
        return config
    seeds = [config.drawn_seed()]
    dist.broadcast_object_list(seeds, dist.get_global_rank(group, 0), group=group)
    return replace(config, seed=seeds[0])


class SampledByRanks:
    """Compares what each step gives with the other ranks of its group, in the order of the steps.

    tell:   what is done about a difference; called where it was found, and once
    copies: what several of these ranks hold; None: nothing, or their first step stored other bits
    """

    def __init__(self, group: Any, tell: Callable[[RanksDisagreeError], object]) -> None:
        """group: gloo's, of the workers that sample the same; of nobody else. KVCanaryError where it cannot compare."""
        self._agreement, self._tell = Agreement(group, TIMEOUT_SECONDS), tell
        self.copies: StoredCopies | None = None
        self._later: SimpleQueue[tuple[int, Any]] | None = None
        self._is_over, self._number = False, 0  # of steps that were compared: their own numbers may differ by rank

    def compare(self, step: int, given: Sampled | None) -> None:
        """What `tell` raises, before the tokens leave."""
        self.agree(step, levels_of(given))

    def agree(self, step: int, levels: Levels, phase: int = GIVEN) -> None:
        """The same of other levels, which have names of their own in each `phase` of a step; with what it gives, copies
        are compared too.
        """
        if self._is_over:
            return
        self._number += 1
        copies = self.copies if phase == GIVEN else None
        try:
            if copies is not None:
                levels = {**levels, **copies.levels(step)}
            self._agreement.check(step, levels, phase, self._number)
        except RanksDisagreeError as error:
            if error.code == X2 and copies is not None and not copies.is_armed:
                self.copies = None
                _events.warning("kvcanary.copies_not_compared", reason=str(error), step=step)
                return
            self._is_over = error.code != X2  # histories differ from here on
            if error.level == STEP and LEFT in error.values:
                _events.warning("kvcanary.ranks_not_compared", reason="a rank has stopped watching", step=step)
                return
            self._tell(error)
            return
        if copies is not None:
            copies.were_alike(step)

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
    return levels_of_tokens((), ()) if given is None else levels_of_tokens(given.req_ids, given.sampled_token_ids)


def levels_of_tokens(names: Sequence[str], tokens: Sequence[Sequence[int]]) -> Levels:
    """The same of requests by name; a step without tokens has no rows of them."""
    rows = dict(zip(names, tokens, strict=False))
    return {"tokens": Level(digest(rows), lambda: {name: [*map(int, row)] for name, row in rows.items()}, X1, True)}
