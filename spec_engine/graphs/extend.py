"""A captured draft extend: the draft pool catches up with what was accepted, and each row's last entry proposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.graphs.drafting import Path
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward, slots_at
from spec_engine.graphs.hooks import StaticForwards

if TYPE_CHECKING:
    from spec_engine.core import Batch
    from spec_engine.drafting.drafter import Drafter
    from spec_engine.graphs.drafting import DraftProgram
    from spec_engine.graphs.program import Recorder
    from spec_engine.step.verify import Accepted


class ExtendProgram:
    """The draft's forward over accepted pairs of up to ``size`` requests, min(T + 1, N) each at most.

    Rows are as long as ``counts`` on the device says; behind the last entry of the last row all is padding. What was
    accepted the host says, or it lies on the device, where the step before has decided.
    """

    def __init__(
        self,
        size: int,
        drafter: Drafter,
        drafts: StaticForwards,
        verified: DraftProgram,
        recorder: Recorder,
        follows: bool,
    ) -> None:
        """``verified``: the program whose nodes are accepted; ``follows``: whether `follow` is asked for."""
        self._drafter, self._drafts, self._verified, self._follows = drafter, drafts, verified, follows
        self._table, self._size = drafter.table.table, size
        self._width = width = drafter.most_accepted
        sizes = {"rows": size, "live": 1, "decided": 1, "lens": size, "counts": size}
        sizes |= {"tokens": size * width, "nodes": size * width} | drafts.sections("extend", size)
        self._feed = Feed(sizes, self._table.device)
        forward = StaticForward.allocate("extend", 0, self._table, requests=size, new=width)
        self._hooked = drafts.hook(forward, drafts.rows(self._feed, "extend", "live"))
        self._acceptance = drafts.hook_acceptance(size, self._feed)
        self._launches = drafts.together([self._hooked])
        if follows:
            verified.follow_by(self._hooked, self._acceptance)
        self._run = recorder.record(self._body)

    def follow(self, batch: Batch) -> None:
        """Extend all requests of the batch by what the step before has accepted, that the host has not collected.

        The canary was told with that step.
        """
        rows, live = [request.row for request in batch.requests], len(batch)
        self._feed.set(rows=rows, live=[live], decided=[1])
        self._feed.send()
        self._run()

    def __call__(self, batch: Batch, accepted: Sequence[Accepted], going: Sequence[int]) -> None:
        """Extend the requests ``going`` of the batch by what was accepted of their trees."""
        width, num_nodes = self._width, self._drafter.num_draft_tokens
        tokens, nodes = [0] * (len(going) * width), [0] * (len(going) * width)
        for row, b in enumerate(going):
            own = accepted[b]
            where = slice(row * width, row * width + len(own.tokens))
            tokens[where], nodes[where] = own.tokens, [b * num_nodes + node for node in own.nodes]
        lens = [batch.lens[b] for b in going]
        counts = [len(accepted[b].tokens) for b in going]
        rows = [batch.requests[b].row for b in going]
        inputs = {"rows": rows, "live": [len(going)], "decided": [0]}
        self._feed.set(**inputs, lens=lens, counts=counts, tokens=tokens, nodes=nodes)
        ids = [batch.ids[b] for b in going]
        self._launches.launch(ids, counts, [sum(lens) + len(going) * self._drafter.head.ahead + sum(counts)])
        self._feed.send()
        self._run()

    def _body(self) -> None:
        forward, drafter, rows = self._hooked.forward, self._drafter, self._feed["rows"]
        committed, counts, tokens, nodes = path = self._path()
        lens = committed + drafter.head.ahead
        ends = forward.bounds[1:]
        torch.cumsum(counts, 0, out=ends)
        entries = torch.arange(forward.slots.numel(), device=rows.device)
        row = torch.searchsorted(ends, entries, right=True).clamp_max(self._size - 1)
        nth = entries - forward.bounds[row]
        is_live = entries < ends[-1]
        flat = row * self._width + nth.clamp(0, self._width - 1)
        columns = torch.arange(self._width, device=rows.device)
        tails = slots_at(self._table, rows[:, None], lens[:, None] + columns)
        forward.tokens.copy_(torch.where(is_live, tokens.flatten()[flat], 0))
        forward.positions.copy_(torch.where(is_live, lens[row] + nth, 0))
        forward.slots.copy_(torch.where(is_live, tails.flatten()[flat], 0))
        forward.read(self._table, rows, lens, tails, self._drafts.pool.num_slots, counts)
        features = drafter.features(self._verified.output, torch.where(is_live, nodes.flatten()[flat], 0))
        self._hooked.rows.advance()
        with self._drafts.open(self._hooked) as attention:
            hidden = drafter.head(forward.tokens, features, forward.positions, attention)
        self._record(rows, path)
        drafter.propose_from(rows, committed + counts, hidden[(ends - 1).clamp_min(0)], counts > 0)
        self._drafts.join()

    def _record(self, rows: Tensor, path: Path) -> None:
        """What the step before has moved and accepted: behind the forward, whose first store would wait for it.

        A graph that begins with branches begins late.
        """
        if self._follows:
            self._verified.record_moves()
        if self._acceptance is not None:
            self._acceptance.record(rows, path.counts, path.tokens.view(self._size, -1))

    def _path(self) -> Path:
        feed, shape = self._feed, (self._size, self._width)
        inputs = Path(feed["lens"], feed["counts"], feed["tokens"].view(shape), feed["nodes"].view(shape))
        if not self._follows:
            return inputs
        is_decided = feed["decided"].bool()
        return Path(*(torch.where(is_decided, *both) for both in zip(self._verified.path(), inputs, strict=True)))
