"""Paged pools of an engine that is only watched: nobody tells of grants and frees, so records speak for themselves.

An adapter shows what a forward is about to read and write (block tables, lengths, tokens, slots); all of it stays on
the device. `PagedCanary.read` comes before a forward, `wrote` after it, `took` when layers that are stored later are,
`look` before the engine lets a row go; `paged_moves` has what else moves bytes. Hits lie in a ring of the last steps;
one counter says whether there were any.
"""

from __future__ import annotations

import functools
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcanary.adapters.paged_state import (
    COUNT_BITS,
    HEAD,
    LOOKS,
    PLACE,
    RING,
    SPLITS,
    STAMP,
    Event,
    Forward,
    Group,
    Layers,
    Step,
)
from kvcanary.adapters.prefixes import Prefixes
from kvcanary.adapters.replays import Replays
from kvcanary.certificate import Coverage, certificate
from kvcanary.config import ROTATION_STEPS, CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.findings import Finding, FindingLog, tell
from kvcanary.sites import pack_site
from kvcanary.views import PoolView
from kvcanary_kernels import reread, walk
from kvcanary_kernels.record import CHAIN, COLUMNS, MASK_32, STEP_SITE, make_keys, seed_id
from kvcanary_kernels.walk import NO_HIT, NOT_FOLLOWED, NOW_ROWS, NOW_STEP, Fed, Rows, Truth

#: What an engine that is only watched can feed: it tells of no grants and frees (R7, R8, W2, W3, P1).
PAGED_FED = frozenset({"R1", "R2", "R3", "R4", "R5", "R6", "R9", "R10", "R12", "T1", "W1", "W4", "W5", "W6"})
NAMED_WRITERS = 1 << 16
STAMPS = (1 << 63 - COUNT_BITS) - 1
UPLOADS = 64  # that may be on their way: more than a few of each of the last steps
FEWEST_ROWS, FEWEST_TOKENS, FEWEST_ENTRIES = 16, 16, 512  # that launches are sized for


class PagedCanary:
    """The canary of one engine's pools on one device."""

    def __init__(
        self,
        config: CanaryConfig,
        num_rows: int,
        max_rejected: int,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        """num_rows: of requests that the engine holds at once; max_rejected: tokens a step may take back of a row;
        max_tokens: of one forward"""
        if config.mode not in ("log", "raise"):
            raise AdapterError(
                f"mode must be 'log' or 'raise' here, got {config.mode!r}: nobody can end one request from outside"
            )
        self.config, self.coverage, self.log, self.fed = config, Coverage(), FindingLog(), PAGED_FED
        self.tell: Callable[[Finding], None] = tell
        self.device = torch.device(device)
        self.uses_kernels = self.device.type == "cuda"
        self.num_rows, self.max_tokens = num_rows, max_tokens
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.identity = make_keys(self.seed, 1, 1, self.device)
        self.prefixes = Prefixes(make_keys(self.seed, 1, 1))
        self.groups: list[Group] = []
        ends, known, roots, uids = self._state = self._zeros(4, num_rows)
        self.truth = Truth(ends.fill_(NOT_FOLLOWED), known, self._zeros(num_rows, max_rejected + 2), roots, uids)
        self.writers: OrderedDict[int, str] = OrderedDict()
        self.step = 0
        self.steps: deque[Step] = deque(maxlen=RING)
        self.incidents: dict[tuple[str, str | None, int], int] = {}
        self.total = self._zeros(1)
        self.events: list[Event] = []  # of what happened since the last forward
        self._looked: list[tuple[str, ...]] = []
        self._uid = 0
        self._uploads, self._uploaded = self._pinned(UPLOADS, 8 * num_rows), 0
        self._now = self._zeros(HEAD + num_rows)  # what the running step is, and the numbers of its rows
        self._looking = self._zeros(HEAD + 2 * num_rows)  # the same of a look, and where their lines are
        self._admitted = self._zeros(FEWEST_ROWS, 6)  # number, end, known, root, uid and tail of new rows
        self._totals, self._counts = self._zeros(RING), self._pinned(RING)  # stamps and counts of the last steps
        self._counts_here = self._counts.numpy()
        lines = self._pinned(RING, len(self._now))
        self._lines = list(zip(lines, lines.numpy(), strict=True))
        self._replays = Replays(self.device)
        self._forward: Forward | None = None

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
        if not new:
            return
        lines = []
        for number, request, tokens, length, salt in new:
            self._uid += 1
            self.writers[self._uid] = request
            if len(self.writers) > NAMED_WRITERS:
                self.writers.popitem(last=False)
            root = self.prefixes.root(salt)
            if tokens is None or len(tokens) < length:
                self.coverage.skip("requests whose tokens nobody knows", 1)
                lines.append((number, NOT_FOLLOWED, 0, root, self._uid, root))
                continue
            tail = self.prefixes.end(tokens[:length], salt) if length else root
            lines.append((number, length, 1, root, self._uid, tail))
        for first in range(0, len(lines), FEWEST_ROWS):
            chosen = lines[first : first + FEWEST_ROWS]
            chosen += chosen[:1] * (FEWEST_ROWS - len(chosen))  # twice the same is harmless
            self.upload(torch.from_numpy(np.array(chosen)), self._admitted)
            self._replays.run(("admit",), self._admit)

    # one forward

    def read(self, forward: Forward) -> None:
        """Record what a forward is about to write, and judge what it is about to read."""
        self.step += 1
        n, (line, host) = len(forward.numbers), self._lines[self.step % RING]
        stamp = (self.step & STAMPS) << COUNT_BITS
        host[:HEAD] = n, forward.num_tokens, self.step, pack_site(*forward.site), self.step % RING, stamp
        host[HEAD : HEAD + n] = forward.numbers
        self._now.copy_(line, non_blocking=True)
        lines, by_number = forward.lines or [table[:n].clone() for table in forward.tables], forward.lines is not None
        step = Step(
            self.step, forward.requests, forward.numbers, lines, by_number, forward.site, self.events,
            self._looked, forward.num_tokens,
        )  # fmt: skip
        self.events, self._looked = [], []
        self.steps.append(step)
        self.coverage.forwards += 1
        self.coverage.unproved_stores += 1  # bytes are taken from the pool, where they were stored
        self.coverage.slots_sealed += forward.num_tokens * len(self.groups)
        self.coverage.peak_live_bytes = max(self.coverage.peak_live_bytes, forward.num_entries * self._entry_bytes)
        self._forward = forward
        self._launch_before(forward, _at_least(n, FEWEST_ROWS, self.num_rows), forward.max_length)

    def wrote(self) -> None:
        """The forward has run: take the bytes that it stored, as they lie in the pools now."""
        if self._forward is not None:
            self._launch_after(_at_least(self._forward.num_tokens, FEWEST_TOKENS, self.max_tokens))

    def took(self, rejected: Tensor) -> None:
        """Late layers have stored this forward's entries now; `rejected` [>= rows]: the last so many are not kept."""
        if self._forward is not None:
            n = min(len(rejected), self.num_rows)
            self._rejected[:n].copy_(rejected[:n])
            most = _at_least(self._forward.num_tokens, FEWEST_TOKENS, self.max_tokens)
            self._launch_late(self._forward.starts, most)

    def prepare(self, forward: Forward) -> None:
        """Compile and capture what forwards of every size launch; `forward`: an empty one, over the same tensors."""
        for _ in range(2):  # as they are, captured
            self.admit([(0, "_", [0, 0], 2, "")])
        self.forget()
        self._now.zero_()
        self._looking.zero_()
        for _ in range(2):
            for rows in {min(size, self.num_rows) for size in _sizes(FEWEST_ROWS, self.num_rows)}:
                for entries in _sizes(FEWEST_ENTRIES, forward.max_length):
                    self._launch_look(forward.lines or forward.tables, rows, entries)
                    self._launch_before(forward, rows, entries)
            for tokens in {min(size, self.max_tokens) for size in _sizes(FEWEST_TOKENS, self.max_tokens)}:
                self._launch_after(tokens)
                self._launch_late(forward.starts, tokens)
        self.restart()

    def look(
        self,
        tables: Sequence[Tensor],
        places: Sequence[int],
        numbers: Sequence[int],
        requests: Sequence[str],
        max_length: int,
    ) -> None:
        """Read every byte of these rows once more, before the next forward.

        tables: by group, [lines, width] block tables; places: which lines are those of the rows
        """
        if self.config.content == "write" or not numbers:
            return
        if len(self._looked) == LOOKS:
            self.coverage.skip("rows that went without a last look", len(numbers))
            return
        n, size = len(numbers), _at_least(len(numbers), FEWEST_ROWS, self.num_rows)
        line = np.zeros(HEAD + 2 * size, dtype=np.int64)
        line[NOW_ROWS], line[NOW_STEP] = n, (self.step + 1) % RING * LOOKS + len(self._looked)
        line[HEAD : HEAD + n], line[HEAD + size : HEAD + size + n] = numbers, places
        self._looked.append(tuple(requests))
        self.upload(torch.from_numpy(line), self._looking)
        self._launch_look(tables, size, max_length)

    def count_to_host(self) -> Callable[[], int]:
        """What gives the counter of findings as it was after `wrote`.

        It is there when anything is that was launched later; asked for before, it waits for the device.
        """
        step = self.step

        def count() -> int:
            stamp, total = divmod(int(self._counts_here[step % RING]), 1 << COUNT_BITS)
            if stamp == step & STAMPS:
                return total
            torch.cuda.synchronize(self.device)  # whatever thread and stream this is
            return int(self._counts_here[step % RING]) % (1 << COUNT_BITS)

        return count

    def restart(self) -> None:
        """Begin to count anew, when kernels were compiled."""
        self.coverage, self.step = Coverage(), 0
        self.steps.clear()
        self.events, self._looked = [], []
        self.total.zero_()
        self._counted.zero_()

    # what was found

    def certificate(self, numbers: Collection[int] = ()) -> dict[str, Any]:
        """What was checked, what was not and why; the same keys as that of an engine's canary.

        numbers: rows that the engine holds now
        """
        counted = self._counted.tolist()
        pools = [layers for group in self.groups for layers in group.layers]
        self.coverage.slots_checked = counted[0]
        self.coverage.bytes_checked = sum(n * own.entry_bytes for n, own in zip(counted[1:], pools, strict=True))
        live_bytes = sum(max(end, 0) for end in self.truth.ends[list(numbers)].tolist()) * self._entry_bytes
        groups = [group.to_dict() for group in self.log.groups.values()]
        fed = self.fed - {"T1"} if self.config.content == "write" else self.fed
        return certificate(self.config, self.coverage, live_bytes, seed_id(self.seed), groups, fed)

    def hits_of(self, step: Step) -> dict[str, Tensor]:
        """On the host: the cells of one step, which waits for the device."""
        place = step.number % RING
        if self.uses_kernels:
            torch.cuda.synchronize(self.device)  # whatever thread and stream this is
        hits = {name: cells[place] for name, cells in self._hits.items() if name in ("walk", "write")}
        hits["read"] = self._hits["read"][:, place]
        hits["look"] = self._hits["look"][:, place * LOOKS : (place + 1) * LOOKS]
        return {name: cells.cpu() for name, cells in hits.items()}

    def stored_by(self, step: Step, group: Group) -> tuple[Tensor, Tensor]:
        """[n] slots and chains of what a step stored."""
        slots, chains = self._entries[group.number]
        place = step.number % RING
        return slots[place, : step.count], chains[place, : step.count]

    def written_twice(self, step: Step, group: Group) -> list[int]:
        """Slots that a step wrote and whose record is of another of its entries (W4)."""
        slots, chains = self.stored_by(step, group)
        held = group.records[slots.clamp(min=0)]
        wrong = (slots >= 0) & (held[:, CHAIN] != chains) & (held[:, STEP_SITE] & MASK_32 == step.number)
        return sorted(set(slots[wrong].tolist()))

    # launches; they may be captured, so that they depend on nothing that a key does not hold

    def _launch_before(self, forward: Forward, most_rows: int, max_length: int) -> None:
        most_entries = _at_least(max_length, FEWEST_ENTRIES)
        used = forward.lengths, forward.starts, forward.tokens, forward.positions, *forward.known
        places = [tensor.data_ptr() for tensor in (*used, *forward.tables, *forward.slots)]
        launch = functools.partial(self._before, forward, most_rows, most_entries)
        self._replays.run(("before", most_rows, most_entries, *places), launch)

    def _launch_look(self, tables: Sequence[Tensor], most_rows: int, max_length: int) -> None:
        most_entries = _at_least(max_length, FEWEST_ENTRIES)
        launch = functools.partial(self._look, tables, most_rows, most_entries)
        self._replays.run(("look", most_rows, most_entries, *[table.data_ptr() for table in tables]), launch)

    def _launch_after(self, most: int) -> None:
        self._replays.run(("after", most), functools.partial(self._after, most))

    def _launch_late(self, starts: Tensor, most: int) -> None:
        if any(layers.is_late for group in self.groups for layers in group.layers):
            key = "late", most, starts.data_ptr(), len(starts)
            self._replays.run(key, functools.partial(self._late, starts, most))

    def _admit(self) -> None:
        numbers, tails = self._admitted[:, 0], self._admitted[:, 5]
        self._state.index_copy_(1, numbers, self._admitted[:, 1:5].T)
        self.truth.tails.select(1, 0).index_copy_(0, numbers, tails)

    def _before(self, forward: Forward, most_rows: int, most_entries: int) -> None:
        content = self.config.content
        self._hits["read"].index_fill_(1, self._now[PLACE : PLACE + 1], NO_HIT)
        numbers = self._now[HEAD : HEAD + most_rows]
        for group, table, own in zip(self.groups, forward.tables, forward.slots, strict=True):
            rows = Rows(numbers, table, forward.lengths, forward.starts)
            fed = Fed(forward.tokens, forward.positions, own, *forward.known)
            slots, chains = self._entries[group.number]
            common = {"block_size": group.block_size, "null_slots": group.block_size, "seeds": self._seeds}
            common |= {"now": self._now, "total": self.total}
            self._run(
                walk, "advance", group.records, rows, fed, self.truth, self.identity, slots=slots, chains=chains,
                hits=self._hits["write"][:, group.number], is_first=group is self.groups[0], **common,
            )  # fmt: skip
            self._run(
                walk, "walk", group.records, rows, self.truth, self.identity, window=group.window,
                hits=self._hits["walk"][:, group.number], counted=self._counted, **common,
            )  # fmt: skip
            for column, layers in self._columns(group) if content != "write" else ():
                stride = 1 if content == "full" else ROTATION_STEPS
                self._reread(group, layers, rows, most_entries, stride, column, self._now, "read")

    def _look(self, tables: Sequence[Tensor], most_rows: int, most_entries: int) -> None:
        numbers, places = self._looking[HEAD : HEAD + 2 * most_rows].view(2, most_rows)
        self._hits["look"].index_fill_(1, self._looking[NOW_STEP : NOW_STEP + 1], NO_HIT)
        for group, table in zip(self.groups, tables, strict=True):
            rows = Rows(numbers, table, places, places)
            for column, layers in self._columns(group):
                self._reread(group, layers, rows, most_entries, 1, column, self._looking, "look", whole=True)

    def _after(self, most: int) -> None:
        for group in self.groups:
            slots, chains = self._entries[group.number]
            for layers in group.layers:
                if not layers.is_late:
                    self._take(group, layers, slots, chains, self._now, most)
        self._totals.index_copy_(0, self._now[PLACE : PLACE + 1], self.total + self._now[STAMP : STAMP + 1])
        self._counts.copy_(self._totals, non_blocking=True)

    def _late(self, starts: Tensor, most: int) -> None:
        ends = starts[1:].to(torch.int64)
        index = torch.arange(most, device=self.device)
        row = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
        valid = index < (ends - self._rejected[: len(ends)])[row]
        place = self._now[PLACE : PLACE + 1]
        for group in self.groups:
            slots, chains = (entries.index_select(0, place) for entries in self._entries[group.number])
            slots[0, :most].masked_fill_(~valid, -1)
            for layers in group.layers:
                if layers.is_late:
                    self._take(group, layers, slots, chains, self._now, most)

    def take_now(self, group: Group, layers: Layers, slots: Tensor, chains: Tensor) -> None:
        """Take the bytes of these slots [n] as they lie now."""
        now = torch.tensor([0, len(slots), 0, 0], device=self.device)
        self._take(group, layers, slots[None], chains[None], now, len(slots))

    def upload(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """To the device, without a wait, into the beginning of `out` if given; what was given long ago is overwritten.

        values: int64 on the host, at most 8 a row
        """
        if self.uses_kernels and values.numel() <= self._uploads.shape[1]:
            self._uploaded = (self._uploaded + 1) % UPLOADS
            values = self._uploads[self._uploaded, : values.numel()].view(values.shape).copy_(values)
        if out is None:
            return values.to(self.device, non_blocking=True)
        return out[: len(values)].copy_(values, non_blocking=True)

    # helpers

    def _reread(
        self,
        group: Group,
        layers: Layers,
        rows: Rows,
        max_length: int,
        stride: int,
        column: int,
        now: Tensor,
        kind: str,
        whole: bool = False,
    ) -> None:
        self._run(
            reread, "reread", layers.rows, group.records, rows, layers.keys, now=now, lanes=layers.lanes,
            stamps=layers.stamps, ends=self.truth.ends, max_length=max_length, stride=stride, window=group.window,
            block_size=group.block_size, whole=whole, hits=self._hits[kind][:, :, column], total=self.total,
            counted=self._counted[1 + column : 2 + column],
        )  # fmt: skip

    def _take(self, group: Group, layers: Layers, slots: Tensor, chains: Tensor, now: Tensor, most: int) -> None:
        self._run(
            reread, "take", layers.rows, group.records, slots, chains, layers.keys, now=now, lanes=layers.lanes,
            stamps=layers.stamps, total=self.total, most=most,
        )  # fmt: skip

    def _run(self, module: ModuleType, name: str, *arguments: Any, **keywords: Any) -> None:
        getattr(module, name if self.uses_kernels else f"{name}_torch")(*arguments, **keywords)

    def _columns(self, group: Group) -> list[tuple[int, Layers]]:
        """Layers of a group, each with its number among those of all groups."""
        first = sum(len(other.layers) for other in self.groups[: group.number])
        return list(enumerate(group.layers, first))

    @cached_property
    def _entries(self) -> list[tuple[Tensor, Tensor]]:
        """By group, [RING, max_tokens] slots and chains of what the last forwards stored."""
        return [(self._zeros(RING, self.max_tokens) - 1, self._zeros(RING, self.max_tokens)) for _ in self.groups]

    @cached_property
    def _hits(self) -> dict[str, Tensor]:
        """By kind: [RING, groups, shares, rows] and [RING, groups, rows] int64, and as `reread` has them, by pool."""
        groups, pools = len(self.groups), sum(len(group.layers) for group in self.groups)
        rows = self.num_rows
        shapes = {"walk": (RING, groups, SPLITS, rows), "write": (RING, groups, rows)}
        shapes |= {"read": (2, RING, pools, rows), "look": (2, RING * LOOKS, pools, rows)}
        return {name: self._zeros(*shape) + NO_HIT for name, shape in shapes.items()}

    @cached_property
    def _counted(self) -> Tensor:
        """Entries whose record was judged, and by pool of layers, those whose bytes were read again."""
        return self._zeros(1 + sum(len(group.layers) for group in self.groups))

    @cached_property
    def _entry_bytes(self) -> int:
        return sum(layers.entry_bytes for group in self.groups for layers in group.layers)

    @cached_property
    def _seeds(self) -> Tensor:
        return self._zeros(2, self.num_rows)

    @cached_property
    def _rejected(self) -> Tensor:
        return self._zeros(self.num_rows)

    def _pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.uses_kernels)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


def _at_least(count: int, fewest: int, most: int | None = None) -> int:
    """The size that launches are made for: the fewest or four times as many, and so on, but not more than the most."""
    size = fewest
    while size < count:
        size *= 4
    return size if most is None else min(size, most)


def _sizes(fewest: int, most: int) -> list[int]:
    """Every size up to the first that is enough for `most`."""
    sizes = [fewest]
    while sizes[-1] < most:
        sizes.append(_at_least(sizes[-1] + 1, fewest))
    return sizes
