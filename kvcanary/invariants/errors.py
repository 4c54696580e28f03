"""The types of broken rules: one for each rule, so that a caller and a test can tell them apart."""

from __future__ import annotations

from kvcanary.errors import KVCanaryError


class InvariantError(KVCanaryError, RuntimeError):
    """A rule of KV memory management was broken; going on would corrupt somebody's cache."""


class PageLeakError(InvariantError):
    """Free and owned pages no longer add up to the pool."""


class DoubleFreeError(InvariantError):
    """A page was freed that is not allocated."""


class PageAliasError(InvariantError):
    """A page was handed out that somebody owns; two requests would share it."""


class NullPageError(InvariantError):
    """Page 0 or request row 0 was handed out; padding writes there."""


class PoolExhaustedError(InvariantError):
    """More pages were asked for than are free: the admission estimate and the allocator disagree."""


class PagesQuarantinedError(PoolExhaustedError):
    """Enough pages are free, but some were freed in this very step: they may be handed out in the next one."""


class StalePageError(InvariantError):
    """A page was shared that nobody holds: the prefix tree, or a copy of a row, points at a free page."""


class ReferenceCountError(InvariantError):
    """A page has another number of references than rows and prefix tree that name it."""


class WritablePageError(InvariantError):
    """A page was published, or cached, that its request may still write."""


class PrefixLockError(InvariantError):
    """A prefix was locked that the tree has evicted, or unlocked more often than locked."""


class PoolSizeError(InvariantError):
    """A pool's tensors have another number of slots than the allocator's pages; the last page would lie outside."""


class PageSizeError(InvariantError):
    """Parts of the engine that share slots count pages of different sizes."""


class ReserveError(InvariantError):
    """A request's reserve does not cover one drafting step and the host's lag."""


class EstimateError(InvariantError):
    """The pages that a request owns are not those that the estimate promised."""


class EstimateMismatchError(InvariantError):
    """A decode step took another number of pages than the estimate by which it was admitted."""


class LengthOrderError(InvariantError):
    """0 <= committed <= allocated <= row width does not hold."""


class RowOverflowError(InvariantError):
    """A request needs more columns than its request-table row has; the write would reach its neighbour's row."""


class RowGapError(InvariantError):
    """Pages do not continue a request-table row where it ends, at a page boundary."""


class RowOwnershipError(InvariantError):
    """A request-table row is used by nobody, by two requests, or was released twice."""


class RowsExhaustedError(InvariantError):
    """More requests were admitted than the request table has rows."""


class IndexOverflowError(InvariantError):
    """A flat index would not fit into a signed 32-bit integer."""


class IndexBufferError(InvariantError):
    """A forward may name more entries than its index buffer holds, or the buffer has more than 32 bits can count."""


class IndexLengthError(InvariantError):
    """An index array and the lengths that it is read by disagree."""


class BranchLayoutError(InvariantError):
    """Draft branches overlap, or reach beyond what their request owns."""


class TreeShapeError(InvariantError):
    """A draft tree is no tree, or an accepted path is no path of it."""


class ChainConstantsError(InvariantError):
    """Constants are no chain, or are used for another number of steps, or more requests, than they were made for."""


class AcceptanceError(InvariantError):
    """Tokens that leave are not the drafts that were accepted, or a tree hangs on another token than the last."""


class CommitError(InvariantError):
    """A committed length moved by something else than what was accepted, or beyond the tokens that are known."""


class ChunkError(InvariantError):
    """A prompt chunk does not continue what is committed, or feeds something else than the prompt."""


class RelayError(InvariantError):
    """A request drafts from proposals that are not its own, or not of its last step."""


class StagingError(InvariantError):
    """A host buffer is read for what it held before it was taken again, or has no room for what is put into it."""


class RecurrentStateError(InvariantError):
    """A recurrent state would go on from something else than the last accepted node of its request."""


class WindowMapError(InvariantError):
    """A window pool's map and its books disagree, or a position is read whose bytes have left the window."""


class ResidencyError(InvariantError):
    """A page of a split pool is used on the device that does not lie there, or more are wanted there than fit."""


class HostCapacityError(InvariantError):
    """Pages are offloaded to a host tier that cannot hold so many."""


class HostBlockError(InvariantError):
    """A block of the host tier is restored that it does not hold, or into another number of pages."""


class StalledError(InvariantError):
    """Requests are there, and for many steps no token has left and none has ended: none of them would ever end."""


class NotRunningError(InvariantError):
    """A request was finished that does not run; its pages and its row would be released twice."""


class MissingHooksError(InvariantError):
    """A program was captured with a forward that has no hooks, and a canary is there that would never see it."""
