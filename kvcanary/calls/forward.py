"""Forward: one model call as the canary keeps it from `open` until its checks have run."""

from __future__ import annotations

from array import array
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import ContradictionError
from kvcanary.ledger.ledger import Request
from kvcanary.native.layout import ADDRESS, CONTRADICTS, FORWARD, KINDS, OTHER, REFUSES, REQUEST, plan_layout
from kvcanary.pools.launch_site import pack_site
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.records.state import PoolState

Ints = NDArray[np.int64]


class Refused(NamedTuple):
    """Entries of a plan that were refused, the ids that were asked for, and why; all [n].

    entries:    int64
    ids, names: int64, slots of the pool, and the ids in the plan: of the full group where the pool has a slot map
    codes:      of their findings
    """

    entries: Ints
    ids: Ints
    names: Ints
    codes: NDArray[np.str_]


class Planned(NamedTuple):
    """The entries of a write plan as they were when the forward was opened; an engine may reuse its tensors.

    slots, tokens, positions: [n] int64; slots of the pool that are safe to write
    """

    slots: Ints
    tokens: Ints
    positions: Ints


class Drafted(NamedTuple):
    """A draft forward whose branches the next one may name.

    number: its index;  chains: [n], by row, once sealed;  chains_at: their address
    """

    step: int
    number: int
    request_ids: tuple[str, ...]
    width: int
    chains: Ints
    chains_at: int


_layout_of = lru_cache(maxsize=256)(plan_layout)  # most steps are as large as the step before


def _listed(name: str) -> cached_property[list[int]]:
    """An array of `PlanLayout` as a list, made when a rule asks for it."""
    return cached_property(lambda forward: forward.part(name).tolist())


class Forward:
    """What a forward was told to read and write, and what it stored.

    width:          rows a request: 1, or the tree width of a draft substep
    num_entries:    that it writes;  num_rows: that it reads;  num_reads: entries of all of these
    request_ids:    names of `requests`
    memory:         int64, filled by `loops.take_plan`: FORWARD (native/layout.py), both plans as `layout` has them,
                    of each request its uid and what acceptance had made final, and room for `chains`; `head`: its
                    address
    is_usable:      whether the loops saw nothing that must be refused
    dense_indices:  where loops read the plan's indices: those themselves, or a copy of them as they were
    has_parents:    whether the entries are nodes of trees;  has_lineage: whether rows say of which branch of the draft
                    forward before they go on, which stands in the place of parents
    has_starts:     whether rows may begin behind position 0
    indices, slots: the plans' own, or copies in which refused ids are null slot 0
    pool_indices, pool_slots: where these lie in the pool, null slot 0 where nowhere; the same without a slot map
    tree_mask:      [requests, N, N] bool, or None
    refused:        entries of the write plan that were refused (W1, W2, W3, W7, W8); None: none were
    refused_reads:  entries of `indices` that were refused (R1)
    fingerprints:          [layers, 2, n] int64, of what it stores; None where nobody will compare the bytes;
                    `fingerprints_at`: its address
    chains_before:  of the draft forward before, by row, where its lineage can be compared with them; None: it can not
    stored:         bitmap of the layers that have stored; `stored_by_engine`: whether one was stored by the engine
                    itself
    not_finite:     [] bool, of values on a device: one of them is NaN or infinite; None: none was looked at there
    names, ids:     `indices` and `pool_indices` as integers, from `read_rows` on; `raw`: `indices` as bytes;
                    `host_names`, `host_ids`: where the loops read them
    """

    refused: Refused | None = None
    refused_reads: Refused | None = None
    fingerprints: Tensor | None = None
    fingerprints_at = stored = 0
    stored_by_engine = False
    chains_before: Ints | None = None
    raw = b""
    not_finite: Tensor | None = None
    names: Ints
    ids: Ints
    host_names: Tensor
    host_ids: Tensor

    def __init__(
        self,
        kind: str,
        index: int,
        pool: PoolState,
        step: int,
        requests: list[Request],
        read: ReadPlan,
        write: WritePlan,
    ) -> None:
        """Read both plans to the host once, an engine may reuse its tensors; refuse those that contradict themselves.

        What only a rule asks for is made when one does.
        """
        width, parents, starts, mask = read.rows_per_request, write.parents, read.starts, read.tree_mask
        lineage = write.lineage
        n, num_rows, written = write.slots.shape[0], len(requests) * width, read.num_written
        self.layout = _layout_of(n, num_rows, len(requests))
        memory = np.empty(FORWARD.size + self.layout.end, np.int64)
        self.kind, self.index, self.pool, self.step = kind, index, pool, step
        self.requests, self.width = requests, width
        self.num_entries, self.num_rows, self.memory = n, num_rows, memory
        self.request_ids, self.num_reads = tuple(read.requests), read.indices.shape[0]
        self.has_parents, self.has_starts, self.tree_mask = parents is not None, starts is not None, mask
        self.has_lineage = lineage is not None
        self.indices, self.slots = read.indices, write.slots
        given = read.indices, write.slots, write.tokens, write.positions, read.indptr, read.prefix_lens
        indices, slots, tokens, positions, indptr, prefixes = map(dense, given)
        self.dense_indices = indices
        parents = None if parents is None else dense(parents)
        starts = None if starts is None else dense(starts)
        lineage = None if lineage is None else dense(lineage)
        counts = dense(written) if isinstance(written, Tensor) else None
        asked = array(  # ASKED (native/layout.py)
            "q",
            (
                pool.struct_at,
                n,
                num_rows,
                width,
                len(requests),
                KINDS.get(kind, OTHER),
                index,
                step,
                pack_site(kind, index),
                parents is not None,
                lineage is not None,
                indices.data_ptr(),
                self.num_reads,
                mask.data_ptr() if mask is not None and mask.is_cpu and mask.is_contiguous() else 0,
                -1 if mask is None else mask.shape[1],
                slots.data_ptr(),
                tokens.data_ptr(),
                positions.data_ptr(),
                0 if parents is None else parents.data_ptr(),
                0 if lineage is None else lineage.data_ptr(),
                indptr.data_ptr(),
                0 if counts is None else counts.data_ptr(),
                0 if isinstance(written, Tensor) else written,
                0 if starts is None else starts.data_ptr(),
                prefixes.data_ptr(),
            ),
        )
        for request in requests:
            asked.extend((request.uid, request.struct[REQUEST.committed_len]))
        seen = pool.loops.take_plan(asked.buffer_info()[0], memory)
        if seen & CONTRADICTS or (mask is not None and len(mask) != num_rows):
            refuse_contradiction(self)
        self.head, self.is_usable = seen & ADDRESS, not seen & REFUSES

    @property
    def site(self) -> tuple[str, int]:
        return self.kind, self.index

    @property
    def is_proved(self) -> bool:
        """Whether the canary itself wrote all that it stored, where it was planned."""
        return not self.stored_by_engine and self.stored == self.pool.full_layers

    @cached_property
    def uids(self) -> Ints:
        """[requests]"""
        return np.array([request.uid for request in self.requests], np.int64)

    @cached_property
    def committed(self) -> list[int]:
        """By request, what acceptance had made final."""
        return self.part("who")[1::2].tolist()

    @cached_property
    def plan(self) -> Ints:
        return self.memory[FORWARD.size : FORWARD.size + self.layout.who]

    @property
    def chains(self) -> Ints:
        """[n] chain value of each entry that it writes, from when it is sealed."""
        return self.part("chains")

    def expect_values(self) -> None:
        """Room for the fingerprints of everything that it will store."""
        shape = self.pool.full_layers.bit_length(), 2, self.num_entries
        self.fingerprints = torch.empty(shape, dtype=torch.int64, device=self.pool.records.device)
        self.fingerprints_at = self.memory[FORWARD.fingerprints] = self.fingerprints.data_ptr()

    @property
    def first_not_finite(self) -> tuple[int, int] | None:
        """Layer and entry of what was stored first with NaN or infinity; (0, 0) where only a device knows which."""
        if first := int(self.memory[FORWARD.not_finite]):
            return divmod(first - 1, self.num_entries)
        return (0, 0) if self.not_finite is not None and bool(self.not_finite) else None

    @property
    def drafted(self) -> Drafted:
        """What is kept of a draft forward for the one behind it."""
        chains = self.chains  # at the end of its memory
        chains_at = self.head + self.memory.nbytes - chains.nbytes
        return Drafted(self.step, self.index, self.request_ids, self.width, chains, chains_at)

    def go_on_from(self, last: Drafted) -> None:
        """Its lineage names branches of the last draft forward, where that is the one before it, of the same rows."""
        *own, chains, chains_at = last
        if self.has_lineage and own == [self.step, self.index - 1, self.request_ids, self.width]:
            self.chains_before = chains
            self.memory[FORWARD.before], self.memory[FORWARD.num_before] = chains_at, len(chains)

    @cached_property
    def pool_indices(self) -> Tensor:
        return self.indices

    @cached_property
    def pool_slots(self) -> Tensor:
        return self.slots

    # the write plan

    @cached_property
    def planned(self) -> Planned:
        """The entries that it writes."""
        plan, at = self.plan, self.layout
        return Planned(plan[: at.tokens], plan[at.tokens : at.positions], plan[at.positions : at.parents])

    @cached_property
    def write_slots(self) -> list[int]:
        """`planned.slots` as plain integers."""
        return self.planned.slots.tolist()

    @cached_property
    def pages(self) -> set[int]:
        """Those whose slots it writes, by the plan's names."""
        return set((self.slot_names // self.pool.view.page_size).tolist())

    @cached_property
    def slot_names(self) -> Ints:
        """[n] int64: what the plan calls these slots."""
        return self.planned.slots

    @cached_property
    def lineage(self) -> Ints | None:
        """[n] by row, the branch of the draft forward before from whose entry it goes on; None: nobody says."""
        return self.part("parents") if self.has_lineage else None

    @cached_property
    def parents(self) -> list[int] | None:
        """By entry of the write plan, its tree parent in the plan or -1; None: every row is a chain."""
        return self.part("parents").tolist() if self.has_parents else None

    # by row, plain integers

    bounds = _listed("bounds")  # and one more: where rows begin in `indices`
    written = _listed("written")  # entries at the row's end that this forward writes
    starts = _listed("starts")  # the position of the row's first entry
    owns = _listed("owns")  # where the entries that this forward writes begin in `indices`
    begins = _listed("begins")  # the position of the first of them
    skipped = _listed("skipped")  # entries at the row's head that lie before its window: they are not judged
    #: By request, entries of its rows that earlier forwards wrote and acceptance made final, says the plan.
    prefixes = _listed("prefixes")

    @cached_property
    def short_rows(self) -> frozenset[int]:
        """Rows that have fewer entries than their prefix and what they write (R10)."""
        if self.is_usable:
            return frozenset()
        rows = zip(self.bounds, self.bounds[1:], self.starts, self.written, strict=False)
        reach = [(start + end - first - written, start) for first, end, start, written in rows]
        return frozenset(
            row for row, (own, start) in enumerate(reach) if own < max(start, self.prefixes[row // self.width])
        )

    def read_rows(self) -> None:
        """Take the slot ids of all rows to the host."""
        self.host_names = self.host_ids = dense(self.indices)
        self.raw = self.host_names.numpy().tobytes()
        self.names = self.ids = np.frombuffer(self.raw, np.int64)
        if self.pool.view.slot_map is not None:
            self.host_ids = dense(self.pool_indices)
            self.ids = self.host_ids.numpy()

    def request_of(self, row: int) -> Request:
        return self.requests[row // self.width]

    def part(self, name: str) -> Ints:
        """An array of `PlanLayout`, in place."""
        return self.layout.part(self.memory[FORWARD.size :], name)


def dense(values: Tensor) -> Tensor:
    """In host memory, one after another."""
    return values if values.is_cpu and values.is_contiguous() else values.cpu().contiguous()


def on_host(values: Tensor) -> Ints:
    """An int64 tensor as an array; of the same memory where that is possible."""
    return (values if values.is_cpu else values.cpu()).numpy()


def refuse_contradiction(forward: Forward) -> None:
    """ContradictionError for what `loops.take_plan` has seen."""
    bounds, entries, n, mask = forward.bounds, forward.indices.shape[0], forward.num_entries, forward.tree_mask
    names = [forward.request_of(row).request_id for row in range(len(forward.written))]
    if bounds[0] != 0 or bounds[-1] != entries:
        raise _contradiction(f"indptr must run from 0 to the {entries} indices, got {bounds[0]} to {bounds[-1]}")
    for row, (who, written) in enumerate(zip(names, forward.written, strict=True)):
        if written < 0:
            raise _contradiction(f"num_written must not be negative, got {written} for row {row} of {who!r}", who)
    if sum(forward.written) != n:
        raise _contradiction(f"the rows write {sum(forward.written)} entries, the write plan has {n}")
    if forward.has_lineage and set(forward.written) - {1}:
        raise _contradiction(
            f"a lineage belongs to rows that write one entry each, got rows that write {forward.written}"
        )
    if mask is not None and (len(mask) != len(forward.written) or set(forward.written) - {mask.shape[1]}):
        raise _contradiction(
            f"tree_mask must be [{len(forward.written)}, N, N] for rows that write N entries each, got "
            f"{list(mask.shape)} for rows of {forward.written}"
        )
    for row, (who, start) in enumerate(zip(names, forward.starts, strict=True)):
        if bounds[row + 1] < bounds[row]:
            raise _contradiction(
                f"indptr must not fall, row {row} of {who!r} runs from {bounds[row]} to {bounds[row + 1]}", who
            )
        for name, number in (("prefix_lens", forward.prefixes[row // forward.width]), ("starts", start)):
            if number < 0:
                raise _contradiction(f"{name} must not be negative, got {number} for row {row} of {who!r}", who)
    first, parents = 0, forward.parents or ()
    for who, written in zip(names, forward.written, strict=True):
        for entry, parent in enumerate(parents[first : first + written], first):
            if parent != -1 and not first <= parent < entry:
                raise _contradiction(f"parents[{entry}] must be -1 or in [{first}, {entry}), got {parent}", who)
        first += written


def _contradiction(message: str, *request_ids: str) -> ContradictionError:
    """`request_ids`: of the row that contradicts itself; none where nobody can tell which does."""
    return ContradictionError(message, request_ids=request_ids)
