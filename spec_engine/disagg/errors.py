"""What goes wrong between two engines: refused before the first byte, or lost on the way."""

from __future__ import annotations

from kvcanary import KVCanaryError


class HandshakeError(KVCanaryError, ValueError):
    """Two engines that cannot exchange K and V; ``expected`` is what this one has, ``found`` what the other has."""

    def __init__(self, message: str, *, expected: str, found: str) -> None:
        super().__init__(message)
        self.expected, self.found = expected, found


class HandoverError(KVCanaryError, ValueError):
    """A handover that no engine with this card could have made."""


class TransferError(KVCanaryError, RuntimeError):
    """Bytes did not come, or not all, or too late: the prompt is computed again; ``reason`` is one word of MISSES."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


#: Why bytes of a handover were not used: nothing was sent; its lease was over or its pages were reused; nothing came in
#: time; the transfer failed; the request was cancelled.
MISSES = ("nothing sent", "stale", "timeout", "failed", "cancelled")
NOTHING_SENT, STALE, TIMEOUT, FAILED, CANCELLED = MISSES
