"""What one step leaves on the device for the next, by request-table row.

The host may be one verify behind (schedule "overlap"); a forward takes its lengths from here, never from the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_engine.step.transfer import to_device


class Relay:
    """``lens [rows] int64``, committed lengths; ``bonus [rows] int64``, the token at that length, not forwarded yet.

    Row 0 is padding's and stays zero.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def seed(self, row: int, committed_len: int) -> None:
        """A request takes this row with ``committed_len`` entries that are there already."""
        self.lens[row].fill_(committed_len)  # to assign a number would wait for a GPU

    def publish(self, rows: Tensor, lens: Sequence[int], bonus: Sequence[int]) -> None:
        """New lengths, and the tokens that follow them, for the requests in ``rows [bs]``."""
        self.lens.index_copy_(0, rows, to_device(lens, rows.device))
        self.bonus.index_copy_(0, rows, to_device(bonus, rows.device))
