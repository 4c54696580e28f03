"""Log-probabilities of the tokens that leave, and of the likeliest beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_engine.acceptance.distribution import finite_logits
from spec_engine.acceptance.walk import Acceptance


@dataclass(frozen=True)
class TokenLogProb:
    """One emitted token: its log-probability, and the likeliest tokens at its place as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Of the T + 1 places of a step; what lies beyond ``Acceptance.lens`` is padding.

    token_ids: [bs, T + 1] int64; chosen: [bs, T + 1] float64; top_ids [bs, T + 1, n] int64 and top [bs, T + 1, n]
    float64, likeliest first.
    """

    token_ids: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def to_list(self, b: int, num_tokens: int, num_top: int) -> list[TokenLogProb]:
        """The first ``num_tokens`` places of request ``b`` with ``num_top`` of the likeliest; waits for the device."""
        rows = (part[b, :num_tokens].tolist() for part in (self.token_ids, self.chosen, self.top_ids, self.top))
        return [
            TokenLogProb(token, logprob, tuple(zip(ids[:num_top], top[:num_top], strict=True)))
            for token, logprob, ids, top in zip(*rows, strict=True)
        ]


def log_probs(logits: Tensor, accepted: Acceptance, num_top: int) -> LogProbs:
    """Log-softmax of the target's raw ``logits [bs, N, V]`` at the accepted nodes, read before anything is compacted.

    Raw: without temperature, penalties, bias and truncation, so the figures say what the model thinks, as is usual.
    ``num_top``: the most that a request of the batch asks for, 0 for the chosen tokens alone.
    """
    rows = accepted.nodes[:, :, None].expand(-1, -1, logits.shape[-1])
    logprobs = torch.log_softmax(finite_logits(logits.gather(1, rows).double()), -1)
    tokens = accepted.tokens
    top, top_ids = logprobs.topk(num_top, -1)
    return LogProbs(tokens, logprobs.gather(2, tokens[:, :, None]).squeeze(2), top_ids, top)
