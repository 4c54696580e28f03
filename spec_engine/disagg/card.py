"""EngineCard: what an engine says of itself before the first byte travels, and whether another one fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kvcanary.transfers import Peer, PoolCard, Reader, Writer, card_of, read_card
from spec_engine.disagg.errors import HandshakeError
from spec_engine.engine import Engine
from spec_engine.errors import ConfigError
from spec_engine.memory.cache.host_tier import HostTier

MAGIC, KIND = b"kvccard\n", 1
NO_SEED = "0" * 16  # seed id of an engine without a canary
#: How a page lies in memory of the tier, outermost first.
ORDER = "slot, layer, K or V, head, dim"


@dataclass(frozen=True)
class EngineCard:
    """One engine as its peers see it.

    seed_id, model: of its canary's seed and settings
    transport: name of the link;  address: what a link of that name needs to reach it
    order:     how a page lies in memory;  rows: type and shape of one slot in each part
    layouts:   of its pools;  num_pages: of its tier
    """

    peer: Peer
    seed_id: str
    model: str
    transport: str
    order: str
    rows: tuple[str, ...]
    layouts: tuple[PoolCard, ...]
    num_pages: int
    address: bytes = b""

    def expect(self, other: EngineCard) -> None:
        """HandshakeError unless bytes of the other engine mean here what they mean there; with both values."""
        for name, mine, theirs in zip(_COMPARED, self._compared(), other._compared(), strict=True):
            if mine != theirs:
                raise HandshakeError(
                    f"{self.peer.engine} and {other.peer.engine} must have one {name}, got {mine} here and {theirs} "
                    "there: no byte was sent; start both with the same settings",
                    expected=mine,
                    found=theirs,
                )

    @property
    def page_size(self) -> int:
        return self.layouts[0].page_size

    def _compared(self) -> tuple[str, ...]:
        layouts, rows = "; ".join(map(str, self.layouts)), "; ".join(self.rows)
        return self.transport, self.seed_id, self.model, layouts, rows, self.order

    def to_bytes(self) -> bytes:
        """A fixed little-endian form with a digest of itself."""
        writer = Writer(KIND, self.seed_id, self.model, MAGIC)
        write_peer(writer, self.peer)
        for text in (self.transport, self.order):
            writer.text(text)
        writer.number("u64", self.num_pages)
        writer.number("u16", len(self.rows))
        for row in self.rows:
            writer.text(row)
        writer.number("u16", len(self.layouts))
        for layout in self.layouts:
            layout.write(writer)
        writer.blob(self.address)
        return writer.finish()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """SealError where these bytes are no card, or not all of one."""
        reader = Reader(data, MAGIC, "card")
        peer, transport, order, num_pages = read_peer(reader), reader.text(), reader.text(), reader.number("u64", 1)
        rows = tuple(reader.text() for _ in range(reader.number("u16", 1)))
        layouts = tuple(read_card(reader) for _ in range(reader.number("u16", 1)))
        address = reader.blob()
        reader.finish()
        return cls(peer, reader.seed_id, reader.model, transport, order, rows, layouts, num_pages, address)


_COMPARED = ("transport", "seed id", "model", "layout", "row of a slot", "order of a page")


def card_for(engine: Engine, peer: Peer, transport: str, address: bytes = b"") -> EngineCard:
    """That of an engine with a host tier, over which everything travels."""
    seed_id = NO_SEED if engine.canary is None else engine.canary.certificate()["seed_id"]
    return EngineCard(
        peer,
        seed_id,
        engine.config.canary.model,
        transport,
        ORDER,
        tuple(map(_row, tier_of(engine).parts)),
        tuple(card_of(engine.view(pool)) for pool in engine.pools.values()),
        tier_of(engine).num_pages,
        address,
    )


def tier_of(engine: Engine) -> HostTier:
    """ConfigError where it has none."""
    if engine.memory.tier is None:
        raise ConfigError(
            "an engine hands requests over by way of its host tier, host_pages is 0", "pass host_pages, 256 or more"
        )
    return engine.memory.tier


def write_peer(writer: Writer, peer: Peer) -> None:
    writer.text(peer.engine)
    writer.number("u32", peer.rank)
    writer.text(peer.uuid)


def read_peer(reader: Reader) -> Peer:
    return Peer(reader.text(), reader.number("u32"), reader.text())


def _row(part: Tensor) -> str:
    return f"{str(part.dtype).removeprefix('torch.')} {'x'.join(map(str, part.shape[1:]))}"
