"""Looks: bytes that are read again behind a step, and judged when the host hears of it."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.beside import LAST, Beside
from kvcanary.captures import Replays
from kvcanary.groups import Ints
from kvcanary.hits import Hit
from kvcanary.intake import HitBatch
from kvcanary.lanes import numbers_are_right, slots_are_right
from kvcanary.ops import ops_for
from kvcanary.outbox import LINES
from kvcanary.state import PoolState

ROOM = 1024  # numbers that a line begins with; it grows with what steps ask for
ALIGNMENT = 2  # numbers, so that kernels find all of them equally aligned
LEAST_SLOTS = 16  # that a place has room for
NO_GRANT = -1  # in which nobody writes
Found = Sequence[Hit | HitBatch]
Judge = Callable[[], Found]


class Numbers:
    """int64 numbers of the host's in memory that does not move, given away from the first on until `clear`.

    What does not fit begins a block that is twice as large; all blocks stay until then.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: reaches them."""
        self._device = device
        self._full: list[tuple[Tensor, int]] = []
        self._block, self._used = _reached(ROOM, device), 0

    def take(self, count: int) -> Tensor:
        """[count], as they were left."""
        first = self._used
        self._used += count + -count % ALIGNMENT
        if self._used > len(self._block):
            self._full.append((self._block, first))
            self._block, first = _reached(max(2 * len(self._block), count + ALIGNMENT), self._device), 0
            self._used = count + -count % ALIGNMENT
        return self._block[first : first + count]

    def are_zero(self) -> bool:
        """Whether all that were given away are."""
        blocks = (*self._full, (self._block, self._used)) if self._used else ()
        return not any(np.count_nonzero(block.numpy()[:used]) for block, used in blocks)

    def clear(self) -> None:
        """Nobody uses what was given away any more."""
        self._full.clear()
        self._used = 0


class Place:
    """Memory of a look at so many slots, or fewer, at addresses that stay: what is launched over it can be captured.

    live, slots, grants: [1], [room], [room] int64, as the host tells them: how many slots, these, and a generation each
    found, answers:      [numbers] int64, as kernels tell them to the host, and the host reads them
    where:               their address and number
    """

    def __init__(self, room: int, numbers: int, device: torch.device) -> None:
        """`device`: reaches all of them, in memory of the host."""
        self.told, self.found = _reached(ALIGNMENT + 2 * room, device), _reached(numbers, device)
        self.live = self.told[:1]
        self.slots, self.grants = self.told[ALIGNMENT:].split(room)
        self._told, self.answers, self._room = self.told.numpy(), self.found.numpy(), room
        self.where = self.answers.ctypes.data, numbers

    def tell(self, slots: Ints, grants: Ints | int | None) -> Ints:
        """The slots, where they stay until others are told; nothing is found of them yet.

        grants: [n], one for all, or None where no kernel asks
        """
        count = self._told[0] = len(slots)
        kept = self._told[ALIGNMENT : ALIGNMENT + count]
        kept[:] = slots
        if grants is not None:
            first = ALIGNMENT + self._room
            self._told[first : first + count] = grants
        self.answers.fill(0)
        return kept


class Captured(NamedTuple):
    """A look that is launched again and again, over its place."""

    place: Place
    launch: Callable[[], None]


class Line:
    """Memory of the looks behind one step.

    numbers: what kernels that are launched one by one tell the host
    asked:   of each look, what it has found and who judges that
    is_sent: these looks are on their way; who wants the line next clears it
    """

    def __init__(self, device: torch.device) -> None:
        self.numbers = Numbers(device)
        self._captured: dict[Hashable, list[Captured]] = {}
        self._taken = Counter[Hashable]()
        self._answers = array("q")  # address and number of each
        self.asked: list[tuple[NDArray[np.int64], Judge]] = []
        self.is_sent = False

    def take(self, key: Hashable) -> Captured | None:
        """The next of these that this step has not taken; None where it has taken all of them."""
        number, own = self._taken[key], self._captured.get(key, ())
        if number == len(own):
            return None
        self._taken[key] = number + 1
        self._answers.extend(own[number].place.where)
        return own[number]

    def add(self, key: Hashable, look: Captured) -> None:
        """One more to be taken, by this step and by all that follow."""
        self._captured.setdefault(key, []).append(look)

    def is_quiet(self) -> bool:
        """Whether no look has found anything."""
        from kvcanary.loops import are_zero

        return self.numbers.are_zero() and are_zero(len(self._answers) // 2, self._answers.buffer_info()[0])

    def clear(self) -> None:
        self.numbers.clear()
        self._taken.clear()
        self._answers, self.asked, self.is_sent = array("q"), [], False


class Sent(NamedTuple):
    """Looks behind one step: what each has found, once the step is over, and who then says where."""

    line: Line

    def hits(self) -> list[Hit | HitBatch]:
        """What fired; the step is over."""
        if self.line.is_quiet():
            return []
        with torch.inference_mode():
            return [hit for found, judge in self.line.asked if found.any() for hit in judge()]


class Looks:
    """Bytes of slots against what is kept of them; judged at once in host memory, on a device when the step is heard.

    Looks of a step lie in memory of their own until it is heard: some are made beside the next step, which asks for its
    own by then. In a step nothing is allocated, once the lines have grown, and no answer is copied.

    beside: where much is read, which leaves the device to the forwards of the next step
    """

    def __init__(self, device: torch.device, at_once: bool) -> None:
        """`at_once`: nobody waits for an answer, which lies in host memory."""
        self._device, self._at_once, self._ops = device, at_once, ops_for(device)
        self.beside = Beside(device, LAST)
        if not at_once:
            self._lines, self._replays = deque(Line(device) for _ in range(LINES)), Replays(device)

    def prepare(self, pool: PoolState) -> None:
        """What looks at this pool launch is launched over no slots, and the last look of a request over one."""
        if self._at_once:
            return
        for look in (self._content(pool, LEAST_SLOTS), self._finite(pool, LEAST_SLOTS)):
            look.launch()
        slots_are_right(pool, torch.full((1,), pool.view.num_slots - 1, device=self._device), both_lanes=True)

    @property
    def waits(self) -> bool:
        """Whether something was launched that no `send` has taken along."""
        return not self._at_once and bool(self._lines[0].asked) and not self._lines[0].is_sent

    def look(self, pool: PoolState, slots: Ints, judge: Callable[[Ints], Found]) -> Found:
        """Lane a of slots [n] int64 against that which is kept: what fired, where that is known at once.

        judge: names it by the slots, where bytes differ
        """
        if self._at_once:
            return [] if numbers_are_right(pool, slots) else judge(slots)
        place, told = self._launch("content", self._content, pool, slots, None)
        return self._ask(place.answers, partial(judge, told))

    def look_for_finite(
        self, pool: PoolState, slots: Ints, judge: Callable[[Tensor], Found], grants: Ints | None = None
    ) -> Found:
        """The same of elements that are not finite.

        judge:  names it by the bitmap [n, 2] int64 of `finite_check`
        grants: [n] int64 generations: of a slot that was written in its own nobody asks
        """
        if self._at_once:
            mismatch = torch.zeros(len(slots), 2, dtype=torch.int64)
            self._ops.finite_check(pool.rows, torch.from_numpy(slots), mismatch=mismatch)
            return judge(mismatch) if mismatch.any() else []
        place, _ = self._launch("finite", self._finite, pool, slots, NO_GRANT if grants is None else grants)
        return self._ask(place.answers, lambda: judge(place.found[: 2 * len(slots)].view(-1, 2)))

    def room(self, count: int) -> Tensor:
        """[count] int64 zeros, in which a kernel of this step's looks says what it has found."""
        if self._at_once:
            return torch.zeros(count, dtype=torch.int64)
        return self._line.numbers.take(count + -count % ALIGNMENT).zero_()[:count]

    def ask(self, found: Tensor, judge: Judge) -> Found:
        """As `look`, of what a kernel says in `room`: whether a number of it is not zero."""
        if self._at_once:
            return judge() if found.any() else []
        return self._ask(found.numpy(), judge)

    def send(self) -> Sent | None:
        """Those since the last time; None where there are none."""
        if not self.waits:
            return None
        line = self._lines[0]
        line.is_sent = True
        self._lines.rotate(-1)
        return Sent(line)

    def _ask(self, found: NDArray[np.int64], judge: Judge) -> Found:
        self._line.asked.append((found, judge))
        return []

    def _launch(
        self,
        kind: str,
        make: Callable[[PoolState, int], Captured],
        pool: PoolState,
        slots: Ints,
        grants: Ints | int | None,
    ) -> tuple[Place, Ints]:
        """A look whose kernels run over as many slots as there is room for, and leave the idle ones at once."""
        room = max(LEAST_SLOTS, 1 << (len(slots) - 1).bit_length())
        key, line = (kind, pool.pool_id, room), self._line
        look = line.take(key)
        while look is None:
            for own in self._lines:  # each step has as many, and memory has grown once for all
                own.add(key, make(pool, room))
            look = line.take(key)
        place, launch = look
        told = place.tell(slots, grants)
        self._replays.run(place, launch)
        return place, told

    def _content(self, pool: PoolState, room: int) -> Captured:
        """Many programs ask for the same slots, which they find on the device therefore."""
        place, check = Place(room, 1, self._device), self._ops.check_content
        with torch.inference_mode(False):
            there = torch.zeros(ALIGNMENT + room, dtype=torch.int64, device=self._device)
        self.beside.keep(there)

        def launch() -> None:
            there.copy_(place.told[: len(there)], non_blocking=True)
            of_pool = pool.rows, there[ALIGNMENT:], pool.keys, pool.content_a
            check(*of_pool, differs=place.found, num_live=there[:1])

        return Captured(place, launch)

    def _finite(self, pool: PoolState, room: int) -> Captured:
        place, check = Place(room, 2 * room, self._device), self._ops.finite_check
        settings = {"num_live": place.live, "records": pool.expected, "grants": place.grants}
        return Captured(place, partial(check, pool.rows, place.slots, mismatch=place.found.view(-1, 2), **settings))

    @property
    def _line(self) -> Line:
        """Of the running step."""
        line = self._lines[0]
        if line.is_sent:
            line.clear()
        return line


def _reached(count: int, device: torch.device) -> Tensor:
    """[count] int64 zeros in memory of the host that the device reaches."""
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int64, pin_memory=device.type != "cpu")
