"""SGLang's recurrent states: one a request in its `MambaPool`, and copies that its prefix cache keeps.

A forward clears entries and copies those of the prefix cache when it begins; behind that it goes on from those of its
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.states import NOT_WATCHED, Left, WatchedStates
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.sglang.compatibility import NEEDED_OF, STATES, STATES_OF_DRAFTS
from kvcanary.errors import PlanError
from kvcanary.pools.state_views import StateView

RUN_INIT = "_maybe_execute_deferred_mamba_cow_and_clear"  # of a model runner: clears and copies as a forward begins
COMMIT = "update_mamba_state_after_mtp_verify"  # of its attention backend: behind a verify
SIDE_STATES = ("mamba_ckpt_pool", "mamba_v2p_table")  # of a table of rows: states lie in other types, or elsewhere
REPLAYED = "enable_linear_replayssm_spec"  # of a pool: accepted tokens are kept, and absorbed several at a time


def views_of(pool: Any, drafts: bool) -> list[StateView]:
    """Where the states of a `MambaPool` lie: its matrices, if it has any, and its windows of convolutions, which are
    looked at apart where a server drafts. PlanError where they are no dense rows of whole words.
    """
    cache = pool.mamba_cache
    windows = {f"conv {number}": list(tensor.unbind(0)) for number, tensor in enumerate(cache.conv)}
    matrices = {"temporal": list(cache.temporal.unbind(0))} if cache.temporal.numel() else {}
    if drafts and matrices:
        return [StateView("states", matrices), StateView("windows", windows)]
    return [StateView("states", windows | matrices)]


class Nodes(NamedTuple):
    """States that a verify leaves behind the nodes of its trees: entry n * steps + k is that of row n behind node k."""

    view: StateView
    steps: int


def nodes_of(pool: Any, like: StateView) -> Nodes | None:
    """Where these lie; None where they are not as large as the states of rows."""
    states = getattr(pool.mamba_cache, "intermediate_ssm", None)
    if states is None or not states.is_contiguous():
        return None
    try:
        view = StateView("nodes", {"temporal": list(states.flatten(1, 2).unbind(0))})
    except PlanError:
        return None
    same = view.slices.words_per_row == like.slices.words_per_row and view.num_slices == like.num_slices
    return Nodes(view, states.shape[2]) if same else None


def not_followed(rows: Any, backend: Any, drafts: bool) -> str | None:
    """Why states of these rows, which this attention backend takes, are not watched; None: they are."""
    gone = missing((*NEEDED_OF[STATES], *(NEEDED_OF[STATES_OF_DRAFTS] if drafts else ())))
    why = "; ".join(gone) or _unlike(rows, backend)
    return f"{NOT_WATCHED}{why}" if why else None


def _unlike(rows: Any, backend: Any) -> str:
    """What of these states is not as it is followed; empty: nothing is."""
    if any(getattr(rows, name, None) is not None for name in SIDE_STATES):
        return "they lie in other types, or under other numbers, in its prefix cache"
    if getattr(rows.mamba_pool, REPLAYED, False) or _is_seeded(backend):
        return "kernels of this server go on from what lies beside them, and put it into them later or not at all"
    try:
        views_of(rows.mamba_pool, False)
    except PlanError as error:
        return str(error)
    return ""


def _is_seeded(backend: Any) -> bool:
    """Kernels of a server that drafts go on from the states of accepted nodes where a verify has left them."""
    return getattr(getattr(backend, "linear_attn_backend", None), "accept_lens_pool", None) is not None


class RowStates:
    """The states of the target's rows, of which each has one; and those that are left for the prefix cache.

    With the strategy `extra_buffer` a forward leaves one more of a row: of a prompt at the end of a chunk, later after
    every so many tokens. When a tree was verified, `COMMIT` puts the state behind its last accepted node in the place
    of the row's, which until then is as it was; but windows are written over.
    """

    def __init__(self, canary: PagedCanary, table: Any, drafts: bool) -> None:
        """table: SGLang's `HybridReqToTokenPool`"""
        self._table = table
        self._is_tracked = bool(getattr(table, "enable_mamba_extra_buffer", False))
        parts, views = 1 + self._is_tracked, views_of(table.mamba_pool, drafts)
        self._all = [WatchedStates(canary, view, n, parts, counted=n == 0) for n, view in enumerate(views)]
        zeros = (torch.zeros(canary.num_rows, parts, dtype=torch.int64, device=views[0].device) for _ in range(2))
        self._left = Left(*zeros)
        self._nodes = nodes_of(table.mamba_pool, views[0]) if drafts else None
        #: Rows of a verify whose acceptance is not known yet, [n], and the names of their requests.
        self._verified: tuple[Tensor, Sequence[str]] | None = None
        self._committed: Sequence[Tensor | None] = ()  # as COMMIT was given it

    # lifetimes: told at once

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        for own in self._all:
            own.forget()

    def copied(self, method: Any, src_indices: Tensor, dst_indices: Tensor) -> None:
        method(src_indices, dst_indices)
        for own in self._all:
            own.copied(src_indices, dst_indices)

    def cleared(self, method: Any, indices: Tensor) -> None:
        method(indices)
        for own in self._all:
            own.cleared(indices)

    def granted(self, method: Any, need_size: int) -> Any:
        entries = method(need_size)
        for own in self._all if entries is not None else ():
            own.granted(entries)
        return entries

    def freed(self, method: Any, free_index: Tensor) -> None:
        for own in self._all:
            own.freed(free_index)
        method(free_index)

    # forwards

    def begin(self, forward: Forward) -> None:
        """A forward was read."""
        for own in self._all:
            own.begin(forward)

    def initialised(self, method: Any, forward_batch: Any) -> None:
        """It has cleared and copied states; one that was not read is that of trees."""
        method(forward_batch)
        forward = self._all[0].forward
        if forward is None:
            if self._verified is not None:
                rows, names = self._verified
                self._all[-1].kept(entries_of(self._table, rows), names)
            return
        n = len(forward.numbers)
        after, tracked = forward.starts[: n + 1].diff(), None
        if self._is_tracked and forward_batch.mamba_track_mask is not None:
            chunks = forward_batch.mamba_track_aligned_lens()
            behind = after if chunks is None else chunks[:n]
            behind = torch.where(forward_batch.mamba_track_mask[:n] & (behind <= after), behind, -1)
            tracked = behind, forward_batch.mamba_track_indices[:n]
        self._take(after, tracked)

    def left(self) -> None:
        """The forward has run."""
        for own in self._all:
            own.left()

    def verifying(self, rows: Tensor, names: Sequence[str]) -> None:
        """Trees of these rows [n] and requests are verified next."""
        self._verified = rows, names

    def committed(
        self, method: Any, last_correct_step_indices: Tensor, mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """States of nodes, [n] of each tree, are put in the places of rows, and others in those of the prefix cache."""
        told = last_correct_step_indices, mamba_track_indices, mamba_steps_to_track
        if self._verified is None:
            return method(*told, *args, **kwargs)
        self._committed, (rows, names) = told, self._verified
        entries = entries_of(self._table, rows)
        for own in self._all[:-1]:
            own.kept(entries, names)
        result = method(*told, *args, **kwargs)
        for own in self._all:
            own.renewed(entries)
        for steps, into in ((last_correct_step_indices, entries), (mamba_steps_to_track, mamba_track_indices)):
            if self._nodes is not None and steps is not None and into is not None:
                first = torch.arange(len(steps), device=steps.device) * self._nodes.steps
                is_node = (steps >= 0) & (steps < self._nodes.steps)
                self._all[0].brought(self._nodes.view, first + steps, into, is_node, names)
        return result

    def accepted(self, path: Tensor) -> None:
        """The forward that was read is that of accepted nodes; path: [n, most], the number of each in its tree, -1 for
        none.
        """
        for own in self._all[1:] if not self._committed else ():  # states lag behind, as the next verify will tell
            own.lost(entries_of(self._table, own.rows))  # windows were written over
        step, into, other = self._committed or (path.new_full((len(path),), -2), None, None)
        self._verified, self._committed = None, ()
        self._take(_places(path, step), None if into is None else (_places(path, other), into))

    def prepare(self, forward: Forward) -> None:
        """Compile and capture what forwards of every size launch; `forward`: an empty one, behind
        `PagedCanary.prepare`.
        """
        for own in (*self._all, *self._all):  # as they are, captured
            own.prepare(forward, left=self._left)
        for own in self._all:
            own.forget()

    def _take(self, after: Tensor, tracked: tuple[Tensor, Tensor] | None) -> None:
        """after: [n] new tokens of each row behind which its state is left;  tracked: the same, and in which entries"""
        n, table, inside = len(after), self._table, self._all[0].inside
        entries = entries_of(table, self._all[0].rows)
        self._left.entries[:n, 0], self._left.after[:n, 0] = inside(entries), after
        if self._is_tracked and tracked is None:
            self._left.after[:n, 1] = -1
        elif tracked is not None:
            self._left.after[:n, 1] = tracked[0]
            self._left.entries[:n, 1] = inside(table.translate_mamba_indices(tracked[1]))
        for own in self._all:
            own.taken_from(entries, self._left)


def _places(path: Tensor, steps: Any) -> Tensor:
    """[n] behind how many nodes of a path [n, most] that of this number [n] is; -1: it is not on the path."""
    is_it = path == steps[:, None]
    return torch.where(is_it.any(1), is_it.to(torch.int64).argmax(1) + 1, -1)


def follow(scheduler: Any, own: Any, replace: Callable[..., None]) -> None:
    """Hear of what happens to the states of this scheduler, if `own`, the target's runner, watches them."""
    rows, states = own.rows, own.states
    if states is None:
        return
    hooks = [
        (own.runner, RUN_INIT, states.initialised),
        (rows.mamba_pool, "copy_from", states.copied),
        (rows.mamba_pool, "clear_slots", states.cleared),
        (rows.mamba_allocator, "alloc", states.granted),
        (rows.mamba_allocator, "free", states.freed),
    ]
    if scheduler.draft_worker is not None:
        hooks.append((own.runner.attn_backend, COMMIT, states.committed))
    for owner, name, hook in hooks:
        replace(owner, name, hook, own.guard)


def entries_of(table: Any, rows: Tensor) -> Tensor:
    """[n] where the states of rows [n] of SGLang's `HybridReqToTokenPool` lie."""
    return table.translate_mamba_indices(table.get_mamba_indices(rows))
