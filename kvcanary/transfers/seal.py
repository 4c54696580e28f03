"""Seal: what is known of bytes that travel, to be compared where they arrive; it outlives the process that made it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from kvcanary.errors import ForeignSnapshotError, SealError
from kvcanary.transfers.wire import Reader, Writer

_KINDS: dict[int, type[Seal]] = {}


class Seal(ABC):
    """Fingerprints and identity of bytes; never the bytes, nor the seed of the keys that made the fingerprints.

    of:      what it seals, in words
    seed_id: public name of that seed;  model: what the settings call the model and its weights, empty: nothing
    """

    kind: ClassVar[int] = 0
    of: ClassVar[str] = ""
    seed_id: str
    model: str

    def __init_subclass__(cls) -> None:
        _KINDS[cls.kind] = cls

    def to_bytes(self) -> bytes:
        """A fixed little-endian form with a digest of itself, the same on every machine (docs/tiers.md)."""
        writer = Writer(self.kind, self.seed_id, self.model)
        self._write(writer)
        return writer.finish()

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Seal:
        """The seal that `to_bytes` gave. SealError where these bytes are none, or not all of one.

        Whatever they are, nothing is executed, and no more is allocated than a small multiple of their size.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SealError(f"a seal must be read from bytes, got {type(data).__name__}: give what to_bytes() returned")
        reader = Reader(data)
        own = _KINDS.get(reader.kind)
        if own is None:
            raise SealError(f"a seal must be of kind {', '.join(map(str, sorted(_KINDS)))}, got {reader.kind}")
        seal = own._read(reader)
        reader.finish()
        return seal

    def expect(self, seed_id: str, model: str) -> None:
        """ForeignSnapshotError unless it was made under this seed and for this model, with both values."""
        if self.seed_id != seed_id:
            raise ForeignSnapshotError(
                f"a {self.of} must come back under the seed that made its fingerprints, got one of seed id "
                f"{self.seed_id} for {seed_id}: give both canaries one seed, or load without a {self.of}",
                expected=seed_id,
                found=self.seed_id,
            )
        if self.model != model:
            raise ForeignSnapshotError(
                f"a {self.of} must come back to the model that it left, got one of {self.model!r} for {model!r}: the "
                "bytes mean something else there, compute them again",
                expected=model,
                found=self.model,
            )

    @abstractmethod
    def _write(self, writer: Writer) -> None:
        """All that follows the head."""

    @classmethod
    @abstractmethod
    def _read(cls, reader: Reader) -> Self:
        """What `_write` has written."""
