"""A draft without weights: right for as many tokens as it is told, then wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from spec_engine.mock.probe import probe
from spec_engine.mock.target import MockModel
from spec_engine.models.decoder import DecoderOutput, KVAccess

AcceptLen = int | Callable[[int, int], int]  # (request, committed length) -> tokens of that step
_STEP, _SURE = 0.5, 8.0  # wrong tokens' logits fall by 0.5; the right one gets 8, more than 0.999 of the mass


class MockDraft(nn.Module):
    """The interface of an EAGLE head for a MockModel, whose verify emits exactly `accept_len` tokens a step.

    accept_len: 1 to num_steps + 1, bonus included, or a function of (request, committed length at the step's start).
    The true continuation is the likeliest candidate of the first accept_len - 1 levels, so that no tree of enough
    nodes misses it, and of deeper levels no candidate at all. A branch that left the truth, or whose forward read a
    wrong row or got features of another position, stays wrong.
    """

    kind = "mock"
    token_offset, ahead = 1, 0
    tap_layers: tuple[int, ...] = ()

    def __init__(self, target: MockModel, accept_len: AcceptLen, *, num_layers: int = 1) -> None:
        super().__init__()
        if isinstance(accept_len, int) and accept_len < 1:
            raise ValueError(f"accept_len must be at least 1, got {accept_len}: a verify always emits its bonus token")
        self.oracle, self.dtype, self.accept_len = target.oracle, target.dtype, accept_len
        self.config = replace(target.config, num_layers=num_layers)
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, self.config.num_kv_heads, self.config.head_dim
        self.num_draft_vocab = self.oracle.vocab_size

    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KVAccess) -> Tensor:
        _, read_right = probe(self.config, self.dtype, input_ids, positions, kv)
        requests, committed, depth, intact = hidden.long().unbind(-1)
        known = (depth == 0) | (input_ids == self.oracle.tokens(requests, positions + 1))
        intact = (intact > 0) & read_right & known
        return torch.stack((requests, committed, depth + 1, intact), -1).to(self.dtype)

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        requests, committed, depth, intact = hidden.long().unbind(-1)
        true = self.oracle.tokens(requests, committed + depth)
        rank = (torch.arange(self.oracle.vocab_size, device=true.device) - true[:, None] - 1) % self.oracle.vocab_size
        agrees = (intact > 0) & (depth < self._accept_lens(requests, committed))
        is_right = agrees[:, None] & (rank == self.oracle.vocab_size - 1)  # the true token ranks last among the wrong
        return torch.where(is_right, _SURE, -_STEP * rank.to(self.dtype))

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids

    def _accept_lens(self, requests: Tensor, committed: Tensor) -> Tensor | int:
        if isinstance(self.accept_len, int):
            return self.accept_len
        lens = [self.accept_len(*pair) for pair in zip(requests.tolist(), committed.tolist(), strict=True)]
        return torch.tensor(lens, dtype=torch.int64, device=requests.device)
