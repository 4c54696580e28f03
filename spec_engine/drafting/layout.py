"""Where a draft branch's token lives: the one formula, for every page size and every width.

Branch b of a request with committed length S begins on a page of its own, behind a copy of the prefix tail's
offset, so that a reader of whole pages finds [tail | branch] in order:

    tail = S % P      base = S - tail      branch_pages = ceil((tail + T) / P)
    position(b, t) = base + b * branch_pages * P + tail + t

Branch 0 continues the prefix's own last page. With P = 1 this is S + b * T + t, with K = 1 it is S + t.
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


def branch_stride(tail_len: Length, num_steps: int, page_size: int) -> Length:
    """Positions from one branch of a request to the next; ``tail_len`` is S % P."""
    return pages_per_branch(tail_len, num_steps, page_size) * page_size
