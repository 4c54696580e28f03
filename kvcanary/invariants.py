"""Always-on host checks: each broken rule has a type and a message that shows both sides of it.

They are exceptions, not ``assert``, so that ``python -O`` keeps them; they cost a few comparisons a step and
stay on with the canary off.
"""

from __future__ import annotations

from kvcanary.errors import KVCanaryError


class InvariantError(KVCanaryError, RuntimeError):
    """A rule of KV memory management was broken; going on would corrupt somebody's cache."""


class PageLeakError(InvariantError):
    """Free and owned pages no longer add up to the pool."""


class DoubleFreeError(InvariantError):
    """A page was freed that is not allocated."""


class PoolExhaustedError(InvariantError):
    """More pages were asked for than are free: the admission estimate and the allocator disagree."""


class RowOverflowError(InvariantError):
    """A request needs more columns than its request-table row has; the write would reach its neighbour's row."""


class TreeShapeError(InvariantError):
    """An accepted path is not a path of the draft tree."""
