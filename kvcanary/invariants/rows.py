"""Rows: whose they are and where they end, what is fed and committed, host buffers, sizes that all must agree on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvcanary.errors import InvariantError
from kvcanary.invariants.pages import NullPageError, PoolSizeError
from kvcanary.invariants.standstill import Standstill

MAX_FLAT_INDEX = (1 << 31) - 1  # kernels address request rows and index buffers with 32-bit integers
MOST_STILL_STEPS = 256  # pages that come back, from a quarantine or the host, are waited for in a few


class RowsExhaustedError(InvariantError):
    """More requests were admitted than the request table has rows."""


def check_rows_available(free: int, total: int) -> None:
    if not free:
        raise RowsExhaustedError(f"1 row needed, 0 of {total} free: more requests run than max_running_requests")


class RowOwnershipError(InvariantError):
    """A request-table row is used by nobody, by two requests, or was released twice."""


def check_row_held(row: int, free_rows: Collection[int], num_rows: int) -> None:
    if row == 0:
        raise NullPageError("row 0 used for a request, it is padding's: rows begin at 1")
    if not 0 < row <= num_rows or row in free_rows:
        raise RowOwnershipError(f"row {row} of 1 to {num_rows} used, but no request holds it")


class RowOverflowError(InvariantError):
    """A request needs more columns than its request-table row has; the write would reach its neighbour's row."""


def check_row_width(width: int, needed: int) -> None:
    if width < needed:
        raise RowOverflowError(
            f"rows of the request table have {width} columns, the longest request and its reserve, rounded to pages, "
            f"need {needed}"
        )


def check_row_fits(row: int, start: int, end: int, width: int, page_size: int) -> None:
    if end > width:
        raise RowOverflowError(
            f"row {row} needs columns [{start}, {end}), its width is {width}: "
            f"{(end - start) // page_size} pages of {page_size} slots do not fit"
        )


class RowGapError(InvariantError):
    """Pages do not continue a request-table row where it ends, at a page boundary."""


def check_row_continues(row: int, start: int, filled: int, page_size: int) -> None:
    if start != filled or start % page_size:
        raise RowGapError(
            f"row {row} is filled to column {filled}, pages of {page_size} slots appended at column {start}"
        )


def check_row_covers(row: int, end: int, filled: int, page_size: int) -> None:
    """Pages are replaced where the row has some."""
    if end > filled:
        raise RowGapError(
            f"row {row} is filled to column {filled}, {end // page_size} pages of {page_size} slots replaced up to "
            f"column {end}"
        )


def check_rows_distinct(requests: Sequence[str], rows: Sequence[int]) -> None:
    if 0 in rows:
        raise NullPageError(f"{requests[rows.index(0)]} uses row 0, it is padding's: rows begin at 1")
    if len(set(rows)) != len(rows):
        named = ", ".join(f"{request} row {row}" for request, row in zip(requests, rows, strict=True))
        raise RowOwnershipError(f"{len(rows)} requests of a batch need {len(rows)} rows of their own, got {named}")


class IndexLengthError(InvariantError):
    """An index array and the lengths that it is read by disagree."""


def check_index_lengths(forward: str, array: str, found: int, lens: Sequence[int]) -> None:
    if found != sum(lens):
        raise IndexLengthError(
            f"{forward}: {array} has {found} entries, its rows' lengths {list(lens)} add to {sum(lens)}"
        )


def check_run_pages(num_keys: int, num_pages: int, page_size: int) -> None:
    if num_pages < num_keys:
        raise IndexLengthError(
            f"tokens of {num_keys} whole pages of {page_size} slots cached with {num_pages} pages: pass a page for each"
        )


class ChunkError(InvariantError):
    """A prompt chunk does not continue what is committed, or feeds something else than the prompt."""


def check_chunk(request: str, start: int, end: int, committed_len: int, prompt_len: int) -> None:
    if not start == committed_len < end <= prompt_len:
        raise ChunkError(
            f"{request}: chunk [{start}, {end}) must begin at the committed length {committed_len} and end within "
            f"the prompt of {prompt_len} tokens"
        )


def check_chunk_feed(request: str, start: int, fed: Sequence[int], prompt: Sequence[int]) -> None:
    """A draft is fed token p + 1 at position p; the last entry of a chunk that is not the last is a prompt token."""
    known = prompt[start + 1 : start + 1 + len(fed)]
    if list(fed[: len(known)]) != list(known):
        place = next(i for i, pair in enumerate(zip(fed, known, strict=False)) if pair[0] != pair[1])
        raise ChunkError(
            f"{request}: draft position {start + place} is fed token {fed[place]}, the prompt has {known[place]} there"
        )


class CommitError(InvariantError):
    """A committed length moved by something else than what was accepted, or beyond the tokens that are known."""


def check_commit(request: str, before: int, after: int, num_accepted: int, most: int) -> None:
    """A decode step commits the bonus token and at most every accepted draft, and exactly what was accepted."""
    if after - before != num_accepted or not 1 <= num_accepted <= most:
        raise CommitError(
            f"{request}: committed length goes from {before} to {after} with {num_accepted} tokens accepted, "
            f"a step commits what is accepted, 1 to {most} tokens"
        )


def check_known_tokens(request: str, committed_len: int, prompt_len: int, output_len: int, finished: bool) -> None:
    """While a request runs one token is known and not committed: the bonus, or more of the prompt.

    A stop inside an accepted chain caps what is owned: nothing is committed beyond what the client saw.
    """
    pending = prompt_len + output_len - committed_len
    exact = output_len > 0 and not finished
    if pending < 0 or (not finished and pending < 1) or (exact and pending != 1):
        rule = "exactly 1" if exact else "at least 0" if finished else "at least 1"
        raise CommitError(
            f"{request}: prompt {prompt_len} + output {output_len} - committed {committed_len} = {pending} tokens "
            f"pending, must be {rule}"
        )


class NotRunningError(InvariantError):
    """A request was finished that does not run; its pages and its row would be released twice."""


def check_running(request: str, is_running: bool, num_running: int) -> None:
    if not is_running:
        raise NotRunningError(f"{request} finished, but it is none of the {num_running} running requests")


class StalledError(InvariantError):
    """Requests are there, and for many steps no token has left and none has ended: none of them would ever end."""


def check_progress(still_steps: int, standstill: Callable[[], Standstill]) -> None:
    """Steps without progress, one after another, are few.

    A step makes progress where a token leaves, a request ends, or something is computed that had not been since the
    last token or end: a long prompt does in each of its chunks, and so does, once, what is computed again after a
    retraction. Requests that are computed, retracted and computed again do not.
    """
    if still_steps > MOST_STILL_STEPS:
        stands = standstill()
        raise StalledError(
            f"no token has left, no request has ended and nothing new was computed for {still_steps} steps, at most "
            f"{MOST_STILL_STEPS} may pass so; {stands}: {stands.remedy}"
        )


def check_pool_slots(pool: str, num_slots: int, num_pages: int, page_size: int) -> None:
    """A pool has the allocator's pages and the null page."""
    if num_slots != (num_pages + 1) * page_size:
        raise PoolSizeError(
            f"pool {pool!r} has {num_slots} slots, {num_pages} pages and the null page of {page_size} slots "
            f"need {(num_pages + 1) * page_size}"
        )


class PageSizeError(InvariantError):
    """Parts of the engine that share slots count pages of different sizes."""


def check_page_sizes(sizes: Mapping[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PageSizeError(f"page_size must be one, got {named}: pass the same to all")


class ReserveError(InvariantError):
    """A request's reserve does not cover one drafting step and the host's lag."""


def check_reserve(reserve: int, lag: int, max_accept: int, alloc_len: int) -> None:
    if reserve < lag * max_accept + alloc_len:
        raise ReserveError(
            f"reserve {reserve} < lag {lag} * max_accept {max_accept} + alloc_len {alloc_len} "
            f"= {lag * max_accept + alloc_len}: size it by the longest draft"
        )


class IndexOverflowError(InvariantError):
    """A flat index would not fit into a signed 32-bit integer."""


def check_flat_indices(what: str, rows: int, width: int) -> None:
    """The last element of a [rows, width] array can be addressed with a signed 32-bit integer."""
    if rows * width > MAX_FLAT_INDEX:
        raise IndexOverflowError(
            f"{what}: {rows} rows * {width} columns = {rows * width} must be below {MAX_FLAT_INDEX + 1}: "
            "lower max_running_requests, topk or context_length"
        )


class StagingError(InvariantError):
    """A host buffer is read for what it held before it was taken again, or has no room for what is put into it."""


def check_staging(buffer: str, generation: int, now: int, count: int) -> None:
    if generation != now:
        raise StagingError(
            f"host buffer {buffer!r} is read for its use {generation}, it is in its use {now}: a ring of {count} "
            "buffers is too short for the steps that the host is behind"
        )


def check_staging_room(buffer: str, needed: int, size: int) -> None:
    if needed > size:
        raise StagingError(
            f"{needed} numbers are put into {buffer!r}, which has room for {size}: size it by the largest"
        )


class EstimateError(InvariantError):
    """The pages that a request owns are not those that the estimate promised."""


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


class EstimateMismatchError(InvariantError):
    """A decode step took another number of pages than the estimate by which it was admitted."""


def check_step_estimate(schedule: str, estimate: int, taken: int, num_requests: int, page_size: int) -> None:
    """A decode step takes page for page what was estimated: less is needless retraction, more an exhausted pool."""
    if estimate != taken:
        raise EstimateMismatchError(
            f"a decode step of {num_requests} requests was estimated at {estimate} pages of {page_size} slots, it took "
            f"{taken} (schedule {schedule}): estimate and allocation must call pages_for with one reserve"
        )


class LengthOrderError(InvariantError):
    """0 <= committed <= allocated <= row width does not hold."""


def check_lengths(request: str, committed_len: int, allocated_len: int, row_width: int) -> None:
    if not 0 <= committed_len <= allocated_len <= row_width:
        raise LengthOrderError(
            f"{request}: 0 <= committed {committed_len} <= allocated {allocated_len} <= row width {row_width} is broken"
        )
