"""What ends the life of entries in SGLang without a free: flush, sleep and wake, and other weights.

SGLang holds bound methods of its scheduler in other objects, so that what is replaced is what those call in the end:
the allocator is cleared by every flush, memory is paused before the flush of a sleep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

KV_CACHE = "kv_cache"  # what SGLang calls the memory of pools that it pauses

Replace = Callable[[Any, str, Callable[..., Any]], None]
Tell = Callable[..., None]


def follow(scheduler: Any, replace: Replace, tell: Tell) -> None:
    """tell: lets each pool hear of something by its method of that name, `flush`, `forget` or `reweighted`"""
    for owner, name, hook in (
        (scheduler.token_to_kv_pool_allocator, "clear", _clear),
        (scheduler.weight_updater.memory_saver_adapter, "pause", _pause),
        (scheduler, "record_weight_version_change", _reweighted),
    ):
        replace(owner, name, functools.partial(hook, tell))


def _clear(tell: Tell, method: Any) -> Any:
    """All slots are free; nobody reads what lies there again."""
    tell("flush")
    result = method()
    tell("forget")
    return result


def _pause(tell: Tell, method: Any, tag: str) -> Any:
    """Pools lose their memory, if that is what is paused: what waits for a read is read now, or never."""
    if tag == KV_CACHE:
        tell("flush")
        tell("forget")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return method(tag)


def _reweighted(tell: Tell, method: Any, new_version: Any) -> Any:
    """The model has other weights; what lies in the prefix cache is of those before, unless it is flushed."""
    tell("reweighted", new_version)
    return method(new_version)
