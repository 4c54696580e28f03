"""The target's distribution after each node (temperature, top-k, top-p, min-p), and the tokens drawn from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_engine.acceptance.coins import DRAW, coins
from spec_engine.acceptance.settings import SamplingBatch


def choose(logits: Tensor, settings: SamplingBatch, positions: Tensor) -> Tensor:
    """The token that follows each node: ``logits [bs, nodes, vocab], positions [bs, nodes] -> [bs, nodes] int64``.

    ``positions`` are those of the tokens to be drawn; penalties and bias belong into the logits (`adjust_logits`).
    Verification compares drafts with these draws, which keeps the target's distribution exactly: every node's draw is
    one from the target, whatever was drafted.
    """
    if settings.all_greedy:
        return greedy_tokens(logits)
    return draw(target_probs(logits, settings), coins(settings.seeds, positions, DRAW))


def target_probs(logits: Tensor, settings: SamplingBatch) -> Tensor:
    """``logits [bs, N, V] -> [bs, N, V] float64``, rows that add to 1.

    In this order: temperature, then top-k, top-p and min-p, each over what the one before kept. Temperature 0 is all
    of the mass on the likeliest token. Penalties and bias belong into the logits.
    """
    logits = finite_logits(logits).double()
    temperature = settings.temperature.masked_fill(settings.temperature == 0, 1.0)
    probs = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    if settings.truncates:
        probs = _truncate(probs, settings)
    if settings.any_greedy:
        certain = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(settings.temperature == 0, certain, probs)
    return probs


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row by its `finite_logits`, the first of equals: ``[..., V] -> [...] int64``."""
    if logits.is_cuda and logits.dtype is not torch.float64:
        from kvcanary_kernels.engine.likeliest import likeliest  # an engine on a CPU loads no kernels

        rows = logits.flatten(0, -2)
        chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        likeliest(rows, chosen)
        return chosen.view(logits.shape[:-1])
    return _bounded(logits).argmax(-1)  # of a row without a finite logit the first, uniform or not


def likeliest_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many of the likeliest tokens of each row: ``[n, V]`` -> probabilities, float32, and tokens, ``[n, count]``."""
    if logits.is_cuda and logits.dtype is not torch.float64:
        from kvcanary_kernels.engine.candidates import candidates  # an engine on a CPU loads no kernels

        tokens = torch.empty(len(logits), count, dtype=torch.int64, device=logits.device)
        probs = torch.empty_like(tokens, dtype=torch.float32)
        candidates(logits, probs=probs, ids=tokens)
        return probs, tokens
    return torch.softmax(logits.float(), -1).topk(count, -1)


def draw(probs: Tensor, coins: Tensor) -> Tensor:
    """One token a row: ``probs [..., V]`` not negative, ``coins [...]`` in [0, 1) -> ``[...] int64``.

    Tokens share [0, 1) in ascending order, so logits that are equal but for rounding draw the same token. Rows need
    not add to 1. Where rounding leaves no token, or one without mass, the likeliest is drawn.
    """
    cumulative = probs.double().cumsum(-1)
    threshold = coins[..., None] * cumulative[..., -1:]
    chosen = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(probs.shape[-1] - 1)
    has_mass = probs.gather(-1, chosen) > 0  # a parallel sum on a device need not grow from token to token
    return torch.where(has_mass, chosen, probs.argmax(-1, keepdim=True)).squeeze(-1)


def node_row(probs: Tensor, node: Tensor) -> Tensor:
    """The distribution after one node of each request: ``[bs, N, V], [bs, 1] -> [bs, V]``."""
    return probs.gather(1, node[:, :, None].expand(-1, -1, probs.shape[-1])).squeeze(1)


def finite_logits(logits: Tensor) -> Tensor:
    """NaN counts as -inf, inf as the largest number; a row without one finite logit becomes uniform."""
    bounded = _bounded(logits)
    return bounded.masked_fill(bounded.amax(-1, keepdim=True) == -math.inf, 0.0)


def finite_probs(probs: Tensor) -> Tensor:
    """Probabilities that are none (NaN, infinite, negative) count as 0."""
    return torch.nan_to_num(probs, nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)


def _bounded(logits: Tensor) -> Tensor:
    return torch.nan_to_num(logits, nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)


def _truncate(probs: Tensor, settings: SamplingBatch) -> Tensor:
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = _normalised(ranked * (rank < settings.top_k))
    before = ranked.cumsum(-1) - ranked
    inside = (before < settings.top_p) | (settings.top_p == 1)
    kept = (ranked > 0) & inside & (ranked >= settings.min_p * ranked[..., :1])
    return _normalised(probs * torch.zeros_like(kept).scatter_(-1, ids, kept))


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)
