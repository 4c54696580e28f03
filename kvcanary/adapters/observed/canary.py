"""Paged pools of an engine that is only watched: nobody tells of grants and frees, so records speak for themselves.

An adapter shows what a forward is about to read and write (block tables, lengths, tokens, slots); all of it stays on
the device. `PagedCanary.read` comes before a forward, `wrote` after it, `took` when layers that are stored later are.
Rows that `admit` and `leave` name wait for the next `read`, or for `flush` where bytes are moved before that;
`moves` has what moves them. Violations lie in a ring of the last steps; one counter says whether there were any.

A canary owns what it has on the device (`memory`) and what it launches there (`launches`). The rest is the host's side:
who comes and goes, how long rows are at most, and what a step was.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.capabilities import PAGED_FED, expect_watching
from kvcanary.adapters.observed.incident_dumps import IncidentDumps, block_history, source_of
from kvcanary.adapters.observed.launches import Launches
from kvcanary.adapters.observed.memory import Memory
from kvcanary.adapters.observed.owners import BlockOwners, Owners
from kvcanary.adapters.observed.prefix_hashes import Prefixes
from kvcanary.adapters.observed.recent_steps import RecentSteps
from kvcanary.adapters.observed.state import RING, Event, Forward, Group, Layers, Step
from kvcanary.calls.coverage import Coverage
from kvcanary.config import CanaryConfig
from kvcanary.report.certificate import certificate
from kvcanary.report.describe import Describer
from kvcanary.report.respond import Response
from kvcanary.report.watched_evidence import WatchedEvidence
from kvcanary.scrub.free_slots import FreeSlots
from kvcanary_kernels.record.layout import (
    CHAIN,
    MASK_32,
    STEP_SITE,
    Identity,
    make_keys,
    read_record,
    seed_id,
    signed,
)
from kvcanary_kernels.watch.advance import FILLED_STAMP
from kvcanary_kernels.watch.begin import NEW_WIDTH
from kvcanary_kernels.watch.walk import NOT_FOLLOWED

POISONED = "a grant of slots that were filled when they were free"
NAMED_WRITERS = 1 << 16
GROWN = 32  # steps of one token a row until lengths are read again
NO_ROW = -(1 << 40)  # entries of a row that there is not, whatever they grow by
FEWEST_ROWS, FEWEST_TOKENS = 16, 16  # that launches are sized for


class PagedCanary:
    """The canary of one engine's pools on one device."""

    def __init__(
        self,
        config: CanaryConfig,
        num_rows: int,
        max_rejected: int,
        max_tokens: int,
        device: torch.device | str,
        has_tokens: bool = False,
        can_heal: bool = False,
    ) -> None:
        """num_rows: of requests that the engine holds at once; max_rejected: tokens a step may take back of a row;
        max_tokens: of one forward; has_tokens: every forward shows what the engine knows of tokens
        can_heal: whoever makes this gives its response a `healing`"""
        expect_watching(config, "one request from outside", can_heal)
        self.config, self.num_rows, self.max_tokens = config, num_rows, max_tokens
        self.memory = Memory(config, num_rows, max_rejected, device)
        self.launches = Launches(config, self.memory, num_rows, max_tokens)
        self.groups, self.kept, self.violations_of = self.memory.groups, self.launches.kept, self.launches.violations_of
        self.coverage, self._has_tokens = Coverage(), has_tokens
        self.fed = PAGED_FED if has_tokens else PAGED_FED - {"W6"}
        self.owners: Owners | BlockOwners | None = None
        self.poison: FreeSlots | None = None
        self.prefixes = Prefixes(make_keys(self.memory.seed, 1, 1))
        self.writers: OrderedDict[int, str] = OrderedDict()
        #: By group and block, which connector said that a load of it failed, and in which step.
        self.failed_loads: dict[tuple[int, int], tuple[str, int]] = {}
        self._taken_back: dict[str, tuple[int, int]] = {}  # since the last forward, as in Step
        self._roots: dict[int, tuple[int, int]] = {}  # by row that is followed: the chain of none, and who writes
        own = weakref.proxy(self)  # pools are freed with the last user of a canary
        self.recent, self.dumps = RecentSteps(config.ring), IncidentDumps(config, functools.partial(source_of, own))
        evidence = WatchedEvidence(self.writers, functools.partial(block_history, own))
        self.response = Response(config, Describer(evidence.read, config.show_tokens), dump=self.dumps.on_finding)
        self.log = self.response.log
        self.step = self.waits = 0  # steps, and those whose counter had to be waited for
        self._steps: deque[Step] = deque(maxlen=RING)
        self._wrote: deque[int] = deque(maxlen=RING)  # the last steps that stored
        self._last: Step | None = None  # that was read; it may be judged, and gone from `_steps`
        #: Steps that were the last one once more and are not among `_steps` yet, and whether the next may be one.
        self._quiet, self._can_repeat = 0, False
        self.events: list[Any] = []  # of what happened since the last forward
        #: What judges more of forwards, `violations(step)` in the order of `number`, and keeps `num_bytes`. It holds
        #: the canary.
        self.beside: weakref.WeakSet[Any] = weakref.WeakSet()
        #: At least what each row has, but for what rows grew by since.
        self._ends, self._grown = np.full(num_rows, NO_ROW), GROWN
        self._live = 0  # entries of the rows of the last forward
        self._gone: list[tuple[int, str]] = []
        self._fresh: list[tuple[int, str]] = []
        self._new: dict[int, tuple[int, ...]] = {}  # as `begin` takes them, by number
        self._uid = 0
        self._forward: Forward | None = None  # that was read last, and at most how many entries it stores
        self._most_stored = 0

    @property
    def num_bytes(self) -> int:
        """Device memory that is kept beside pools and states."""
        return self.memory.num_bytes + sum(own.num_bytes for own in self.beside)

    def follow_owners(self) -> Owners:
        """The engine tells of grants and frees of the first group's slots: R7, R8, W2, W3 and W7 are judged too.

        With content `full` and poison `finite` so is P1: what is freed is filled, and looked at when it is granted.
        """
        group = self.groups[0]
        self.owners = group.owners = owners = Owners(group.records.shape[0], self.memory.device, group.records)
        self.fed |= {"R7", "R8", "W2", "W3", "W7"}
        self.poison = self._poison_of(group)
        if self.poison is not None:
            owners.on_freed, owners.on_granted = self.poison.freed, self.poison.granted
            self.fed |= {"P1"}
        return owners

    def _poison_of(self, group: Group | None) -> FreeSlots | None:
        """For what is free in a group; None where there is none, and where settings leave it alone."""
        if group is None or self.config.content != "full" or self.config.poison != "finite":
            return None
        filled = functools.partial(self._filled, group)
        return FreeSlots([layers.rows for layers in _early(group)], self.memory.device, group.number, filled)

    def _filled(self, group: Group, slots: Tensor) -> None:
        """These slots [n] hold a pattern now, which is no entry's: it is known, so that a store shows."""
        self.memory.bytes_gone(group, slots)
        for layers in _early(group):
            self.launches.take_now(group, layers, slots, group.records[slots, CHAIN])
            layers.stamps.index_fill_(0, slots, FILLED_STAMP)

    def follow_blocks(self, block_sizes: Sequence[int], are_shared: bool = False) -> BlockOwners:
        """The engine tells of grants of blocks, in every group; which codes that feeds its adapter says in `fed`.

        block_sizes: by group, slots of a block as the engine counts blocks
        are_shared:  their memory is that of other blocks too, of which nobody tells
        """
        num_slots = [group.records.shape[0] for group in self.groups]
        self.owners = self.launches.owners = owners = BlockOwners(num_slots, block_sizes, self.memory.device)
        for group, own in zip(self.groups, owners.of, strict=True):
            group.owners = own
        self.poison = None if are_shared else self._poison_of(self.memory.covering(block_sizes))
        return owners

    # rows of requests

    def admit(self, new: Sequence[tuple[int, str, Sequence[int] | None, int, Identity]]) -> list[int]:
        """New rows, each (row number, request, tokens or None where nobody knows them, entries that it has, identity).

        Entries that it has are another's: the next forward, which must have the row, reads all their bytes. Gives the
        numbers by which records and owners name them.
        """
        first = self._uid + 1
        for number, request, tokens, length, identity in new:
            self._uid += 1
            self.writers[self._uid] = request
            if len(self.writers) > NAMED_WRITERS:
                self.writers.popitem(last=False)
            root = self.prefixes.root(identity)
            if tokens is None or len(tokens) < length:
                self.coverage.skip("requests whose tokens nobody knows", 1)
                self._new[number] = number, NOT_FOLLOWED, 1, root, self._uid, self.step, root, 0, 0
                self._roots.pop(number, None)
                continue
            self._roots[number] = root, self._uid
            tail = root
            if length:
                tail = root if self._has_tokens else self.prefixes.end(tokens[:length], identity)
                if self.config.content != "write":
                    self._fresh.append((number, request))
            self._new[number] = number, length, 1, root, self._uid, self.step, tail, 0, 0
        return list(range(first, self._uid + 1))

    def compare_kept(self, number: int, tokens: Sequence[int], width: int) -> bool:
        """Let the next forward compare what the engine keeps of a row that was just admitted; False: there is no room.

        width: tokens that the engine has room for, of every row
        """
        first = self.launches.prompts(width).put(tokens, self.step + 1, self._is_over)
        if first is not None:
            self._new[number] = *self._new[number][:-2], first, len(tokens)
        return first is not None

    def take_back(
        self, number: int, request: str, before: int, now: int, tokens: Sequence[int], identity: Identity
    ) -> None:
        """The engine computes a row again from entry `now`, which is before its last one; tokens: up to there at least,
        where forwards do not show what the engine knows of them.
        """
        if number in self._roots:
            root, uid = self._roots[number]
            tail = root if self._has_tokens or not now else self.prefixes.end(tokens[:now], identity)
            self._new[number] = number, now, 1, root, uid, self.step, tail, 0, 0
        self._taken_back[request] = before, now

    def leave(self, numbers: Sequence[int], requests: Sequence[str]) -> None:
        """These rows end: every byte of theirs is read once more, with the next forward, along the lines they had."""
        self._tell_quiet()
        is_read, room = self.config.content != "write", self.num_rows - len(self._gone)
        self._ends = self._ends.copy()  # what was is kept with recent steps
        for number, request in zip(numbers, requests, strict=True):
            end, self._ends[number] = max(int(self._ends[number]) + self._grown, 0), NO_ROW
            self._live -= end
            if is_read and room > 0:
                self._gone.append((number, request))
                room -= 1
            elif is_read:
                self.coverage.skip("rows that went without a last re-read", 1)

    def flush(self, empty: Forward) -> None:
        """Do now what waits for a forward, but for rows that begin: bytes are about to move, or nobody runs; or
        somebody stores before the next forward is shown, into slots that are filled, or looked at, before that.

        empty: a forward of no rows
        """
        is_told = self.owners is not None and self.owners.is_told
        if self._gone or self._new or (self.poison is not None and (is_told or self.poison.is_told)):
            fresh, self._fresh = self._fresh, []
            self.read(empty)
            self._fresh = fresh

    # one forward

    def read(self, forward: Forward) -> None:
        """Record what a forward is about to write, and judge what it is about to read."""
        if self.owners is not None:
            self.owners.apply()
        self._tell_quiet()
        self.step += 1
        n, events = len(forward.numbers), (0, 0)
        most_rows = at_least(n, FEWEST_ROWS, self.num_rows)
        free = self.launches.head(self.step, forward, most_rows)
        reread: tuple[tuple[str, ...], ...] = ()
        if self._new or forward.num_tokens != n or self._grown >= GROWN:
            self._measure(forward)
        else:  # every row by one
            self._grown, self._live = self._grown + 1, self._live + n
        if self._new or self._gone or self._fresh:
            events, reread = self._put_events(free)
        own = self.step, forward.requests, forward.numbers, forward.site, self.events, reread
        step = Step(*own, forward.num_tokens, forward.in_place)
        self._can_repeat = bool(n) and n == forward.num_tokens and events == (0, 0) and forward.site[0] == "decode"
        self.events = []
        self._steps.append(step)
        self._last = step
        if n:
            step.taken_back, self._taken_back = self._taken_back, {}
            ran = self.step, forward.site, forward.requests, forward.numbers, forward.num_tokens
            self.recent.ran(ran, self._ends, self._grown)
            self._ran(1, forward.num_tokens)
        self._forward, self._most_stored = forward, at_least(forward.num_tokens, FEWEST_TOKENS, self.max_tokens)
        self.launches.before(forward, most_rows, events)
        if self.poison is not None:
            self._look_at_poison(self.poison, step.events)

    def _look_at_poison(self, poison: FreeSlots, events: list[Any]) -> None:
        """Behind the last look at rows that went, whose slots were freed; before this forward stores."""
        group = self.groups[poison.group]
        for pool, slots, mismatch, uids in poison.apply(self.coverage):
            self.memory.total += (mismatch != 0).any(1).sum()
            row_of = functools.partial(_owner_of, self.writers, uids)
            own = _early(group)[pool], slots, mismatch, group
            events.append(Event("P1", POISONED, *own, {}, by_record=False, row_of=row_of, site="grant"))

    def read_again(self) -> bool:
        """The forward that was read last comes once more: the same rows over the same tensors, each one entry further.

        False: it is to be read as any other, since something waits for it, or lengths are to be measured. What such a
        step was is put down when somebody asks for it; the device judges it like any other.
        """
        grown = self._grown + 1
        if not self._can_repeat or grown > GROWN:
            return False
        if self._new or self._gone or self._fresh or self.events:
            return False
        if self.owners is not None:
            self.owners.apply()
        if self.poison is not None and self.poison.is_told:
            return False
        self.step += 1
        self._quiet, self._grown = self._quiet + 1, grown
        self.recent.goes_on(self.step)
        self.launches.again(self.step)
        return True

    @property
    def steps(self) -> deque[Step]:
        """The last ones."""
        self._tell_quiet()
        return self._steps

    def _tell_quiet(self) -> None:
        """Put down what the steps were that repeated the last one."""
        quiet, self._quiet = self._quiet, 0
        last = self._last
        if not quiet or last is None:
            return
        for number in range(self.step + 1 - min(quiet, RING), self.step + 1):
            self._steps.append(Step(number, last.requests, last.numbers, last.site, [], (), last.count, last.in_place))
        n, self._live = len(last.numbers), self._live + quiet * len(last.numbers)
        self._ran(quiet, n)

    def _ran(self, steps: int, num_tokens: int) -> None:
        """So many forwards were shown, each of so many tokens."""
        coverage = self.coverage
        coverage.forwards += steps
        coverage.unproved_stores += steps  # bytes are taken from the pool, where they were stored
        coverage.slots_sealed += steps * num_tokens * len(self.groups)
        coverage.peak_live_bytes = max(coverage.peak_live_bytes, self._live * self.memory.entry_bytes)

    def ends_at_most(self, numbers: NDArray[np.integer], new: NDArray[np.integer], most: int) -> Tensor:
        """[rows] where rows end behind a forward of so many `new` entries, at most, where the device alone knows it."""
        held = self._ends[numbers]
        return torch.from_numpy(np.where(held > 0, np.minimum(held + self._grown + new, most), most))

    def _measure(self, forward: Forward) -> None:
        """Read from a forward how long its rows are; not in every step, since the host's time is short."""
        ends = forward.ends.numpy()[: len(forward.numbers)]
        self._ends = self._ends + self._grown  # another array, as above
        self._ends[forward.numbers] = ends
        self._grown, self._live = 0, int(ends.sum())

    def wrote(self) -> None:
        """The forward has run: take the bytes that it stored, as they lie in the pools now."""
        if self._forward is not None:
            self.launches.after(self._most_stored)
            self._wrote.append(self.step)

    def took(self, rejected: Tensor) -> None:
        """Late layers have stored this forward's entries now; `rejected` [>= rows]: the last so many are not kept."""
        if self._forward is not None:
            self.launches.late(self._forward.starts, rejected, self._most_stored)

    def launch_on_stored(self, name: str, group: Group, launch: Callable[[Tensor, Tensor], None]) -> None:
        """`launch(slots, chains)` of what this forward stored in a group, [n] each; slot -1: nothing.

        It may be captured: all that changes from step to step lies in tensors; `name` tells such launches apart.
        """
        if self._forward is not None:
            self.launches.on_stored(name, group, launch, self._most_stored)

    def prepare(self, forward: Forward) -> None:
        """Compile and capture what forwards of every size launch; `forward`: an empty one, over the same tensors."""
        self.launches.restart()
        none = torch.zeros(0, dtype=torch.int64)
        for _ in range(2):  # as they are, captured
            for rows in {min(size, self.num_rows) for size in sizes(FEWEST_ROWS, self.num_rows)}:
                few = min(FEWEST_ROWS, self.num_rows)
                for events in (0, 0), (few, 0), (few, few):
                    self.launches.before(forward, rows, events)
            for tokens in {min(size, self.max_tokens) for size in sizes(FEWEST_TOKENS, self.max_tokens)}:
                self.launches.after(tokens)
                self.launches.late(forward.starts, none, tokens)
        if self.owners is not None:
            self.owners.prepare()
        self.memory.forget()
        self.restart()

    def _is_over(self, step: int) -> bool:
        return step <= self.step - RING or self.launches.count_of(step) is not None

    def count_at(self, step: int) -> int:
        """The counter of findings as it was after `wrote` of one of the last steps.

        It is there when anything is that was launched later; asked for before, it waits for the device.
        """
        total = self.launches.count_of(step)
        if total is None:
            self.waits += 1
            total = self.launches.wait_for_count(step)
        return total

    def last_stored(self, step: int) -> int:
        """The step that stored last, of the last ones up to this; 0: none did. Others looked alone."""
        return max((own for own in tuple(self._wrote) if own <= step), default=0)

    def sums_at(self, step: int) -> list[int]:
        """Sums of what was stored (`Launches.sum_stored`) up to a step that stored; as `count_at`."""
        sums = self.launches.sums_of(step)
        if sums is None:
            self.launches.wait_for_count(step)
            sums = self.launches.sums_of(step)
        return [] if sums is None else sums

    def restart(self) -> None:
        """Begin to count anew, when kernels were compiled."""
        self.coverage, self.step = Coverage(), 0
        self._quiet, self._can_repeat = 0, False
        self._steps.clear()
        self._wrote.clear()
        self.recent.clear()
        self.events, self._gone, self._fresh, self._new = [], [], [], {}
        self._ends, self._grown = np.full(self.num_rows, NO_ROW), GROWN
        self.launches.restart()

    def _put_events(self, line: NDArray[np.int64]) -> tuple[tuple[int, int], tuple[tuple[str, ...], ...]]:
        """Write what waits into the words of a line: at most how many rows went and are new, and whose are read."""
        most_new = self._room_for(max(len(self._new), len(self._fresh)))
        most_gone = self._room_for(len(self._gone)) or (most_new and self._room_for(1))  # fewer graphs
        words: list[int] = []
        for rows, most in (self._gone, most_gone), (self._fresh, most_new):
            if most:
                words += len(rows), 0, self.step, 0, self.step % RING, 0
                words += [number for number, _ in rows]
                words += (0,) * (most - len(rows))
        for row in self._new.values():
            words += row
        words += (self.num_rows,) * (NEW_WIDTH * (most_new - len(self._new)))  # nobody's
        line[: len(words)] = words
        reread = tuple([tuple([request for _, request in rows]) for rows in (self._gone, self._fresh)])
        self._gone, self._fresh, self._new = [], [], {}
        return (most_gone, most_new), reread

    def _room_for(self, count: int) -> int:
        return at_least(count, FEWEST_ROWS, self.num_rows) if count else 0

    # what was found

    def certificate(self, numbers: Collection[int] = ()) -> dict[str, Any]:
        """What was checked, what was not and why; the same keys as that of an engine's canary.

        numbers: rows that the engine holds now
        """
        self._tell_quiet()
        self.read_counters()
        fed = self.fed - {"T1"} if self.config.content == "write" else self.fed
        live_bytes, seed = self.memory.live_bytes(numbers), seed_id(self.memory.seed)
        told = certificate(self.config, self.coverage, live_bytes, seed, self.log, fed, self.memory.device)
        return told | {"watched": [layers.described for layers in self.memory.layers]}

    def read_counters(self) -> None:
        """What the device has checked so far into `coverage`; waits for the device."""
        self.coverage.slots_checked, *read = self.launches.counted.tolist()
        pools = zip(read, self.memory.layers, strict=True)
        self.coverage.bytes_checked = sum(n * layers.entry_bytes for n, layers in pools)

    def known_tokens(self, number: int) -> list[int] | None:
        """Tokens of a row as the engine says them; None where it does not."""
        if self._forward is None or not self._forward.known:
            return None
        tokens, ends = self._forward.known
        return tokens[number, : int(ends[number])].tolist()

    def written_twice(self, step: Step, group: Group) -> list[int]:
        """Slots that a step wrote and whose record is of another of its entries (W4)."""
        slots, chains = self.launches.stored_by(step, group)
        held = group.records[slots.clamp(min=0)]
        wrong = (slots >= 0) & (held[:, CHAIN] != chains) & (held[:, STEP_SITE] & MASK_32 == step.number)
        return sorted(set(slots[wrong].tolist()))

    def stored_at(self, step: Step, group: Group, request: str | None, position: int) -> int | None:
        """Where a step stored an entry of a request; None: outside the pool, or all its entries were overwritten."""
        slots, chains = self.launches.stored_by(step, group)
        for entry, (slot, chain) in enumerate(zip(slots.tolist(), chains.tolist(), strict=True)):
            held = read_record(group.records, slot) if slot >= 0 else None
            if held is None or (held.step, signed(held.chain)) != (step.number & MASK_32, chain):
                continue
            own = entry + position - held.position  # entries of a row lie one behind the other
            if self.writers.get(held.request) == request and 0 <= own < len(slots):
                return None if int(slots[own]) < 0 else int(slots[own])
        return None


def _early(group: Group) -> list[Layers]:
    """Layers that the target stores: a draft may store beyond what its row was granted, and takes that back."""
    return [layers for layers in group.layers if not layers.is_late]


def _owner_of(writers: Mapping[int, str], uids: Tensor, entry: int, slot: int) -> str | None:
    """Who was granted a slot that somebody had written before."""
    return writers.get(int(uids[entry]))


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
