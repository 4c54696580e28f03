"""Lengths and tokens: what is announced, fed and committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcanary.invariants.errors import ChunkError, CommitError, IndexLengthError, NotRunningError, StalledError
from kvcanary.invariants.standstill import Standstill

MOST_STILL_STEPS = 256  # pages that come back, from a quarantine or the host, are waited for in a few


def check_index_lengths(forward: str, array: str, found: int, lens: Sequence[int]) -> None:
    """An array has one entry for each that the rows' lengths announce."""
    if found != sum(lens):
        raise IndexLengthError(
            f"{forward}: {array} has {found} entries, its rows' lengths {list(lens)} add to {sum(lens)}"
        )


def check_run_pages(num_keys: int, num_pages: int, page_size: int) -> None:
    """A run of cached tokens has a page for every key."""
    if num_pages < num_keys:
        raise IndexLengthError(
            f"tokens of {num_keys} whole pages of {page_size} slots cached with {num_pages} pages: pass a page for each"
        )


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


def check_running(request: str, is_running: bool, num_running: int) -> None:
    if not is_running:
        raise NotRunningError(f"{request} finished, but it is none of the {num_running} running requests")


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
