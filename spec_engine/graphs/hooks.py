"""The two doors into a pool for captured forwards, with the canary's graph-safe hooks at both."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary import site_name
from kvcanary.faults import seam
from kvcanary.invariants import check_hooked
from kvcanary_kernels.engine.attention import attention_workspace, paged_attention, paged_attention_torch
from kvcanary_kernels.judge.forward import ForwardPlan
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward
from spec_engine.memory.pools.pool import KVPool
from spec_engine.models.decoder import KVAccess

if TYPE_CHECKING:
    from kvcanary import CanaryManager
    from kvcanary.captured import AcceptedTokens, CapturedAcceptance, CapturedMove, CapturedSubstep, CapturedTruth

TRUTH = (
    "uids",
    "prefix_lens",
    "truths",
    "roots",
)  # sections of a feed that a watched forward needs, by row, one behind the other as in `RowTruth`
UNCOLLECTED = "uncollected"  # one more, where the host may launch a step before it has collected the last one
STEP = "step"  # a section of one number, the running step's, for all rows of a feed


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a program's forwards, and what the host says of them.

    pool: that they lie in;  name: of their sections in the feed;  live: the section that says how many are no padding
    width: rows a request;  truth: where they go on by what the host has not collected; None: the host knows them
    """

    feed: Feed
    pool: str
    name: str
    live: str
    width: int
    truth: CapturedTruth | None

    def section(self, part: str) -> Tensor:
        return self.feed[f"{self.name}_{part}"]

    @cached_property
    def _places(self) -> list[array[int]]:
        """By turn of the feed, where the canary tells what it knows of the rows live next (native/layout.py)."""
        feed, first = self.feed, f"{self.name}_{TRUTH[0]}"
        shape = len(feed[first]), len(TRUTH) + (self.truth is not None), self.width
        return [array("q", (at + feed.offset(STEP), at + feed.offset(first), *shape)) for at in feed.addresses]

    @cached_property
    def places(self) -> list[int]:
        """Their addresses."""
        return [place.buffer_info()[0] for place in self._places]

    def advance(self) -> None:
        """Within a program, before forwards of these rows are judged: opened, or postponed ones caught up with."""
        if self.truth is not None:
            self.truth.advance()


@dataclass(frozen=True, eq=False)
class Hooked:
    """A static forward of these rows with its hooks; workspace: of its attention on a GPU.

    out: [n, heads, head_dim], what a layer's attention gives; padding that no row writes keeps what lies there, finite.
    """

    forward: StaticForward
    rows: Rows
    out: Tensor
    workspace: Tensor | None
    substep: CapturedSubstep | None

    def check_hooks(self) -> None:
        """MissingHooksError where it has none; asked where there is a canary."""
        forward = self.forward
        name, size = site_name(forward.kind, forward.index), forward.num_rows // forward.width
        check_hooked(name, self.rows.pool, size, self.substep is not None)


class Together:
    """Hooked forwards that run one behind the other, in parts of the same rows, and how the canary is told of it.

    acceptance: of the step before, what it accepts is what the last part writes; None: the host knows that
    """

    def __init__(
        self,
        canary: CanaryManager | None,
        parts: Sequence[Sequence[Hooked]],
        acceptance: CapturedAcceptance | None = None,
    ) -> None:
        self._canary = canary
        if canary is not None:
            for one in chain.from_iterable(parts):
                one.check_hooks()
            substeps = [[one.substep for one in part if one.substep is not None] for part in parts]
            self._launch_group = canary.registry.launch_group(*substeps, acceptance=acceptance)
            self._rows = [part[0].rows for part in parts]
            self._where = array("q", bytes(8 * len(parts)))
            self._where_at = self._where.buffer_info()[0]

    def launch(self, requests: Sequence[str], written: Sequence[int], reads: Sequence[int]) -> None:
        """They run next: tell the canary, and each feed what the canary knows of its rows.

        written: by part and request, entries of each row; none where the last part's are what was accepted
        reads: by forward, entries that rows read
        """
        if self._canary is not None:
            where = self._where
            for part, rows in enumerate(self._rows):
                where[part] = rows.places[rows.feed.turn]
            self._canary.launch_group(self._launch_group, requests, written, reads, self._where_at)


class StaticForwards:
    """Opens static forwards over one pool; ``num_heads`` are the query heads of the model that owns it.

    accepted_tokens: what steps accept, by row of the request table, where a host may be behind that; else None
    """

    def __init__(
        self, pool: KVPool, num_heads: int, canary: CanaryManager | None, accepted_tokens: AcceptedTokens | None = None
    ) -> None:
        self.pool, self.num_heads, self.canary, self.accepted_tokens = pool, num_heads, canary, accepted_tokens

    def sections(self, name: str, rows: int) -> dict[str, int]:
        """What a feed must hold for forwards of so many rows."""
        if self.canary is None:
            return {}
        parts = TRUTH if self.accepted_tokens is None else (*TRUTH, UNCOLLECTED)
        return {f"{name}_{part}": rows for part in parts} | {STEP: 1}

    def rows(self, feed: Feed, name: str, live: str, width: int = 1) -> Rows:
        """Rows of the requests in the feed's ``rows``, with sections ``name``."""
        rows = Rows(feed, self.pool.name, name, live, width, None)
        if self.canary is None or self.accepted_tokens is None:
            return rows
        known = (rows.section(part) for part in (UNCOLLECTED, "prefix_lens", "truths"))
        return replace(rows, truth=self.canary.registry.add_truth(self.pool.name, feed["rows"], *known))

    def hook(self, forward: StaticForward, rows: Rows, is_deferred: bool = False) -> Hooked:
        """The forward with its hooks; ``is_deferred``: judged beside a later one of its program, and `admit` comes.

        MissingHooksError where it has none, at once: hooks of later forwards build on those of earlier ones.
        """
        hooked = self._hook(forward, rows, is_deferred)
        if self.canary is not None:
            hooked.check_hooks()
        return hooked

    def _hook(self, forward: StaticForward, rows: Rows, is_deferred: bool) -> Hooked:
        kv, workspace = self.pool.kv, self._workspace(forward)
        shape = (forward.slots.numel(), self.num_heads, kv.shape[-1])
        out = torch.zeros(shape, dtype=self.pool.dtype, device=kv.device)
        if self.canary is None:
            return Hooked(forward, rows, out, workspace, None)
        uids, prefix_lens, truths, roots = (rows.section(part) for part in TRUTH)
        if rows.truth is not None:
            prefix_lens, truths = rows.truth.prefix_lens, rows.truth.truths
        plan = ForwardPlan(
            forward.indices,
            forward.indptr[:-1],
            forward.indptr[1:],
            forward.bounds,
            forward.slots,
            forward.tokens,
            forward.positions,
            forward.parents,
            prefix_lens,
            truths,
            uids,
            rows.feed[rows.live],
            forward.ancestors,
            roots,
            forward.lineage,
        )
        substep = self.canary.registry.add(
            self.pool.name,
            forward.kind,
            forward.index,
            plan,
            rows.feed[STEP],
            width=forward.width,
            max_depth=forward.depth,
            tree_mask=forward.tree_mask,
            attends=True,
            is_deferred=is_deferred,
        )
        substep = seam("hooks.captured_without_hooks", substep, kind=forward.kind, index=forward.index)
        return Hooked(forward, rows, out, workspace, substep)

    def _workspace(self, forward: StaticForward) -> Tensor | None:
        kv, device = self.pool.kv, self.pool.kv.device
        if device.type != "cuda":
            return None
        return attention_workspace(
            forward.slots.numel(),
            self.num_heads,
            *kv.shape[-2:],
            rows=forward.num_rows,
            max_q_len=forward.new,
            max_kv_len=forward.max_kv_len,
            device=device,
        )

    def together(self, *parts: Sequence[Hooked], acceptance: CapturedAcceptance | None = None) -> Together:
        """How these are launched, one behind the other; a part without forwards is none."""
        return Together(self.canary, [part for part in parts if part], acceptance)

    def hook_move(self, size: int, feed: Feed) -> CapturedMove | None:
        """What tells the canary of moves of at most ``size`` entries in the program of this feed; None without one."""
        return None if self.canary is None else self.canary.registry.add_move(self.pool.name, size, feed[STEP])

    def hook_acceptance(self, size: int, feed: Feed) -> CapturedAcceptance | None:
        """What keeps what the program of this feed accepts; None where the host is never behind that."""
        return None if self.accepted_tokens is None else self.accepted_tokens.add_acceptance(size, feed[STEP])

    def launch_move(self, move: CapturedMove) -> None:
        """Tell the canary that a move runs next."""
        if self.canary is not None:
            self.canary.launch_move(move)

    def admit(self, hooked: Sequence[Hooked]) -> None:
        """Within a program: the slots of these postponed forwards lie on the device, and none of them has begun."""
        for one in hooked:
            if one.substep is not None:
                one.substep.admit()

    @contextmanager
    def open(self, hooked: Hooked) -> Iterator[KVAccess]:
        """The attention of one forward, whose index arrays have been built."""
        substep = hooked.substep
        if substep is None:
            yield StaticAttention(self, hooked)
            return
        substep.open()
        try:
            yield StaticAttention(self, hooked)
        except BaseException:
            substep.abandon()
            raise
        substep.close(joins=False)

    def join(self) -> None:
        """Within a program, behind its forwards: what the canary does beside them is over when the program is."""
        if self.canary is not None:
            self.canary.registry.join()


class StaticAttention:
    """A `KVAccess` by token indices that lie on the device."""

    def __init__(self, forwards: StaticForwards, hooked: Hooked) -> None:
        self._pool, self._heads = forwards.pool, forwards.num_heads
        self._forward, self._substep, self._workspace = hooked.forward, hooked.substep, hooked.workspace
        self._out = hooked.out

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v ``[n, kv_heads, head_dim]``; the attention of q ``[n, heads, head_dim]``, until the next call."""
        forward, pool = self._forward, self._pool
        if self._substep is None:
            pool.store(layer, forward.slots, k, v)
        else:
            self._substep.store(layer, *pool.stored(k, v))
        kv, scales = pool.rows(layer)
        keys, values = kv.unbind(1)
        k_scale, v_scale = (None, None) if scales is None else scales.unbind(1)
        attend = paged_attention if q.is_cuda else paged_attention_torch
        attend(
            q,
            keys,
            values,
            kv_indptr=forward.indptr,
            kv_indices=forward.indices,
            q_indptr=forward.bounds,
            max_kv_len=forward.max_kv_len,
            max_q_len=forward.new,
            scale=q.shape[-1] ** -0.5,
            out=self._out,
            tree_mask=forward.tree_mask,
            k_scale=k_scale,
            v_scale=v_scale,
            workspace=self._workspace,
            reads=None if self._substep is None else self._substep.reads(layer),
        )
        return self._out
