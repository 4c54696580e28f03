"""Penalties and logit bias, node by node of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_engine.acceptance.settings import SamplingBatch
from spec_engine.acceptance.walk import Acceptance


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Which tokens a request has seen.

    prompt: [bs, V] bool, whether the token stands in the prompt; output: [bs, V] int64, how often it stands in the
    output, the bonus token (the root of the next tree) included.
    """

    prompt: Tensor
    output: Tensor

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], vocab_size: int, device: torch.device
    ) -> TokenCounts:
        prompt = torch.stack([_count(ids, vocab_size) for ids in prompts]) > 0
        return cls(prompt.to(device), torch.stack([_count(ids, vocab_size) for ids in outputs]).to(device))

    def add(self, accepted: Acceptance) -> None:
        """Count what a step emitted, in place."""
        self.output.scatter_add_(1, accepted.tokens, accepted.is_live.long())


class RowCounts:
    """`TokenCounts` of running requests by request-table row, beside the device: a host that lags has no part in them.

    Nothing is allocated before the first request with a penalty.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._all: TokenCounts | None = None

    def begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count anew what a request in ``row`` has."""
        own = TokenCounts.of([prompt], [output], self._vocab_size, self._device)
        self.put(torch.tensor([row], device=self._device), own)

    def of(self, rows: Tensor) -> TokenCounts:
        """A copy of the counts in ``rows [bs]``."""
        counts = self._counts
        return TokenCounts(counts.prompt[rows], counts.output[rows])

    def put(self, rows: Tensor, counts: TokenCounts) -> None:
        self._counts.prompt[rows] = counts.prompt
        self._counts.output[rows] = counts.output

    @property
    def _counts(self) -> TokenCounts:
        if self._all is None:
            shape = (self._num_rows, self._vocab_size)
            prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._all = TokenCounts(prompt, torch.zeros(shape, dtype=torch.int64, device=self._device))
        return self._all


def adjust_logits(
    logits: Tensor,
    settings: SamplingBatch,
    counts: TokenCounts | None = None,
    tokens: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Repetition, frequency and presence penalty, then bias: ``[bs, N, V] -> [bs, N, V]``.

    counts: needed where ``settings.penalises``. tokens [bs, N] int64, mask [bs, N, N] bool (node n sees itself and its
    ancestors): the tree; None for rows without drafts. At node n the output ends with the drafts on its path, so a
    node is penalised as plain decoding would be that had come there.
    """
    if settings.penalises:
        if counts is None:
            raise ValueError("counts must be given where a request has a penalty, got None: pass TokenCounts")
        logits = _penalise(logits, settings, counts, _path_counts(tokens, mask, logits))
    return logits if settings.bias is None else logits + settings.bias.to(logits.dtype)


def _penalise(logits: Tensor, settings: SamplingBatch, counts: TokenCounts, drafted: Tensor | int) -> Tensor:
    output = counts.output[:, None] + drafted
    repetition, frequency, presence = (
        penalty.to(logits.dtype)
        for penalty in (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts.prompt[:, None] | (output > 0), repeated, logits)
    return logits - frequency * output - presence * (output > 0)


def _path_counts(tokens: Tensor | None, mask: Tensor | None, logits: Tensor) -> Tensor | int:
    """How often each token was drafted on the way to a node, itself included: [bs, N, V]; the root is no draft."""
    if tokens is None or mask is None:
        return 0
    drafted = mask.long()
    drafted[..., 0] = 0
    ids = tokens.clamp(0, logits.shape[-1] - 1)[:, None, :].expand_as(drafted)
    return torch.zeros(logits.shape, dtype=torch.int64, device=logits.device).scatter_add_(2, ids, drafted)


def _count(ids: Sequence[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
