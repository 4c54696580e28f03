"""One canary inside an engine that others wrote: from the first hook to the last finding, whichever engine it is.

An adapter derives from `HostHandle` and calls, in this order, `_read` when it knows what the forward that is next will
write and read, `_wrote` when that has run, and `_hold` with what the step gives. The counter of findings travels with
the tokens, so that none leaves before it is read.
"""

from __future__ import annotations

import functools
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from typing import Any, ClassVar

import structlog

from kvcanary.adapters.hosted import metrics
from kvcanary.adapters.hosted.copies import StoredCopies
from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.hosted.output_gate import hold_back
from kvcanary.adapters.hosted.ranks import SharedReporter
from kvcanary.adapters.hosted.replacements import Replacements
from kvcanary.adapters.hosted.sampled import SampledByRanks
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.report import pool_of, report_step
from kvcanary.adapters.observed.state import RING, Forward
from kvcanary.config import MEMORY, CanaryConfig
from kvcanary.errors import KVCorruptionError
from kvcanary.hardware.identity import hardware_of
from kvcanary.hardware.turns import turn_of
from kvcanary.names import Published, store_at
from kvcanary.ranks.agreement import RanksDisagreeError
from kvcanary.ranks.findings import violation_of

_events = structlog.get_logger("kvcanary")


class HostHandle(ABC):
    """The canary of one process of an engine, until `detach()`.

    host:         what the engine is called in events
    role:         whose pools these are, in metrics
    rank:         of this process; is_alone: the engine has no other
    is_collected: the engine takes the outputs of this process, so that what they wait for is told in time
    """

    host: ClassVar[str]
    role: ClassVar[str] = "all"

    def __init__(self, config: CanaryConfig, rank: int = 0, is_alone: bool = True, is_collected: bool = True) -> None:
        self.config, self.rank, self._is_alone, self._is_collected = config, rank, is_alone, is_collected
        self.canary: PagedCanary | None = None
        self._reporter = SharedReporter(rank, is_alone)
        self.is_armed = False
        self.guard = Guard(self.host, config.mode, self._stopped, rank=rank, pool=self.role)
        self.replaced = Replacements(self.guard)
        self._is_running = False  # a forward that was read is on its way
        self._seen = 0
        self._uncollected = deque[int](maxlen=RING - 1)
        self.sampled: SampledByRanks | None = None  # where several workers sample the same
        self._published: Published | None = None  # names of blocks, where others find them
        self._why_ended = ""  # why this process ends with its next step

    def report(self) -> dict[str, Any]:
        """The certificate of this process, with the first finding of each incident."""
        if self.canary is None:
            return {"armed": False}
        if not self.guard.stopped:
            self._look_at(int(self.canary.memory.total), self.canary.step)
        own: dict[str, Any] = {"armed": self.is_armed, "rank": self.rank, "bytes": self.canary.num_bytes}
        own["waits"] = self.canary.waits  # steps whose counter was not there when their tokens were
        known = self.canary.dumps.environment
        own |= {"engine": self.host, "host_version": known.get("version", "not known")}
        own["incidents"] = [finding.to_dict() for finding in self.canary.log.findings]
        return {**own, **self.canary.certificate(self._held())}

    def detach(self) -> None:
        """Undo everything. Twice is harmless."""
        if self.is_armed:
            metrics.watching(self.host, self.role, self.rank, False)
        if self.sampled is not None:
            self.sampled.leave()
        if self._published is not None:
            self._published.close()
            self._published = None
        self.replaced.undo()

    # what engines differ in

    @abstractmethod
    def _empty_forward(self) -> Forward:
        """No rows, over the tensors of the engine."""

    @abstractmethod
    def _held(self) -> Collection[int]:
        """Numbers of the rows that there are."""

    # attaching

    def _hook(self, owner: Any, names: Collection[str]) -> None:
        """Call the method of this class whose name is that with one `_` before it, the replaced one as its first."""
        for name in names:
            self.replaced.replace(owner, name, getattr(self, f"_{name.lstrip('_')}"))

    def _published_names(self) -> Published | None:
        """Names that other processes find; None where settings want none."""
        if self._published is None and self.config.names != MEMORY:
            self._published = Published(functools.partial(store_at, self.config.names), self._who())
        return self._published

    def _who(self) -> str:
        """This process, as others are told of it."""
        return f"{self.host} {socket.gethostname()}:{os.getpid()} rank {self.rank}"

    def _adopt(self, canary: PagedCanary) -> PagedCanary:
        """Let a canary tell of its findings as processes of one engine do."""
        canary.response.announce = self._reporter.announce
        canary.dumps.environment |= {"engine": self.host} | ({} if self._is_alone else {"rank": self.rank})
        return canary

    def _arm(self, canary: PagedCanary) -> None:
        """From now on forwards are judged."""
        canary.memory.forget()
        self.is_armed = self.guard.is_serving = True
        metrics.watching(self.host, self.role, self.rank, True)
        self._seen = int(canary.memory.total)
        _events.info(
            "kvcanary.attached", host=self.host, mode=self.config.mode, content=self.config.content, pid=os.getpid(),
            rank=self.rank, groups=len(canary.groups), bytes=canary.num_bytes,
            turn=turn_of(self.config.share), hardware=hardware_of(canary.memory.device),
        )  # fmt: skip

    def _stopped(self, reason: str) -> None:
        """A hook failed: nothing is judged any more."""
        self.is_armed = self._is_running = False
        metrics.watching(self.host, self.role, self.rank, False)
        if self.sampled is not None:
            self.sampled.leave()
        if self.canary is not None:
            self.canary.coverage.skip(f"stopped watching: {reason}", 1)

    # a step

    def _flush(self) -> None:
        """Bytes are about to move, or nobody runs: do now what waits for a forward."""
        if self.is_armed and self.canary is not None:
            self.canary.flush(self._empty_forward())

    def _begin(self) -> None:
        """A step begins."""
        self._is_running = False
        if self._why_ended:
            raise SystemExit(self._why_ended)
        if self._uncollected:
            self._collect_late()

    def _read(self, forward: Forward) -> None:
        """Show the canary the forward that is next."""
        if self.canary is not None:
            self.canary.read(forward)
            self._is_running = True

    def _wrote(self) -> bool:
        """The forward that was read has run; False: there was none."""
        if not self._is_running or self.canary is None:
            self._flush()
            return False
        self.canary.wrote()
        if self.canary.step % metrics.COUNTED_STEPS == 0:
            metrics.ran(self.canary.memory.device, self.rank)
        return True

    def _hold(self, result: Any) -> Any:
        """Look at the counter before tokens leave: now, or when the engine asks for an output that is on its way."""
        if self._is_running and self.canary is not None:
            self._is_running = False
            look = functools.partial(self.guard.run, self._look, self.canary, self.canary.step)
            comes_later = hasattr(result, "get_output")
            if not self._is_collected:
                self._uncollected.append(self.canary.step)
                if self.sampled is not None:
                    (self.sampled.compare_later if comes_later else self.sampled.compare)(self.canary.step, result)
            elif comes_later:
                hold_back(result, look)
            else:
                self._look(self.canary, self.canary.step, result)
        return result

    def _look(self, canary: PagedCanary, step: int, result: Any) -> None:
        """Before the tokens of a step leave: are they those of all ranks, and did nothing fire?"""
        if self.sampled is not None:
            self.sampled.compare(step, result)
        self._look_at(canary.count_at(step), step)

    def _compare_ranks(self, canary: PagedCanary, group: Any, num_ranks: int) -> None:
        """A canary is made; from now on with what the workers of this gloo group sample, which nobody else uses, and
        with what so many of them hold alike.

        group: None where there are none, or one is there already
        """
        if group is not None:
            self.sampled = SampledByRanks(group, self._ranks_differ)
        if self.sampled is None:
            return
        canary.fed |= {"X1"}
        copies = None if "X2" in self.config.disable else StoredCopies(canary, num_ranks)
        self.sampled.copies = copies or None

    # telling

    def _ranks_differ(self, error: RanksDisagreeError) -> None:
        """X1 or X2. KVCorruptionError in mode raise; a worker whose outputs nobody takes ends with its next step."""
        canary = self.canary
        if canary is None:
            return
        copies = None if self.sampled is None else self.sampled.copies
        told = violation_of if copies is None else copies.violation_of
        violation = told(error, pool_of(canary, canary.groups[0]))
        try:
            canary.response.answer([violation], error.step, canary.coverage)
        except KVCorruptionError as found:
            if self._is_collected:
                raise
            self._reporter.announce(found.report, on_screen=False)
            self._why_ended = str(found)

    def _collect_late(self) -> None:
        """Look at the steps that have arrived here, where the engine takes no output; mode raise ends this process.

        The engine would only log an exception of such a worker, while the others wait for it.
        """
        while self._uncollected and self.canary is not None:
            total = self.canary.launches.count_of(self._uncollected[0])
            if total is None:
                return
            try:
                self._look_at(total, self._uncollected.popleft())
            except KVCorruptionError as error:
                self._reporter.announce(error.report, on_screen=False)  # SystemExit prints it
                raise SystemExit(str(error)) from error

    def _look_at(self, total: int, step: int) -> None:
        """Tell of what fired up to this step; `total`: the counter behind it."""
        canary = self.canary
        if canary is None or total <= self._seen:
            return
        fired, self._seen = total - self._seen, total
        reported = 0
        for known in list(canary.steps):
            if not known.is_reported and known.number <= step:
                known.is_reported = True
                reported += report_step(canary, known)
        if not reported:
            canary.coverage.untold_incidents += fired
