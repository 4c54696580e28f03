"""Published names: what a worker gives to a store from a thread of its own, and asks it where something was loaded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import structlog

from kvcanary.names.store import Named, NameStore

_events = structlog.get_logger("kvcanary")
MOST_WAITING = 16  # steps whose names are on their way
#: Gives (chain, fingerprint) of blocks, when they have arrived on the host.
Take = Callable[[], Sequence[tuple[int, int]]]


class Published:
    """Names of one worker in a store that others use too.

    A store that fails ends nothing: names are lost and counted, and one event says so until it answers again.
    """

    def __init__(self, open_own: Callable[[], NameStore], by: str) -> None:
        """open_own: opens the store, for each thread once; by: who writes, as a finding tells others"""
        self.by, self._open_own, self._here = by, open_own, open_own()
        self.label = self._here.label
        self.put, self.lost = 0, 0  # names that were stored, and those that were not
        self.unanswered = 0  # questions
        self._fails = False
        self._waiting: queue.Queue[tuple[str, Take] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="kvcanary names", daemon=True)
        self._thread.start()

    def give(self, space: str, take: Take) -> bool:
        """Store these soon; False: too many wait."""
        try:
            self._waiting.put_nowait((space, take))
        except queue.Full:
            self.lose()
            return False
        return True

    def lose(self) -> None:
        """Names of a step have no room on their way."""
        self.lost += 1
        self._failed("put", TimeoutError("names of earlier steps are on their way still"))

    @property
    def told(self) -> dict[str, str | int]:
        """For the certificate: names that were stored; steps or names that were lost; questions without an answer."""
        return {"store": self.label, "put": self.put, "lost": self.lost, "unanswered": self.unanswered}

    def get(self, space: str, chains: Sequence[int]) -> dict[int, Named]:
        """Of each chain that is known; nothing where the store does not answer."""
        try:
            return self._here.get(space, chains) if chains else {}
        except Exception as error:
            self.unanswered += 1
            self._failed("get", error)
            return {}

    def chain_of(self, space: str, fingerprint: int) -> int | None:
        """A chain under which such bytes were written, where that is known."""
        try:
            return self._here.chain_of(space, fingerprint)
        except Exception as error:
            self._failed("get", error)
            return None

    def expect_space(self, space: str) -> None:
        """Warn where the store has names of others only, since none of them will be compared."""
        try:
            others = self._here.spaces()
        except Exception as error:
            self._failed("get", error)
            return
        if others and space not in others:
            _events.warning(
                "kvcanary.names_of_others", store=self.label, own=space, others=others[:4],
                hint="only names of the same seed, model, layout and block size are compared",
            )  # fmt: skip

    def settle(self) -> None:
        """Wait until all that was given is stored."""
        self._waiting.join()

    def close(self) -> None:
        """Store what waits, and end."""
        self._waiting.put(None)
        self._thread.join(timeout=10)
        self._here.close()

    def _run(self) -> None:
        store: NameStore | None = None
        while (told := self._waiting.get()) is not None:
            names: Sequence[tuple[int, int]] = ()
            try:
                space, take = told
                names = take()
                store = store or self._open_own()
                if names:
                    store.put(space, self.by, names)
                self.put, self._fails = self.put + len(names), False
            except Exception as error:
                self.lost += max(1, len(names))
                self._failed("put", error)
            finally:
                self._waiting.task_done()
        self._waiting.task_done()
        if store is not None:
            store.close()

    def _failed(self, what: str, error: Exception) -> None:
        if not self._fails:
            _events.warning(
                "kvcanary.names_failed", store=self.label, what=what, error=f"{type(error).__name__}: {error}"
            )
        self._fails = True
