"""PrefillSide: requests whose prompt is computed here, and kept on the host until another engine has them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcanary.transfers import Peer
from spec_engine.disagg.card import EngineCard, card_for, tier_of
from spec_engine.disagg.handover import Handover, Ticket
from spec_engine.disagg.link import Link
from spec_engine.engine import Engine
from spec_engine.memory.cache.host_tier import HostBlock, names_of
from spec_engine.request import Request

NOTHING = Ticket(0, 0)
TAKEN = struct.Struct("<Q")  # what a reader tells when it has all bytes: the generation of their ticket


@dataclass(frozen=True)
class Lease:
    """A block that is kept for whoever has its ticket, until then."""

    block: HostBlock
    until: float


class PrefillSide:
    """What an engine with a host tier adds to serve as prefill. All calls come from the thread that steps the engine.

    leases: by generation of their ticket;  num_expired: that ran out before anybody had taken the bytes
    """

    def __init__(
        self,
        engine: Engine,
        link: Link,
        peer: Peer,
        lease_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """peer: what others call this engine"""
        self._engine, self._tier, self._link, self._clock = engine, tier_of(engine), link, clock
        self._peer, self._lease_seconds = peer, lease_seconds
        address = link.expose([*self._tier.parts, self._tier.generations])
        self.card: EngineCard = card_for(engine, peer, link.name, address)
        self.leases: dict[int, Lease] = {}
        self.num_expired = 0

    def hand_over(self, request_id: str) -> Handover:
        """What another engine needs of a request that was submitted with `hands_over` and has ended as "handed_over".

        Its pages stay until the other engine has told that it has them, or the lease is over.
        """
        self.tend()
        request, block = self._engine.take_handed_over(request_id)
        if block is None:
            return _handover(request, None, self._peer, NOTHING)
        self._engine.streams.host.use("hand over", names_of(block.places), requests=(request_id,))
        self.leases[block.number] = Lease(block, self._clock() + self._lease_seconds)
        ticket = Ticket(block.number, int(self._lease_seconds * 1000))
        return _handover(request, block, self._peer, ticket)

    def tend(self) -> None:
        """Let go of what was taken, and of what nobody has come for in time. To be called now and then."""
        for message in self._link.heard():
            if len(message) == TAKEN.size and (lease := self.leases.get(TAKEN.unpack(message)[0])) is not None:
                self._let_go(lease)
        now = self._clock()
        for lease in [lease for lease in self.leases.values() if lease.until <= now]:
            self.num_expired += 1
            self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        del self.leases[lease.block.number]
        self._engine.memory.drop(lease.block)


def _handover(request: Request, block: HostBlock | None, peer: Peer, ticket: Ticket) -> Handover:
    return Handover(
        tokens=tuple(request.prompt_ids),
        params=request.params,
        priority=request.priority,
        salt=request.salt,
        adapter=request.adapter,
        length=0 if block is None else block.length,
        places=() if block is None else block.places,
        seal=None if block is None else block.snapshot,
        origin=peer,
        ticket=ticket,
    )
