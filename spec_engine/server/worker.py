"""EngineWorker: the one thread that owns an engine, and how an asyncio side submits, cancels and asks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvcanary import KVCanaryError, KVCorruptionError
from spec_engine.engine import KV_CORRUPTION, Engine
from spec_engine.request import TokenEvent
from spec_engine.sampling import SamplingParams

SHUTDOWN = "shutdown"  # finish reason of what the server's end cut short
REST_SECONDS = 1.0  # after which a canary that has nothing to do looks at what waits for long
SERVER_ERROR = "server_error"  # finish reason of what ran when the engine stopped by itself

Answer = TypeVar("Answer")
Submit = Callable[[Engine], str]


class ServerStoppedError(KVCanaryError, RuntimeError):
    """The engine takes no more requests: it has stopped, or is about to."""


class BusyError(KVCanaryError, RuntimeError):
    """As many sequences wait as may."""


class Job:
    """The sequences of one HTTP request; iterating gives (number of the sequence, event) until all have ended."""

    def __init__(self, num_sequences: int) -> None:
        self._left = num_sequences
        self._events: asyncio.Queue[tuple[int, TokenEvent]] = asyncio.Queue()

    def put(self, index: int, event: TokenEvent) -> None:
        self._events.put_nowait((index, event))

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        while self._left:
            index, event = await self._events.get()
            self._left -= event.finished
            yield index, event


class EngineWorker:
    """Steps the engine while it has work, and obeys commands between steps.

    num_live: sequences that were submitted and have not ended, as the asyncio side knows; ``capacity`` is their most.
    ended: how many ended, by finish reason.
    drills: how many drills ended how.
    failure: what stopped the engine.
    hurries: `drain` waits for nobody.
    before_step: called in the thread before every step.
    """

    def __init__(self, engine: Engine, max_waiting: int = 64) -> None:
        self.engine = engine
        self.capacity = engine.config.max_running_requests + max_waiting
        self.num_live = 0
        self.ended: Counter[str] = Counter()
        self.drills: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.is_draining = self.hurries = False
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()  # of `_is_open`: no command comes behind the last
        self._is_open, self._stops = True, False
        self._places: dict[str, tuple[Job, int]] = {}  # of the engine's requests; the thread's alone
        self.before_step: Callable[[], None] = lambda: None
        self._on_failure: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # the asyncio side

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Run the thread beside the current event loop, where ``on_failure`` is called when the engine stops."""
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._is_open and self._thread.is_alive() and not self.is_draining

    async def submit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], hands_over: bool = False
    ) -> Job:
        """Queue sequences, all or none. ConfigError, BusyError or ServerStoppedError where that can not be."""
        return await self.submit_by(
            [
                lambda engine, prompt=prompt, own=own: engine.submit(prompt, own, hands_over=hands_over)  # type: ignore[misc]
                for prompt, own in zip(prompts, params, strict=True)
            ]
        )

    async def submit_by(self, submits: Sequence[Submit]) -> Job:
        """The same for whoever submits in another way: each gives the id of one request."""
        if self.is_draining:
            raise ServerStoppedError("the server is shutting down and takes no more requests")
        if self.num_live + len(submits) > self.capacity:
            raise BusyError(
                f"{self.num_live} sequences run or wait and {len(submits)} more were asked for, the limit is "
                f"{self.capacity}: try again later"
            )
        job = Job(len(submits))
        self.num_live += len(submits)
        try:
            await self.call(lambda engine: self._enqueue(engine, job, submits))
        except asyncio.CancelledError:
            self.cancel(job)
            raise
        return job

    def cancel(self, job: Job) -> None:
        """End what still runs of a job, and free what it holds; nothing happens where all has ended."""
        self.post(lambda: self._end_all("cancelled", job))

    async def call(self, ask: Callable[[Engine], Answer]) -> Answer:
        """The answer of a question that is asked between two steps, in the engine's thread."""
        answer: Future[Answer] = Future()
        if not self.post(lambda: _answer(answer, ask, self.engine)):
            raise ServerStoppedError("the engine has stopped")
        return await asyncio.shield(asyncio.wrap_future(answer))

    async def drain(self, seconds: float) -> None:
        """Take no more requests; those that run have so many seconds to finish, then they end as "shutdown"."""
        self.is_draining = True
        deadline = self._loop.time() + seconds
        while self.num_live and self._is_open and not self.hurries and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        self.post(lambda: self._end_all(SHUTDOWN))

    async def stop(self) -> None:
        """End the thread, behind everything that was asked before."""
        self.is_draining = True
        self.post(self._stop)
        await asyncio.to_thread(self._thread.join)

    def post(self, command: Callable[[], object]) -> bool:
        """Do this between two steps, in the engine's thread; False where that has ended."""
        with self._lock:
            if self._is_open:
                self._commands.put(command)
            return self._is_open

    def _forget(self, num_sequences: int) -> None:
        self.num_live -= num_sequences

    def _deliver(self, events: Sequence[tuple[Job, int, TokenEvent]]) -> None:
        for job, index, event in events:
            self.num_live -= event.finished
            job.put(index, event)

    # the engine's thread

    def _run(self) -> None:
        try:
            while not self._stops:
                self._obey()
                if self.engine.has_work:
                    self.before_step()
                    self._send(self.engine.step())
                else:
                    self.engine.rest()
            while self.engine.has_work:  # nobody's any more: what is in flight arrives, and is judged
                self._send(self.engine.step())
            if self.engine.canary is not None:
                self.engine.canary.drain()
        except BaseException as error:
            self.failure = error
        self._close()

    def _obey(self) -> None:
        """All commands that wait; where there is nothing else to do one is waited for, with a canary not for long."""
        patience, waits = None if self.engine.canary is None else REST_SECONDS, not self.engine.has_work
        try:
            while not self._stops:
                self._commands.get(block=waits, timeout=patience)()
                waits = False
        except Empty:
            return

    def request_of(self, job: Job) -> str | None:
        """The engine's name of a sequence of a job, None where all have ended. In the engine's thread."""
        return next((name for name, (own, _) in self._places.items() if own is job), None)

    def _enqueue(self, engine: Engine, job: Job, submits: Sequence[Submit]) -> None:
        names: list[str] = []
        try:
            for submit in submits:
                names.append(submit(engine))
        except BaseException:
            for name in names:
                engine.cancel(name)
            self._later(lambda: self._forget(len(submits)))
            raise
        self._places.update((name, (job, index)) for index, name in enumerate(names))

    def _end_all(self, reason: str, job: Job | None = None) -> None:
        names = [name for name, (own, _) in self._places.items() if job is None or own is job]
        events = [event for name in names if (event := self.engine.cancel(name)) is not None]
        self._send([replace(event, finish_reason=reason) for event in events])

    def _send(self, events: Sequence[TokenEvent]) -> None:
        delivered = []
        for event in events:
            delivered.append((*self._places[event.request_id], event))
            if event.finish_reason is not None:
                del self._places[event.request_id]
                self.ended[event.finish_reason] += 1
        if delivered:
            self._later(lambda: self._deliver(delivered))

    def _stop(self) -> None:
        self._end_all(SHUTDOWN)
        self._stops = True

    def _close(self) -> None:
        """Nothing is taken from now on, what waits is answered, and what runs ends with a reason."""
        with self._lock:
            self._is_open = False
        while not self._commands.empty():
            with suppress(Exception):  # it is answered, whatever the engine still says to it
                self._commands.get()()
        touched = _touched(self.failure)
        reasons = {name: KV_CORRUPTION if name in touched else SERVER_ERROR for name in self._places}
        self._send([TokenEvent(name, (), "", reason) for name, reason in reasons.items()])
        if self.failure is not None:
            self._later(self._on_failure)

    def _later(self, action: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)


def _answer(answer: Future[Answer], ask: Callable[[Engine], Answer], engine: Engine) -> None:
    try:
        answer.set_result(ask(engine))
    except BaseException as error:
        answer.set_exception(error)
        if isinstance(error, KVCanaryError) and not isinstance(error, ValueError):
            raise  # a finding or a broken rule: the engine stops; what is refused is a ValueError


def _touched(failure: BaseException | None) -> frozenset[str]:
    """The requests that the findings which stopped the engine name."""
    if not isinstance(failure, KVCorruptionError):
        return frozenset()
    return frozenset(name for finding in failure.findings for name in finding.readers)
