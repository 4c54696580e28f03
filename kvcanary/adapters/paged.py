"""Paged pools of an engine that is only watched: nobody tells of grants and frees, so records speak for themselves.

An adapter shows what a forward is about to read and write (block tables, lengths, tokens, slots); all of it stays on
the device. `PagedCanary.read` comes before a forward, `wrote` after it, `took` when layers that are stored later are,
`look` before the engine lets a row go; `paged_moves` has what else moves bytes. Hits lie in a ring of the last steps;
one counter says whether there were any.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcanary.adapters.paged_device import FEWEST_ENTRIES, FEWEST_ROWS, FEWEST_TOKENS, PagedDevice, at_least, sizes
from kvcanary.adapters.paged_state import COUNT_BITS, HEAD, LOOKS, RING, Event, Forward, Group, Step
from kvcanary.adapters.prefixes import Prefixes
from kvcanary.certificate import Coverage, certificate
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.findings import Finding, FindingLog, tell
from kvcanary.sites import pack_site
from kvcanary_kernels.record import CHAIN, MASK_32, STEP_SITE, make_keys, seed_id
from kvcanary_kernels.walk import NOT_FOLLOWED, NOW_ROWS, NOW_STEP

#: What an engine that is only watched can feed: it tells of no grants and frees (R7, R8, W2, W3, P1).
PAGED_FED = frozenset({"R1", "R2", "R3", "R4", "R5", "R6", "R9", "R10", "R12", "T1", "W1", "W4", "W5", "W6"})
NAMED_WRITERS = 1 << 16
STAMPS = (1 << 63 - COUNT_BITS) - 1


class PagedCanary(PagedDevice):
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
        super().__init__(config, num_rows, max_rejected, max_tokens, device)
        self.coverage, self.log, self.fed = Coverage(), FindingLog(), PAGED_FED
        self.tell: Callable[[Finding], None] = tell
        self.prefixes = Prefixes(make_keys(self.seed, 1, 1))
        self.writers: OrderedDict[int, str] = OrderedDict()
        self.step = 0
        self.steps: deque[Step] = deque(maxlen=RING)
        self.incidents: dict[tuple[str, str | None, int], int] = {}
        self.events: list[Event] = []  # of what happened since the last forward
        self._looked: list[tuple[str, ...]] = []
        self._uid = 0
        self._forward: Forward | None = None

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
        self._launch_before(forward, at_least(n, FEWEST_ROWS, self.num_rows), forward.max_length)

    def wrote(self) -> None:
        """The forward has run: take the bytes that it stored, as they lie in the pools now."""
        if self._forward is not None:
            self._launch_after(at_least(self._forward.num_tokens, FEWEST_TOKENS, self.max_tokens))

    def took(self, rejected: Tensor) -> None:
        """Late layers have stored this forward's entries now; `rejected` [>= rows]: the last so many are not kept."""
        if self._forward is not None:
            n = min(len(rejected), self.num_rows)
            self._rejected[:n].copy_(rejected[:n])
            most = at_least(self._forward.num_tokens, FEWEST_TOKENS, self.max_tokens)
            self._launch_late(self._forward.starts, most)

    def prepare(self, forward: Forward) -> None:
        """Compile and capture what forwards of every size launch; `forward`: an empty one, over the same tensors."""
        for _ in range(2):  # as they are, captured
            self.admit([(0, "_", [0, 0], 2, "")])
        self.forget()
        self._now.zero_()
        self._looking.zero_()
        for _ in range(2):
            for rows in {min(size, self.num_rows) for size in sizes(FEWEST_ROWS, self.num_rows)}:
                for entries in sizes(FEWEST_ENTRIES, forward.max_length):
                    self._launch_look(forward.lines or forward.tables, rows, entries)
                    self._launch_before(forward, rows, entries)
            for tokens in {min(size, self.max_tokens) for size in sizes(FEWEST_TOKENS, self.max_tokens)}:
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
        n, size = len(numbers), at_least(len(numbers), FEWEST_ROWS, self.num_rows)
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
