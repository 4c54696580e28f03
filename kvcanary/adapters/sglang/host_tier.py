"""SGLang's host tier (hierarchical cache): entries that left the device and come back are judged when they arrive.

A load is queued while requests are admitted, starts before the forward that reads it, and lands layer by layer beside
it. Here the forward waits for all layers of a load, so that what arrived is compared before anybody reads it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary.adapters.vllm.connector import Loads

NAME = "the host tier"
PLAIN = ("MHATokenToKVPool", "MLATokenToKVPool")


class HostTier:
    """Loads into the pool of one runner.

    controller: SGLang's, of the cache;  on_stream: gives a context in which launches are on the stream of forwards
    """

    def __init__(self, own: WatchedRunner, controller: Any, on_stream: Callable[[], Any]) -> None:
        self._own, self._controller, self._on_stream = own, controller, on_stream
        self._loads = Loads(own.canary, NAME, (), bool)
        self._slots: list[Tensor] = []  # that are loaded into
        own.canary.poison = own.owners.on_freed = own.owners.on_granted = None  # a load may land before it is filled
        own.canary.fed -= {"P1"}

    def queued(self, slots: Tensor) -> None:
        """Entries will be loaded into these slots, which a request and the prefix cache share from now on."""
        slots = slots.to(torch.int64)
        self._own.owners.shared(slots)
        self._slots.append(slots)

    def starts(self) -> None:
        """Loads begin: what waits to be read in slots that they overwrite is read now."""
        with self._on_stream():
            self._own.flush()

    def admitted(self, new: list[Any]) -> None:
        """New rows, as a canary takes them; where loads are on their way, they may begin with what is loaded."""
        if self._slots:
            self._loads.expect(new)

    def arrive(self, lines: list[Tensor]) -> None:
        """A forward is next: let loads land, and judge and record what they brought."""
        if not self._slots:
            return
        slots, self._slots = torch.cat(self._slots), []
        counter = self._controller.layer_done_counter
        for layer in range(int(counter.num_layers)):
            counter.wait_until(layer)
        self._own.canary.groups[0].records.index_fill_(0, slots, 0)
        self._loads.arrived(lines)

    def wrote(self) -> None:
        """A forward has stored: its bytes have the names of their prefixes."""
        self._loads.name()

    @property
    def compared(self) -> int:
        """Entries that were loaded and whose bytes had a name."""
        return self._loads.compared


def unfollowed(scheduler: Any) -> list[str]:
    """What stands against following the host tier of this scheduler, one sentence each."""
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    if not has_tier(scheduler):
        return []
    if scheduler.draft_worker is not None:
        return ["enable_hierarchical_cache is not followed where the server drafts: its draft's entries are loaded too"]
    if type(pool).__name__ not in PLAIN:
        return [
            f"enable_hierarchical_cache is followed for pools of class {' and '.join(PLAIN)}, got {type(pool).__name__}"
        ]
    return []


def has_tier(scheduler: Any) -> bool:
    """Whether entries may come back from host memory."""
    return getattr(scheduler.tree_cache, "cache_controller", None) is not None


def follow(scheduler: Any, own: WatchedRunner, replace: Callable[..., None]) -> None:
    """Hear of the loads of this scheduler's cache, if it has a host tier."""
    if not has_tier(scheduler):
        return
    controller = scheduler.tree_cache.cache_controller
    stream = scheduler.forward_stream_ctx
    own.tier = HostTier(own, controller, contextlib.nullcontext if stream is None else lambda: stream)
    replace(controller, "load", functools.partial(_load, own), own.guard)
    replace(controller, "start_loading", functools.partial(_start_loading, own), own.guard)


def _load(own: WatchedRunner, method: Any, *args: Any, **kwargs: Any) -> Any:
    slots = method(*args, **kwargs)
    if slots is not None and own.tier is not None and len(slots):
        own.tier.queued(slots)
    return slots


def _start_loading(own: WatchedRunner, method: Any) -> Any:
    if own.tier is not None:
        own.tier.starts()
    return method()
