"""Wire: numbers, texts and arrays of a seal as little-endian bytes, and back.

Nothing is executed, and no length is believed before so many bytes are there: hostile ones allocate no more than they
are.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcanary.errors import SealError

MAGIC = b"kvcseal\n"  # of a seal; other messages that are written so have their own
VERSION = 1
DIGEST_BYTES = 16
MOST_TEXT = (1 << 16) - 1
#: Magic, version, kind of seal, 0, number of all bytes, seed id; then the text that names the model.
_HEAD = struct.Struct("<8sHHIQ8s")
LEAST_BYTES = _HEAD.size + 2 + DIGEST_BYTES
_NUMBERS = {
    "u16": struct.Struct("<H"),
    "u32": struct.Struct("<I"),
    "u64": struct.Struct("<Q"),
    "i64": struct.Struct("<q"),
}
_REAL = struct.Struct("<d")


class Writer:
    """Bytes of one seal, or of another message with its own magic of 8 bytes."""

    def __init__(self, kind: int, seed_id: str, model: str, magic: bytes = MAGIC) -> None:
        self._kind, self._seed_id, self._parts, self._magic = kind, bytes.fromhex(seed_id), list[bytes](), magic
        self.text(model)

    def number(self, kind: str, value: int) -> None:
        try:
            self._parts.append(_NUMBERS[kind].pack(value))
        except struct.error:
            raise SealError(f"a number of a seal must be {kind}, got {value}: it cannot be written") from None

    def real(self, value: float) -> None:
        self._parts.append(_REAL.pack(value))

    def blob(self, value: bytes) -> None:
        self.number("u64", len(value))
        self._parts.append(value)

    def text(self, value: str) -> None:
        raw = value.encode()
        if len(raw) > MOST_TEXT:
            raise SealError(f"texts of a seal must be at most {MOST_TEXT} bytes, got {len(raw)}: give shorter names")
        self.number("u16", len(raw))
        self._parts.append(raw)

    def array(self, values: NDArray[Any], kind: str) -> None:
        """In rows; how many there are is told elsewhere."""
        self._parts.append(np.ascontiguousarray(values).astype(kind, copy=False).tobytes())

    def finish(self) -> bytes:
        body = b"".join(self._parts)
        total = _HEAD.size + len(body) + DIGEST_BYTES
        sealed = _HEAD.pack(self._magic, VERSION, self._kind, 0, total, self._seed_id) + body
        return sealed + digest_of(sealed)


class Reader:
    """What `Writer` has written, from the head on. SealError where it is something else, is cut or was changed.

    kind, seed_id, model: of the seal
    """

    def __init__(self, data: bytes | bytearray | memoryview, magic: bytes = MAGIC, what: str = "seal") -> None:
        view = memoryview(data).cast("B") if memoryview(data).contiguous else memoryview(bytes(data))
        if len(view) < LEAST_BYTES or view[: len(magic)] != magic:
            raise SealError(f"these {len(view)} bytes are no {what}: a {what} begins with {magic!r} and is whole")
        _, version, self.kind, _, total, seed_id = _HEAD.unpack(view[: _HEAD.size])
        if version != VERSION:
            raise SealError(f"a {what} must be of version {VERSION}, got {version}: give both sides one release")
        if total != len(view):
            raise SealError(f"a {what} of {total} bytes came as {len(view)}: it is cut, or something follows it")
        if digest_of(view[:-DIGEST_BYTES]) != view[-DIGEST_BYTES:]:
            raise SealError(
                f"the digest of a {what} is not that of its bytes: the {what} itself was changed on its way"
            )
        self._view, self._at, self.seed_id = view[:-DIGEST_BYTES], _HEAD.size, seed_id.hex()
        self.model = self.text()

    def number(self, kind: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        form = _NUMBERS[kind]
        value: int = form.unpack(self._take(form.size))[0]
        if not least <= value <= most:
            raise SealError(f"a number of this seal is {value}, it must be {least} to {most}: nothing was read")
        return value

    def real(self) -> float:
        value: float = _REAL.unpack(self._take(_REAL.size))[0]
        return value

    def blob(self) -> bytes:
        return bytes(self._take(self.number("u64")))

    def text(self) -> str:
        raw = self._take(self.number("u16"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise SealError(f"a text of this seal is no UTF-8: {bytes(raw[:16])!r}") from None

    def array(self, kind: str, *shape: int) -> NDArray[Any]:
        """A copy, in the byte order of this machine."""
        dtype = np.dtype(kind)
        raw = self._take(prod(shape) * dtype.itemsize)
        return np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))

    def finish(self) -> None:
        if self._at != len(self._view):
            raise SealError(f"{len(self._view) - self._at} bytes follow the end of this seal: nothing was read")

    def _take(self, count: int) -> memoryview:
        if count > len(self._view) - self._at:
            raise SealError(f"a seal says {count} bytes where {len(self._view) - self._at} are left: nothing was read")
        self._at += count
        return self._view[self._at - count : self._at]


def digest_of(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
