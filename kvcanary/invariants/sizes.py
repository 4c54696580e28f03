"""Sizes: pools, pages, reserves and estimates that several parts of an engine must agree on."""

from __future__ import annotations

from collections.abc import Mapping

from kvcanary.invariants.errors import (
    EstimateError,
    EstimateMismatchError,
    IndexOverflowError,
    LengthOrderError,
    PageSizeError,
    PoolSizeError,
    ReserveError,
)

MAX_FLAT_INDEX = (1 << 31) - 1  # kernels address request rows and index buffers with 32-bit integers


def check_pool_slots(pool: str, num_slots: int, num_pages: int, page_size: int) -> None:
    """A pool has the allocator's pages and the null page."""
    if num_slots != (num_pages + 1) * page_size:
        raise PoolSizeError(
            f"pool {pool!r} has {num_slots} slots, {num_pages} pages and the null page of {page_size} slots "
            f"need {(num_pages + 1) * page_size}"
        )


def check_page_sizes(sizes: Mapping[str, int]) -> None:
    """Everything that shares slots counts the same pages."""
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PageSizeError(f"page_size must be one, got {named}: pass the same to all")


def check_reserve(reserve: int, lag: int, max_accept: int, alloc_len: int) -> None:
    if reserve < lag * max_accept + alloc_len:
        raise ReserveError(
            f"reserve {reserve} < lag {lag} * max_accept {max_accept} + alloc_len {alloc_len} "
            f"= {lag * max_accept + alloc_len}: size it by the longest draft"
        )


def check_flat_indices(what: str, rows: int, width: int) -> None:
    """The last element of a [rows, width] array can be addressed with a signed 32-bit integer."""
    if rows * width > MAX_FLAT_INDEX:
        raise IndexOverflowError(
            f"{what}: {rows} rows * {width} columns = {rows * width} must be below {MAX_FLAT_INDEX + 1}: "
            "lower max_running_requests, topk or context_length"
        )


def check_estimate(request: str, taken: int, committed_len: int, reserve: int, page_size: int, most: int) -> None:
    """A request owns exactly the pages that its length and its reserve need, and no more than admission counted."""
    estimate = -(-(committed_len + reserve) // page_size)
    if taken != estimate:
        raise EstimateError(
            f"{request} owns {taken} pages, committed {committed_len} + reserve {reserve} slots at page_size "
            f"{page_size} need {estimate}"
        )
    if taken > most:
        raise EstimateError(f"{request} owns {taken} pages, it was admitted for {most} of {page_size} slots at most")


def check_step_estimate(schedule: str, estimate: int, taken: int, num_requests: int, page_size: int) -> None:
    """A decode step takes page for page what was estimated: less is needless retraction, more an exhausted pool."""
    if estimate != taken:
        raise EstimateMismatchError(
            f"a decode step of {num_requests} requests was estimated at {estimate} pages of {page_size} slots, it took "
            f"{taken} (schedule {schedule}): estimate and allocation must call pages_for with one reserve"
        )


def check_lengths(request: str, committed_len: int, allocated_len: int, row_width: int) -> None:
    if not 0 <= committed_len <= allocated_len <= row_width:
        raise LengthOrderError(
            f"{request}: 0 <= committed {committed_len} <= allocated {allocated_len} <= row width {row_width} is broken"
        )
