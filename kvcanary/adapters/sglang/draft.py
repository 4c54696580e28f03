"""The model runner of a draft: its own pool, whose entries hold the token that follows their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.inputs import UNKNOWN, Entries, judge_fed
from kvcanary.adapters.sglang.fed import FedForward
from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary.adapters.sglang.step_trace import TRACE, StepTrace
from kvcanary.config import CanaryConfig

#: Of steps in a graph of SGLang's that was captured before the canary came: what each of them was fed is gone.
WITHIN = "positions of single draft steps within a graph of SGLang's: what they leave behind is judged"


class Planned(NamedTuple):
    """Draft steps of a round, as the table of rows has them before they run.

    names:   of the rows
    steps:   which of the round;  numbers: the same on the device
    lengths: [n] int64 committed entries
    table:   [n, width] int64 slots
    stride:  [n] from one branch of a row to the next: whole pages, the first of which begins with the prefix's end
    """

    names: list[str]
    steps: range
    numbers: Tensor
    lengths: Tensor
    table: Tensor
    stride: Tensor


class WatchedDraft(WatchedRunner):
    """The canary of a draft runner: entries hold the token that follows their position.

    A draft step writes what the extend of the same round writes again, so its bytes are nobody's: its positions and
    slots are judged. What an extend writes is recorded; only what was accepted is read, from the next round on.
    """

    role, reads_hidden = "draft", True
    token_offset = name_offset = 1

    def __init__(
        self,
        runner: Any,
        config: CanaryConfig,
        most_tokens: int,
        width: int,
        topk: int,
        steps: int,
        *,
        target: WatchedRunner,
    ) -> None:
        """target: whose forwards come before those of this draft"""
        super().__init__(runner, config, most_tokens, width)
        self._target = target
        self._topk, self._steps, self._page = topk, steps, int(runner.token_to_kv_pool.page_size)
        self._round, self._step = None, 0
        self._sampled: Tensor | None = None

    def adapted(self, nodes: int, steps: int) -> None:
        super().adapted(nodes, steps)
        self._steps = steps

    def prefill(
        self, method: Any, batch: Any, target_hidden_states: Any, next_token_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The draft's forward over a prompt, behind the target's; `next_token_ids` [rows]: what that has sampled."""
        self._sampled = next_token_ids
        try:
            return method(batch, target_hidden_states, next_token_ids, *args, **kwargs)
        finally:
            self._sampled = None

    def _known(self, fed: FedForward, requests: Mapping[str, Any]) -> Tensor:
        """Behind the last entry of a prompt comes what was sampled just now, which the host does not know yet."""
        known = super()._known(fed, requests)
        if self._sampled is not None:
            last = self.canary.memory.upload(torch.from_numpy(np.cumsum(fed.new) - 1))
            held = known[last]
            known[last] = torch.where(held == UNKNOWN, self._sampled.to(held.dtype), held)
        return known

    def forward(self, method: Any, batch: Any, requests: Mapping[str, Any]) -> Any:
        mode = batch.forward_mode
        if mode.is_draft_extend_v2():
            fed = self._entries_of(batch, np.full(batch.batch_size, self.nodes))
            self.read(fed, batch, ("extend", 0))
            output = method()
            self._wrote()
            return output
        if mode.is_decode():
            self._draft_step(batch)
            return method()
        return super().forward(method, batch, requests)

    def replayed(self, graph: Any, method: Any, batch: Any) -> Any:
        """All draft steps of a round in one graph of SGLang's, which is judged behind it, by what its steps were fed.

        graph: with a StepTrace, or, where it was captured before the canary came, with its `buffers` alone: the slots
        of all steps, [rows, topk, steps] flat, and positions, [rows, topk] flat. Each step moves these on and the last
        one puts them back: a step too many or too few is left over behind it.
        """
        self._flush()
        planned, count = self._plan(batch, range(self._steps - 1)), batch.batch_size * self._topk
        if self._page > 1 and self._topk > 1:
            self._judge_copies(planned)
        output = method(batch)
        trace: StepTrace | None = getattr(graph, TRACE, None)
        if trace is not None:
            by_row = (len(planned.steps), -1, self._topk)
            positions, slots = (fed[:, :count].view(by_row).transpose(0, 1) for fed in (trace.positions, trace.slots))
        else:
            slots = graph.buffers.out_cache_loc[: count * self._steps].view(-1, self._topk, self._steps)
            slots = slots[..., :-1].transpose(1, 2)
            positions = graph.buffers.positions[:count].view(-1, 1, self._topk) + planned.numbers[:, None]
            self.canary.coverage.skip(WITHIN, len(planned.steps))
        self._judge_drafts(planned, positions, slots)
        return output

    def _draft_step(self, batch: Any) -> None:
        """One draft step that the runner runs by itself."""
        self._flush()  # it stores and is never shown
        self._step = self._step + 1 if batch is self._round else 0
        self._round = batch
        planned, count = self._plan(batch, range(self._step, self._step + 1)), batch.batch_size * self._topk
        self._judge_drafts(
            planned, *(fed[:count].view(-1, 1, self._topk) for fed in (batch.positions, batch.out_cache_loc))
        )
        if self._step == 0 and self._page > 1 and self._topk > 1:
            self._judge_copies(planned)

    def _plan(self, batch: Any, steps: range) -> Planned:
        lengths = batch.seq_lens.to(torch.int64)
        table = self.rows.req_to_token[batch.req_pool_indices.long()].to(torch.int64)
        numbers = torch.arange(steps.start, steps.stop, device=lengths.device)
        stride = (lengths % self._page + self._steps + self._page - 1) // self._page * self._page
        return Planned(list(batch.rids), steps, numbers, lengths, table, stride)

    def _judge_drafts(self, planned: Planned, positions: Tensor, slots: Tensor) -> None:
        """Entry i of each branch lies i behind the committed ones, in the slots that the row has for this branch.

        positions, slots: [rows, steps, topk], as they were fed
        """
        lengths, steps, topk = planned.lengths[:, None, None], planned.steps, self._topk
        right = (lengths + planned.numbers[:, None]).expand(-1, -1, topk)
        branches = torch.arange(topk, device=lengths.device) * planned.stride[:, None, None]
        granted = planned.table.gather(1, (right + branches).flatten(1)).flatten().to(slots.dtype)
        rows = np.repeat(np.arange(len(planned.names)), len(steps) * topk)
        indices = np.tile(np.repeat(np.arange(steps.start, steps.stop), topk), len(planned.names))
        slots, right = slots.flatten(), right.flatten()
        branch = lambda entry: f"branch {entry % topk} of its row"  # noqa: E731
        entries, site = Entries(planned.names, rows, right, slots, branch, indices), ("draft", steps.start)
        judge_fed(self.canary, "W5", "position", positions.flatten(), right, entries, site)
        judge_fed(self.canary, "W5", "slot", slots, granted, entries, site)

    def _judge_copies(self, planned: Planned) -> None:
        """Every branch but the first begins with a copy of the prefix's last page, as far as that is full (T1)."""
        names, lengths, table, stride = planned.names, planned.lengths, planned.table, planned.stride
        tail = lengths % self._page
        offsets = torch.arange(self._page, device=lengths.device)
        source = (lengths - tail)[:, None, None] + offsets
        numbers = torch.arange(1, self._topk, device=lengths.device)
        target = source + numbers[:, None] * stride[:, None, None]
        is_copied = (offsets < tail[:, None, None]).expand_as(target).flatten()
        wanted, found = (
            table.gather(1, columns.expand_as(target).flatten(1)).flatten() for columns in (source, target)
        )
        each = self._page * (self._topk - 1)
        paged_moves.expect_equal(
            self.canary, self.canary.groups[0], found, wanted, is_copied, "the copy of a prefix's end for a branch",
            lambda entry, slot: names[entry // each],
        )  # fmt: skip


class WatchedByPosition(WatchedDraft):
    """The same where the prefix cache hands out entries by the tokens up to their position, not by the one behind it as
    well: of a draft model of its own, and of every draft beside recurrent states.

    The last entry that rows share may hold another one's next token. So entries have the names of the target's, as they
    have in that cache, and what they are fed is judged when they are stored.
    """

    name_offset, reads_hidden = 0, False

    def read(self, fed: FedForward, batch: Any, site: tuple[str, int]) -> None:
        super().read(replace(fed, tokens=self._target.stored(len(fed.tokens))), batch, site)
