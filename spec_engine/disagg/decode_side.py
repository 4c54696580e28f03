"""DecodeSide: requests that were prefilled elsewhere. Their bytes come into the host tier, and are compared on the way
into pages, like those of a request that was retracted here. What does not come is computed again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcanary.transfers import Peer
from spec_engine.disagg.card import EngineCard, card_for, tier_of
from spec_engine.disagg.errors import (
    CANCELLED,
    FAILED,
    NOTHING_SENT,
    STALE,
    TIMEOUT,
    HandoverError,
    TransferError,
)
from spec_engine.disagg.handover import Handover
from spec_engine.disagg.link import Link, Piece, Transfer, expect_all, pages_of, until_over
from spec_engine.disagg.prefill_side import TAKEN
from spec_engine.engine import Engine
from spec_engine.errors import ConfigError
from spec_engine.memory.cache.host_tier import HostBlock, names_of
from spec_engine.step.streams import Event

STAMP_BYTES = 8
LANES = 256  # more transfers than are under way at a time


@dataclass(eq=False)
class Arrival:
    """A handover whose bytes are on their way into reserved places of the tier.

    transfer: None: nothing is on its way
    deadline: after which nobody waits for them;  miss: why they are not used, "" as long as they may be
    """

    handover: Handover
    card: EngineCard | None
    deadline: float
    places: tuple[int, ...] = ()
    transfer: Transfer | None = None
    event: Event | None = None
    miss: str = ""

    def is_over(self, now: float) -> bool:
        """Whether there is nothing to wait for."""
        return self.transfer is None or bool(self.miss) or self.transfer.is_over or now > self.deadline


class DecodeSide:
    """What an engine with a host tier adds to serve as decode. All calls come from the thread that steps the engine.

    misses:    handovers whose prompt was computed again, by reason;  num_arrived: those whose bytes have come
    """

    def __init__(
        self,
        engine: Engine,
        link: Link,
        peer: Peer,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """peer: what others call this engine;  timeout: seconds until the bytes of a request are computed again"""
        self._engine, self._tier, self._link, self._clock = engine, tier_of(engine), link, clock
        self._timeout, self._came = timeout, torch.zeros_like(self._tier.generations)
        link.expose([*self._tier.parts, self._came])
        self.card = card_for(engine, peer, link.name)
        self._known: dict[Peer, EngineCard] = {}
        self._connected: dict[Peer, str] = {}
        self._late: list[Arrival] = []  # that nobody waits for, into whose places something may still be written
        self.misses: Counter[str] = Counter()
        self.num_arrived = self._num_fetched = 0

    @property
    def num_late(self) -> int:
        """Transfers that nobody waits for, and that are not over."""
        return len(self._late)

    def knows(self, peer: Peer) -> bool:
        """Whether it has shaken hands with this process."""
        return peer in self._known

    def meet(self, card: EngineCard) -> None:
        """The handshake, before the first byte: HandshakeError where this engine and the other do not fit."""
        self.card.expect(card)
        self._known[card.peer] = card

    def begin(self, handover: Handover) -> Arrival:
        """Bytes start on their way. HandoverError where its sender is not known, or cannot have sent it so."""
        self.tend()
        card = self._known.get(handover.origin)
        if card is None:
            known = ", ".join(map(str, self._known)) or "nobody"
            raise HandoverError(f"a handover comes from {handover.origin}, known is {known}: shake hands first")
        handover.check(card)
        lease = min(self._timeout, handover.ticket.lease_ms / 1000)
        arrival = Arrival(handover, card, self._clock() + lease)
        if not handover.places or len(handover.places) > self._tier.num_obtainable:
            arrival.miss = NOTHING_SENT
            return arrival
        arrival.places = self._tier.reserve(len(handover.places))
        try:
            arrival.transfer = self._fetch(arrival)
        except TransferError as error:
            arrival.miss = error.reason
            self._connected.pop(handover.origin, None)
        return arrival

    def submit(self, arrival: Arrival) -> str:
        """Queue its request, when `is_over`: with what has come, or as a prompt like any other; its request id."""
        handover, block = arrival.handover, self._block(arrival)
        try:
            return self._engine.submit(
                handover.tokens,
                handover.params,
                priority=handover.priority,
                salt=handover.salt,
                adapter=handover.adapter,
                block=block,
            )
        except ConfigError:
            if block is not None:
                self._engine.memory.drop(block)
            raise

    def cancel(self, arrival: Arrival) -> None:
        """Nobody wants it any more. Its places are free when nothing is written there any more, and no earlier."""
        self._miss(arrival, CANCELLED)

    def tend(self) -> None:
        """Let go of places whose late transfers are over. To be called now and then."""
        for arrival in [arrival for arrival in self._late if arrival.transfer is None or arrival.transfer.is_over]:
            self._late.remove(arrival)
            self._let_go(arrival)

    # helpers

    def _fetch(self, arrival: Arrival) -> Transfer:
        handover, size = arrival.handover, self.card.page_size
        there = pages_of(self._tier.parts, handover.places, size)
        transfer = self._link.fetch(self._peer_of(arrival), there, pages_of(self._tier.parts, arrival.places, size))
        self._num_fetched += 1
        side = self._engine.streams.outside(f"handover {self._num_fetched % LANES}")  # nothing orders two of them
        arrival.event = side.submit("receive", lambda: until_over(transfer), writes=names_of(arrival.places))
        return transfer

    def _peer_of(self, arrival: Arrival) -> str:
        origin = arrival.handover.origin
        if origin not in self._connected:
            self._connected[origin] = self._link.connect(self._known[origin].address)
        return self._connected[origin]

    def _block(self, arrival: Arrival) -> HostBlock | None:
        """What has come, as a block of the tier; None: the prompt is computed again, and why is counted."""
        try:
            event = self._finish(arrival)
        except TransferError as error:
            self._miss(arrival, error.reason)
            return None
        self.num_arrived += 1
        handover = arrival.handover
        seal = None if handover.seal is None else handover.seal.arrived_from(handover.origin)
        return self._tier.adopt(arrival.places, handover.length, event, seal)

    def _finish(self, arrival: Arrival) -> Event:
        """The host has waited for all bytes, which were those of the ticket to the end; else TransferError."""
        if arrival.miss or arrival.transfer is None or arrival.event is None:
            raise TransferError(arrival.miss or NOTHING_SENT, "nothing is on its way")
        expect_all(arrival.transfer)
        self._check_generation(arrival)
        self._link.notify(self._peer_of(arrival), TAKEN.pack(arrival.handover.ticket.generation))
        self._engine.streams.host.wait(arrival.event)
        return arrival.event

    def _check_generation(self, arrival: Arrival) -> None:
        """Behind the last byte: places that the sender has reused meanwhile are of another generation."""
        handover, part = arrival.handover, len(self._tier.parts)
        there = [Piece(part, place * STAMP_BYTES, STAMP_BYTES) for place in handover.places]
        here = [Piece(part, place * STAMP_BYTES, STAMP_BYTES) for place in arrival.places]
        stamps = self._link.fetch(self._peer_of(arrival), there, here)
        until_over(stamps, self._timeout)
        expect_all(stamps)
        found = self._came[list(arrival.places)]
        if not bool((found == handover.ticket.generation).all()):
            raise TransferError(STALE, f"pages of generation {handover.ticket.generation} are of {found.tolist()} now")

    def _miss(self, arrival: Arrival, reason: str) -> None:
        self.misses[reason] += 1
        arrival.miss = reason
        if reason in (FAILED, TIMEOUT):
            self._connected.pop(arrival.handover.origin, None)
        if arrival.transfer is not None and not arrival.transfer.is_over:
            self._late.append(arrival)
        else:
            self._let_go(arrival)

    def _let_go(self, arrival: Arrival) -> None:
        if arrival.event is not None:
            self._engine.streams.host.wait(arrival.event)
        self._tier.give_back(arrival.places)
        arrival.places = ()
