"""Random right traffic through the toy engine: everything that may happen to a page happens, in any order."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from kvcanary_tools.bench.toy.engine import ToyEngine


@dataclass(frozen=True)
class Load:
    """How much runs: at most `max_rows` requests of up to `max_len` tokens, prompts of `prompt_lens`, prefilled in
    chunks of up to `max_chunk` tokens."""

    max_rows: int = 6
    prompt_lens: tuple[int, int] = (2, 24)
    max_len: int = 48
    max_chunk: int = 12


#: How often each action is drawn. An action that has nothing to act on falls through to one that has.
WEIGHTS = {
    "draft": 10,
    "decode": 3,
    "prefill": 6,
    "admit": 3,
    "admit_again": 2,
    "fork": 1,
    "fork_by_reference": 2,
    "share": 2,
    "acquire": 2,
    "evict": 1,
    "finish": 1,
    "cancel": 1,
    "preempt": 1,
}
SEEN = 32  # token lists that later prompts may begin with


class Traffic:
    """One random engine step after the other; `counts` says how many of each action there were.

    An action is a method `_<name>` that returns whether it could act. Rows that have ended are kept by the cache or
    not, and requests may begin with the tokens of others.
    """

    def __init__(self, engine: ToyEngine, load: Load | None = None, seed: int = 0) -> None:
        self.engine, self.load = engine, load or Load()
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._admitted = 0
        self._seen: deque[list[int]] = deque(maxlen=SEEN)

    def act(self) -> str:
        """One action; its name."""
        while True:
            (action,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self._make_room()
            if getattr(self, f"_{action}")():
                self.counts[action] += 1
                return action

    def run(self, actions: int) -> None:
        for _ in range(actions):
            self.act()

    def end(self) -> None:
        """Every request ends, and the cache gives up everything."""
        for name in list(self.engine.rows):
            self._finish_one(name)
        while unused := self.engine.pages.unused():
            self.engine.evict(unused)
        self.engine.canary.drain()

    # actions

    def _admit(self) -> bool:
        length = self.random.randint(*self.load.prompt_lens)
        if not self._has_room():
            return False
        self.engine.admit(self._new_name(), length)
        return True

    def _admit_again(self) -> bool:
        """A prompt that begins with tokens of an earlier request, or the same; the cache is asked at once or later."""
        if not self._seen or not self._has_room():
            return False
        tokens = self.random.choice(self._seen)
        most = min(len(tokens), self.load.max_len * 3 // 4)
        known = tokens[: most - self.random.choice((0, 1, self.random.randrange(most)))]
        name = self._new_name()
        self.engine.admit(name, known + self.random.choices(range(1, 100), k=self.random.randint(0, 2)))
        if self.random.random() < 0.5 and self.engine.acquire(name):
            self.counts["acquire"] += 1
        return True

    def _prefill(self) -> bool:
        rows = {name: row for name, row in self.engine.rows.items() if not row.is_ready}
        if not rows:
            return False
        names = self.random.sample(list(rows), self.random.randint(1, len(rows)))
        self.engine.prefill({name: self._chunk_end(name) for name in names})
        return True

    def _draft(self) -> bool:
        return self._step(self.engine.draft)

    def _decode(self) -> bool:
        return self._step(self.engine.decode)

    def _fork(self) -> bool:
        """A request that copies the beginning of another's row, and goes its own way."""
        sources = [name for name, row in self.engine.rows.items() if row.is_ready]
        if not sources or not self._has_room():
            return False
        source = self.random.choice(sources)
        num_tokens = self.random.randint(2, self.engine.rows[source].committed)
        self.engine.fork(source, self._new_name(), num_tokens, self.random.randrange(num_tokens))
        return True

    def _fork_by_reference(self) -> bool:
        """A request that goes on where another is, sharing its pages; samples of one prompt do so."""
        sources = [name for name, row in self.engine.rows.items() if row.is_ready]
        if not sources or not self._has_room():
            return False
        self.engine.fork_by_reference(self.random.choice(sources), self._new_name())
        return True

    def _share(self) -> bool:
        """A running row is published as far as it is final, also in the midst of its prefill."""
        names = [name for name, row in self.engine.rows.items() if row.committed]
        return bool(names) and self._share_one(self.random.choice(names)) > 0

    def _acquire(self) -> bool:
        """A waiting request, new or preempted, begins with what the cache has."""
        names = [name for name, row in self.engine.rows.items() if not row.pages]
        return any(self.engine.acquire(name) for name in self.random.sample(names, len(names)))

    def _evict(self) -> bool:
        unused = self.engine.pages.unused()
        if not unused:
            return False
        self.engine.evict(self.random.sample(unused, self.random.randint(1, -(-len(unused) // 2))))
        return True

    def _finish(self) -> bool:
        return self._end_one([name for name, row in self.engine.rows.items() if len(row.tokens) >= self.load.max_len])

    def _cancel(self) -> bool:
        """Whatever it was doing: waiting, half prefilled, or decoding."""
        return self._end_one(list(self.engine.rows))

    def _preempt(self) -> bool:
        names = [name for name, row in self.engine.rows.items() if row.pages]
        if not names:
            return False
        self.engine.preempt(self.random.choice(names))
        return True

    # helpers

    def _step(self, step) -> bool:
        """All that are ready, or some; those that are long enough end first."""
        for name, row in list(self.engine.rows.items()):
            if row.is_ready and len(row.tokens) >= self.load.max_len:
                self._finish_one(name)
                self.counts["finish"] += 1
        names = [name for name, row in self.engine.rows.items() if row.is_ready]
        if not names:
            return False
        step(*(names if self.random.random() < 0.8 else self.random.sample(names, self.random.randint(1, len(names)))))
        return True

    def _end_one(self, names: list[str]) -> bool:
        if not names:
            return False
        self._finish_one(self.random.choice(names))
        return True

    def _finish_one(self, name: str) -> None:
        """What has ended may stay in the cache."""
        if self.random.random() < 0.5:
            self._share_one(name)
        self.engine.finish(name)

    def _share_one(self, name: str) -> int:
        self._seen.append(list(self.engine.rows[name].tokens))
        return self.engine.share(name)

    def _chunk_end(self, name: str) -> int:
        row = self.engine.rows[name]
        return min(row.prefill_len, row.committed + self.random.randint(1, self.load.max_chunk))

    def _has_room(self) -> bool:
        return len(self.engine.rows) < self.load.max_rows

    def _make_room(self) -> None:
        """The cache keeps no more pages than rows of full length leave over."""
        shape = self.engine.shape
        most = self.load.max_rows * -(-(self.load.max_len + 2 * shape.window) // shape.page_size)
        while self.engine.pages.num_cached() > shape.num_pages - 1 - most and (unused := self.engine.pages.unused()):
            self.engine.evict(unused)

    def _new_name(self) -> str:
        self._admitted += 1
        return f"toy-{self._admitted}"
