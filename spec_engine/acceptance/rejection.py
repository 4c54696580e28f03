"""Chain rejection sampling: a draft that was drawn from q stays with probability min(1, p / q).

Leviathan et al. 2023 and Chen et al. 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.acceptance.distribution import draw, finite_probs, node_row
from spec_engine.acceptance.walk import Acceptance, follow, last_nodes


def reject_chain(
    tokens: Tensor, probs: Tensor, draft_probs: Tensor, accept_coins: Tensor, draw_coins: Tensor
) -> Acceptance:
    """Verify a chain (K = 1): ``tokens [bs, T + 1]`` root first, ``probs [bs, T + 1, V]`` of the target.

    draft_probs [bs, T, V]: the distribution from which draft t was drawn; coins [bs, T + 1] as in `sample_tree`. A
    draft stays if coin * q < p with q in (0, 1]; at the first that does not, max(0, p - q) is drawn from, and p
    itself where all stay.
    """
    p, q = finite_probs(probs), finite_probs(draft_probs)
    num_steps, vocab = q.shape[1], p.shape[-1]
    drafts = tokens[:, 1:]
    ids = drafts.clamp(0, vocab - 1)
    p_draft, q_draft = (part.gather(2, ids[:, :, None]).squeeze(2) for part in (p[:, :-1], q))
    stays = (ids == drafts) & (q_draft > 0) & (q_draft <= 1) & (accept_coins[:, :num_steps] * q_draft < p_draft)
    lens = 1 + stays.long().cumprod(1).sum(1)
    levels = torch.arange(num_steps + 1, device=tokens.device)
    nodes = torch.where(levels < lens[:, None], levels, 0)
    rejected = last_nodes(nodes, lens)
    q = torch.cat((q, torch.zeros_like(p[:, :1])), 1)  # behind the whole chain nothing was drafted
    rest = residual(node_row(p, rejected), node_row(q, rejected))
    return follow(tokens, nodes, lens, draw(rest, draw_coins.gather(1, rejected).squeeze(1)))


def residual(target: Tensor, drafted: Tensor) -> Tensor:
    """``[bs, V]``: what of the target the draft does not cover; all of it where nothing is left."""
    left = (target - drafted).clamp_min(0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target)
