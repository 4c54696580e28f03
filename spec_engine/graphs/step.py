"""What the programs of decode steps share: the requests of a run, their lengths, and what the program decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.acceptance.walk import Acceptance
from spec_engine.core import Batch
from spec_engine.graphs.decision import publish
from spec_engine.graphs.feed import Feed

if TYPE_CHECKING:
    from spec_engine.request import Request
    from spec_engine.step.relay import Relay

SECTIONS = ("live", "decides")  # of a step's feed beside its rows, one number each


class StepProgram:
    """A step of up to ``size`` requests; its feed has ``rows [size]`` of the request table and `SECTIONS`.

    Where the host says that it decides, new lengths and bonus tokens go to the relay within the program.
    """

    def __init__(self, size: int, feed: Feed, relay: Relay) -> None:
        self.size = size
        self._feed, self._relay = feed, relay
        self._lens, self._bonus = (torch.zeros_like(feed["rows"]) for _ in range(2))
        self._accepted: Acceptance

    def batch(self, requests: Sequence[Request], lens: Sequence[int]) -> Batch:
        """These requests, of committed lengths ``lens``, on the addresses of the program: there once it has run."""
        live, ids = slice(len(requests)), tuple(request.request_id for request in requests)
        rows = self._feed["rows"][live]
        return Batch(tuple(requests), ids, rows, tuple(lens), self._lens[live], self._bonus[live])

    def accepted(self, live: int) -> Acceptance:
        """What the first ``live`` requests accept by argmax, on the device."""
        own = self._accepted
        return Acceptance(own.nodes[:live], own.lens[:live], own.predict[:live])

    # within the program

    def _load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, committed lengths and bonus tokens, [size] each; those of padding are zeros."""
        rows = self._feed["rows"]
        self._lens.copy_(self._relay.lens[rows])
        self._bonus.copy_(self._relay.bonus[rows])
        return rows, self._lens, self._bonus

    def _commit(self, accepted: Acceptance) -> Tensor:
        """Keep what was accepted, and publish what is decided: [size] bool says for whom."""
        rows, self._accepted = self._feed["rows"], accepted
        is_live = torch.arange(self.size, device=rows.device) < self._feed["live"]
        is_decided = is_live & self._feed["decides"].bool()
        publish(self._relay, rows, self._lens, accepted, is_decided)
        return is_decided
