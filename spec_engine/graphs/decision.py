"""What a captured step decides by itself: greedy acceptance, the relay's new lengths, accepted nodes to the front."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from spec_engine.acceptance.walk import Acceptance

if TYPE_CHECKING:
    from spec_engine.memory.pools.pool import KVPool
    from spec_engine.sampling import SamplingParams
    from spec_engine.step.relay import Relay


def is_decided_by_argmax(params: Iterable[SamplingParams]) -> bool:
    """Whether every request takes its likeliest token, as the logits are, and asks for nothing else."""
    return all(
        own.temperature == 0 and not own.is_penalised and not own.logit_bias and own.logprobs is None for own in params
    )


def publish(relay: Relay, rows: Tensor, lens: Tensor, accepted: Acceptance, is_decided: Tensor) -> None:
    """Committed lengths and bonus tokens of the rows that are decided; the others', padding's too, stay."""
    relay.lens[rows] = torch.where(is_decided, lens + accepted.lens, relay.lens[rows])
    relay.bonus[rows] = torch.where(is_decided, accepted.bonus, relay.bonus[rows])


class Moves(NamedTuple):
    """Slots of a move, all [size * (T + 1)]; where nothing ``moves`` both are null slots."""

    source: Tensor
    destination: Tensor
    moves: Tensor


def compact(pool: KVPool, windows: Tensor, accepted: Acceptance, is_decided: Tensor) -> Moves:
    """Bring accepted nodes to the front of their ``windows [size, N]``."""
    nodes = accepted.nodes
    places = torch.arange(nodes.shape[1], device=nodes.device).clamp_max(windows.shape[1] - 1).expand_as(nodes)
    moves = is_decided[:, None] & accepted.is_live & (nodes != places)
    source, destination = (torch.where(moves, windows.gather(1, which), 0).flatten() for which in (nodes, places))
    pool.move(source, destination)
    return Moves(source, destination, moves.flatten())
