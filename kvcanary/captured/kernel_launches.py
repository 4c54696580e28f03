"""Launches: every operation of a captured substep with its arguments bound once, over buffers that never move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcanary.pools.launch_site import pack_site
from kvcanary.records.dispatch import ops_for
from kvcanary.records.side_stream import SideStream
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.content.attest import kept_rows
from kvcanary_kernels.content.reads import ReadKeys
from kvcanary_kernels.judge.count import NUM_BITS, STEP, unset_first
from kvcanary_kernels.judge.forward import ForwardPlan, Planned, Room, new_planned, room_on
from kvcanary_kernels.judge.settle import NUM_RUNS
from kvcanary_kernels.judge.verify import NO_PREDECESSOR, ROOT
from kvcanary_kernels.record.layout import MASK_32, signed

PLANNED, READ = range(2)  # sides of a header: codes of the plan, codes of what was read
HEADER = 2 * NUM_BITS + NUM_RUNS

Launch = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Shared:
    """What all substeps of a registry use.

    step:   [1] int64, the running engine step in the low 32 bits, and above them the turn: how many have begun
    claims: by pool, [num_slots] int64 (plan)
    side_stream: where operations run for which no body waits
    opened: substeps between open() and close()
    """

    state: CanaryState
    step: Tensor
    claims: dict[str, Tensor]
    side_stream: SideStream
    opened: set[object] = field(default_factory=set)


class DraftedBefore(Protocol):
    """A draft forward of the same program, of which another one needs what it has written."""

    @property
    def work(self) -> Workspace: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """What makes one forward unlike another.

    width:         rows a request: 1, or the tree width of a draft forward
    max_depth:     of the trees that are written, in steps from a node to its row
    tree_mask:     [requests, N, N] bool, what attention lets each node see; the host judges it. None: no trees
    puts:          values are fingerprinted as they are stored (put), and slots sealed before: no copies are kept, of
                   what may be many entries
    attends:       the engine's attention fingerprints what it reads, by layer, with what `CapturedSubstep.reads` is
    read_keys:     of that, the registry's own: where bytes are compared in every forward; None: nobody compares them
    before:        the draft forward before it, from whose entries rows with a lineage go on, in the same program
    is_deferred:  where the forward may write is asked before it is opened (admit), and all else of it is found out
                   beside a later forward of the same program: nothing of the canary but stores stands in its body
    """

    width: int = 1
    max_depth: int = 0
    tree_mask: Tensor | None = None
    puts: bool = False
    attends: bool = False
    read_keys: ReadKeys | None = None
    before: DraftedBefore | None = None
    is_deferred: bool = False


class Workspace:
    """What a substep writes besides records: all of it is allocated here.

    codes:          [nnz] int64, read codes
    firsts:         first findings of both sides, [64, 4] int64 each (count)
    arrivals:       [1] int64, of count
    kept, times:    copies of what each layer stored last, and how often since the last close (store); empty where
                    values are fingerprinted as they are put
    root_seeds:     [rows], chain value that position 0 of each row continues: the forward's, or the pool's own
    sums:           as `codes`, fingerprints of what attention reads, over its layers; empty where nobody compares them
    """

    def __init__(self, forward: ForwardPlan, pool: PoolState, settings: Settings, room: Room | None = None) -> None:
        """`room`: where these lie, as for `new_planned`."""
        rows, entries = forward.num_rows, forward.num_entries
        new = room_on(pool.records.device) if room is None else room

        def filled(value: int, n: int) -> Tensor:
            return new(torch.full((n,), value))

        self.planned: Planned = new_planned(forward, new)
        self.codes = new(forward.capacity)
        firsts = [new(unset_first().view(-1)).view(NUM_BITS, -1) for _ in (PLANNED, READ)]
        self.firsts = firsts[PLANNED], firsts[READ]
        self.arrivals = new(1)
        self.chains, self.twice = new(entries), new(entries)
        self.no_predecessors = new(entries).fill_(NO_PREDECESSOR)
        self.no_seeds, self.no_positions = new(entries), new(rows)
        self.roots = filled(ROOT, rows)
        self.root_seeds = filled(signed(pool.root), rows) if forward.roots is None else forward.roots
        layers = pool.view.num_layers
        self.sums = new(0 if settings.read_keys is None else self.codes.numel())
        kept = 0 if settings.puts else entries
        self.times = new(layers * kept).view(layers, kept)
        self.kept = torch.zeros(layers, kept, pool.rows.words_per_row, dtype=torch.int32, device=pool.records.device)

    def forget_firsts(self, step: int) -> None:
        """Those up to this step have been told: the next finding of each check is its first again."""
        for first in self.firsts:
            is_unread = is_later(first[:, STEP, None], step) & (first[:, STEP, None] >= 0)
            first.copy_(torch.where(is_unread, first, unset_first(first.device)))


class Launches:
    """The operations of one substep in the order of their run; nothing but `store` takes an argument."""

    def __init__(
        self,
        shared: Shared,
        pool: PoolState,
        site: tuple[str, int],
        forward: ForwardPlan,
        work: Workspace,
        header: Tensor,
        settings: Settings,
    ) -> None:
        self._ops, self._shared, self._pool = ops_for(pool.records.device), shared, pool
        self._forward, self._work, self._settings = forward, work, settings
        state, pages = shared.state, pool.view.num_pages
        self._claims = shared.claims[pool.name]
        self._rows: dict[str, Any] = {"num_live": forward.num_live}
        self._entries: dict[str, Any] = {"num_live": work.planned.live_entries}
        self._seal_of: dict[str, Any] = {"pool_id": pool.pool_id, "keys": pool.keys}
        self._truth: dict[str, Any] = {
            "generations": state.generations[:pages],
            "states": state.page_states[:pages],
            "owners": state.owners[:pages],
            "page_size": state.page_size,
            "null_slots": pool.view.null_slots,
        }
        self._judged: dict[str, Any] = {
            "layers": pool.layers,
            "codes": work.codes,
            "step": shared.step,
            **self._seal_of,
            **self._truth,
        }
        counts = header[: 2 * NUM_BITS].view(2, NUM_BITS)
        self.admit = self._admit()
        self.plan = self._plan(site)
        self.chain = self._chain()
        self.seal = self._seal()
        self.verify_prefixes = self._verify_prefixes()
        self.store = self._store()
        self.put = self._put()
        self.attest = self._attest()
        self.verify_own = self._verify_own()
        self.settle = self._settle(header[2 * NUM_BITS :])
        self.judge_reads = self._judge_reads()
        self.count_planned = self._count_planned(counts[PLANNED])
        self.count_read = self._count_read(counts[READ])
        self.post = self._ops.post

    def _plan(self, site: tuple[str, int]) -> Launch:
        before = self._settings.before
        return partial(
            self._ops.plan,
            self._forward,
            self._work.planned,
            records=self._pool.records,
            claims=self._claims,
            roots=self._work.root_seeds,
            site=pack_site(*site),
            width=self._settings.width,
            before=None if before is None else before.work.chains,
            **self._truth,
        )

    def _admit(self) -> Launch:
        pages = {name: self._truth[name] for name in ("states", "owners", "page_size", "null_slots")}
        out = self._work.planned.safe_slots  # which the plan makes again
        return partial(self._ops.admit, self._forward, num_slots=self._pool.view.num_slots, out=out, **pages)

    def _chain(self) -> Launch:
        forward, planned, out = self._forward, self._work.planned, {"keys": self._pool.keys, "out": self._work.chains}
        operands = forward.tokens, forward.positions
        if forward.parents is None:
            return partial(self._ops.chain_scan, *operands, forward.bounds, planned.seeds, **out, **self._rows)
        depth = self._settings.max_depth
        tree = planned.parents, planned.entry_seeds
        return partial(self._ops.chain_tree, *operands, *tree, max_depth=depth, **out, **self._entries)

    def _seal(self) -> Launch:
        planned = self._work.planned
        return partial(
            self._ops.seal,
            self._pool.records,
            planned.safe_slots,
            tokens=self._forward.tokens,
            positions=self._forward.positions,
            chains=self._work.chains,
            requests=planned.requests,
            generations=planned.generations,
            step=self._shared.step,
            sites=planned.sites,
            **self._seal_of,
            **self._entries,
        )

    def _verify_prefixes(self) -> Launch:
        """What earlier forwards wrote: one segment a row, from its root."""
        work = self._work
        return partial(
            self._ops.verify,
            self._pool.records,
            self._forward.indices,
            starts=work.planned.starts,
            lengths=work.planned.read_lengths,
            first_positions=work.no_positions,
            predecessors=work.roots,
            seeds=work.root_seeds,
            readers=self._forward.uids,
            group=self._settings.width,
            **self._judged,
            **self._rows,
        )

    def _verify_own(self) -> Launch:
        """What this forward wrote, where its rows read it: one segment an entry, since parents give its place."""
        work, planned = self._work, self._work.planned
        return partial(
            self._ops.verify,
            self._pool.records,
            self._forward.indices,
            starts=planned.places,
            lengths=planned.own_lengths,
            first_positions=self._forward.positions,
            predecessors=work.no_predecessors,
            seeds=work.no_seeds,
            readers=planned.requests,
            longest=1,
            **self._judged,
            **self._entries,
        )

    def _store(self) -> Launch:
        return partial(
            self._ops.store,
            self._pool.rows,
            kept=self._work.kept,
            times=self._work.times,
            **({} if self._settings.is_deferred else self._entries),  # how many are live is not planned yet
        )

    def _put(self) -> Launch:
        return partial(
            self._ops.put,
            self._pool.rows,
            keys=self._pool.keys,
            records=self._pool.records,
            content_a=self._pool.content_a,
            twice=self._work.twice,
            **self._entries,
        )

    def _attest(self) -> Launch:
        """Fingerprints of what was stored, and not put."""
        work = self._work
        if self._settings.puts:
            return _nothing
        return partial(
            self._ops.attest,
            kept_rows(self._pool.rows, work.kept),
            work.planned.safe_slots,
            keys=self._pool.keys,
            times=work.times,
            records=self._pool.records,
            content_a=self._pool.content_a,
            twice=work.twice,
            **self._entries,
        )

    def _settle(self, runs: Tensor) -> Launch:
        return partial(
            self._ops.settle,
            self._forward,
            self._work.planned,
            records=self._pool.records,
            expected=self._pool.expected,
            layers=self._pool.layers,
            claims=self._claims,
            twice=self._work.twice,
            codes=self._work.codes,
            runs=runs,
            null_slots=self._pool.view.null_slots,
        )

    def _judge_reads(self) -> Launch:
        """Bytes, where attention has fingerprinted them."""
        if self._settings.read_keys is None:
            return _nothing
        return partial(
            self._ops.judge_reads,
            self._forward,
            self._work.planned,
            sums=self._work.sums,
            content_a=self._pool.content_a,
            start_a=self._pool.keys.start_a,
            codes=self._work.codes,
            null_slots=self._pool.view.null_slots,
        )

    def _count_planned(self, counts: Tensor) -> Launch:
        planned = self._work.planned
        return partial(
            self._ops.count,
            planned.codes,
            planned.asked,
            starts=planned.counted_starts,
            lengths=planned.counted_lengths,
            row_ids=planned.counted_rows,
            counts=counts,
            first=self._work.firsts[PLANNED],
            step=self._shared.step,
            row_violations=planned.row_violations,
            arrivals=self._work.arrivals,
        )

    def _count_read(self, counts: Tensor) -> Launch:
        work = self._work
        return partial(
            self._ops.count,
            work.codes,
            self._forward.indices,
            starts=work.planned.starts,
            lengths=work.planned.row_lengths,
            counts=counts,
            first=work.firsts[READ],
            step=self._shared.step,
            row_violations=work.planned.row_violations,
            arrivals=work.arrivals,
            **self._rows,
        )


def is_later(step: Any, other: int) -> Any:
    """Whether a step, or each of a tensor of them, comes after another; of both the low words count."""
    return ((step - other - 1) & MASK_32) < 1 << 31


def _nothing() -> None:
    """What a forward launches that has nothing of the kind."""
