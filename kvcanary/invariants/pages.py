"""Pages: handed out once, freed once, shared while somebody holds them, and all of them accounted for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvcanary.invariants.errors import (
    DoubleFreeError,
    NullPageError,
    PageAliasError,
    PageLeakError,
    PagesQuarantinedError,
    PoolExhaustedError,
    PoolSizeError,
    PrefixLockError,
    ReferenceCountError,
    StalePageError,
    WritablePageError,
)


def check_pages_available(needed: int, free: int, total: int) -> None:
    if needed > free:
        raise PoolExhaustedError(
            f"{needed} pages needed, {free} of {total} free: raise max_total_tokens or lower max_running_requests"
        )


def check_pages_ready(needed: int, ready: int, quarantined: int) -> None:
    """Pages that were freed in this step are not handed out in it: a forward in flight may still touch them."""
    if needed > ready:
        raise PagesQuarantinedError(
            f"{needed} pages needed, {ready} ready and {quarantined} more in quarantine since this step: wait a step"
        )


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


def check_pages_freed(pages: Sequence[int], taken: Collection[int]) -> None:
    """Pages about to be freed are taken, and named once."""
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


def check_pages_shared(pages: Sequence[int], references: Mapping[int, int]) -> None:
    """A page gets one more reference only while somebody holds it."""
    stale = [page for page in pages if page not in references]
    if stale:
        raise StalePageError(
            f"pages {list(pages)} shared, but {stale} are free: evict a prefix before its last reference goes"
        )


def check_references(references: Mapping[int, int], named: Mapping[int, int]) -> None:
    """Each page has one reference for each row that names it and one for the prefix tree."""
    for page in sorted(references.keys() | named.keys()):
        count, names = references.get(page, 0), named.get(page, 0)
        if count != names:
            raise ReferenceCountError(
                f"references of page {page} are {count}, rows and prefix tree name it {names} times"
            )


def check_pages_add_up(free: int, quarantined: int, owned: int, evictable: int, protected: int, total: int) -> None:
    """After every step each page is free, waits, is one live request's, or is cached once."""
    found = free + quarantined + owned + evictable + protected
    if found != total:
        what = f"{total - found} leaked" if found < total else f"{found - total} counted twice"
        raise PageLeakError(
            f"{free} pages free + {quarantined} quarantined + {owned} owned by requests + {evictable} evictable "
            f"+ {protected} protected in the prefix tree = {found} != {total} in all: {what}"
        )


def check_pages_final(request: str, num_pages: int, committed_len: int, page_size: int) -> None:
    """Only pages that lie wholly below the committed length are written no more."""
    if num_pages * page_size > committed_len:
        raise WritablePageError(
            f"{request} publishes {num_pages} pages of {page_size} slots, it has committed {committed_len} and may "
            f"write behind that: publish {committed_len // page_size}"
        )


def check_pages_uncached(pages: Sequence[int], cached: Collection[int]) -> None:
    """A page stands for one prefix."""
    twice = [page for page in pages if page in cached]
    if twice or len(set(pages)) != len(pages):
        raise PageAliasError(
            f"pages {list(pages)} cached, but {twice or 'some of them twice'} already stand for another prefix"
        )


def check_prefix_lock(num_locks: int, is_cached: bool) -> None:
    """What is locked or unlocked is in the tree, and no lock is taken back twice."""
    if not is_cached:
        raise PrefixLockError("a prefix that the tree has evicted was locked or unlocked: lock what was just matched")
    if num_locks < 0:
        raise PrefixLockError(f"a prefix was unlocked once more than locked, its locks would be {num_locks}")
