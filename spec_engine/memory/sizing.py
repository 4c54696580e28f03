"""How many slots, pages and columns a request needs: each formula once.

The allocator, the admission estimate, the leak check and the request table all call these. Letters as in
the rest of the engine: P page_size, K topk, T num_steps, N num_draft_tokens, S committed length.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Length = TypeVar("Length", int, Tensor)  # one length, or a batch of them


def cdiv(a: Length, b: int) -> Length:
    """``ceil(a / b)`` for non-negative whole numbers."""
    return (a + b - 1) // b


def pages_per_branch(tail_len: Length, num_steps: int, page_size: int) -> Length:
    """Pages of one draft branch whose first page begins with ``tail_len`` tokens of the prefix."""
    return cdiv(tail_len + num_steps, page_size)


def draft_alloc_len(page_size: int, topk: int, num_steps: int, num_draft_tokens: int) -> int:
    """Slots past S that one drafting step may touch, whatever ``S % P`` is.

    With one branch, or with pages of one slot, branches lie densely; otherwise every branch owns whole pages.
    The verify window [S, S+N) lies inside the same region.
    """
    if page_size == 1 or topk == 1:
        return max(num_steps * topk, num_draft_tokens)
    worst_branch = pages_per_branch(page_size - 1, num_steps, page_size) * page_size
    return max(worst_branch * topk, num_draft_tokens)


def reserve_len(alloc_len: int, max_accept: int, lag: int, ahead: int = 0) -> int:
    """Slots to hold past the length the host knows; ``lag`` is how many verifies the host is behind (0 or 1).

    ahead: entries that the draft pool holds beyond the committed length.
    """
    return lag * max_accept + alloc_len + ahead


def row_width(context_length: int, reserve: int, page_size: int) -> int:
    """Columns of a request-table row: the context, the reserve behind it, and the rounding of both to pages."""
    return context_length + reserve + page_size - 1


def pages_for(committed_len: Length, reserve: int, page_size: int) -> Length:
    """Pages a request must own before its next step."""
    return cdiv(committed_len + reserve, page_size)


def window_row_pages(window: int, reserve: int, page_size: int) -> int:
    """Most pages that a row in decode holds of a window pool: what its last whole page sees, itself, and the reserve.

    Both ends may lie anywhere in a page.
    """
    return pages_for(page_size + window, reserve, page_size) + 1


def step_pages(committed_len: Length, num_pages: Length, reserve: int, page_size: int) -> Length:
    """Pages that a request which owns ``num_pages`` takes for its next step: none when it owns enough."""
    missing = pages_for(committed_len, reserve, page_size) - num_pages
    return missing * (missing > 0)


def worst_case_step_pages(num_requests: int, reserve: int, page_size: int) -> int:
    """An upper bound of ``step_pages`` that looks at no request: a whole reserve for each, from a page's last slot.

    As an admission estimate it retracts requests that own their pages already (sgl-project/sglang#22406).
    """
    return num_requests * pages_for(page_size - 1, reserve, page_size)
