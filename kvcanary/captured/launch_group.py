"""LaunchGroup: captured forwards that are launched together, what of them stays the same, and their launches."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from kvcanary.calls.forward import Ints
from kvcanary.captured.accepted_tokens import CapturedAcceptance
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.errors import PlanError
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import ROWS, RUN
from kvcanary.pools.launch_site import site_name
from kvcanary.records.mailbox import NUM_MESSAGES, Message

Part = tuple[CapturedSubstep, ...]


class LaunchGroup:
    """Forwards that run one behind the other, in parts; those of a part are of one kind and pool, and have one truth.

    Made by `SubstepRegistry.launch_group`.

    parts, substeps: of each part, and of all
    count:      how many, without a call
    acceptance: of the step whose tokens the last part writes, one forward then; None: the host says how many entries
    num_known:   parts of which the host says it
    places:     numbers that such a step tells of a request: how many tokens, then these; else 0
    sizes:      how many parts, and the address of how many forwards each has, as `loops.launch_runs` takes them
    structs:      by message, [forwards * RUN.size] int64 (native/layout.py): what is known before a launch
    num_kept:   numbers that are kept of clean runs, beside what was accepted
    comes_once: its forward is no captured one
    """

    def __init__(self, parts: Sequence[Part], acceptance: CapturedAcceptance | None = None) -> None:
        for part in parts:
            kinds = {f"{substep.site[0]} of the {substep.pool.name} pool" for substep in part}
            if len(kinds) != 1:
                what = ", ".join(sorted(kinds)) or "none"
                raise PlanError(
                    f"forwards that are launched together must be of one kind and pool, got {what}: launch each"
                )
            _expect_in_a_row(part)
        if acceptance is not None and len(parts[-1]) != 1:
            raise PlanError(f"what a step accepts must be written by one forward, got {len(parts[-1])}: launch each")
        self.parts, self.substeps = tuple(parts), tuple(substep for part in parts for substep in part)
        self.count, self.acceptance = len(self.substeps), acceptance
        self.num_known = len(parts) - (acceptance is not None)
        self.comes_once = any(substep.number is None for substep in self.substeps)
        self.places = 0 if acceptance is None else 1 + acceptance.places
        self._sizes = array("q", map(len, parts))
        self.sizes = self._sizes.buffer_info()[::-1]
        self.num_kept = 0 if self.comes_once else sum(substep.num_kept for substep in self.substeps)
        turns = [0] * NUM_MESSAGES if self.comes_once else range(NUM_MESSAGES)
        self.structs = [*map(self._structs_of, turns)]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[CapturedSubstep]:
        return iter(self.substeps)

    def __str__(self) -> str:
        return ", ".join(map(str, self.substeps))

    def of_each(self, num_requests: int) -> Iterator[tuple[CapturedSubstep, slice | None]]:
        """By forward, in the order of their run, which of the entries that a launch of so many requests names are its
        own, by request; None: as many as the step has accepted.
        """
        for number, part in enumerate(self.parts):
            own = slice(number * num_requests, (number + 1) * num_requests) if number < self.num_known else None
            for substep in part:
                yield substep, own

    def accepted(self, turn: int) -> Ints | None:
        """[size, places], what the step has accepted that runs before them in this turn."""
        if self.acceptance is None:
            return None
        return self.acceptance.posted.message_of(turn)[0].reshape(-1, self.places)

    def _structs_of(self, turn: int) -> array[int]:
        structs = array("q", bytes(8 * RUN.size * self.count))
        for number, substep in enumerate(self.substeps):
            first = RUN.size * number
            structs[first + RUN.message_struct] = substep.message_struct_at
            structs[first + RUN.message] = substep.written.message_of(turn).at
            structs[first + RUN.keep] = substep.num_kept
        if self.acceptance is not None:
            structs[first + RUN.places] = self.places
            structs[first + RUN.accepted] = self.acceptance.posted.message_of(turn).at
        return structs


class Launch(NamedTuple):
    """Captured forwards that the host has launched in this turn and knows nothing more of.

    rows:      by part, [ROWS.size * requests + 1] (native/layout.py), at that time
    written:   by part of which the host says it, and by request, entries that each of their rows writes
    record:    where the listener keeps them, by forward; None: nowhere
    """

    launch_group: LaunchGroup
    batch: Batch
    rows: array[int]
    step: int
    turn: int
    written: array[int]
    record: Any = None

    def make_room(self) -> None:
        """For what a step accepts of these requests."""
        _make_room(self.batch, self.launch_group.places)

    def runs(self) -> Iterator[Launched]:
        """Each of them."""
        accepted, records = self.launch_group.accepted(self.turn), repeat(None) if self.record is None else self.record
        for (substep, entries), record in zip(self.launch_group.of_each(len(self.batch)), records, strict=False):
            own = self.batch, self.rows, self.step, self.turn, substep.written.message_of(self.turn)
            if entries is None:
                yield Launched(substep, *own, None, accepted, record)
            else:
                yield Launched(substep, *own, self.written[entries], None, record)


def runs_of(launches: Iterable[Launch]) -> list[Launched]:
    """All of them, in the order of their run."""
    return [run for launch in launches for run in launch.runs()]


class Launched(NamedTuple):
    """One captured forward of a `Launch`.

    message:   what `CapturedSubstep.written` will say of it
    written:   by request, entries that each of its rows writes; None: as many as were accepted
    accepted:  [size, 1 + places], what the step says that it has accepted before
    """

    substep: CapturedSubstep
    batch: Batch
    rows: array[int]
    step: int
    turn: int
    message: Message
    written: array[int] | None
    accepted: Ints | None = None
    record: Any = None

    def make_room(self) -> None:
        """As of the `Launch`."""
        _make_room(self.batch, 0 if self.accepted is None else self.accepted.shape[1])

    @property
    def committed(self) -> list[int]:
        """By request; of the first part, which has those of all others."""
        return self.rows[ROWS.committed * len(self.batch) : ROWS.size * len(self.batch)].tolist()


def _make_room(batch: Batch, places: int) -> None:
    """`places`: numbers that a step tells of each request, as `LaunchGroup` has it."""
    batch.make_room(repeat(max(places - 1, 0), len(batch)))


def _expect_in_a_row(part: Part) -> None:
    """PlanError where one of several draft forwards is left out between two others, or comes twice."""
    names = [site_name(*substep.site) for substep in part]
    first = part[0].site[1]
    wanted = [site_name("draft", number) for number in range(first, first + len(part))]
    if part[0].site[0] == "draft" and names != wanted:
        raise PlanError(
            f"draft forwards of the {part[0].pool.name} pool that are launched together must be numbered without gaps, "
            f"{', '.join(wanted)}, got {', '.join(names)}: give one substep for each"
        )
