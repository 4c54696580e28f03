"""Target-only sampling over a draft tree: the output follows the target's distribution, and likely drafts stay."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.acceptance.distribution import draw, finite_probs, node_row
from spec_engine.acceptance.thresholds import Thresholds
from spec_engine.acceptance.walk import Acceptance, descend, follow, last_nodes, sound_parents

EXACT = Thresholds()


def sample_tree(
    tokens: Tensor,
    parents: Tensor,
    probs: Tensor,
    accept_coins: Tensor,
    draw_coins: Tensor,
    thresholds: Thresholds = EXACT,
) -> Acceptance:
    """Walk each tree by its coins: ``tokens, parents [bs, N] int64``, ``probs [bs, N, V]``, both coins [bs, T + 1].

    At each node one coin in [0, 1) is laid beside the probabilities of its children, one after the other: the child
    within whose share it falls is accepted. Beyond all of them the residual, the target without the tokens that were
    tried, is drawn from with a coin of its own. So child x is taken with probability p(x), any other token too.
    Coin column d decides the token at depth d + 1, at position S + d + 1 behind a root at S.
    """
    probs = finite_probs(probs)
    ids = tokens.clamp(0, probs.shape[-1] - 1)
    parents = torch.where(ids == tokens, sound_parents(tokens, parents), -1)

    def accepts(depth: int, node: Tensor, children: Tensor) -> Tensor:
        own = node_row(probs, node).gather(1, ids) * children
        share = own.cumsum(1) / max(thresholds.acc, 1e-9)
        return (own > 0) & ((accept_coins[:, depth, None] < share) | (own >= thresholds.single))

    num_steps = accept_coins.shape[1] - 1
    nodes, lens = descend(parents, num_steps, accepts)
    last = last_nodes(nodes, lens)
    tried = (parents == last) & (lens <= num_steps)[:, None]
    bonus = draw(residual(node_row(probs, last), ids, tried), draw_coins.gather(1, lens[:, None] - 1).squeeze(1))
    return follow(tokens, nodes, lens, bonus)


def residual(probs: Tensor, ids: Tensor, tried: Tensor) -> Tensor:
    """``probs [bs, V]`` without the tokens ``ids [bs, N]`` where ``tried [bs, N]``; all of it where nothing is left."""
    was_tried = torch.zeros_like(probs).scatter_add_(1, ids, tried.to(probs.dtype)) > 0
    left = probs.masked_fill(was_tried, 0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, probs)
