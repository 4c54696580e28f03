"""The way of a step's tokens to the host: one copy behind the step, into a buffer that the host reads behind the copy.

A host that is behind the device (schedule "overlap") has a ring of such buffers, one for each step of which it has not
heard; with schedule "sync" it waits for every step, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary.invariants import check_staging_room
from spec_engine.drafting.tree import MADE_FOR
from spec_engine.step.runner import Part, StepResult
from spec_engine.step.streams import Event, Staging, StagingRing, Streams
from spec_engine.step.verify import Owner, accepted_of, told_of

if TYPE_CHECKING:
    from kvcanary import CanaryManager

STREAM = "results"


@dataclass(frozen=True, eq=False)
class Landing:
    """A step of which the host has not heard: behind ``event`` its tokens lie in ``staging``, None: nothing comes."""

    result: StepResult
    event: Event | None
    staging: Staging | None = None
    num_columns: int = 0


class Results:
    """``max_bs`` requests a step, each with ``max_accept`` tokens of trees of ``max_nodes`` at most; see `_told_of`."""

    def __init__(
        self,
        streams: Streams,
        canary: CanaryManager | None,
        *,
        lag: int,
        max_bs: int,
        max_accept: int,
        max_nodes: int = 0,
    ) -> None:
        self._streams, self._canary = streams, canary
        most = max_bs * (1 + max_accept + (4 * max_nodes + MADE_FOR if max_nodes else 0))
        self._ring = StagingRing(streams, STREAM, lag + 2, (most,), torch.int64) if lag else None

    def send(self, result: StepResult) -> Landing:
        """The step is launched, and so is the copy of what it says."""
        if self._ring is None or result.accepted is None:
            return Landing(result, self._streams.launched())
        told = _told_of(result)
        copy = lambda target: _table(target, *told.shape).copy_(told, non_blocking=True)  # noqa: E731
        staging = self._ring.fetch("results", self._streams.side(STREAM), self._streams.main, copy)
        return Landing(result, staging.event, staging, told.shape[1])

    def hear(self, landing: Landing) -> StepResult:
        """What the step says, once it is there and the canary has judged it.

        KVCorruptionError or StagingError for what is not there, or not any more, and for what fired; behind these
        TreeShapeError for what is no tree.
        """
        result, parts, said = landing.result, landing.result.parts, dict[str, list[int]]()
        doomed: frozenset[str] = frozenset()
        if self._ring is None or landing.staging is None or landing.event is None:
            self._streams.heard(landing.event)
        else:
            speaking = [part.request.request_id for part in parts if part.tokens]
            self._streams.host.receive(landing.event, "results", speaking)
            doomed = doomed if self._canary is None else self._canary.judge_copies()
            self._ring.check(landing.staging)
            told = _table(landing.staging.tensor, len(speaking), landing.num_columns).tolist()
            said = dict(zip(speaking, told, strict=True))
        if self._canary is not None and result.flight is not None:
            doomed |= self._canary.collect(result.flight)  # a report says more than that a tree is none
        if said:
            heard = said.keys() - doomed  # who ends by a finding has no tree to check
            own = ((part.request.request_id, part) for part in parts)
            parts = tuple(_told(part, said[name], result) if name in heard else part for name, part in own)
        if self._canary is not None and not result.is_heard:
            going = [part for part in parts if part.request.finish_reason is None]
            if doomed:
                going = [part for part in going if part.request.request_id not in doomed]
            ids = [part.request.request_id for part in going]
            self._canary.append_all(ids, [part.tokens for part in going])
            if result.drafted is not None:
                self._canary.commit_all(ids, [part.committed_len for part in going])
        return replace(result, parts=parts, doomed=result.doomed | doomed, is_heard=True)


def _table(buffer: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """What a step says, [rows, columns], without gaps: for a copy into a part of each row the host would wait."""
    check_staging_room(STREAM, num_rows * num_columns, buffer.numel())
    return buffer[: num_rows * num_columns].view(num_rows, num_columns)


def _told_of(result: StepResult) -> Tensor:
    """``[bs, columns] int64``: how many tokens each request has, then the tokens, then padding.

    Of trees that the host has not heard of it is `told_of`.
    """
    accepted = result.accepted
    if result.drafted is not None:
        return told_of(result.drafted, accepted)
    return torch.cat((accepted.lens[:, None], accepted.tokens), 1)


def _told(part: Part, row: list[int], result: StepResult) -> Part:
    """The part with what its row in the buffer says; errors as of `accepted_of`.

    Who has ended meanwhile has no row of its own any more.
    """
    if result.drafted is None or result.accepted is None:
        return replace(part, tokens=row[1 : 1 + row[0]])
    request, shapes = part.request, (result.drafted.tokens.shape[1], result.accepted.nodes.shape[1])
    place = (request.row, request.committed_len) if request.finish_reason is None else None
    own = accepted_of(row, *shapes, Owner(request.request_id, place))
    return replace(part, committed_len=request.committed_len + row[0], tokens=own.tokens, root=own.root)
