"""Pages: handed out once, freed once, shared while somebody holds them, and all of them accounted for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvcanary.errors import InvariantError


class PoolExhaustedError(InvariantError):
    """More pages were asked for than are free: the admission estimate and the allocator disagree."""


def check_pages_available(needed: int, free: int, total: int) -> None:
    if needed > free:
        raise PoolExhaustedError(
            f"{needed} pages needed, {free} of {total} free: raise max_total_tokens or lower max_running_requests"
        )


class PagesQuarantinedError(PoolExhaustedError):
    """Enough pages are free, but some were freed in this very step: they may be handed out in the next one."""


def check_pages_ready(needed: int, ready: int, quarantined: int) -> None:
    """Pages that were freed in this step are not handed out in it: a forward in flight may still touch them."""
    if needed > ready:
        raise PagesQuarantinedError(
            f"{needed} pages needed, {ready} ready and {quarantined} more in quarantine since this step: wait a step"
        )


class NullPageError(InvariantError):
    """Page 0 or request row 0 was handed out; padding writes there."""


class PoolSizeError(InvariantError):
    """A pool's tensors have another number of slots than the allocator's pages; the last page would lie outside."""


class PageAliasError(InvariantError):
    """A page was handed out that somebody owns; two requests would share it."""


def check_pages_granted(pages: Sequence[int], taken: Collection[int], total: int) -> None:
    """Pages about to be handed out are in the pool, nobody's, and not the null page."""
    for page in pages:
        if not page:
            raise NullPageError(f"page 0 handed out with {list(pages)}, it is padding's: pages are 1 to {total}")
        if not 1 <= page <= total:
            raise PoolSizeError(f"page {page} handed out with {list(pages)}, the pool has pages 1 to {total}")
        if page in taken:
            raise PageAliasError(f"page {page} handed out with {list(pages)}, but it is one of {len(taken)} taken")
    if len(set(pages)) != len(pages):
        raise PageAliasError(f"pages {list(pages)} handed out, {len(pages)} in all, but {len(set(pages))} different")


class DoubleFreeError(InvariantError):
    """A page was freed that is not allocated."""


def check_pages_freed(pages: Sequence[int], taken: Collection[int]) -> None:
    stray = [page for page in pages if page not in taken]
    if stray or len(set(pages)) != len(pages):
        raise DoubleFreeError(f"pages {list(pages)} freed, but {stray or 'some of them twice'} not allocated")


def check_generations(pages: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> None:
    """Pages named by an earlier grant are still under that grant."""
    stale = [page for page, was, now in zip(pages, expected, found, strict=True) if was != now]
    if stale:
        raise DoubleFreeError(
            f"pages {list(pages)} of generations {list(expected)} freed, but {stale} were freed since: "
            f"generations are {list(found)}"
        )


class StalePageError(InvariantError):
    """A page was shared that nobody holds: the prefix tree, or a copy of a row, points at a free page."""


def check_pages_shared(pages: Sequence[int], references: Mapping[int, int]) -> None:
    stale = [page for page in pages if page not in references]
    if stale:
        raise StalePageError(
            f"pages {list(pages)} shared, but {stale} are free: evict a prefix before its last reference goes"
        )


class ReferenceCountError(InvariantError):
    """A page has another number of references than rows and prefix tree that name it."""


def check_references(references: Mapping[int, int], named: Mapping[int, int]) -> None:
    for page in sorted(references.keys() | named.keys()):
        count, names = references.get(page, 0), named.get(page, 0)
        if count != names:
            raise ReferenceCountError(
                f"references of page {page} are {count}, rows and prefix tree name it {names} times"
            )


class PageLeakError(InvariantError):
    """Free and owned pages no longer add up to the pool."""


def check_pages_add_up(free: int, quarantined: int, owned: int, evictable: int, protected: int, total: int) -> None:
    """After every step each page is free, waits, is one live request's, or is cached once."""
    found = free + quarantined + owned + evictable + protected
    if found != total:
        what = f"{total - found} leaked" if found < total else f"{found - total} counted twice"
        raise PageLeakError(
            f"{free} pages free + {quarantined} quarantined + {owned} owned by requests + {evictable} evictable "
            f"+ {protected} protected in the prefix tree = {found} != {total} in all: {what}"
        )


class WritablePageError(InvariantError):
    """A page was published, or cached, that its request may still write."""


def check_pages_final(request: str, num_pages: int, committed_len: int, page_size: int) -> None:
    """Only pages that lie wholly below the committed length are written no more."""
    if num_pages * page_size > committed_len:
        raise WritablePageError(
            f"{request} publishes {num_pages} pages of {page_size} slots, it has committed {committed_len} and may "
            f"write behind that: publish {committed_len // page_size}"
        )


def check_pages_uncached(pages: Sequence[int], cached: Collection[int]) -> None:
    twice = [page for page in pages if page in cached]
    if twice or len(set(pages)) != len(pages):
        raise PageAliasError(
            f"pages {list(pages)} cached, but {twice or 'some of them twice'} already stand for another prefix"
        )


class PrefixLockError(InvariantError):
    """A prefix was locked that the tree has evicted, or unlocked more often than locked."""


def check_prefix_lock(num_locks: int, is_cached: bool) -> None:
    if not is_cached:
        raise PrefixLockError("a prefix that the tree has evicted was locked or unlocked: lock what was just matched")
    if num_locks < 0:
        raise PrefixLockError(f"a prefix was unlocked once more than locked, its locks would be {num_locks}")
