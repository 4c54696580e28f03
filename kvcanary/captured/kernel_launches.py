"""Launches: every operation of a captured substep with its arguments bound once, over buffers that never move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from typing import Any

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
    before:        of the draft forward before it, from whose entries rows with a lineage go on, in the same program
    is_deferred:  where the forward may write is asked before it is opened (admit), and all else of it is found out
                   beside a later forward of the same program: nothing of the canary but stores stands in its body
    """

    width: int = 1
    max_depth: int = 0
    tree_mask: Tensor | None = None
    puts: bool = False
    attends: bool = False
    read_keys: ReadKeys | None = None
    before: Workspace | None = None
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
    """The operations of one substep in the order of their run; nothing but `store` and `put` takes an argument.

    Each is given, of what all of them share, the parameters that it names, and beside these what is its own.
    """

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
        self._ops, self._pool = ops_for(pool.records.device), pool
        self._forward, self._work, self._settings = forward, work, settings
        self._rows: dict[str, Any] = {"num_live": forward.num_live}
        self._entries: dict[str, Any] = {"num_live": work.planned.live_entries}
        state, view, planned = shared.state, pool.view, work.planned
        known: dict[str, Any] = {"forward": forward, "planned": planned, "step": shared.step, "keys": pool.keys}
        known |= {name: getattr(pool, name) for name in ("pool_id", "records", "expected", "content_a", "layers")}
        known |= {name: getattr(forward, name) for name in ("indices", "tokens", "positions")}
        known |= {name: getattr(work, name) for name in ("chains", "codes", "twice", "sums", "times", "arrivals")}
        known |= {"claims": shared.claims[pool.name], "row_violations": planned.row_violations}
        pages = {"generations": state.generations, "states": state.page_states, "owners": state.owners}
        known |= {name: values[: view.num_pages] for name, values in pages.items()}
        self._known = known | {"page_size": state.page_size, "null_slots": view.null_slots, "num_slots": view.num_slots}
        counts = header[: 2 * NUM_BITS].view(2, NUM_BITS)
        self._bind_writes(site)
        self._bind_values(pool.asks_finite)
        self._bind_judges(header[2 * NUM_BITS :])
        self._bind_counts(counts[PLANNED], counts[READ])

    def _bind(self, operation: Launch, *first: Any, **own: Any) -> Launch:
        shared = {name: self._known[name] for name in _parameters(operation) if name in self._known}
        return partial(operation, *first, **shared | own)

    def _bind_writes(self, site: tuple[str, int]) -> None:
        """Where the forward may write, and the records of that."""
        bind, ops, forward, work, planned = self._bind, self._ops, self._forward, self._work, self._work.planned
        before, width = self._settings.before, self._settings.width
        self.admit = bind(ops.admit, out=planned.safe_slots)  # which the plan makes again
        chains = None if before is None else before.chains
        self.plan = bind(ops.plan, roots=work.root_seeds, site=pack_site(*site), width=width, before=chains)
        if forward.parents is None:
            rows = {"indptr": forward.bounds, "seeds": planned.seeds}
            self.chain = bind(ops.chain_scan, **rows, out=work.chains, **self._rows)
        else:
            trees = {"parents": planned.parents, "seeds": planned.entry_seeds, "max_depth": self._settings.max_depth}
            self.chain = bind(ops.chain_tree, **trees, out=work.chains, **self._entries)
        grants = {"requests": planned.requests, "generations": planned.generations, "sites": planned.sites}
        self.seal = bind(ops.seal, slots=planned.safe_slots, **grants, **self._entries)

    def _bind_values(self, asks_finite: bool) -> None:
        """K and V into the pool, and their fingerprints: as they are put, or of copies of what was stored."""
        bind, ops, rows, work = self._bind, self._ops, self._pool.rows, self._work
        live = {} if self._settings.is_deferred else self._entries  # how many are live is not planned yet
        self.store = bind(ops.store, rows, kept=work.kept, **live)
        self.put = bind(ops.put, rows, asks_finite=asks_finite, **self._entries)
        self.attest: Launch = lambda: None
        if not self._settings.puts:
            finite, slots = rows if asks_finite else None, work.planned.safe_slots
            self.attest = bind(ops.attest, kept_rows(rows, work.kept), slots, finite=finite, **self._entries)

    def _bind_judges(self, runs: Tensor) -> None:
        """Prefixes, which earlier forwards wrote, are one segment a row, from its root; what this forward wrote is one
        segment an entry, since parents give its place. Bytes are judged where attention has fingerprinted them.
        """
        bind, ops, forward, work, planned = self._bind, self._ops, self._forward, self._work, self._work.planned
        self.verify_prefixes = bind(
            ops.verify,
            starts=planned.starts,
            lengths=planned.read_lengths,
            first_positions=work.no_positions,
            predecessors=work.roots,
            seeds=work.root_seeds,
            readers=forward.uids,
            group=self._settings.width,
            **self._rows,
        )
        self.verify_own = bind(
            ops.verify,
            starts=planned.places,
            lengths=planned.own_lengths,
            first_positions=forward.positions,
            predecessors=work.no_predecessors,
            seeds=work.no_seeds,
            readers=planned.requests,
            longest=1,
            **self._entries,
        )
        self.settle = bind(ops.settle, runs=runs)
        self.judge_reads: Launch = lambda: None
        if self._settings.read_keys is not None:
            self.judge_reads = bind(ops.judge_reads, start_a=self._pool.keys.start_a)

    def _bind_counts(self, counts_planned: Tensor, counts_read: Tensor) -> None:
        bind, ops, firsts, planned = self._bind, self._ops, self._work.firsts, self._work.planned
        self.count_planned = bind(
            ops.count,
            codes=planned.codes,
            indices=planned.asked,
            starts=planned.counted_starts,
            lengths=planned.counted_lengths,
            row_ids=planned.counted_rows,
            counts=counts_planned,
            first=firsts[PLANNED],
        )
        rows = {"starts": planned.starts, "lengths": planned.row_lengths}
        self.count_read = bind(ops.count, **rows, counts=counts_read, first=firsts[READ], **self._rows)
        self.post = ops.post


def is_later(step: Any, other: int) -> Any:
    """Whether a step, or each of a tensor of them, comes after another; of both the low words count."""
    return ((step - other - 1) & MASK_32) < 1 << 31


@cache
def _parameters(operation: Launch) -> tuple[str, ...]:
    return tuple(signature(operation).parameters)
