"""Sub-pools and tiers: a window pool, a split pool and a host tier beside the pages of the full pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcanary.invariants.errors import (
    HostBlockError,
    HostCapacityError,
    PoolExhaustedError,
    ResidencyError,
    WindowMapError,
)


def check_window_pages(needed: int, free: int, total: int) -> None:
    """Each page of the full pool takes one of the window pool: the smaller one decides."""
    if needed > free:
        raise PoolExhaustedError(
            f"{needed} window pages needed, {free} of {total} free: raise the window pool or lower max_running_requests"
        )


def check_protected(request: str, protected_len: int, page_size: int) -> None:
    """What a prefix cache holds of a row are whole pages."""
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


def check_resident(request: str, slots: Sequence[int], resident: Collection[int]) -> None:
    """A forward reads and writes only what lies on the device."""
    absent = [slot for slot in slots if slot not in resident]
    if absent:
        raise ResidencyError(
            f"{request}: {len(absent)} of {len(slots)} tokens are not on the device, the first is logical slot "
            f"{absent[0]}: swap them in and wait for it"
        )


def check_hot_room(request: str, wanted: int, room: int, total: int) -> None:
    if wanted > room:
        raise ResidencyError(
            f"{request}: {wanted} tokens wanted on the device, its {total} hot slots have room for {room}: the others "
            "are wanted too, or not saved yet; raise hot_pages or save more often"
        )


def check_verify_width(request: str, num_nodes: int, num_taken: int, page_size: int) -> None:
    """The tokens of one verify lie on one extra page, which is settled before the next."""
    if num_taken or not 1 <= num_nodes <= page_size:
        raise ResidencyError(
            f"{request}: {num_nodes} verify tokens for an extra page of {page_size} slots, {num_taken} slots are "
            "taken already: settle the last verify first, and draft no more than a page holds"
        )


def check_hot_slots(request: str, free: int, resident: int, total: int) -> None:
    if free + resident != total:
        raise ResidencyError(f"{request}: {free} hot slots free + {resident} resident != {total} in all")


def check_host_capacity(needed: int, total: int) -> None:
    if not 1 <= needed <= total:
        raise HostCapacityError(
            f"{needed} pages offloaded at once, the host tier has {total}: raise its size, or recompute them"
        )


def check_host_block(block: str, is_held: bool, held: int, wanted: int) -> None:
    """A block that comes back is held, and comes back into as many pages as it left."""
    if not is_held:
        raise HostBlockError(f"{block} restored, but it was dropped or evicted: ask holds() first, or recompute it")
    if held != wanted:
        raise HostBlockError(f"{block} of {held} pages restored into {wanted}: allocate as many as were offloaded")
