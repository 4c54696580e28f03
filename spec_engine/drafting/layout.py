"""Where a draft branch's token lives: the one formula, for every page size and every width.

Branch b of a request with committed length S begins on a page of its own, behind a copy of the prefix tail's
offset, so that a reader of whole pages finds [tail | branch] in order:

    tail = S % P      base = S - tail      branch_pages = ceil((tail + T) / P)
    position(b, t) = base + b * branch_pages * P + tail + t

Branch 0 continues the prefix's own last page. With P = 1 this is S + b * T + t, with K = 1 it is S + t. Behind
them lie the ``tail`` positions that open the first page of every later branch: its holes, which a reader of whole
pages wants filled with the prefix tail.
"""

from __future__ import annotations

import torch

from spec_engine.memory.sizing import Length, pages_per_branch


def branch_positions(committed_lens: torch.Tensor, *, topk: int, num_steps: int, page_size: int) -> torch.Tensor:
    """Row position of every branch's token at every draft step: ``[bs] int64 -> [bs, topk, num_steps] int64``."""
    tail = committed_lens % page_size
    stride = branch_stride(tail, num_steps, page_size)
    branches = torch.arange(topk, device=committed_lens.device)
    steps = torch.arange(num_steps, device=committed_lens.device)
    starts = committed_lens[:, None] + stride[:, None] * branches
    return starts[:, :, None] + steps


def tail_duplicates(
    committed_lens: torch.Tensor, *, topk: int, num_steps: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row positions to copy in the draft pool, (sources, destinations), both ``[bs, topk - 1, page_size - 1] int64``.

    Entry (r, b, j) brings the prefix tail's token j into its hole of branch b + 1. Tails are shorter than that: where
    j >= S % P there is no hole, and the entry copies a position of the last prefix page onto itself.
    """
    tail = committed_lens % page_size
    stride = branch_stride(tail, num_steps, page_size)
    offsets = torch.arange(page_size - 1, device=committed_lens.device)
    branches = torch.arange(1, topk, device=committed_lens.device)
    sources = ((committed_lens - tail)[:, None] + offsets)[:, None].expand(-1, topk - 1, -1)
    moved = stride[:, None, None] * branches[:, None]
    return sources, sources + moved * (offsets < tail[:, None])[:, None]


def branch_stride(tail_len: Length, num_steps: int, page_size: int) -> Length:
    """Positions from one branch of a request to the next; ``tail_len`` is S % P."""
    return pages_per_branch(tail_len, num_steps, page_size) * page_size


def longest_starts(least: int, most: int, page_size: int) -> list[int]:
    """Committed lengths among [least, most] whose branches may end furthest: the longest, and its page's forerunner.

    Within a page branches lie further apart the longer its tail is, and a new page begins with a short one.
    """
    before = most // page_size * page_size - 1
    return [before, most] if before >= least else [most]
