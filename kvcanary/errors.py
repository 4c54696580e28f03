"""Every error kvcanary raises: one base, and subclasses that are also the builtin a caller expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary.report.finding import Finding
    from kvcanary.report.render import Report


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


class ContradictionError(PlanError):
    """Numbers that an engine gave in the run contradict each other, or what they belong to.

    request_ids: of the rows in which they do; empty where nobody can tell
    """

    def __init__(self, message: str, *, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class ForeignSnapshotError(ContradictionError):
    """A seal of other keys, another model, or another layout: what it knows says nothing of these bytes.

    expected, found: the seed id, model or layout here, and that of the seal
    """

    def __init__(self, message: str, *, expected: str, found: str) -> None:
        super().__init__(message)
        self.expected, self.found = expected, found


class SealError(KVCanaryError, ValueError):
    """Bytes are no seal, not all of one, or of another release; nothing was read from them."""


class AdapterError(KVCanaryError, RuntimeError):
    """An adapter does not know the engine that is installed, or what it is asked to follow; nothing was attached."""


class CanaryNotRunningError(KVCanaryError, RuntimeError):
    """A model ran, and nothing of it was watched: silence would be no sign of health."""


class InvariantError(KVCanaryError, RuntimeError):
    """A rule of KV memory management was broken; going on would corrupt somebody's cache."""


class HookOrderError(KVCanaryError, RuntimeError):
    """The engine called a hook in a phase where it has no meaning."""


class LifetimeError(KVCanaryError, RuntimeError):
    """A request or page event contradicts what the ledger knows: unknown, twice, or someone else's.

    outside: a page that it names and that no request may have: a null page, or none of the pool
    """

    outside: int | None = None


class UnknownRequestError(LifetimeError):
    """An event names a request that is not admitted: it never was, or it has ended."""

    def __init__(self, message: str, *, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


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


#: Errors out of hooks that say what an engine did: in modes `log` and `abort` they are findings (L1). All others are
#: misuse by whoever wrote the adapter, and are raised in every mode: hooks in a wrong order, shapes, types, names of
#: pools, kinds and groups, settings; and so is an UnknownRequestError for a request that was never admitted.
ENGINES_DOING = LifetimeError, ContradictionError
