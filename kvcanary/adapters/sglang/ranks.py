"""Ranks of one SGLang server: each schedules and samples for itself, and all of them must do the same (X1)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.cells import Shard
from kvcanary.adapters.hosted.sampled import GIVEN, levels_of_tokens, new_group
from kvcanary.adapters.sglang.compatibility import NEEDED_OF, RANKS
from kvcanary.config import CanaryConfig
from kvcanary.ranks.levels import Levels, level

PLANNED, STARTED = GIVEN + 1, GIVEN + 2  # other phases of a step; the last one is none's


def group_of(scheduler: Any, config: CanaryConfig) -> Any:
    """A new group of the ranks that run the same batches as this one; None where there is one, or none is compared."""
    if missing(NEEDED_OF[RANKS]) or len(scheduler.attn_tp_group.ranks) == 1:
        return None
    return new_group(scheduler.attn_tp_group.ranks, config)


def shard_of(scheduler: Any) -> Shard | None:
    """What this rank has of each layer; None: all, or nothing is compared."""
    if missing(NEEDED_OF[RANKS]) or len(scheduler.attn_tp_group.ranks) == 1:
        return None
    own = scheduler.attn_tp_group
    return Shard(own.rank_in_group, len(own.ranks), scheduler.model_config.get_total_num_kv_heads())


def started(rows: Tensor, allocator: Any) -> Levels:
    """What a rank was started with: rows and their length, slots and their pages."""
    return {"shape": level({"": [*rows.shape, int(allocator.size), int(allocator.page_size)]})}


def planned(batch: Any, allocator: Any) -> Levels:
    """What is about to run: entries that each request has room for, and those that the prefix cache gave it; slots
    that nobody has.
    """
    cached = batch.prefix_lens if batch.forward_mode.is_extend() else [0] * len(batch.reqs)
    rows = {
        request.rid: [int(request.kv.kv_allocated_len), int(length)]
        for request, length in zip(batch.reqs, cached, strict=True)
    }
    return {"rows": level(rows), "pages": level({"": [int(allocator.available_size())]})}


def given(batch: Any, result: Any) -> Levels:
    """The tokens of a step, and how many; of a round with drafts those that were accepted, of embeddings none."""
    told, accepted = getattr(result, "next_token_ids", None), getattr(result, "accept_lens", None)
    names = [] if told is None else [request.rid for request in batch.reqs]
    tokens = [] if told is None else _listed(told)
    lengths = [1] * len(names) if accepted is None else _listed(accepted)
    width = len(tokens) // max(1, len(names))  # of a row, which has no tokens behind those
    rows = [tokens[width * row :][:length] for row, length in enumerate(lengths)]
    counts = {name: [len(row)] for name, row in zip(names, rows, strict=True)}
    return {"lengths": level(counts), **levels_of_tokens(names, rows)}


def _listed(values: Tensor | list[int]) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
