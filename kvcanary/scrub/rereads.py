"""Rereads: bytes that are read again behind a step, and judged when the host collects it."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.pools.slot_maps import Ints
from kvcanary.records.dispatch import ops_for
from kvcanary.records.fingerprints import slots_are_right
from kvcanary.records.graph_cache import Replays
from kvcanary.records.mailbox import NUM_MESSAGES
from kvcanary.records.side_stream import LAST, SideStream
from kvcanary.records.state import PoolState

ROOM = 1024  # numbers that a line begins with; it grows with what steps ask for
ALIGNMENT = 2  # numbers, so that kernels find all of them equally aligned
LEAST_SLOTS = 16  # that a place has room for
_NOBODYS = np.full(1, -1)  # a grant in which nobody writes
_NO_GRANTS = np.empty(0, np.int64)  # where no kernel asks for them
Found = Sequence[Violation | ViolationBatch]
Judge = Callable[[], Found]
#: Slots [n] int64 of a pool that are looked at with others; [n] int64 generations, of a slot that was written in its
#: own nobody asks, None: all are asked; and who names what was found by the bitmap [n, 2] int64 of `finite_check`.
Part = tuple[Ints, Ints | None, Callable[[Tensor], Found]]


class Numbers:
    """int64 numbers of the host's in memory that does not move, given away from the first on until `clear`.

    What does not fit begins a block that is twice as large; all blocks stay until then.

    used: of the newest block
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: reaches them."""
        self._device = device
        self._full: list[Tensor] = []
        self._block, self.used = _reached(ROOM, device), 0

    def take(self, count: int) -> Tensor:
        """[count], as they were left."""
        first = self.used
        self.used += count + -count % ALIGNMENT
        if self.used > len(self._block):
            self._full.append(self._block)
            self._block, first = _reached(max(2 * len(self._block), count + ALIGNMENT), self._device), 0
            self.used = count + -count % ALIGNMENT
        return self._block[first : first + count]

    def clear(self) -> None:
        """Nobody uses what was given away any more."""
        self._full.clear()
        self.used = 0


class Place:
    """Memory of a re-read of so many slots, or fewer, at addresses that stay: what is launched over it can be captured.

    live, slots, grants: [1], [room], [room] int64, as the host tells them: how many slots, these, and a generation each
    found, answers:      [numbers] int64, as kernels tell them to the host, and the host reads them
    at:                  where all this is, as `loops.put_slots` takes it;  where: the address of the answers, how many
    launch:              the kernels that read what lies there
    """

    launch: Callable[[], None]

    def __init__(self, room: int, numbers: int, device: torch.device) -> None:
        """`device`: reaches all of them, in memory of the host."""
        self.inputs, self.found = _reached(ALIGNMENT + 2 * room, device), _reached(numbers, device)
        self.live = self.inputs[:1]
        self.slots, self.grants = self.inputs[ALIGNMENT:].split(room)
        self.answers, self._slot_numbers = self.found.numpy(), self.slots.numpy()
        self.where = self.found.data_ptr(), numbers
        self.at = self.live.data_ptr(), self.slots.data_ptr(), self.grants.data_ptr(), *self.where

    def name(self, count: int, judge: Callable[[Ints], Found]) -> Found:
        """So many slots differ, as they were told last."""
        return judge(self._slot_numbers[:count])

    def name_part(self, first: int, end: int, judge: Callable[[Tensor], Found]) -> Found:
        """Some of these slots, with two numbers each, have elements that are not finite."""
        return judge(self.found[2 * first : 2 * end].view(-1, 2))


class StepRereads:
    """Re-reads behind one step, and their memory: what each has found, once it is over, and who then says where.

    free:    by kind, those that the step has not taken;  taken: the others, and where they are free again
    answers: address and number of each
    asked:   of each re-read, what it has found and who judges that
    is_sent: they are on their way; who wants the memory next clears it
    """

    def __init__(self, device: torch.device) -> None:
        from kvcanary.native.loops import are_zero

        self._numbers, self._are_zero = Numbers(device), are_zero
        self.free = defaultdict[Hashable, list[Place]](list)
        self.taken: list[tuple[list[Place], Place]] = []
        self.answers = array("q")
        self.asked: list[tuple[NDArray[np.int64], Judge]] = []
        self.is_sent = False

    def room(self, count: int) -> Tensor:
        """[count] zeros, for what kernels that are launched one by one tell the host."""
        found = self._numbers.take(count).zero_()
        self.answers.extend((found.data_ptr(), count))
        return found

    def violations(self) -> list[Violation | ViolationBatch]:
        """What fired; the step is over."""
        if self._are_zero(len(self.answers) // 2, self.answers.buffer_info()[0]):
            return []
        with torch.inference_mode():
            return [violation for found, judge in self.asked if found.any() for violation in judge()]

    def clear(self) -> None:
        for free, place in self.taken:
            free.append(place)
        self.taken, self.answers, self.asked, self.is_sent = [], array("q"), [], False
        if self._numbers.used:
            self._numbers.clear()


class Rereads:
    """Bytes of slots against what is kept of them; judged at once in host memory, on a device when the step is
    collected.

    Re-reads of a step lie in memory of their own until it is collected: some are made beside the next step, which asks
    for its own by then. In a step nothing is allocated, once the lines have grown, and no answer is copied.

    beside: where much is read, which leaves the device to the forwards of the next step
    waits:  whether something was launched that no `send` has taken along
    """

    def __init__(self, device: torch.device, at_once: bool) -> None:
        """`at_once`: nobody waits for an answer, which lies in host memory."""
        self._device, self._at_once, self._ops = device, at_once, ops_for(device)
        self.side_stream, self.waits = SideStream(device, LAST), False
        if not at_once:
            self._by_step, self._replays = deque(StepRereads(device) for _ in range(NUM_MESSAGES)), Replays(device)

    def prepare(self, pool: PoolState) -> None:
        """What looks at this pool launch is launched over no slots, and the last re-read of a request over one."""
        if self._at_once:
            return
        for place in (self._content(pool, LEAST_SLOTS), self._finite(pool, LEAST_SLOTS)):
            place.launch()
        slots_are_right(pool, torch.full((1,), pool.view.num_slots - 1, device=self._device), both_fingerprints=True)

    def reread(self, pool: PoolState, slots: Ints, judge: Callable[[Ints], Found]) -> Found:
        """Fingerprint a of slots [n] int64 against that which is kept: what fired, where that is known at once.

        judge: names it by the slots, where bytes differ
        """
        if pool.is_gone:
            return []
        if self._at_once:
            return [] if pool.loops.match_slots(pool.struct_at, slots, False) else judge(slots)
        count = len(slots)
        place = self._take("content", self._content, pool, count)
        pool.loops.put_slots(*place.at, 0, slots, _NO_GRANTS)
        self._replays.run(place, place.launch)
        self._by_step[0].asked.append((place.answers, partial(place.name, count, judge)))
        return []

    def check_finite(self, pool: PoolState, parts: Sequence[Part]) -> Found:
        """The same of elements that are not finite, in all parts at once."""
        if pool.is_gone:
            return []
        if self._at_once:
            return [violation for slots, _, judge in parts for violation in self._not_finite(pool, slots, judge)]
        place = self._take("finite", self._finite, pool, sum([len(slots) for slots, _, _ in parts]))
        asked, first = self._by_step[0].asked, 0
        for slots, grants, judge in parts:
            end = first + len(slots)
            pool.loops.put_slots(*place.at, first, slots, _NOBODYS if grants is None else grants)
            asked.append((place.answers[2 * first : 2 * end], partial(place.name_part, first, end, judge)))
            first = end
        self._replays.run(place, place.launch)
        return []

    def room(self, count: int) -> Tensor:
        """[count] int64 zeros, in which a kernel of this step's re-reads says what it has found."""
        if self._at_once:
            return torch.zeros(count, dtype=torch.int64)
        return self._current.room(count)

    def ask(self, found: Tensor, judge: Judge) -> Found:
        """As `reread`, of what a kernel says in `room`: whether a number of it is not zero."""
        if self._at_once:
            return judge() if found.any() else []
        self._by_step[0].asked.append((found.numpy(), judge))
        return []

    def send(self) -> StepRereads | None:
        """Those since the last time; None where there are none."""
        if not self.waits:
            return None
        current, self.waits = self._by_step[0], False
        current.is_sent = True
        self._by_step.rotate(-1)
        return current

    def _not_finite(self, pool: PoolState, slots: Ints, judge: Callable[[Tensor], Found]) -> Found:
        mismatch = torch.zeros(len(slots), 2, dtype=torch.int64)
        self._ops.finite_check(pool.rows, torch.from_numpy(slots), mismatch=mismatch)
        return judge(mismatch) if mismatch.any() else []

    def _take(self, kind: str, make: Callable[[PoolState, int], Place], pool: PoolState, count: int) -> Place:
        """For a re-read whose kernels run over as many slots as there is room for, and leave the idle ones at once."""
        room = max(LEAST_SLOTS, 1 << (count - 1).bit_length())
        key, current = (kind, pool.pool_id, room), self._current
        free = current.free[key]
        if not free:
            for own in self._by_step:  # each step has as many, and memory has grown once for all
                own.free[key].append(make(pool, room))
        place = free.pop()
        current.taken.append((free, place))
        current.answers.extend(place.where)
        return place

    def _content(self, pool: PoolState, room: int) -> Place:
        """Many programs ask for the same slots, which they find on the device therefore."""
        place, check = Place(room, 1, self._device), self._ops.check_content
        with torch.inference_mode(False):
            there = torch.zeros(ALIGNMENT + room, dtype=torch.int64, device=self._device)
        self.side_stream.keep(there)

        def launch() -> None:
            there.copy_(place.inputs[: len(there)], non_blocking=True)
            of_pool = pool.rows, there[ALIGNMENT:], pool.keys, pool.content_a
            check(*of_pool, differs=place.found, num_live=there[:1])

        place.launch = launch
        return place

    def _finite(self, pool: PoolState, room: int) -> Place:
        place, check = Place(room, 2 * room, self._device), self._ops.finite_check
        settings = {"num_live": place.live, "records": pool.expected, "grants": place.grants}
        place.launch = partial(check, pool.rows, place.slots, mismatch=place.found.view(-1, 2), **settings)
        return place

    @property
    def _current(self) -> StepRereads:
        """Of the running step, for what is about to be launched."""
        current, self.waits = self._by_step[0], True
        if current.is_sent:
            current.clear()
        return current


def _reached(count: int, device: torch.device) -> Tensor:
    """[count] int64 zeros in memory of the host that the device reaches."""
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int64, pin_memory=device.type != "cpu")
