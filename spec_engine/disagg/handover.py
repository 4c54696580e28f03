"""Handover: a request that was prefilled, as it goes to the engine that decodes it; its bytes follow by a link.

What travels is what a retraction keeps: K and V of all tokens but the last known one, which the receiver forwards
again. So it computes logits, hidden states and drafts by itself, and none of these travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from kvcanary import SealError
from kvcanary.transfers import PageSnapshot, Peer, Reader, Seal, Writer
from spec_engine.disagg.card import NO_SEED, EngineCard, read_peer, write_peer
from spec_engine.disagg.errors import HandoverError
from spec_engine.errors import ConfigError
from spec_engine.sampling import SamplingParams

MAGIC, KIND = b"kvchand\n", 1
NO_LOGPROBS = -1
_WHOLE = ("max_new_tokens", "top_k", "seed")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Ticket(NamedTuple):
    """Generation of the sender's pages: they hold these bytes while it lasts; and for how long they are kept."""

    generation: int
    lease_ms: int


@dataclass(frozen=True)
class Handover:
    """One request on its way.

    tokens: of the prompt;  params, priority, salt, adapter: as the client gave them
    length: entries of its row whose K and V can be fetched, on these places of the sender's tier, in row order; 0: none
    seal:   of the canary, for these places; None: the sender has none
    origin: who computed them
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: str
    adapter: str
    length: int
    places: tuple[int, ...]
    seal: PageSnapshot | None
    origin: Peer
    ticket: Ticket

    def check(self, card: EngineCard) -> None:
        """HandoverError where an engine with this card cannot have sent it: nothing is fetched then."""
        count = -(-self.length // card.page_size)
        if self.length >= max(len(self.tokens), 1) or len(self.places) != count:
            raise HandoverError(
                f"a handover of {len(self.tokens)} tokens must have K and V of fewer, on pages of {card.page_size}, "
                f"got {self.length} on {len(self.places)} pages: nothing was fetched"
            )
        if stray := [place for place in self.places if not 1 <= place <= card.num_pages]:
            raise HandoverError(
                f"{card.peer.engine} has pages 1 to {card.num_pages}, a handover names {stray[0]}: nothing was fetched"
            )
        if self.places and (self.seal is None) != (card.seed_id == NO_SEED):
            raise HandoverError("a handover must come with a seal exactly where its sender has a canary")
        if self.seal is not None and (self.seal.num_pages, self.seal.layouts) != (count, card.layouts):
            raise HandoverError(
                f"the seal of a handover must be of its {count} pages of {'; '.join(map(str, card.layouts))}, got "
                f"{self.seal.num_pages} of {'; '.join(map(str, self.seal.layouts))}: nothing was fetched"
            )

    def to_bytes(self) -> bytes:
        """A fixed little-endian form with a digest of itself (docs/tiers.md)."""
        seal = self.seal
        writer = Writer(KIND, NO_SEED if seal is None else seal.seed_id, "" if seal is None else seal.model, MAGIC)
        _write_ids(writer, self.tokens)
        _write_params(writer, self.params)
        writer.number("i64", self.priority)
        for text in (self.salt, self.adapter):
            writer.text(text)
        writer.number("u64", self.length)
        _write_ids(writer, self.places)
        write_peer(writer, self.origin)
        for number in self.ticket:
            writer.number("u64", number)
        writer.blob(b"" if seal is None else seal.to_bytes())
        return writer.finish()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """SealError where these bytes are no handover, or not all of one."""
        reader = Reader(data, MAGIC, "handover")
        tokens, params = _read_ids(reader), _read_params(reader)
        priority, salt, adapter = reader.number("i64", -(1 << 63)), reader.text(), reader.text()
        length, places, origin = reader.number("u64"), _read_ids(reader), read_peer(reader)
        ticket = Ticket(reader.number("u64"), reader.number("u64"))
        seal = _seal(reader.blob())
        reader.finish()
        return cls(tokens, params, priority, salt, adapter, length, places, seal, origin, ticket)


def _seal(data: bytes) -> PageSnapshot | None:
    if not data:
        return None
    seal = Seal.from_bytes(data)
    if not isinstance(seal, PageSnapshot):
        raise SealError(f"a handover must come with a {PageSnapshot.of} of pages, got a {seal.of}")
    return seal


def _write_ids(writer: Writer, ids: tuple[int, ...]) -> None:
    writer.number("u64", len(ids))
    writer.array(np.array(ids, np.int64), "<i8")


def _read_ids(reader: Reader) -> tuple[int, ...]:
    return tuple(reader.array("<i8", reader.number("u64")).tolist())


def _write_params(writer: Writer, params: SamplingParams) -> None:
    for name in _WHOLE:
        writer.number("i64", getattr(params, name))
    for name in _REAL:
        writer.real(getattr(params, name))
    writer.number("u16", params.ignore_eos)
    writer.number("i64", NO_LOGPROBS if params.logprobs is None else params.logprobs)
    _write_ids(writer, params.stop_token_ids)
    writer.number("u16", len(params.stop))
    for text in params.stop:
        writer.text(text)
    _write_ids(writer, tuple(params.logit_bias))
    for bias in params.logit_bias.values():
        writer.real(bias)


def _read_params(reader: Reader) -> SamplingParams:
    given: dict[str, object] = {name: reader.number("i64", -(1 << 63)) for name in _WHOLE}
    given |= {name: reader.real() for name in _REAL}
    given["ignore_eos"] = bool(reader.number("u16", 0, 1))
    logprobs = reader.number("i64", NO_LOGPROBS)
    given["logprobs"] = None if logprobs == NO_LOGPROBS else logprobs
    given["stop_token_ids"] = _read_ids(reader)
    given["stop"] = tuple(reader.text() for _ in range(reader.number("u16")))
    given["logit_bias"] = {token: reader.real() for token in _read_ids(reader)}
    try:
        return SamplingParams(**given)  # type: ignore[arg-type]
    except ConfigError as error:
        raise SealError(f"a handover has parameters that no request has: {error}") from error
