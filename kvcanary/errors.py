"""Every error kvcanary raises: one base, and subclasses that are also the builtin a caller expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary.findings import Finding
    from kvcanary.report import Report


class KVCanaryError(Exception):
    """Base of all errors of this package."""


class KVCorruptionError(KVCanaryError, RuntimeError):
    """The canary found corruption and its mode is `raise`; no token of this step may leave."""

    def __init__(self, findings: Sequence[Finding], report: Report) -> None:
        super().__init__(report.text())
        self.findings = list(findings)
        self.report = report


class CanaryConfigError(KVCanaryError, ValueError):
    """A setting of `CanaryConfig` is refused."""


class PlanError(KVCanaryError, ValueError):
    """A pool view, a read plan or a write plan contradicts itself; the message has the numbers."""


class AdapterError(KVCanaryError, RuntimeError):
    """An adapter does not know the engine that is installed, or what it is asked to follow; nothing was attached."""


class HookOrderError(KVCanaryError, RuntimeError):
    """The engine called a hook in a phase where it has no meaning."""


class LifetimeError(KVCanaryError, RuntimeError):
    """A request or page event contradicts what the ledger knows: unknown, twice, or someone else's."""


class PageStateError(LifetimeError):
    """An event came to a page in a state that has no such event: a double free, a publication too early."""

    def __init__(self, message: str, *, page: int, state: str, event: str) -> None:
        super().__init__(message)
        self.page, self.state, self.event = page, state, event


class PageOwnerError(LifetimeError):
    """A request touches a page that is not in its row, or is in it already."""

    def __init__(self, message: str, *, page: int, request_id: str, owner: str | None) -> None:
        super().__init__(message)
        self.page, self.request_id, self.owner = page, request_id, owner


class PageReferenceError(LifetimeError):
    """The reference count of a page forbids the event, or is not the number of rows that name the page."""

    def __init__(self, message: str, *, page: int, refcount: int) -> None:
        super().__init__(message)
        self.page, self.refcount = page, refcount


class RepairRefusedError(KVCanaryError, ValueError):
    """Bytes are patched only where exactly one changed word is certain; `reason` is one word for the sentence."""

    def __init__(self, message: str, *, pool: str, slot: int, reason: str) -> None:
        super().__init__(message)
        self.pool, self.slot, self.reason = pool, slot, reason


class DumpError(KVCanaryError, ValueError):
    """A dump cannot be read: truncated, foreign, of a newer version, or made to harm."""
