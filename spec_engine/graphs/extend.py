"""A captured draft extend: the draft pool catches up with what was accepted, and each row's last entry proposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward, slots_at
from spec_engine.graphs.hooks import StaticForwards

if TYPE_CHECKING:
    from spec_engine.core import Batch
    from spec_engine.drafting.drafter import Drafter
    from spec_engine.graphs.drafting import DraftProgram
    from spec_engine.graphs.program import Recorder
    from spec_engine.verify import Accepted


class ExtendProgram:
    """The draft's forward over accepted pairs of up to ``size`` requests, min(T + 1, N) each at most.

    Rows are as long as ``counts`` on the device says; behind the last entry of the last row all is padding.
    """

    def __init__(
        self, size: int, drafter: Drafter, drafts: StaticForwards, verified: DraftProgram, recorder: Recorder
    ) -> None:
        """``verified``: the program whose nodes are accepted."""
        self._drafter, self._drafts, self._verified = drafter, drafts, verified
        self._table, self._size = drafter.table.table, size
        self._width = width = min(drafter.num_steps + 1, drafter.num_draft_tokens)
        sizes = {"rows": size, "live": 1, "lens": size, "counts": size, "tokens": size * width, "nodes": size * width}
        self._feed = Feed(sizes | drafts.sections("extend", size), self._table.device)
        forward = StaticForward.allocate("extend", 0, self._table, requests=size, new=width)
        self._hooked = drafts.hook(forward, self._feed, "extend", "live")
        self._run = recorder.record(self._body)

    def __call__(self, batch: Batch, accepted: Sequence[Accepted], going: Sequence[int]) -> None:
        """Extend the requests ``going`` of the batch by what was accepted of their trees."""
        width, num_nodes = self._width, self._drafter.num_draft_tokens
        tokens, nodes = [0] * (len(going) * width), [0] * (len(going) * width)
        for row, b in enumerate(going):
            own = accepted[b]
            where = slice(row * width, row * width + len(own.tokens))
            tokens[where], nodes[where] = own.tokens, [b * num_nodes + node for node in own.nodes]
        lens = [batch.lens[b] + self._drafter.head.ahead for b in going]
        counts = [len(accepted[b].tokens) for b in going]
        rows = [batch.requests[b].row for b in going]
        self._feed.set(rows=rows, live=[len(going)], lens=lens, counts=counts, tokens=tokens, nodes=nodes)
        ids = [batch.ids[b] for b in going]
        self._drafts.launch(self._hooked, self._feed, ids, counts, reads=sum(lens) + sum(counts))
        self._feed.send()
        self._run()

    def _body(self) -> None:
        feed, forward, drafter = self._feed, self._hooked.forward, self._drafter
        rows, lens, counts = feed["rows"], feed["lens"], feed["counts"]
        ends = forward.bounds[1:]
        torch.cumsum(counts, 0, out=ends)
        entries = torch.arange(forward.slots.numel(), device=rows.device)
        row = torch.searchsorted(ends, entries, right=True).clamp_max(self._size - 1)
        nth = entries - forward.bounds[row]
        is_live = entries < ends[-1]
        flat = row * self._width + nth.clamp(0, self._width - 1)
        columns = torch.arange(self._width, device=rows.device)
        tails = slots_at(self._table, rows[:, None], lens[:, None] + columns)
        forward.tokens.copy_(torch.where(is_live, feed["tokens"][flat], 0))
        forward.positions.copy_(torch.where(is_live, lens[row] + nth, 0))
        forward.slots.copy_(torch.where(is_live, tails.flatten()[flat], 0))
        forward.read(self._table, rows, lens, tails, self._drafts.pool.num_slots, counts)
        features = drafter.features(self._verified.output, torch.where(is_live, feed["nodes"][flat], 0))
        with self._drafts.open(self._hooked) as attention:
            hidden = drafter.head(forward.tokens, features, forward.positions, attention)
        drafter.propose_from(rows, hidden[(ends - 1).clamp_min(0)], counts > 0)
        self._drafts.join()
