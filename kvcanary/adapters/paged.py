"""Paged pools of an engine that is only watched: nobody tells of grants and frees, so records speak for themselves.

An adapter shows rows (block tables, lengths, where new entries begin), what was fed and where it was stored; all of it
stays on the device. `PagedCanary.read` comes before a forward, `wrote` after it, `took` for layers that are stored
later, `look` before the engine lets a row go. Hits lie in a ring of the last steps; one counter says whether there were
any.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvcanary.certificate import Coverage, certificate
from kvcanary.config import ROTATION_STEPS, CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.findings import FindingLog
from kvcanary.sites import pack_site
from kvcanary.views import PoolView
from kvcanary_kernels import reread, walk
from kvcanary_kernels.chain import chain_scan_torch
from kvcanary_kernels.content import check_content, check_content_torch
from kvcanary_kernels.record import (
    CHAIN,
    COLUMNS,
    MASK_32,
    REQUEST_GENERATION,
    SEAL,
    STEP_SITE,
    TOKEN_POSITION,
    Keys,
    chain_root,
    make_keys,
    seed_id,
    signed,
)
from kvcanary_kernels.rows import PoolRows
from kvcanary_kernels.seal import identity_words, seal_values
from kvcanary_kernels.walk import NO_HIT, NOT_FOLLOWED, Fed, Rows, Truth, table_slots

LaneOf = Callable[[Tensor], tuple[Tensor, Tensor]]
#: What an engine that is only watched can feed: it tells of no grants and frees (R7, R8, W2, W3, P1).
PAGED_FED = frozenset({"R1", "R2", "R3", "R4", "R5", "R6", "R9", "R10", "R12", "T1", "W1", "W4", "W5", "W6"})
RING = 8  # steps whose hits are kept: more than any engine's host is behind its device
LOOKS = 4  # at rows, between two forwards
SPLITS = 8  # shares of a row that are judged side by side
NAMED_WRITERS = 1 << 16


@dataclass(eq=False)
class Layers:
    """Layers of one group whose rows are alike: where their bytes lie and what these were.

    names: what the engine calls them
    is_late: they are stored by a later forward of the step (a draft's), `took` says when
    """

    view: PoolView
    names: tuple[str, ...]
    keys: Keys
    lanes: Tensor
    stamps: Tensor
    is_late: bool = False

    @property
    def rows(self) -> PoolRows:
        return self.view.rows


@dataclass(eq=False)
class Group:
    """Layers that share slots: one block table, one record a slot."""

    number: int
    block_size: int
    window: int
    records: Tensor
    layers: list[Layers] = field(default_factory=list)


@dataclass(eq=False)
class Step:
    """What the host must know to tell of a step's hits later.

    lines:   by group, [rows, width] block tables of the batch, or of all rows by number where `by_number`
    looked:  requests whose rows were read before this step, with their lines by group
    """

    number: int
    requests: tuple[str, ...]
    numbers: Tensor
    lines: Sequence[Tensor]
    by_number: bool
    site: tuple[str, int]
    events: list[Event]
    looked: list[Looked]
    count: int = 0
    is_settled: bool = False


@dataclass(eq=False)
class Looked:
    requests: tuple[str, ...]
    lines: list[Tensor]


@dataclass(eq=False)
class Event:
    """Slots that were looked at by themselves: after a copy, a load, a zeroing, or before a row goes.

    mismatch: [n, 2] int64 bitmap of layers; slots: [n] int64
    """

    code: str
    what: str
    layers: Layers
    slots: Tensor
    mismatch: Tensor
    group: Group


class PagedCanary:
    """The canary of one engine's pools on one device."""

    def __init__(self, config: CanaryConfig, num_rows: int, max_rejected: int, device: torch.device | str) -> None:
        """num_rows: of requests that the engine holds at once; max_rejected: tokens a step may take back of a row."""
        if config.mode not in ("log", "raise"):
            raise AdapterError(
                f"mode must be 'log' or 'raise' here, got {config.mode!r}: nobody can end one request from outside"
            )
        self.config, self.coverage, self.log = config, Coverage(), FindingLog()
        self.device = torch.device(device)
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.identity = make_keys(self.seed, 1, 1, self.device)
        self._host_keys = make_keys(self.seed, 1, 1)
        self._uses_kernels = self.device.type == "cuda"
        self.groups: list[Group] = []
        self.truth = self._empty_truth(num_rows, max_rejected + 2)
        self.writers: OrderedDict[int, str] = OrderedDict()
        self.step = 0
        self.steps: deque[Step] = deque(maxlen=RING)
        self.incidents: dict[tuple[str, str | None, int], int] = {}
        self.total = self._zeros(1)
        self._uid = 0
        self._events: list[Event] = []  # of what happened since the last forward
        self._looked: list[Looked] = []

    def add_group(self, number: int, block_size: int, num_slots: int, window: int = 0) -> Group:
        group = Group(number, block_size, window, self._zeros(num_slots, COLUMNS))
        self.groups.append(group)
        return group

    def add_layers(self, group: Group, view: PoolView, names: Sequence[str], is_late: bool = False) -> None:
        """`names`: what the engine calls these layers."""
        rows, num_slots = view.rows, group.records.shape[0]
        if rows.num_slots != num_slots:
            raise AdapterError(f"layers of {view.name} have {rows.num_slots} slots, their group {num_slots}")
        keys = make_keys(self.seed, rows.num_layers, rows.words_per_row, self.device)
        lanes, stamps = self._zeros(2, rows.num_layers, num_slots), self._zeros(num_slots)
        group.layers.append(Layers(view, tuple(names), keys, lanes, stamps, is_late))

    @property
    def num_bytes(self) -> int:
        """Device memory that records and lanes take; it never grows."""
        own = [layers.lanes.nbytes + layers.stamps.nbytes for group in self.groups for layers in group.layers]
        return sum(own) + sum(group.records.nbytes for group in self.groups)

    def forget(self) -> None:
        """The bytes are gone, or nobody answers for them any more."""
        for group in self.groups:
            group.records.zero_()
            for layers in group.layers:
                layers.stamps.zero_()
        self.truth.ends.fill_(NOT_FOLLOWED)

    # rows of requests

    def admit(self, new: Sequence[tuple[int, str, Sequence[int] | None, int, str]]) -> None:
        """New rows, each (row number, request, tokens or None where nobody knows them, entries that it has, salt)."""
        lines = []
        for number, request, tokens, length, salt in new:
            self._uid += 1
            self.writers[self._uid] = request
            if len(self.writers) > NAMED_WRITERS:
                self.writers.popitem(last=False)
            root = chain_root(self._host_keys, "paged", salt)
            if tokens is None or len(tokens) < length:
                self.coverage.skip("requests whose tokens nobody knows", 1)
                lines.append((number, NOT_FOLLOWED, 0, 0, self._uid))
                continue
            chain = self.prefix_chains(tokens[:length], salt)
            last = int(chain[-1]) if length else signed(root)
            lines.append((number, length, last, signed(root), self._uid))
        if lines:
            numbers, ends, tails, roots, uids = self._upload(torch.tensor(lines)).unbind(1)
            truth = self.truth
            truth.ends[numbers] = ends
            truth.known[numbers] = 1
            truth.tails[numbers, 0] = tails
            truth.roots[numbers] = roots
            truth.uids[numbers] = uids

    def prefix_chains(self, tokens: Sequence[int], salt: str = "") -> Tensor:
        """[n] int64 on the host: chain of every prefix of these tokens."""
        values = torch.tensor(tokens, dtype=torch.int64)
        out, seed = torch.empty_like(values), signed(chain_root(self._host_keys, "paged", salt))
        ends, positions = torch.tensor([0, len(values)]), torch.arange(len(values))
        chain_scan_torch(values, positions, ends, torch.tensor([seed]), keys=self._host_keys, out=out)
        return out

    # one forward

    def read(
        self,
        rows: Sequence[Rows],
        requests: Sequence[str],
        site: tuple[str, int],
        max_length: int,
        lines: Sequence[Tensor] | None = None,
    ) -> None:
        """Judge what a forward is about to read: rows by group, in the order of the groups.

        max_length: at least the entries of the longest row, new ones included
        lines:      by group, block tables of all rows by number, where `rows` has tables that the next step overwrites
        """
        self.step += 1
        tables = [row.table for row in rows] if lines is None else lines
        by_number = lines is not None
        step = Step(self.step, tuple(requests), rows[0].numbers, tables, by_number, site, self._events, self._looked)
        self._events, self._looked = [], []
        self.steps.append(step)
        self.coverage.forwards += 1
        self.coverage.unproved_stores += 1  # bytes are taken from the pool, where they were stored
        place, content = self.step % RING, self.config.content
        self._hits["read"][place].fill_(NO_HIT)
        column = 0
        for group, row in zip(self.groups, rows, strict=True):
            self._run(
                walk, "walk", group.records, row, self.truth, self.identity, block_size=group.block_size,
                null_slots=group.block_size, window=group.window, seeds=self._seeds,
                hits=self._hits["walk"][place, group.number], total=self.total,
            )  # fmt: skip
            for layers in group.layers:
                if content != "write":
                    stride = 1 if content == "full" else ROTATION_STEPS
                    self._reread(
                        group, layers, row, max_length, self.step % stride, stride, self._hits["read"][place, column]
                    )
                column += 1

    def wrote(self, rows: Sequence[Rows], fed: Sequence[Fed]) -> None:
        """Record what this forward stored, and take its bytes as they lie in the pools now."""
        place = self.step % RING
        self.steps[-1].count = fed[0].tokens.shape[0]
        for group, row, new in zip(self.groups, rows, fed, strict=True):
            slots, chains = self.scratch(place, group.number, new.tokens.shape[0])
            self._run(
                walk, "advance", group.records, row, new, self.truth, self.identity, seeds=self._seeds, step=self.step,
                site=pack_site(*self.steps[-1].site), block_size=group.block_size, null_slots=group.block_size,
                slots=slots, chains=chains, hits=self._hits["write"][place, group.number], total=self.total,
            )  # fmt: skip
            self.coverage.slots_sealed += new.tokens.shape[0]
            for layers in group.layers:
                if not layers.is_late:
                    self._take(group, layers, slots, chains)

    def took(self, count: int, valid: Tensor) -> None:
        """Late layers have stored this forward's entries now, where `valid` [count] bool says so."""
        for group in self.groups:
            slots, chains = self.scratch(self.step % RING, group.number, count)
            for layers in group.layers:
                if layers.is_late:
                    self._take(group, layers, torch.where(valid, slots, -1), chains)

    def look(self, tables: Sequence[Tensor], numbers: Sequence[int], requests: Sequence[str], max_length: int) -> None:
        """Read every byte of these rows once more, before the next forward.

        tables: by group, [rows of the engine, width], lines by number
        """
        if self.config.content == "write" or not numbers:
            return
        if len(self._looked) == LOOKS:
            self.coverage.skip("rows that went without a last look", len(numbers))
            return
        chosen = self._upload(torch.tensor(numbers))
        hits = self._hits["look"][(self.step + 1) % RING, len(self._looked)]
        self._looked.append(Looked(tuple(requests), [table[chosen] for table in tables]))
        hits.fill_(NO_HIT)
        for group, table in zip(self.groups, tables, strict=True):
            row = Rows(chosen, table, chosen, chosen)
            for layers in group.layers:
                self._reread(group, layers, row, max_length, 0, 1, hits, whole=True)

    # bytes that move

    def copied(self, group: Group, src: Tensor, dst: Tensor) -> None:
        """Blocks were copied: records follow, and what arrived is read at once (T1). src, dst: [n] blocks."""
        src, dst = self._slots(group, src), self._slots(group, dst)
        held = group.records[src]
        held[:, SEAL] += seal_values(identity_words(held), dst, 0, self.identity)
        held[:, SEAL] -= seal_values(identity_words(held), src, 0, self.identity)
        group.records[dst] = held
        for layers in group.layers:
            layers.lanes[:, :, dst] = layers.lanes[:, :, src]
            layers.stamps[dst] = layers.stamps[src]
            self._event("T1", "a copy of blocks", group, layers, dst, judged=layers.stamps[dst] == held[:, CHAIN])

    def zeroed(self, group: Group, blocks: Tensor) -> None:
        """Blocks were zeroed: nobody's bytes lie there now, and they must be zeros (T1)."""
        slots = self._slots(group, blocks)
        group.records[slots] = 0
        for layers in group.layers:
            layers.stamps[slots] = 0
            layers.lanes[0, :, slots] = layers.keys.start_a[:, None]
            layers.lanes[1, :, slots] = 0
            self._event("T1", "zeroed blocks", group, layers, slots, judged=None)

    def loaded(self, number: int, tokens: Tensor, chains: Tensor, lines: Sequence[Tensor], lane_of: LaneOf) -> None:
        """The first entries of a row came from elsewhere, but for those that lie there with records of their own.

        tokens, chains: [n] int64 on the host, of this prefix; lines: by group, block tables by number
        lane_of: (lane a summed over the layers, whether it is known) by chain: bytes that differ are T1
        """
        tokens, chains = self._upload(tokens), self._upload(chains)
        positions = torch.arange(len(chains), device=self.device)
        for group, line in zip(self.groups, lines, strict=True):
            slots = table_slots(line[number : number + 1], positions[None], group.block_size)[0]
            held = group.records[slots.clamp(0, group.records.shape[0] - 1)]
            is_new = (held[:, CHAIN] != chains) & (slots >= group.block_size) & (slots < group.records.shape[0])
            slots, own, places, words = slots[is_new], chains[is_new], positions[is_new], tokens[is_new]
            if not len(slots):
                continue
            self.coverage.skip("entries loaded from elsewhere", len(slots))
            records = torch.zeros(len(slots), COLUMNS, dtype=torch.int64, device=self.device)
            records[:, TOKEN_POSITION], records[:, CHAIN] = words | places << 32, own
            records[:, REQUEST_GENERATION] = self.truth.uids[number]
            records[:, STEP_SITE] = self.step | pack_site("load", 0) << 32
            records[:, SEAL] = seal_values(identity_words(records), slots, 0, self.identity)
            group.records[slots] = records
            for layers in group.layers:
                self._take(group, layers, slots, own)
            layers = group.layers[0]
            wanted, is_known = lane_of(own)
            wrong = is_known & (layers.lanes[0, :, slots].sum(0) != wanted)
            self.total += wrong.sum()
            mismatch = wrong[:, None].to(torch.int64) * torch.tensor(
                [(1 << len(layers.names)) - 1, 0], device=self.device
            )
            self._events.append(Event("T1", "an external load", layers, slots, mismatch, group))

    def scratch_of_step(self, group: Group, count: int) -> tuple[Tensor, Tensor]:
        """[n] slots and chains of what the last forward stored."""
        return self.scratch(self.step % RING, group.number, count)

    def restart(self) -> None:
        """Begin to count anew, when kernels were compiled."""
        self.coverage, self.step = Coverage(), 0
        self.steps.clear()
        self._events, self._looked = [], []
        self.total.zero_()

    # what was found

    def certificate(self) -> dict[str, Any]:
        """What was checked, what was not and why; the same keys as that of an engine's canary."""
        groups = [group.to_dict() for group in self.log.groups.values()]
        fed = PAGED_FED - {"T1"} if self.config.content == "write" else PAGED_FED
        return certificate(self.config, self.coverage, 0, seed_id(self.seed), groups, fed)

    def hits_of(self, step: Step) -> dict[str, Tensor]:
        """On the host: the cells of one step, which waits for the device."""
        place = step.number % RING
        if self._uses_kernels:
            torch.cuda.synchronize(self.device)  # whatever thread and stream this is
        return {name: cells[place].cpu() for name, cells in self._hits.items()}

    def written_twice(self, step: Step, group: Group) -> list[int]:
        """Slots that a step wrote and whose record is of another of its entries (W4)."""
        slots, chains = self.scratch(step.number % RING, group.number, step.count)
        held = group.records[slots.clamp(min=0)]
        wrong = (slots >= 0) & (held[:, CHAIN] != chains) & (held[:, STEP_SITE] & MASK_32 == step.number)
        return sorted(set(slots[wrong].tolist()))

    # helpers

    def _reread(
        self,
        group: Group,
        layers: Layers,
        rows: Rows,
        max_length: int,
        phase: int,
        stride: int,
        hits: Tensor,
        whole: bool = False,
    ) -> None:
        self._run(
            reread, "reread", layers.rows, group.records, rows, layers.keys, lanes=layers.lanes, stamps=layers.stamps,
            ends=self.truth.ends, max_length=max_length, phase=phase, stride=stride, window=group.window,
            block_size=group.block_size, whole=whole, hits=hits, total=self.total,
        )  # fmt: skip

    def _take(self, group: Group, layers: Layers, slots: Tensor, chains: Tensor) -> None:
        self._run(
            reread, "take", layers.rows, group.records, slots, chains, layers.keys, lanes=layers.lanes,
            stamps=layers.stamps, total=self.total,
        )  # fmt: skip

    def _event(self, code: str, what: str, group: Group, layers: Layers, slots: Tensor, judged: Tensor | None) -> None:
        if self.config.content == "write":
            return
        mismatch = torch.zeros(len(slots), 2, dtype=torch.int64, device=self.device)
        check = check_content if self._uses_kernels else check_content_torch
        check(layers.rows, slots, layers.keys, layers.lanes[0], mismatch=mismatch)
        if judged is not None:
            mismatch *= judged[:, None]
        self.total += (mismatch != 0).any(1).sum()
        self._events.append(Event(code, what, layers, slots, mismatch, group))

    def _run(self, module: ModuleType, name: str, *arguments: Any, **keywords: Any) -> None:
        getattr(module, name if self._uses_kernels else f"{name}_torch")(*arguments, **keywords)

    def _slots(self, group: Group, blocks: Tensor) -> Tensor:
        size = group.block_size
        return (blocks.to(torch.int64)[:, None] * size + torch.arange(size, device=blocks.device)).flatten()

    def scratch(self, place: int, group: int, count: int) -> tuple[Tensor, Tensor]:
        """Slots and chains of the entries of a forward; kept as long as its hits."""
        key = place, group
        held = self._entries.get(key)
        if held is None or held[0].shape[0] < count:
            size = 1 << max(count - 1, 255).bit_length()
            held = self._entries[key] = self._zeros(size) - 1, self._zeros(size)
        return held[0][:count], held[1][:count]

    @cached_property
    def _entries(self) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _hits(self) -> dict[str, Tensor]:
        """By kind, [RING, ..., rows] int64."""
        rows, groups = self.truth.ends.shape[0], len(self.groups)
        pools = sum(len(group.layers) for group in self.groups)
        shapes = {"walk": (groups, SPLITS, rows), "write": (groups, rows), "read": (pools, rows), "look": (LOOKS, rows)}
        return {name: self._zeros(RING, *shape) + NO_HIT for name, shape in shapes.items()}

    @cached_property
    def _seeds(self) -> Tensor:
        return self._zeros(self.truth.ends.shape[0])

    def _empty_truth(self, rows: int, width: int) -> Truth:
        ends, known, roots, uids = (self._zeros(rows) for _ in range(4))
        return Truth(ends.fill_(NOT_FOLLOWED), known, self._zeros(rows, width), roots, uids)

    def _upload(self, values: Tensor) -> Tensor:
        """To the device, without a wait."""
        return values.pin_memory().to(self.device, non_blocking=True) if self._uses_kernels else values

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)
