"""A captured decode without drafts: one token of every request, its index arrays, and what follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcanary_kernels.engine.relay import leave, leave_torch, take, take_torch
from spec_engine.acceptance.distribution import greedy_tokens
from spec_engine.acceptance.walk import single
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward
from spec_engine.graphs.hooks import StaticForwards
from spec_engine.graphs.results import Results
from spec_engine.graphs.states import StateSource, StaticStates
from spec_engine.graphs.step import SECTIONS, StepProgram
from spec_engine.step.verify import Accepted

if TYPE_CHECKING:
    from spec_engine.core import Batch
    from spec_engine.graphs.program import Recorder
    from spec_engine.memory.request_table import RequestTable
    from spec_engine.models.decoder import Decoder
    from spec_engine.step.relay import Relay


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
        states: StateSource | None = None,
    ) -> None:
        """``states``: of a model with recurrent layers"""
        sizes = {"rows": size, **dict.fromkeys(SECTIONS, 1), **forwards.sections("decode", size)}
        super().__init__(size, Feed(sizes, table.table.device), relay)
        self._model, self._forwards, self._table = model, forwards, table.table
        forward = StaticForward.allocate("decode", 0, self._table, requests=size, new=1)
        self._hooked = forwards.hook(forward, forwards.rows(self._feed, "decode", "live"))
        self._launches = forwards.together([self._hooked])
        self._states = None if states is None else StaticStates(states, self._hooked)
        self._hidden = torch.zeros(
            size, model.config.hidden_size, dtype=forwards.pool.dtype, device=forward.slots.device
        )
        self._chosen = torch.zeros_like(self._bonus)
        self._accepted = single(self._chosen[:, None])
        self._results = Results({"bonus": (size,)}, self._table.device)
        self._run = recorder.record(self._body)

    def fetch(self, batch: Batch) -> list[Accepted]:
        """What follows by argmax, for each request; waits for the device."""
        return [Accepted([0], [token]) for token in self._results.fetch()["bonus"][: len(batch)].tolist()]

    def __call__(self, batch: Batch, decides: bool) -> Tensor:
        """The hidden states of the requests' bonus tokens, [bs, H]; ``decides``: the relay's new lengths too."""
        live = len(batch)
        self._feed.set(rows=[request.row for request in batch.requests], live=[live], decides=[decides])
        self._launches.launch(batch.ids, [1] * live, [sum(batch.lens) + live])
        if self._states is not None:
            self._states.launch(batch.ids)
        self._feed.send()
        self._run()
        return self._hidden[:live]

    def _body(self) -> None:
        forward, relay, rows = self._hooked.forward, self._relay, self._feed["rows"]
        take_rows, leave_rows = (take, leave) if rows.is_cuda else (take_torch, leave_torch)
        tables = relay.lens, relay.bonus, self._table
        take_rows(rows, *tables, lens=self._lens, bonus=self._bonus, slots=forward.slots)
        forward.tokens.copy_(self._bonus)
        forward.positions.copy_(self._lens)
        forward.read(self._table, rows, self._lens, forward.slots[:, None], self._forwards.pool.num_slots)
        own: tuple[Any, ...] = ()
        if self._states is not None:
            self._states.begin(rows, self._lens)
            own = (), self._states.access
        with self._forwards.open(self._hooked) as attention:
            self._hidden.copy_(self._model(forward.tokens, forward.positions, attention, *own).hidden)
        if self._states is not None:
            self._states.end()
        self._chosen.copy_(greedy_tokens(self._model.logits(self._hidden)))
        counts = {"num_live": self._feed["live"], "decides": self._feed["decides"]}
        leave_rows(rows, relay.lens, relay.bonus, lens=self._lens, chosen=self._chosen, **counts)
        self._results.put(bonus=self._chosen)
        self._forwards.join()
