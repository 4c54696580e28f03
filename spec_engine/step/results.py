"""The way of a step's tokens to the host: one copy behind the step, into a buffer that the host reads behind the copy.

A host that is behind the device (schedule "overlap") has a ring of such buffers, one for each step of which it has not
heard; with schedule "sync" it waits for every step, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary.invariants import check_staging_room
from spec_engine.drafting.tree import MADE_FOR
from spec_engine.step.runner import Part, StepResult
from spec_engine.step.streams import Event, Staging, StagingRing, Streams
from spec_engine.step.verify import Owner, accepted_of, results_of

if TYPE_CHECKING:
    from kvcanary import CanaryManager

STREAM = "results"


@dataclass(frozen=True, eq=False)
class PendingResult:
    """A step that the host has not collected: behind ``event`` its tokens lie in ``staging``, None: nothing comes.

    sums: [n] int64, of copies that ranks compare, where they lie in no staging, on the device.
    """

    result: StepResult
    event: Event | None
    staging: Staging | None = None
    num_columns: int = 0
    sums: Tensor | None = None


class Results:
    """``max_bs`` requests a step, each with ``max_accept`` tokens of trees of ``max_nodes`` at most; see
    `_results_of`.
    """

    def __init__(
        self,
        streams: Streams,
        canary: CanaryManager | None,
        *,
        lag: int,
        max_bs: int,
        max_accept: int,
        max_nodes: int = 0,
        num_sums: int = 0,
    ) -> None:
        self._streams, self._canary = streams, canary
        most = max_bs * (1 + max_accept + (4 * max_nodes + MADE_FOR if max_nodes else 0)) + num_sums
        self._num_sums = num_sums
        self._ring = StagingRing(streams, STREAM, lag + 2, (most,), torch.int64) if lag else None

    def send(self, result: StepResult, sums: Sequence[Tensor] = ()) -> PendingResult:
        """The step is launched, and so is the copy of what it says; ``sums``: [] int64 each, that go with it."""
        if self._ring is None or result.accepted is None:
            return PendingResult(result, self._streams.launched(), sums=torch.stack(tuple(sums)) if sums else None)
        results = _results_of(result)
        flat = results.flatten()
        if sums:
            flat = torch.cat((flat, *(own.view(1) for own in sums)))
        copy = lambda target: _flat(target, len(flat)).copy_(flat, non_blocking=True)  # noqa: E731
        staging = self._ring.fetch("results", self._streams.side(STREAM), self._streams.main, copy)
        return PendingResult(result, staging.event, staging, results.shape[1])

    def collect(self, pending: PendingResult) -> StepResult:
        """What the step says, once it is there and the canary has judged it.

        KVCorruptionError or StagingError for what is not there, or not any more, and for what fired; behind these
        TreeShapeError for what is no tree.
        """
        result, parts, said = pending.result, pending.result.parts, dict[str, list[int]]()
        aborted: frozenset[str] = frozenset()
        sums = () if pending.sums is None else tuple(pending.sums.tolist())
        if self._ring is None or pending.staging is None or pending.event is None:
            self._streams.collected(pending.event)
        else:
            speaking = [part.request.request_id for part in parts if part.tokens]
            self._streams.host.receive(pending.event, "results", speaking)
            aborted = aborted if self._canary is None else self._canary.judge_copies()
            self._ring.check(pending.staging)
            size = len(speaking) * pending.num_columns
            flat = _flat(pending.staging.tensor, size + self._num_sums)
            said = dict(zip(speaking, flat[:size].view(len(speaking), -1).tolist(), strict=True))
            sums = tuple(flat[size:].tolist()) if self._num_sums else ()
        if self._canary is not None and result.flight is not None:
            aborted |= self._canary.collect(result.flight)  # a report says more than that a tree is none
        if said:
            collected = said.keys() - aborted  # who ends by a finding has no tree to check
            own = ((part.request.request_id, part) for part in parts)
            parts = tuple(_filled(part, said[name], result) if name in collected else part for name, part in own)
        if self._canary is not None and not result.is_collected:
            going = [part for part in parts if part.request.goes_on]
            if aborted:
                going = [part for part in going if part.request.request_id not in aborted]
            ids = [part.request.request_id for part in going]
            self._canary.append_all(ids, [part.tokens for part in going])
            if result.drafted is not None:
                self._canary.commit_all(ids, [part.committed_len for part in going])
        return replace(result, parts=parts, aborted=result.aborted | aborted, is_collected=True, sums=sums)


def _flat(buffer: Tensor, count: int) -> Tensor:
    """What a step says, without gaps: for a copy into a part of each row the host would wait."""
    check_staging_room(STREAM, count, buffer.numel())
    return buffer[:count]


def _results_of(result: StepResult) -> Tensor:
    """``[bs, columns] int64``: how many tokens each request has, then the tokens, then padding.

    Of trees that the host has not collected it is `results_of`.
    """
    accepted = result.accepted
    if result.drafted is not None:
        return results_of(result.drafted, accepted)
    return torch.cat((accepted.lens[:, None], accepted.tokens), 1)


def _filled(part: Part, row: list[int], result: StepResult) -> Part:
    """The part with what its row in the buffer says; errors as of `accepted_of`.

    Who has ended meanwhile has no row of its own any more.
    """
    if result.drafted is None or result.accepted is None:
        return replace(part, tokens=row[1 : 1 + row[0]])
    request, shapes = part.request, (result.drafted.tokens.shape[1], result.accepted.nodes.shape[1])
    place = (request.row, request.committed_len) if request.goes_on else None
    own = accepted_of(row, *shapes, Owner(request.request_id, place))
    return replace(part, committed_len=request.committed_len + row[0], tokens=own.tokens, root=own.root)
