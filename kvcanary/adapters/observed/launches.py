"""What a canary of watched pools has on the device, and what it launches there.

Launches are the same in every step and may be captured: what changes lies in `now`, and they depend on nothing that the
key of a replay does not hold.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvcanary.adapters.observed.state import HEAD, LOOKS, PLACE, RING, SPLITS, STAMP, Forward, Group, Layers
from kvcanary.config import ROTATION_STEPS, CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.pools.views import PoolView
from kvcanary.records.dispatch import watch_ops_for
from kvcanary.records.graph_cache import Replays
from kvcanary_kernels.record.layout import COLUMNS, make_keys
from kvcanary_kernels.watch.begin import NEW_WIDTH
from kvcanary_kernels.watch.walk import NO_HIT, NOT_FOLLOWED, NOW_TOKENS, NOW_WIDTH, Fed, Rows, Truth

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
        self._ops = watch_ops_for(self.device)
        self.num_rows, self.max_tokens = num_rows, max_tokens
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.identity = make_keys(self.seed, 1, 1, self.device)
        self.groups: list[Group] = []
        ends, known, roots, uids = self._zeros(4, num_rows)
        self.truth = Truth(ends.fill_(NOT_FOLLOWED), known, self._zeros(num_rows, max_rejected + 2), roots, uids)
        self.total = self._zeros(1)
        self._uploads, self._uploaded = self._pinned(UPLOADS, 8 * num_rows), 0
        self._lines = self._pinned(RING, HEAD + num_rows + events_width(num_rows, num_rows))  # what the last steps were
        self._lines_here = self._lines.numpy()
        self._now, self._ticks = self._zeros(self._lines.shape[1]), self._zeros(2)  # the running step's, and its number
        self._counts = self._pinned(RING)  # stamps and counts of the last steps
        self._counts_here = self._counts.numpy()
        self.kept: list[Tensor] = []  # by group, block tables by number as rows had them in their last forward
        self._replays = Replays(self.device)
        #: What an engine gives with every forward, as long as it gives the same, and where that lies.
        self._lasting: tuple[Sequence[Tensor], Sequence[Tensor], tuple[int, ...]] = (), (), ()

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

    def _launch_before(self, forward: Forward, most_rows: int, most_entries: int, events: tuple[int, int]) -> None:
        """events: at most how many rows went, and how many are new."""
        if not self.kept:
            shapes = [(self.num_rows, table.shape[1]) for table in forward.tables]
            tables = zip(shapes, forward.tables, strict=True)
            self.kept = [torch.zeros(shape, dtype=table.dtype, device=self.device) for shape, table in tables]
        slots, known, lasting = self._lasting
        if forward.slots is not slots or forward.known is not known:
            lasting = tuple([tensor.data_ptr() for tensor in (*forward.slots, *forward.known)])
            self._lasting = forward.slots, forward.known, lasting
        used = forward.lengths, forward.starts, forward.tokens, forward.positions, *forward.tables
        places = [tensor.data_ptr() for tensor in used]
        launch = functools.partial(self._before, forward, most_rows, most_entries, *events)
        self._replays.run(("before", most_rows, most_entries, *events, lasting, *places), launch)

    def _launch_after(self, most: int) -> None:
        self._replays.run(("after", most), functools.partial(self._after, most))

    def _launch_late(self, starts: Tensor, most: int) -> None:
        if any(layers.is_late for layers in self._pools):
            key = "late", most, starts.data_ptr(), len(starts)
            self._replays.run(key, functools.partial(self._late, starts, most))

    def _before(self, forward: Forward, most_rows: int, most_entries: int, most_gone: int, most_new: int) -> None:
        content, now = self.config.content, self._now
        width = HEAD + most_rows + events_width(most_gone, most_new)
        self._ops.fetch(self._lines, self._ticks, now, width=width, cells=self._cells.flatten(2))
        numbers, (gone, fresh, new) = now[HEAD : HEAD + most_rows], events_of(now[HEAD + most_rows : width], most_gone)
        if most_gone:
            self._look(gone, most_entries)
        if most_new:
            self._ops.begin(new, self.truth, self.identity, *forward.known[:1])
        for table, kept, group in zip(forward.tables, self.kept, self.groups, strict=True):
            rows, width = Rows(numbers, table, numbers, numbers), -(-most_entries // group.block_size)
            self._ops.keep(rows, now=now, kept=kept, width=min(width, table.shape[1]))
        if most_new:
            self._look(fresh, most_entries)
        for group, table, own in zip(self.groups, forward.tables, forward.slots, strict=True):
            rows = Rows(numbers, table, forward.lengths, forward.starts)
            fed = Fed(forward.tokens, forward.positions, own, *forward.known)
            slots, chains = self._entries[group.number]
            common = {"block_size": group.block_size, "null_slots": group.block_size, "seeds": self._seeds}
            common |= {"now": now, "total": self.total}
            self._ops.advance(
                group.records, rows, fed, self.truth, self.identity, slots=slots, chains=chains,
                hits=self._hits["write"][:, group.number], is_first=group is self.groups[0], **common,
            )  # fmt: skip
            self._ops.walk(
                group.records, rows, self.truth, self.identity, window=group.window,
                hits=self._hits["walk"][:, group.number], counted=self._counted[:1], **common,
            )  # fmt: skip
            for column, layers in self._columns(group) if content != "write" else ():
                stride = 1 if content == "full" else ROTATION_STEPS
                self._reread(group, layers, rows, most_entries, stride, now, self._cells[:, :, 0, column], column)

    def _look(self, look: Tensor, most_entries: int) -> None:
        """Read all that is recorded of some rows. look: [NOW_WIDTH + rows], how many, which cell, and their numbers."""
        if self.config.content == "write":
            return
        numbers, cells = look[NOW_WIDTH:], self._cells.flatten(1, 2)
        for group, kept in zip(self.groups, self.kept, strict=True):
            rows = Rows(numbers, kept, numbers, numbers)
            for column, layers in self._columns(group):
                self._reread(group, layers, rows, most_entries, 1, look, cells[:, :, column], column, whole=True)

    def _after(self, most: int) -> None:
        for group in self.groups:
            slots, chains = self._entries[group.number]
            for layers in group.layers:
                if not layers.is_late:
                    self._take(group, layers, slots, chains, self._now, most)
        self._ops.send(self.total, self._now, self._counts, place=PLACE, stamp=STAMP)

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
        now: Tensor,
        hits: Tensor,
        column: int,
        whole: bool = False,
    ) -> None:
        self._ops.reread(
            layers.rows, group.records, rows, layers.keys, now=now, lanes=layers.lanes,
            stamps=layers.stamps, ends=self.truth.ends, max_length=max_length, stride=stride, window=group.window,
            block_size=group.block_size, whole=whole, hits=hits, total=self.total,
            counted=self._counted[1 + column : 2 + column],
        )  # fmt: skip

    def _take(self, group: Group, layers: Layers, slots: Tensor, chains: Tensor, now: Tensor, most: int) -> None:
        self._ops.take(
            layers.rows, group.records, slots, chains, layers.keys, now=now, lanes=layers.lanes,
            stamps=layers.stamps, total=self.total, most=most,
        )  # fmt: skip

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
        """By kind: [RING, groups, shares, rows] and [RING, groups, rows] int64."""
        shapes = {
            "walk": (RING, len(self.groups), SPLITS, self.num_rows),
            "write": (RING, len(self.groups), self.num_rows),
        }
        return {name: self._zeros(*shape) + NO_HIT for name, shape in shapes.items()}

    @cached_property
    def _cells(self) -> Tensor:
        """[2, RING, 1 + LOOKS, pools, rows] int64, as `reread` has them: of what a forward reads, and of each look."""
        return self._zeros(2, RING, 1 + LOOKS, len(self._pools), self.num_rows) + NO_HIT

    @cached_property
    def _counted(self) -> Tensor:
        """Entries whose record was judged, and by pool of layers, those whose bytes were read again."""
        return self._zeros(1 + len(self._pools))

    @property
    def _pools(self) -> list[Layers]:
        return [layers for group in self.groups for layers in group.layers]

    @cached_property
    def _entry_bytes(self) -> int:
        return sum(layers.entry_bytes for layers in self._pools)

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


def events_width(gone: int, new: int) -> int:
    """Words of a line for at most so many rows that went and new ones: which these are, and what they begin with."""
    return (NOW_WIDTH + gone if gone else 0) + (NOW_WIDTH + (1 + NEW_WIDTH) * new if new else 0)


def events_of(words: Tensor, gone: int) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of these words: two looks, and [new, NEW_WIDTH]."""
    first = events_width(gone, 0)
    new = max(len(words) - first - NOW_WIDTH, 0) // (1 + NEW_WIDTH)
    second = first + NOW_WIDTH + new
    return words[:first], words[first:second], words[second:].view(new, NEW_WIDTH)


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
