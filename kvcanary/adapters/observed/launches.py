"""What a canary of watched pools launches in a step, and what this leaves behind for the host.

Launches are the same in every step and may be captured: what changes lies in `now`, and they depend on nothing that the
key of a replay does not hold.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.memory import Memory, TokenRing
from kvcanary.adapters.observed.owners import FEW_CHANGES, FEW_WORDS, NO_CHANGES, BlockOwners
from kvcanary.adapters.observed.state import COUNT_BITS, LOOKS, RING, Forward, Group, Layers, Step
from kvcanary.config import ROTATION_STEPS, CanaryConfig
from kvcanary.pools.launch_site import pack_site
from kvcanary.records.dispatch import watch_ops_for
from kvcanary.records.graph_cache import Replays
from kvcanary_kernels.watch.advance import Fed, Overwritten
from kvcanary_kernels.watch.begin import NEW_WIDTH, Told
from kvcanary_kernels.watch.grant import words_of
from kvcanary_kernels.watch.reread import ENTRIES_PER_LAYER, NOT_FINITE, NOT_STORED, Before
from kvcanary_kernels.watch.walk import NO_VIOLATION, NOW_PLACE, NOW_TOKENS, NOW_WIDTH, Rows, Watched

STAMPS = (1 << 63 - COUNT_BITS) - 1
COUNTS = (1 << COUNT_BITS) - 1
#: A line: `now`, changes of owners, rows, events.
ROWS_AT = NOW_WIDTH + FEW_WORDS
HEADS = [struct.Struct(f"={NOW_WIDTH + words_of(changes)}q") for changes in range(FEW_CHANGES + 1)]


class Launches:
    """The lines that say what a step is, and launches that read them; violations lie in a ring of the last steps."""

    def __init__(self, config: CanaryConfig, memory: Memory, num_rows: int, max_tokens: int) -> None:
        """As PagedCanary."""
        self.config, self.memory, self.num_rows, self.max_tokens = config, memory, num_rows, max_tokens
        self._ops, self._replays = watch_ops_for(memory.device), Replays(memory.device)
        width = ROWS_AT + num_rows + events_width(num_rows, num_rows)
        self._lines = memory.pinned(RING, width)  # what the last steps were
        self._lines_here = self._lines.numpy()
        self._line_bytes, self._line_width = self._lines_here.data.cast("B"), self._lines_here[0].nbytes
        self._now, self._ticks = memory.zeros(width), memory.zeros(2)  # the running step's, its number
        self._counts = memory.pinned(RING)  # stamps and counts of the last steps
        self._counts_here = self._counts.numpy().data
        #: Of layers whose fingerprints are summed up as they are stored: their sum [1], and what it was after the last
        #: steps, as a count, twice as `_counts`.
        self._sums: dict[Layers, tuple[Tensor, Tensor, memoryview]] = {}
        #: [rows, 2] of the last forward's, the chain of what each had before it, and whether that is known.
        self.seeds, self._rejected = memory.zeros(num_rows, 2), memory.zeros(num_rows)
        #: By what `take` finds, the writers of records of which it is known.
        self.told: dict[int, set[int]] = {NOT_FINITE: set(), NOT_STORED: set()}
        self.owners: BlockOwners | None = None  # whose changes lines take along
        self._prompts: TokenRing | None = None
        self.kept: list[Tensor] = []  # by group, block tables by number as rows had them in their last forward
        #: What an engine gives with every forward, as long as it gives the same, and where that lies.
        self._lasting: tuple[Sequence[Tensor], Sequence[Tensor], tuple[int, ...]] = (), (), ()
        #: What the last line says of its step beside its number, which numbers of rows lie in which line, and what does
        #: the last launches once more.
        self._head: tuple[int, int, int] = 0, 0, 0
        self._numbers: NDArray[Any] = np.empty(0, dtype=np.int64)
        self._numbers_in: list[Any] = [None] * RING
        self._again: Callable[[], Any] = lambda: None
        self._after_again: dict[int, Callable[[], Any]] = {}

    def head(self, step: int, forward: Forward, most_rows: int) -> NDArray[np.int64]:
        """Write into the line of a step what it is; gives the words behind its rows, for events."""
        n, place = len(forward.numbers), step % RING
        line, self._head = self._lines_here[place], (n, forward.num_tokens, pack_site(*forward.site))
        self._begin_line(step, place)
        line[ROWS_AT : ROWS_AT + n] = self._numbers = forward.numbers
        self._numbers_in[place] = forward.numbers
        return line[ROWS_AT + most_rows :]

    def again(self, step: int) -> None:
        """The forward that was launched last once more, as another step."""
        place = step % RING
        self._begin_line(step, place)
        if self._numbers_in[place] is not self._numbers:
            end = ROWS_AT + len(self._numbers)
            self._lines_here[place, ROWS_AT:end] = self._numbers_in[place] = self._numbers
        self._again = self._again() or self._again

    def _begin_line(self, step: int, place: int) -> None:
        """Write which step it is, and which owners change in front of it."""
        n, num_tokens, site = self._head
        stamp = (step & STAMPS) << COUNT_BITS
        changes = NO_CHANGES if self.owners is None else self.owners.few()
        head = HEADS[changes[0]]
        head.pack_into(self._line_bytes, place * self._line_width, n, num_tokens, step, site, place, stamp, *changes)

    def before(self, forward: Forward, most_rows: int, events: tuple[int, int]) -> None:
        """events: at most how many rows went, and how many are new."""
        if not self.kept:
            shapes = [(self.num_rows, table.shape[1]) for table in forward.tables]
            tables, device = zip(shapes, forward.tables, strict=True), self.memory.device
            self.kept += [torch.zeros(shape, dtype=table.dtype, device=device) for shape, table in tables]
        slots, known, lasting = self._lasting
        if forward.slots is not slots or forward.known is not known:
            lasting = tuple([tensor.data_ptr() for tensor in (*forward.slots, *forward.known)])
            self._lasting = forward.slots, forward.known, lasting
        used = forward.lengths, forward.starts, forward.tokens, forward.positions, *forward.tables
        places = [tensor.data_ptr() for tensor in used]
        launch = functools.partial(self._before, forward, most_rows, *events)
        key = "before", most_rows, *events, lasting, *places
        self._again = self._run(key, launch)

    def after(self, most: int) -> None:
        again = self._after_again.get(most) or functools.partial(self._run, ("after", most), self._after_of(most))
        self._after_again[most] = again() or again

    def _after_of(self, most: int) -> Callable[[], None]:
        return functools.partial(self._after, most)

    def _run(self, key: Hashable, launch: Callable[[], None]) -> Callable[[], Any]:
        """Launch, and give what does the same again; that gives something better, or nothing."""
        return self._replays.run(key, launch) or functools.partial(self._run, key, launch)

    def late(self, starts: Tensor, rejected: Tensor, most: int) -> None:
        """rejected: of each row, the last so many entries are not kept."""
        n = min(len(rejected), self.num_rows)
        self._rejected[:n].copy_(rejected[:n])
        if any(layers.is_late for layers in self.memory.layers):
            key = "late", most, starts.data_ptr(), len(starts)
            self._replays.run(key, functools.partial(self._late, starts, most))

    def on_stored(self, name: str, group: Group, launch: Callable[[Tensor, Tensor], None], most: int) -> None:
        """As `PagedCanary.launch_on_stored`."""
        self._replays.run((name, group.number, most), lambda: launch(*self._stored(group, most)))

    def beside(self, key: Hashable, most_rows: int, launch: Callable[[Tensor, Tensor], None]) -> None:
        """`launch(now, numbers)` of the forward that was read last, numbers [most_rows] of its rows.

        key: what tells the launch apart, and all that it depends on which does not lie on the device
        """
        numbers = self._now[ROWS_AT : ROWS_AT + most_rows]
        self._replays.run((key, most_rows), functools.partial(launch, self._now, numbers))

    @property
    def now(self) -> Tensor:
        """[>= NOW_WIDTH] of the forward that was read last."""
        return self._now

    @property
    def numbers(self) -> Tensor:
        """[num_rows] of the rows of the forward that was read last; behind them lies something else."""
        return self._now[ROWS_AT : ROWS_AT + self.num_rows]

    def sum_stored(self, layers: Layers) -> None:
        """From now on keep the sum of what forwards store into these layers; before anything is captured."""
        sent = self.memory.pinned(RING)
        self._sums[layers] = self.memory.zeros(1), sent, sent.numpy().data

    def stored_chains(self, group: Group) -> Tensor:
        """[RING, max_tokens] of what the last forwards stored."""
        return self._entries[group.number][1]

    def take_now(self, group: Group, layers: Layers, slots: Tensor, chains: Tensor) -> None:
        """Take the bytes of these slots [n] as they lie now."""
        now = self.memory.upload(torch.tensor([0, len(slots), 0, 0, 0]))
        self._take(group, layers, slots[None], chains[None], now, len(slots), are_stored=False)

    def restart(self) -> None:
        """Begin to count steps anew; the lines of steps say nothing."""
        self._lines_here.fill(0)
        self._numbers_in = [None] * RING
        for counter in (self._ticks, self.counted, self.memory.total, *(own[0] for own in self._sums.values())):
            counter.zero_()

    # what they leave behind

    def count_of(self, step: int) -> int | None:
        """The counter of findings as it was after one of the last steps; None: it has not arrived."""
        return _count_in(self._counts_here, step)

    def sums_of(self, step: int) -> list[int] | None:
        """Low bits of what `sum_stored` keeps, as it was after one of the last steps; None: they have not arrived."""
        sums = [_count_in(sent, step) for *_, sent in self._sums.values()]
        return None if None in sums else [own for own in sums if own is not None]

    def wait_for_count(self, step: int) -> int:
        """The same, when the device has done all it was asked to; on a host all is done, and nobody said `wrote`."""
        if not self.memory.is_cuda:
            return int(self.memory.total) & COUNTS
        torch.cuda.synchronize(self.memory.device)  # whatever thread and stream this is
        return self._counts_here[step % RING] & COUNTS

    def violations_of(self, step: Step) -> dict[str, Tensor]:
        """On the host: the cells of one step, which waits for the device.

        walk, write: [groups, rows];  read: [2, pools of layers, rows];  look: [2, LOOKS, pools of layers, rows]
        """
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)
        cells = self._cells[step.number % RING].cpu()
        num_groups = len(self.memory.groups)
        read = cells[self._read_kinds].view(1 + LOOKS, -1, 2, self.num_rows).permute(2, 0, 1, 3)
        walked, written = cells[: 2 * num_groups].split(num_groups)
        return {"walk": walked, "write": written, "read": read[:, 0], "look": read[:, 1:]}

    def take_first(self, step: Step, layers: Layers, kind: int) -> tuple[int, int] | None:
        """Of these layers the first that `take` found in a step, as layer and entry; it is told with that."""
        cell = self._firsts(layers)[step.number % RING, kind]
        first = int(cell)
        cell.fill_(NO_VIOLATION)
        return None if first == NO_VIOLATION else divmod(first, ENTRIES_PER_LAYER)

    def stored_by(self, step: Step, group: Group) -> tuple[Tensor, Tensor]:
        """[n] slots and chains of what a step stored."""
        slots, chains = self._entries[group.number]
        place = step.number % RING
        return slots[place, : step.count], chains[place, : step.count]

    # launches

    def _before(self, forward: Forward, most_rows: int, most_gone: int, most_new: int) -> None:
        now, memory, cells = self._now, self.memory, self._cells
        end = ROWS_AT + most_rows
        width = end + events_width(most_gone, most_new)
        self._ops.fetch(self._lines, self._ticks, now, width=width, cells=cells.flatten(1))
        if self.owners is not None:
            self.owners.grant(now[NOW_WIDTH:ROWS_AT])
        numbers, (gone, fresh, new) = now[ROWS_AT:end], events_of(now[end:width], most_gone)
        if most_gone:
            self._look(gone, 1)
        if most_new:
            self._begin(new, forward.known)
        for table, kept, group in zip(forward.tables, self.kept, memory.groups, strict=True):
            rows = Rows(numbers, table, forward.lengths, forward.starts, forward.in_place)
            self._ops.keep(rows, now=now, kept=kept, block_size=group.block_size)
        if most_new:
            self._look(fresh, 2)
        for group, table, own in zip(memory.groups, forward.tables, forward.slots, strict=True):
            rows, watched = (
                Rows(numbers, table, forward.lengths, forward.starts, forward.in_place),
                self._watched(group, now),
            )
            fed = Fed(forward.tokens, forward.positions, own, *forward.known)._replace(ahead=memory.ahead)
            is_first = group is memory.groups[0]
            slots, chains = self._entries[group.number]
            self._ops.advance(
                watched, rows, fed, memory.truth, seeds=self.seeds, slots=slots, chains=chains,
                violations=cells[:, len(memory.groups) + group.number], overwritten=self._overwritten[group.number],
                is_first=is_first,
            )  # fmt: skip
            violations = cells[:, group.number]
            self._ops.walk(
                watched, rows, memory.truth, seeds=self.seeds, violations=violations, counted=self.counted[:1]
            )
            stride = 1 if self.config.content == "full" else ROTATION_STEPS
            self._reread(group, rows, now, 0, stride)

    def _begin(self, new: Tensor, known: Sequence[Tensor]) -> None:
        """known: as of Forward"""
        kept, told, memory = None, None, self.memory
        if known:
            kept = known[0]
            told = Told(self.prompts(kept.shape[1]).tokens, self._now, self.kept_violations, memory.total)
        self._ops.begin(new, memory.truth, memory.identity, kept, told)

    def _look(self, look: Tensor, number: int) -> None:
        """Read all that is recorded of some rows. look: [NOW_WIDTH + rows], as `now`, and their numbers."""
        numbers = look[NOW_WIDTH:]
        for group, kept in zip(self.memory.groups, self.kept, strict=True):
            self._reread(group, Rows(numbers, kept, numbers, numbers), look, number, 1)

    def _reread(self, group: Group, rows: Rows, now: Tensor, look: int, stride: int) -> None:
        """look: 0: of what a forward reads; else of whole rows."""
        cells = self._cells[:, self._read_kinds].unflatten(1, (1 + LOOKS, -1, 2))
        for column, layers in enumerate(self.memory.layers) if self.config.content != "write" else ():
            if layers in group.layers:
                self._ops.reread(
                    self._watched(group, now), layers.rows, rows, layers.keys, fingerprints=layers.fingerprints,
                    stamps=layers.stamps, truth=self.memory.truth, stride=stride, whole=look > 0,
                    violations=cells[:, look, column], counted=self.counted[1 + column : 2 + column],
                )  # fmt: skip

    def _after(self, most: int) -> None:
        for group in self.memory.groups:
            slots, chains = self._entries[group.number]
            for layers in group.layers:
                if not layers.is_late:
                    self._take(group, layers, slots, chains, self._now, most)
            if self.memory.is_shared or any(layers in self._sums for layers in group.layers):
                stored = self._stored(group, most)[0]
                self._sum(group, stored, is_late=False)
                self.memory.overwritten(group, stored)
        for total, sent, _ in self._sums.values():
            self._ops.send(total & COUNTS, self._now, sent)
        self._ops.send(self.memory.total, self._now, self._counts)

    def _late(self, starts: Tensor, most: int) -> None:
        ends = starts[1:].to(torch.int64)
        index = torch.arange(most, device=ends.device)
        row = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
        is_kept = index < (ends - self._rejected[: len(ends)])[row]
        for group in self.memory.groups:
            slots, chains = self._stored(group, most)
            slots, chains = (line.expand(RING, -1) for line in (torch.where(is_kept, slots, -1), chains))
            for layers in group.layers:
                if layers.is_late:
                    self._take(group, layers, slots, chains, self._now, most)
            self._sum(group, slots[0], is_late=True)

    def _sum(self, group: Group, slots: Tensor, is_late: bool) -> None:
        """Add up what was taken of slots [n] of layers whose sum is wanted; -1: none. Of null slots nothing is."""
        for layers in group.layers:
            if layers in self._sums and layers.is_late is is_late:
                own = layers.fingerprints[0].index_select(1, slots.clamp(min=0))
                self._sums[layers][0].add_(torch.where(slots >= 0, own, 0).sum())

    def _stored(self, group: Group, most: int) -> tuple[Tensor, Tensor]:
        """[most] slots and chains of what this forward stores; slot -1: nothing."""
        place, index = self._now[NOW_PLACE : NOW_PLACE + 1], torch.arange(most, device=self.memory.device)
        slots, chains = (entries.index_select(0, place)[0, :most] for entries in self._entries[group.number])
        return torch.where(index < self._now[NOW_TOKENS : NOW_TOKENS + 1], slots, -1), chains

    def _take(
        self,
        group: Group,
        layers: Layers,
        slots: Tensor,
        chains: Tensor,
        now: Tensor,
        most: int,
        are_stored: bool = True,
    ) -> None:
        """are_stored: by the forward of this step, which is asked whether they are finite, and whether it stored."""
        own: dict[str, Any] = {"fingerprints": layers.fingerprints, "stamps": layers.stamps}
        if are_stored:
            own |= {"firsts": self._firsts(layers), "asks_finite": "N1" not in self.config.disable}
            overwritten = self._overwritten[group.number]
            if overwritten is not None:
                first = int(not layers.reads_hidden)
                own["before"] = Before(overwritten.is_another, group.layers.index(layers), layers.zeros, first)
        self._ops.take(self._watched(group, now), layers.rows, slots, chains, layers.keys, **own, most=most)

    def _watched(self, group: Group, now: Tensor) -> Watched:
        memory = self.memory
        owners = None if group.owners is None else group.owners.slots
        return Watched(
            group.records, memory.identity, group.block_size, group.window, now, memory.total, group.null_slots, owners
        )

    # what lies on the device, once all groups are known

    @cached_property
    def _entries(self) -> list[tuple[Tensor, Tensor]]:
        """By group, [RING, max_tokens] slots and chains of what the last forwards stored."""
        zeros = functools.partial(self.memory.zeros, RING, self.max_tokens)
        return [(zeros() - 1, zeros()) for _ in self.memory.groups]

    @cached_property
    def _cells(self) -> Tensor:
        """[RING, kinds, rows] int64: first violations of walk and of advance by group, of reread twice by look and
        pool, twice by pool, in its first column, of take, and of begin.
        """
        kinds = self._read_kinds.stop + 2 * len(self.memory.layers) + 1
        return self.memory.zeros(RING, kinds, self.num_rows) + NO_VIOLATION

    @cached_property
    def _read_kinds(self) -> slice:
        """Of `_cells`, those of reread."""
        first = 2 * len(self.memory.groups)
        return slice(first, first + 2 * (1 + LOOKS) * len(self.memory.layers))

    def _firsts(self, layers: Layers) -> Tensor:
        """[RING, 2] cells of what `take` finds in these layers."""
        cells = self._cells[:, self._read_kinds.stop : -1, 0].unflatten(1, (-1, 2))
        return cells[:, self.memory.layers.index(layers)]

    @property
    def kept_violations(self) -> Tensor:
        """[RING, rows] cells of what `begin` finds."""
        return self._cells[:, -1]

    def prompts(self, width: int) -> TokenRing:
        """For tokens of rows that begin; width: the most that an engine keeps of a row, always the same."""
        if self._prompts is None:
            self._prompts = TokenRing(self.memory, 2 * max(width, self.max_tokens))
        return self._prompts

    @cached_property
    def _overwritten(self) -> list[Overwritten | None]:
        """By group, what lay where the last forwards stored; None: nobody asks (R12)."""
        if "R12" in self.config.disable:
            return [None for _ in self.memory.groups]
        return [
            Overwritten.of([own.stamps for own in group.layers], RING, self.max_tokens) for group in self.memory.groups
        ]

    @cached_property
    def counted(self) -> Tensor:
        """Entries whose record was judged, and by pool of layers, those whose bytes were read again."""
        return self.memory.zeros(1 + len(self.memory.layers))


def events_width(gone: int, new: int) -> int:
    """Words of a line for at most so many rows that went and new ones: which these are, and what they begin with."""
    return (NOW_WIDTH + gone if gone else 0) + (NOW_WIDTH + (1 + NEW_WIDTH) * new if new else 0)


def events_of(words: Tensor, gone: int) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of these words: two looks, and [new, NEW_WIDTH]."""
    first = events_width(gone, 0)
    new = max(len(words) - first - NOW_WIDTH, 0) // (1 + NEW_WIDTH)
    second = first + NOW_WIDTH + new
    return words[:first], words[first:second], words[second:].view(new, NEW_WIDTH)


def _count_in(sent: memoryview, step: int) -> int | None:
    """What was sent behind a step; None: it is not there."""
    word = sent[step % RING]
    return word & COUNTS if word >> COUNT_BITS == step & STAMPS else None
