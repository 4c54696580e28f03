"""Model calls as the recorder keeps them, one by one or as they were launched, and the rows that no grant explains."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcanary.captured.decoded import CollectedRun
from kvcanary.native.layout import PlanLayout, plan_layout

if TYPE_CHECKING:
    from kvcanary.calls.forward import Forward
    from kvcanary.captured.decoded import DecodedForward
    from kvcanary.captured.launch_group import LaunchGroup
    from kvcanary.captured.substep import CapturedSubstep

Ints = NDArray[Any]
MOST_UNPACKED = 4096  # entries of forwards that are packed only when somebody asks: till then they are twice as large


class RecordedForward:
    """Plans and rows of one forward; empty until it was judged.

    plan:   as `Forward.plan`, with the ids that were asked for where some were refused; int32 where that holds them
    tails:  [entries] of every row, one after another, what comes behind the prefix that the plan believes
    wholes: by row, all its ids, where it does not name what its request was granted
    mask:   the bits of the tree mask, packed; None: there is none
    stored: bitmap of the layers that have stored
    """

    def __init__(self, forward: Forward | DecodedForward) -> None:
        self._forward: Any = forward
        self.plan = self.tails = _NONE
        self.wholes: dict[int, Ints] = {}

    @property
    def layout(self) -> PlanLayout:
        """Of `plan`."""
        return plan_layout(self.entries, self.rows, len(self.requests))

    @property
    def num_bytes(self) -> int:
        mask = 0 if self.mask is None else self.mask.nbytes
        return self.plan.nbytes + self.tails.nbytes + mask + sum(row.nbytes for row in self.wholes.values())

    def keep(self, forward: Forward, suspects: Iterable[int]) -> None:
        """Take plans and rows from a forward whose rows are on the host, and let go of it."""
        names, rows, plan = forward.names, forward.num_rows, _plan_of(forward)
        if forward.refused_reads is not None:
            names = names.copy()
            names[forward.refused_reads.entries] = forward.refused_reads.names
        bounds, starts, prefixes = (forward.part(name) for name in ("bounds", "starts", "prefixes"))
        prefixes = prefixes.repeat(forward.width)
        begins = bounds[:-1] + (prefixes - starts).clip(0)
        lengths = (bounds[1:] - begins).clip(0)
        ends = lengths.cumsum()
        total = int(ends[-1]) if rows else 0
        self.tails = _small(names[np.arange(total) + (begins - ends + lengths).repeat(lengths)])
        self.plan = _small(plan)
        for row in {*suspects, *forward.short_rows}:
            self.wholes[row] = _small(names[bounds[row] : bounds[row + 1]])
        self._keep_rest(forward, forward.stored, forward.request_ids)

    def keep_clean(self, forward: Forward, plan: Ints, tails: Ints) -> None:
        """The same for one whose rows are all as granted, of which a loop has taken plan and tails."""
        self.plan, self.tails = plan, tails
        self._keep_rest(forward, forward.stored, forward.request_ids)

    def keep_captured(self, forward: DecodedForward, stored: int, request_ids: tuple[str, ...]) -> None:
        """The same for a captured one, whose rows lie on the device: prefixes as granted, ancestors, own entries.

        stored: bitmap of its layers
        """
        n, rows, ancestors = forward.num_entries, forward.num_rows, forward.ancestors
        own, written = forward.planned.slots, np.array(forward.written, np.int64)
        if ancestors.shape[1] and n == rows and written.all():  # a draft's rows write one each
            own = np.concatenate((ancestors, own[:, None]), 1).ravel()
        elif ancestors.shape[1]:
            begins = written.cumsum() - written
            own = np.insert(own, begins.repeat(ancestors.shape[1]), ancestors.ravel())
        self.plan, self.tails = _small(forward.plan), _small(own)
        self._keep_rest(forward, stored, request_ids)

    def keep_unjudged(self) -> None:
        """The same for one that is not judged yet: every row is kept whole."""
        forward = self._forward
        if forward is not None:
            forward.read_rows()
            self.keep(forward, range(forward.num_rows))
            self._forward = forward

    def _keep_rest(self, forward: Forward | DecodedForward, stored: int, request_ids: tuple[str, ...]) -> None:
        self.kind, self.index, self.pool = forward.kind, forward.index, forward.pool.name
        self.requests, self.stored, self.has_starts = request_ids, stored, forward.has_starts
        self.width, self.entries, self.rows = forward.width, forward.num_entries, forward.num_rows
        self.has_parents, self.has_lineage = forward.has_parents, forward.has_lineage
        self.mask: Ints | None = None
        self.mask_shape: tuple[int, ...] | None = None
        if forward.tree_mask is not None:
            bits = forward.tree_mask.cpu().numpy()
            self.mask, self.mask_shape = np.packbits(bits), bits.shape
        self._forward = None


class RecordedGroup:
    """Captured forwards as the host launched them together; of each a `RecordedLaunch`, made when somebody asks.

    written, reads: as of `CanaryManager.launch_group`
    num_kept: numbers that are kept of them, where all are clean
    collected:    then: the step's number, numbers that are kept of several, where their own begin, and the layers that
              each stored, in their order
    """

    def __init__(
        self, launch_group: LaunchGroup, requests: tuple[str, ...], written: Sequence[int], reads: Sequence[int]
    ) -> None:
        self.launch_group, self.requests, self.written, self.reads = launch_group, requests, written, reads
        self.num_kept = launch_group.num_kept + len(requests) * launch_group.places
        self.collected: tuple[int, array[int], int, tuple[tuple[int, ...], ...]] | None = None
        self._launches: list[RecordedLaunch] | None = None

    def __iter__(self) -> Iterator[RecordedLaunch]:
        return iter(self.launches)

    def is_of(self, number: int, pool: str, site: tuple[str, int]) -> bool:
        """Whether this one of them is the forward of a site."""
        substep = self.launch_group.substeps[number]
        return substep.site == site and substep.pool.name == pool

    @property
    def launches(self) -> list[RecordedLaunch]:
        """One for each, with what was collected."""
        n, of_each = len(self.requests), [*self.launch_group.of_each(len(self.requests))]
        if self._launches is None:
            self._launches = [
                RecordedLaunch(substep, self.requests, () if entries is None else self.written[entries], reads)
                for (substep, entries), reads in zip(of_each, self.reads, strict=True)
            ]
        if self.collected is not None:
            (step, numbers, first, layers), self.collected = self.collected, None
            for launch, (substep, entries), stored in zip(self._launches, of_each, layers, strict=True):
                end = first + substep.num_kept + (n * self.launch_group.places if entries is None else 0)
                launch.collected = CollectedRun(substep, step, n, numbers, first, end)
                launch.layers, first = stored, end
        return self._launches


class RecordedLaunch:
    """A captured forward of a `RecordedGroup`; what it read and wrote is there once the host has collected it.

    number:  of its substep in the registry, None: it is no captured forward, but an eager one that judged itself there
    written, reads: as `CanaryManager.launch` was told; of `launch_accepted` what the device has reported, with
                    `forward`
    collected:    what the host has collected it; None: nothing yet
    layers:  that it stored, in their order
    accepted: as `DecodedForward` has it;  again: layers that have stored before, and did again; both with `forward`
    strays:  (row, place, slot) that checks found, which are all that a row may name besides
    padding: (row, entry, slot) of W9, one of them -1
    """

    layers: tuple[int, ...]
    again: Sequence[int]
    strays: tuple[tuple[int, int, int], ...]
    padding: tuple[tuple[int, int, int], ...]

    def __init__(self, substep: CapturedSubstep, requests: tuple[str, ...], written: Sequence[int], reads: int) -> None:
        self.number, self.requests, self.written, self.reads = substep.number, requests, written, reads
        self.collected: RecordedForward | DecodedForward | CollectedRun | None = None
        self.accepted: list[list[int]] | None = None
        self.layers = self.again = self.strays = self.padding = ()

    @property
    def forward(self) -> RecordedForward | None:
        """Its plans, and its rows as granted; packed when somebody asks for the first time, which few ever do."""
        collected = self.collected
        if collected is None or isinstance(collected, RecordedForward):
            return collected
        learned = collected.learned() if isinstance(collected, CollectedRun) else collected
        stored, self.again = _stored(self.layers, learned.pool.full_layers)
        self.accepted = learned.accepted
        if self.accepted is not None:
            self.written = tuple(map(len, self.accepted))
        self.collected = packed = RecordedForward(learned)
        packed.keep_captured(learned, stored, self.requests)
        return packed

    @property
    def num_bytes(self) -> int:
        return 0 if self.collected is None else self.collected.num_bytes

    def learn(self, forward: DecodedForward, layers: tuple[int, ...]) -> None:
        """`layers`: those that stored, in their order."""
        self.collected, self.layers = forward, layers
        rows = forward.rows() if self.number is None and forward.has_read_violations else None
        if forward.num_entries > MOST_UNPACKED or rows is not None:
            packed = self.forward
            if packed is not None and rows is not None:
                packed.wholes = {number: _small(row) for number, row in enumerate(rows)}
        else:
            forward.keep()


class RecordedMove:
    """A captured move in a pool; `places`: as `LaunchedMove` has them, once the host has collected it."""

    def __init__(self, number: int, pool: str) -> None:
        self.number, self.pool = number, pool
        self.places: array[int] | None = None

    @property
    def moved(self) -> tuple[Ints, Ints] | None:
        """Slots where entries lay, and where they have arrived, [n] each; None: nobody has heard of it."""
        if self.places is None:
            return None
        destinations, sources = np.array(self.places).reshape(2, -1)
        return sources[destinations >= 0], destinations[destinations >= 0]


@lru_cache(maxsize=256)
def _stored(layers: tuple[int, ...], full: int) -> tuple[int, list[int]]:
    """The bitmap of layers that stored in this order, and those that had stored before; `full`: the bitmap of all."""
    stored = set(layers)
    again = [layer for number, layer in enumerate(layers) if layer in layers[:number]]
    return full if len(stored) == full.bit_length() else sum(1 << layer for layer in stored), again


_NONE: Ints = np.empty(0, np.int32)


def _plan_of(forward: Forward) -> Ints:
    """`Forward.plan` with the slots that were asked for, and parents of -1 where there are no trees and no lineage."""
    plan, n = forward.plan.copy(), forward.num_entries
    plan[:n] = forward.slot_names
    if not (forward.has_parents or forward.has_lineage):
        forward.layout.part(plan, "parents")[:] = -1
    if forward.refused is not None:
        plan[forward.refused.entries] = forward.refused.names
    return plan


def _small(values: Ints) -> Ints:
    """A copy, in 32 bits where these hold all values."""
    small = values.astype(np.int32)
    return small if (small == values).all() else values.copy()
