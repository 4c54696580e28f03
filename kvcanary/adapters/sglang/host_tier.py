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


class HostTier:
    """Loads into the pool of one runner.

    controller: SGLang's, of the cache;  on_stream: gives a context in which launches are on the stream of forwards
    """

    def __init__(self, own: WatchedRunner, controller: Any, on_stream: Callable[[], Any]) -> None:
        self._own, self._controller, self._on_stream = own, controller, on_stream
        self._loads = Loads(own.canary, NAME, (), bool)
        self._layers = range(int(controller.layer_done_counter.num_layers))
        self._is_coming = False

    def queued(self, slots: Tensor) -> None:
        """Entries will be loaded into these slots, which a request and the prefix cache share from now on."""
        self._own.owners.shared(slots.to(torch.int64))
        self._is_coming = True

    def starts(self) -> None:
        """Loads begin: what waits to be read in slots that they overwrite is read now."""
        with self._on_stream():
            self._own.flush()
            # what was in those slots is nobody's: see `arrive`

    def admitted(self, new: list[Any]) -> None:
        """New rows, as a canary takes them; where loads are on their way, they may begin with what is loaded."""
        if self._is_coming:
            self._loads.expect(new)

    def arrive(self, lines: list[Tensor]) -> None:
        """A forward is next: let loads land, and judge and record what they brought."""
        if self._is_coming:
            self._is_coming = False
            for layer in self._layers:
                self._controller.layer_done_counter.wait_until(layer)
            self._loads.arrived(lines)

    def wrote(self) -> None:
        """A forward has stored: its bytes have the names of their prefixes."""
        self._loads.name()

    @property
    def compared(self) -> int:
        """Entries that were loaded and whose bytes had a name."""
        return self._loads.compared


def follow(scheduler: Any, own: WatchedRunner, replace: Callable[..., None]) -> None:
    """Hear of the loads of this scheduler's cache, if it has a host tier."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    if controller is None:
        return
    own.tier = HostTier(own, controller, getattr(scheduler, "forward_stream_ctx", None) or contextlib.nullcontext)
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
