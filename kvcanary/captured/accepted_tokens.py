"""AcceptedTokens: what captured steps accepted, on the device, so that the truth of rows needs no word of the host.

A host that launches a step before it has collected the last one knows rows as they were before that. What it knows is a
checkpoint; the accepted tokens that it has not collected lie here, by row of the request table, and `CapturedTruth`
adds them to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary.captured.kernel_launches import Shared
from kvcanary.records.dispatch import ops_for
from kvcanary.records.mailbox import Packed
from kvcanary.records.state import PoolState


class AcceptedTokens:
    """One for each row of an engine's request table, made by `SubstepRegistry.add_accepted_tokens`.

    accepted: [num_table_rows, 1 + places] int64, of the last captured step of each: how many tokens it accepted, then
              these
    """

    def __init__(self, shared: Shared, num_table_rows: int, places: int) -> None:
        self.shared, self.places = shared, places
        with torch.inference_mode(False):
            self.accepted = shared.step.new_zeros(num_table_rows, 1 + places)

    def add_acceptance(self, size: int, step: Tensor) -> CapturedAcceptance:
        """What a program accepts for at most ``size`` requests; ``step``: that of its forwards."""
        return CapturedAcceptance(self, size, step)


class CapturedTruth:
    """Final entries of rows and the chain values behind them, as `ForwardPlan` takes them.

    prefix_lens, truths: [rows] int64, as of the last `advance`
    """

    def __init__(self, owner: AcceptedTokens, pool: PoolState, table_rows: Tensor, *known: Tensor) -> None:
        """Tensors as for `advance`, at fixed addresses; known: uncollected, known_lens, known_chains."""
        self._owner, self._pool, self._table_rows, self._known = owner, pool, table_rows, known
        self._advance = ops_for(table_rows.device).advance
        with torch.inference_mode(False):
            self.prefix_lens, self.truths = (torch.zeros_like(known[1]) for _ in range(2))

    def advance(self) -> None:
        """Within a program, before the forwards of these rows are opened and before it accepts."""
        with self._owner.shared.side_stream.behind():
            self._advance(
                self._owner.accepted,
                self._table_rows,
                *self._known,
                width=len(self.truths) // len(self._table_rows),
                shift=entries_behind(self._pool, 0),
                keys=self._pool.keys,
                lens=self.prefix_lens,
                chains=self.truths,
            )


class CapturedAcceptance:
    """What one program accepts. No hook allocates or waits for the device.

    reported: what the host learns of a run: [size, 1 + places], as `AcceptedTokens.accepted`
    """

    def __init__(self, owner: AcceptedTokens, size: int, step: Tensor) -> None:
        self._owner, self.size, self.places = owner, size, owner.places
        with torch.inference_mode(False):
            self._now = owner.accepted.new_zeros(size, 1 + owner.places)
        self.posted = Packed((self._now,), step, ops_for(owner.accepted.device).post)

    def record(self, table_rows: Tensor, counts: Tensor, tokens: Tensor) -> None:
        """Within a program: ``table_rows, counts [size]``, ``tokens [size, places]``; padding has count 0 and row 0."""
        with self._owner.shared.side_stream.behind():
            torch.cat((counts[:, None], tokens), 1, out=self._now)
            self._owner.accepted.index_copy_(0, table_rows, self._now)
            self.posted.pack()


def entries_behind(pool: PoolState, count: int) -> int:
    """Entries of a row behind those whose tokens the host knows, when a step that it has not collected took ``count``.

    The host knows one token more than are committed.
    """
    return count + pool.view.token_offset + pool.view.ahead - 1
