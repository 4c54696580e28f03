"""SGLang's recurrent states: one a request in its `MambaPool`, and copies that its prefix cache keeps.

A forward clears entries and copies those of the prefix cache when it begins; behind that it goes on from those of its
rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvcanary.adapters.hosted.states import NOT_WATCHED, WatchedStates
from kvcanary.errors import PlanError
from kvcanary.pools.state_views import StateView

RUN_INIT = "_maybe_execute_deferred_mamba_cow_and_clear"  # of a model runner: clears and copies as a forward begins
SIDE_STATES = ("mamba_ckpt_pool", "mamba_v2p_table")  # of a table of rows: states lie in other types, or elsewhere


def view_of(pool: Any) -> StateView:
    """Where the states of a `MambaPool` lie: its convolution windows, and its matrices where it has any. PlanError
    where they are no dense rows of whole words.
    """
    cache = pool.mamba_cache
    parts = {f"conv {number}": list(tensor.unbind(0)) for number, tensor in enumerate(cache.conv)}
    if cache.temporal.numel():
        parts["temporal"] = list(cache.temporal.unbind(0))
    return StateView("states", parts)


def not_followed(rows: Any, drafts: bool) -> str | None:
    """Why states of these rows are not watched; None: they are, or there are none."""
    if getattr(rows, "mamba_pool", None) is None:
        return None
    why = None
    if drafts:
        why = "a server that drafts keeps several of each request"
    elif any(getattr(rows, name, None) is not None for name in SIDE_STATES):
        why = "they lie in other types, or under other numbers, in its prefix cache"
    elif getattr(rows, "enable_mamba_extra_buffer", False):
        why = "with --mamba-scheduler-strategy extra_buffer kernels leave further ones within a forward"
    else:
        try:
            view_of(rows.mamba_pool)
        except PlanError as error:
            why = str(error)
    return why and f"{NOT_WATCHED}{why}"


def follow(scheduler: Any, own: Any, replace: Callable[..., None]) -> None:
    """Hear of what happens to the states of this scheduler, if `own`, the target's runner, watches them."""
    rows, states = own.rows, own.states
    if states is None:
        return
    for owner, name, hook in (
        (own.runner, RUN_INIT, functools.partial(_initialised, rows)),
        (rows.mamba_pool, "copy_from", _copied),
        (rows.mamba_pool, "clear_slots", _cleared),
        (rows.mamba_allocator, "alloc", _granted),
        (rows.mamba_allocator, "free", _freed),
    ):
        replace(owner, name, functools.partial(hook, states), own.guard)


def entries_of(table: Any, rows: Tensor) -> Tensor:
    """[n] where the states of rows [n] of SGLang's `HybridReqToTokenPool` lie."""
    return table.translate_mamba_indices(table.get_mamba_indices(rows))


def _initialised(table: Any, states: WatchedStates, method: Any, forward_batch: Any) -> None:
    method(forward_batch)
    if states.forward is not None:
        states.taken_from(entries_of(table, states.rows))


def _copied(states: WatchedStates, method: Any, src_indices: Tensor, dst_indices: Tensor) -> None:
    method(src_indices, dst_indices)
    states.copied(src_indices, dst_indices)


def _cleared(states: WatchedStates, method: Any, indices: Tensor) -> None:
    method(indices)
    states.cleared(indices)


def _granted(states: WatchedStates, method: Any, need_size: int) -> Any:
    entries = method(need_size)
    if entries is not None:
        states.granted(entries)
    return entries


def _freed(states: WatchedStates, method: Any, free_index: Tensor) -> None:
    states.freed(free_index)
    method(free_index)
