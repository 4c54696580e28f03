"""A captured decode without drafts: one token of every request, its index arrays, and what follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.acceptance.distribution import greedy_tokens
from spec_engine.acceptance.walk import single
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward, slots_at
from spec_engine.graphs.hooks import StaticForwards
from spec_engine.graphs.results import Results
from spec_engine.graphs.step import SECTIONS, StepProgram
from spec_engine.verify import Accepted

if TYPE_CHECKING:
    from spec_engine.core import Batch
    from spec_engine.graphs.program import Recorder
    from spec_engine.memory.request_table import RequestTable
    from spec_engine.models.decoder import Decoder
    from spec_engine.relay import Relay


class DecodeProgram(StepProgram):
    """The decode forward of up to ``size`` requests, and what follows by argmax."""

    def __init__(
        self,
        size: int,
        model: Decoder,
        forwards: StaticForwards,
        table: RequestTable,
        relay: Relay,
        recorder: Recorder,
    ) -> None:
        sizes = {"rows": size, **dict.fromkeys(SECTIONS, 1), **forwards.sections("decode", size)}
        super().__init__(size, Feed(sizes, table.table.device), relay)
        self._model, self._forwards, self._table = model, forwards, table.table
        forward = StaticForward.allocate("decode", 0, self._table, requests=size, new=1)
        self._hooked = forwards.hook(forward, self._feed, "decode", "live")
        self._hidden = torch.zeros(
            size, model.config.hidden_size, dtype=forwards.pool.dtype, device=forward.slots.device
        )
        self._results = Results({"bonus": (size,)}, self._table.device)
        self._run = recorder.record(self._body)

    def fetch(self, batch: Batch) -> list[Accepted]:
        """What follows by argmax, for each request; waits for the device."""
        return [Accepted([0], [token]) for token in self._results.fetch()["bonus"][: len(batch)].tolist()]

    def __call__(self, batch: Batch, decides: bool) -> Tensor:
        """The hidden states of the requests' bonus tokens, [bs, H]; ``decides``: the relay's new lengths too."""
        live = len(batch)
        self._feed.set(rows=[request.row for request in batch.requests], live=[live], decides=[decides])
        self._forwards.launch(self._hooked, self._feed, batch.ids, [1] * live, reads=sum(batch.lens) + live)
        self._feed.send()
        self._run()
        return self._hidden[:live]

    def _body(self) -> None:
        rows, lens, bonus = self._load()
        forward = self._hooked.forward
        forward.tokens.copy_(bonus)
        forward.positions.copy_(lens)
        forward.slots.copy_(slots_at(self._table, rows, lens))
        forward.read(self._table, rows, lens, forward.slots[:, None], self._forwards.pool.num_slots)
        with self._forwards.open(self._hooked) as attention:
            self._hidden.copy_(self._model(forward.tokens, forward.positions, attention).hidden)
        chosen = greedy_tokens(self._model.logits(self._hidden))
        self._commit(single(chosen[:, None]))
        self._results.put(bonus=chosen)
