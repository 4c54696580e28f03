"""Link: three verbs by which bytes go from one engine's memory to another's.

expose   memory that others may read, once, before the handshake; the bytes that it returns are for their `connect`
fetch    read pieces of a peer's memory into pieces of one's own, without its help and without waiting
notify   tell a peer a few bytes; it hears them in the order in which they were told
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from spec_engine.disagg.errors import FAILED, TIMEOUT, TransferError

POLL_SECONDS = 0.0005


class Piece(NamedTuple):
    """``count`` bytes of an exposed tensor, from byte ``first`` on; ``part``: its number among them."""

    part: int
    first: int
    count: int


class Transfer(Protocol):
    """One fetch under way. As long as it is not over something may be written into its pieces."""

    @property
    def is_over(self) -> bool: ...

    @property
    def error(self) -> str:
        """Why not all has come, once it is over; "" where it has."""


class Link(Protocol):
    """``name``: of the transport, the same on both sides."""

    name: str

    def expose(self, parts: Sequence[Tensor]) -> bytes: ...

    def connect(self, address: bytes) -> str:
        """What `fetch` and `notify` call this peer from now on. TransferError where it is not there."""

    def fetch(self, peer: str, there: Sequence[Piece], here: Sequence[Piece]) -> Transfer: ...

    def notify(self, peer: str, message: bytes) -> None: ...

    def heard(self) -> list[bytes]:
        """What peers have told since the last call."""

    def close(self) -> None: ...


def until_over(transfer: Transfer, seconds: float = float("inf")) -> None:
    """Waits for its end, or so long."""
    deadline = time.monotonic() + seconds
    while not transfer.is_over and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def expect_all(transfer: Transfer) -> None:
    """TransferError where it is not over, or not all has come."""
    if not transfer.is_over:
        raise TransferError(TIMEOUT, "the transfer was not over in time")
    if transfer.error:
        raise TransferError(FAILED, transfer.error)


def pages_of(parts: Sequence[Tensor], places: Sequence[int], page_size: int) -> list[Piece]:
    """Whole pages of every part, [rows, ...] contiguous, in the order of the parts."""
    pieces = []
    for number, part in enumerate(parts):
        page = part[0].nbytes * page_size
        pieces += [Piece(number, place * page, page) for place in places]
    return pieces
