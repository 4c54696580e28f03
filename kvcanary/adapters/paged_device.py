"""What a canary of watched pools has on the device, and what it launches there.

Launches are the same in every step and may be captured: what changes lies in `now`, and they depend on nothing that the
key of a replay does not hold.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.paged_state import ADMITTED, HEAD, LOOKS, PLACE, RING, SPLITS, STAMP, Forward, Group, Layers
from kvcanary.captures import Replays
from kvcanary.config import ROTATION_STEPS, CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.views import PoolView
from kvcanary_kernels import fetch, reread, walk
from kvcanary_kernels.record import COLUMNS, make_keys
from kvcanary_kernels.walk import NO_HIT, NOT_FOLLOWED, NOW_STEP, NOW_TOKENS, NOW_WIDTH, Fed, Rows, Truth

UPLOADS = 64  # that may be on their way
FEWEST_ROWS, FEWEST_TOKENS, FEWEST_ENTRIES = 16, 16, 512  # that launches are sized for


class PagedDevice:
    """Records, lanes and truths of one engine's pools, the lines that say what a step is, and their launches."""

    def __init__(
        self, config: CanaryConfig, num_rows: int, max_rejected: int, max_tokens: int, device: torch.device | str
    ) -> None:
        """As PagedCanary."""
        self.config = config
        self.device = torch.device(device)
        self.uses_kernels = self.device.type == "cuda"
        self.num_rows, self.max_tokens = num_rows, max_tokens
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.identity = make_keys(self.seed, 1, 1, self.device)
        self.groups: list[Group] = []
        self._state, self._tails = self._zeros(4, num_rows + 1), self._zeros(num_rows + 1, max_rejected + 2)
        ends, known, roots, uids = self._state[:, :num_rows]  # the last one is nobody's
        self.truth = Truth(ends.fill_(NOT_FOLLOWED), known, self._tails[:num_rows], roots, uids)
        self.total = self._zeros(1)
        self._uploads, self._uploaded = self._pinned(UPLOADS, 8 * num_rows), 0
        self._lines = self._pinned(RING, HEAD + num_rows + events_width(num_rows))  # what the last steps were
        self._lines_here = self._lines.numpy()
        self._now, self._ticks = self._zeros(self._lines.shape[1]), self._zeros(1)  # the running step's, and its number
        self._totals, self._counts = self._zeros(RING), self._pinned(RING)  # stamps and counts of the last steps
        self._counts_here = self._counts.numpy()
        self.kept: list[Tensor] = []  # by group, block tables by number as rows had them in their last forward
        self._replays = Replays(self.device)

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

    def upload(self, values: Tensor) -> Tensor:
        """To the device, without a wait; what was given long ago is overwritten.

        values: int64 on the host
        """
        if self.uses_kernels and values.numel() <= self._uploads.shape[1]:
            self._uploaded = (self._uploaded + 1) % UPLOADS
            values = self._uploads[self._uploaded, : values.numel()].view(values.shape).copy_(values)
        return values.to(self.device, non_blocking=True)

    def take_now(self, group: Group, layers: Layers, slots: Tensor, chains: Tensor) -> None:
        """Take the bytes of these slots [n] as they lie now."""
        now = torch.tensor([0, len(slots), 0, 0], device=self.device)
        self._take(group, layers, slots[None], chains[None], now, len(slots))

    # launches

    def _launch_before(self, forward: Forward, most_rows: int, most_entries: int, most_events: int) -> None:
        if not self.kept:
            shapes = [(self.num_rows, table.shape[1]) for table in forward.tables]
            tables = zip(shapes, forward.tables, strict=True)
            self.kept = [torch.zeros(shape, dtype=table.dtype, device=self.device) for shape, table in tables]
        used = forward.lengths, forward.starts, forward.tokens, forward.positions, *forward.known
        places = [tensor.data_ptr() for tensor in (*used, *forward.tables, *forward.slots)]
        launch = functools.partial(self._before, forward, most_rows, most_entries, most_events)
        self._replays.run(("before", most_rows, most_entries, most_events, *places), launch)

    def _launch_after(self, most: int) -> None:
        self._replays.run(("after", most), functools.partial(self._after, most))

    def _launch_late(self, starts: Tensor, most: int) -> None:
        if any(layers.is_late for group in self.groups for layers in group.layers):
            key = "late", most, starts.data_ptr(), len(starts)
            self._replays.run(key, functools.partial(self._late, starts, most))

    def _before(self, forward: Forward, most_rows: int, most_entries: int, most_events: int) -> None:
        content, now = self.config.content, self._now
        self._ticks.add_(1)
        width = HEAD + most_rows + events_width(most_events)
        self._run(fetch, "fetch", self._lines, self._ticks, now, width=width)
        numbers, events = now[HEAD : HEAD + most_rows], now[HEAD + most_rows : width]
        if most_events:
            gone, fresh, admitted = events_of(events, most_events)
            self._look(gone, most_entries)
            table = admitted.T.contiguous()
            self._state.index_copy_(1, table[0], table[1:5])
            self._tails.select(1, 0).index_copy_(0, table[0], table[5])
        for table, kept, group in zip(forward.tables, self.kept, self.groups, strict=True):
            rows, width = Rows(numbers, table, numbers, numbers), -(-most_entries // group.block_size)
            self._run(fetch, "keep", rows, now=now, kept=kept, width=min(width, table.shape[1]))
        if most_events:
            self._look(fresh, most_entries)
        self._hits["read"].index_fill_(1, now[PLACE : PLACE + 1], NO_HIT)
        for group, table, own in zip(self.groups, forward.tables, forward.slots, strict=True):
            rows = Rows(numbers, table, forward.lengths, forward.starts)
            fed = Fed(forward.tokens, forward.positions, own, *forward.known)
            slots, chains = self._entries[group.number]
            common = {"block_size": group.block_size, "null_slots": group.block_size, "seeds": self._seeds}
            common |= {"now": now, "total": self.total}
            self._run(
                walk, "advance", group.records, rows, fed, self.truth, self.identity, slots=slots, chains=chains,
                hits=self._hits["write"][:, group.number], is_first=group is self.groups[0], **common,
            )  # fmt: skip
            self._run(
                walk, "walk", group.records, rows, self.truth, self.identity, window=group.window,
                hits=self._hits["walk"][:, group.number], counted=self._counted[:1], **common,
            )  # fmt: skip
            for column, layers in self._columns(group) if content != "write" else ():
                stride = 1 if content == "full" else ROTATION_STEPS
                self._reread(group, layers, rows, most_entries, stride, column, now, "read")

    def _look(self, look: Tensor, most_entries: int) -> None:
        """Read all that is recorded of some rows. look: [NOW_WIDTH + rows], how many, which cell, and their numbers."""
        if self.config.content == "write":
            return
        numbers = look[NOW_WIDTH:]
        self._hits["look"].index_fill_(1, look[NOW_STEP : NOW_STEP + 1], NO_HIT)
        for group, kept in zip(self.groups, self.kept, strict=True):
            rows = Rows(numbers, kept, numbers, numbers)
            for column, layers in self._columns(group):
                self._reread(group, layers, rows, most_entries, 1, column, look, "look", whole=True)

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
        is_kept = index < (ends - self._rejected[: len(ends)])[row]
        for group in self.groups:
            slots, chains = self._stored(group, most)
            slots = torch.where(is_kept, slots, -1)[None]
            for layers in group.layers:
                if layers.is_late:
                    self._take(group, layers, slots, chains[None], self._now, most)

    def _stored(self, group: Group, most: int) -> tuple[Tensor, Tensor]:
        """[most] slots and chains of what this forward stores; slot -1: nothing."""
        place, index = self._now[PLACE : PLACE + 1], torch.arange(most, device=self.device)
        slots, chains = (entries.index_select(0, place)[0, :most] for entries in self._entries[group.number])
        return torch.where(index < self._now[NOW_TOKENS], slots, -1), chains

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


def events_width(most: int) -> int:
    """Words of a line that say which rows went, which begin with entries of others, and which are new."""
    return LOOKS * (NOW_WIDTH + most) + ADMITTED * most if most else 0


def events_of(line: Any, most: int) -> tuple[Any, Any, Any]:
    """The parts of these words, at most so many rows in each: two looks, and [most, ADMITTED]."""
    width = NOW_WIDTH + most
    return line[:width], line[width : 2 * width], line[2 * width :].reshape(most, ADMITTED)


def at_least(count: int, fewest: int, most: int | None = None) -> int:
    """The size that launches are made for: the fewest or four times as many, and so on, but not more than the most."""
    size = fewest
    while size < count:
        size *= 4
    return size if most is None else min(size, most)


def sizes(fewest: int, most: int) -> list[int]:
    """Every size up to the first that is enough for `most`."""
    sizes = [fewest]
    while sizes[-1] < most:
        sizes.append(at_least(sizes[-1] + 1, fewest))
    return sizes
