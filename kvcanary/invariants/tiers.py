"""Sub-pools and tiers: a window pool, a split pool and a host tier beside the pages of the full pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcanary.errors import InvariantError
from kvcanary.invariants.pages import PoolExhaustedError


def check_window_pages(needed: int, free: int, total: int) -> None:
    """Each page of the full pool takes one of the window pool: the smaller one decides."""
    if needed > free:
        raise PoolExhaustedError(
            f"{needed} window pages needed, {free} of {total} free: raise the window pool or lower max_running_requests"
        )


class WindowMapError(InvariantError):
    """A window pool's map and its books disagree, or a position is read whose bytes have left the window."""


def check_protected(request: str, protected_len: int, page_size: int) -> None:
    if protected_len % page_size:
        raise WindowMapError(f"{request}: protected length {protected_len} must be whole pages of {page_size} slots")


def check_window_slide(request: str, evicted_len: int, committed_len: int, allocated_len: int) -> None:
    """What has left the window ends before what forwards still write."""
    if not evicted_len <= committed_len <= allocated_len:
        raise WindowMapError(
            f"{request}: evicted {evicted_len} <= committed {committed_len} <= allocated {allocated_len} is broken: "
            "slide by the length that the host has committed"
        )


def check_window_mapped(
    request: str, pages: Sequence[int], mapped: Collection[int], start: int, page_size: int
) -> None:
    """From the page of position ``start`` on, every page of a row has one in the window pool."""
    for place in range(start // page_size, len(pages)):
        if pages[place] not in mapped:
            raise WindowMapError(
                f"{request}: page {pages[place]} of positions [{place * page_size}, {(place + 1) * page_size}) has no "
                f"window page, but readers see positions from {start} on"
            )


class ResidencyError(InvariantError):
    """A page of a split pool is used on the device that does not lie there, or more are wanted there than fit."""


def check_resident(request: str, pages: Sequence[int], resident: Collection[int]) -> None:
    absent = [page for page in pages if page not in resident]
    if absent:
        raise ResidencyError(
            f"{request}: {len(absent)} of {len(pages)} pages are not on the device, the first is page {absent[0]}: "
            "bring them before the forward"
        )


def check_device_room(forward: str, wanted: int, num_pages: int) -> None:
    """The rows of one forward are on the device together."""
    if wanted > num_pages:
        raise ResidencyError(
            f"{forward}: {wanted} pages wanted on the device at once, it has {num_pages}: run fewer rows at a time"
        )


def check_device_pages(num_on_device: int, num_saved: int, num_held: int) -> None:
    """Whatever lies on the device or on the host is of a page that somebody holds."""
    if max(num_on_device, num_saved) > num_held:
        raise ResidencyError(
            f"{num_on_device} pages lie on the device and {num_saved} on the host, {num_held} are held: pages that "
            "were freed kept their places"
        )


class HostCapacityError(InvariantError):
    """Pages are offloaded to a host tier that cannot hold so many."""


def check_host_capacity(needed: int, total: int) -> None:
    if not 1 <= needed <= total:
        raise HostCapacityError(
            f"{needed} pages offloaded at once, the host tier has {total}: raise its size, or recompute them"
        )


class HostBlockError(InvariantError):
    """A block of the host tier is restored that it does not hold, or into another number of pages."""


def check_host_block(block: str, is_held: bool, held: int, wanted: int) -> None:
    if not is_held:
        raise HostBlockError(f"{block} restored, but it was dropped or evicted: ask holds() first, or recompute it")
    if held != wanted:
        raise HostBlockError(f"{block} of {held} pages restored into {wanted}: allocate as many as were offloaded")
