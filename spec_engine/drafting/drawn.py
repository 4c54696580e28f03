"""Drafts that are drawn rather than the likeliest, for chain rejection sampling: what each was drawn from is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.acceptance.coins import DRAFT, coins
from spec_engine.acceptance.distribution import draw, target_probs
from spec_engine.acceptance.settings import SamplingBatch
from spec_engine.core import Batch
from spec_engine.models.loader import Draft


class DrawnDrafts:
    """Draws the drafts of chains (K = 1) with each request's temperature, top-k, top-p, min-p and seed.

    The distribution of a step's first draft, made by the forward before it, waits by request-table row.
    """

    def __init__(self, head: Draft, num_rows: int, device: torch.device) -> None:
        self._vocab_size = head.config.vocab_size
        self._target_ids = head.to_target_ids(torch.arange(head.num_draft_vocab, device=device))
        self._first = torch.zeros(num_rows, self._vocab_size + 2, dtype=torch.float64, device=device)  # as of proposals
        self._steps: list[Tensor] = []
        self.made_for: Tensor

    @property
    def probs(self) -> Tensor:
        """``[bs, T, V] float64``: what the drafts of the current chains were drawn from, over the target's tokens."""
        return torch.stack(self._steps, 1)

    def begin(self, batch: Batch) -> None:
        """New chains, whose first drafts are those that wait; ``made_for`` says for whom, as in `Proposals`."""
        first, made_for = self._first[batch.rows].split((self._vocab_size, 2), 1)
        self._steps, self.made_for = [first], made_for.long()

    def forget(self, row: int) -> None:
        """Nothing waits for who takes this row."""
        self._first[row].zero_()

    def extend(self, logits: Tensor, batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One more draft a chain: ``logits [bs, draft vocabulary]``; ``positions [bs]`` are those of the drafts.

        Returns float32 probabilities and target-vocabulary ids, both [bs, 1].
        """
        probs, ids, drawn_from = self._draw(logits, batch, positions)
        self._steps.append(drawn_from)
        return probs, ids

    def first(self, logits: Tensor, batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first draft of each request's next chain, as `extend` draws the later ones."""
        probs, ids, drawn_from = self._draw(logits, batch, positions)
        made_for = torch.stack((batch.rows, positions - 1), 1)
        self._first[batch.rows] = torch.cat((drawn_from, made_for.to(drawn_from)), 1)
        return probs, ids

    def _draw(self, logits: Tensor, batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        params = [request.params for request in batch.requests]
        settings = SamplingBatch.of(params, self._vocab_size, logits.device)
        probs = target_probs(logits[:, None], settings)
        chosen = draw(probs, coins(settings.seeds, positions[:, None], DRAFT))
        probs = probs.squeeze(1)
        drawn_from = probs.new_zeros(len(probs), self._vocab_size)
        drawn_from[:, self._target_ids] = probs
        return probs.gather(1, chosen).float(), self._target_ids[chosen], drawn_from
