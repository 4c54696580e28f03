"""The sampling parameters of a batch as tensors, one entry a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.step.transfer import to_device

if TYPE_CHECKING:
    from spec_engine.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """What `SamplingParams` says, over requests; made anew when the batch changes.

    Floats are [bs, 1, 1] float64, to be broadcast over [bs, N, V]; top_k: [bs, 1, 1] int64, the vocabulary for all
    tokens; bias: [bs, 1, V] float64, or None where no request has one. The flags are host values: what no request
    asks for costs nothing.
    """

    seeds: tuple[int, ...]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias: Tensor | None
    any_greedy: bool
    all_greedy: bool
    truncates: bool  # some request has top-k, top-p or min-p
    penalises: bool  # some request has a penalty, so that tokens must be counted

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingBatch:
        def column(name: str) -> Tensor:
            values = [float(getattr(request, name)) for request in params]
            return to_device(values, device, torch.float64).view(-1, 1, 1)

        top_k = [min(request.top_k or vocab_size, vocab_size) for request in params]
        greedy = [request.temperature == 0 for request in params]
        return cls(
            seeds=tuple(request.seed for request in params),
            temperature=column("temperature"),
            top_k=to_device(top_k, device).view(-1, 1, 1),
            top_p=column("top_p"),
            min_p=column("min_p"),
            repetition_penalty=column("repetition_penalty"),
            presence_penalty=column("presence_penalty"),
            frequency_penalty=column("frequency_penalty"),
            bias=_bias(params, vocab_size, device),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            truncates=any(request.top_k or request.top_p < 1 or request.min_p > 0 for request in params),
            penalises=any(request.is_penalised for request in params),
        )


def _bias(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Tensor | None:
    if not any(request.logit_bias for request in params):
        return None
    bias = torch.zeros(len(params), 1, vocab_size, dtype=torch.float64)
    for b, request in enumerate(params):
        for token, value in request.logit_bias.items():
            bias[b, 0, token] = value
    return bias.to(device)
