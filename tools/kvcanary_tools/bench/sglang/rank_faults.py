"""What goes wrong in one of several ranks of a real SGLang, which its others do not see; as in faults.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcanary_tools.bench.sglang.faults import Touched, around
from kvcanary_tools.bench.sglang.host import VOCAB


def another_token(host: Any) -> Iterator[Touched]:
    """It draws the token behind the one that all others draw, for the first request of a step."""

    def sample(method: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = method(*args, **kwargs)
        tokens[0] = (tokens[0] + 1) % VOCAB
        return tokens

    with around(host.scheduler.tp_worker.model_runner, "sample", sample):
        yield {"request": host.scheduler.running_batch.reqs[0].rid}


def fewer_slots(host: Any) -> Iterator[Touched]:
    """It has given away a page that nobody asked for."""
    allocator = host.scheduler.token_to_kv_pool_allocator
    slots = allocator.alloc(allocator.page_size)
    yield {"slots": len(slots)}
    allocator.free(slots)


def forgotten_prefixes(host: Any) -> Iterator[Touched]:
    """It has evicted all that its prefix cache may."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    yield {"slots": host.scheduler.tree_cache.evict(EvictParams(num_tokens=1 << 20)).num_tokens_evicted}


def other_weight(host: Any) -> Iterator[Touched]:
    """One bit of the norm before its last layer's attention is another: it computes other K and V."""
    import torch

    named = host.scheduler.tp_worker.model_runner.model.named_parameters()
    name, weight = [own for own in named if own[0].endswith("input_layernorm.weight")][-1]
    words = weight.data.view(torch.int32)
    words[0] ^= 1 << 22  # the first bit of the mantissa
    yield {"layer": int(name.split(".layers.")[1].split(".")[0])}
    words[0] ^= 1 << 22


RANK_FAULTS = {own.__name__: own for own in (another_token, fewer_slots, forgotten_prefixes, other_weight)}
