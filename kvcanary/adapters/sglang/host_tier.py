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

from kvcanary.adapters.hosted.loads import Loads
from kvcanary.adapters.observed.state import Event
from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary_kernels.record.layout import signed

NAME = "the host tier"
PLAIN = ("MHATokenToKVPool", "MLATokenToKVPool")


class HostTier:
    """Loads into the pool of one runner.

    controller: SGLang's, of the cache;  on_stream: gives a context in which launches are on the stream of forwards
    """

    def __init__(self, own: WatchedRunner, controller: Any, on_stream: Callable[[], Any]) -> None:
        self._own, self._controller, self._on_stream = own, controller, on_stream
        self._loads = Loads(own.canary, NAME)
        self._slots: list[Tensor] = []  # that are loaded into
        self._readers: list[tuple[int, str, int]] = []  # rows that may begin with them, by number, request and entries
        self._landing: Tensor | None = None  # those that the forward on its way reads
        self._waited = -1  # the last layer of them that it waited for
        own.canary.poison = own.owners.on_freed = own.owners.on_granted = None  # a load may land before it is filled
        own.canary.fed = own.canary.fed - {"P1"} | {"O1"}

    def queued(self, slots: Tensor) -> None:
        """Entries will be loaded into these slots, which a request and the prefix cache share from now on."""
        slots = slots.to(torch.int64)
        self._own.owners.loaded(slots)
        self._slots.append(slots)

    def starts(self) -> None:
        """Loads begin: what waits to be read in slots that they overwrite is read now."""
        with self._on_stream():
            self._own.flush()

    def admitted(self, new: list[Any]) -> None:
        """New rows, as a canary takes them; where loads are on their way, they may begin with what is loaded."""
        if self._slots:
            self._loads.expect(new)
            self._readers += [(number, request, length) for number, request, _, length, _ in new]

    def arrive(self, lines: list[Tensor]) -> None:
        """A forward is next: let loads land, and judge and record what they brought."""
        if not self._slots:
            return
        slots, self._slots = torch.cat(self._slots), []
        counter = self._controller.layer_done_counter
        for layer in range(int(counter.num_layers)):
            counter.events[counter.producer_index].wait(layer)
        self._own.canary.groups[0].records.index_fill_(0, slots, 0)
        self._loads.arrived(lambda request, number: [line[number] for line in lines])
        self._landing, self._waited = slots, -1

    def waits(self, layer: int) -> None:
        """The forward waits until this layer of a load has landed, and all before it."""
        if self._controller.layer_done_counter.consumer_index >= 0:
            self._waited = max(self._waited, layer)

    def ran(self) -> None:
        """A forward has read what was loaded: layers that it did not wait for are O1."""
        slots, self._landing = self._landing, None
        readers, self._readers = self._readers, []
        count = int(self._controller.layer_done_counter.num_layers)
        if slots is None or self._waited >= count - 1:
            return
        canary = self._own.canary
        group, missed = canary.groups[0], range(self._waited + 1, count)
        bits = [signed(sum(1 << layer - 64 * half for layer in missed if layer // 64 == half)) for half in (0, 1)]
        mismatch = torch.tensor([bits], device=slots.device).expand(len(slots), 2)
        table = self._own.rows.req_to_token
        names = {slot: name for number, name, length in readers for slot in table[number, :length].tolist()}
        what = f"a forward did not wait for what {NAME} loads"
        canary.memory.total += len(slots)
        told = Event("O1", what, group.layers[0], slots, mismatch, group, names, by_record=False, site="load")
        canary.steps[-1].events.append(told)

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
    replace(controller.layer_done_counter, "wait_until", functools.partial(_wait_until, own), own.guard)


def _load(own: WatchedRunner, method: Any, *args: Any, **kwargs: Any) -> Any:
    slots = method(*args, **kwargs)
    if slots is not None and own.tier is not None and len(slots):
        own.tier.queued(slots)
    return slots


def _start_loading(own: WatchedRunner, method: Any) -> Any:
    if own.tier is not None:
        own.tier.starts()
    return method()


def _wait_until(own: WatchedRunner, method: Any, threshold: int) -> None:
    if own.tier is not None:
        own.tier.waits(threshold)
    method(threshold)
