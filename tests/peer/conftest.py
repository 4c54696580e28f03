"""Toy engines: one with drafts, and one of a hybrid model: a full pool, and a window pool behind a slot map."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan
from kvcanary.pools.slot_maps import window_start
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyShape

PAGE_SIZE, WINDOW, FULL_PAGES, OWN_PAGES, VOCABULARY = 4, 6, 48, 24, 1000


class SlidingEngine:
    """Every forward writes both pools; pages that lie before a row's window are given back in the sliding pool alone.

    tight: rows of the sliding pool begin where their window does; else at position 0, and the kernel masks the rest
    tells: of the pages that the sliding pool takes and gives back
    `change_read` and `change_write` see every plan of the sliding pool.
    """

    def __init__(self, tight: bool = True, tells: bool = False, **config: object) -> None:
        self.tight, self.tells, self.random = tight, tells, random.Random(5)
        pages = {"target": FULL_PAGES, "sliding": OWN_PAGES}
        self.kv = {name: torch.zeros(2, count * PAGE_SIZE, 2, 1, 4) for name, count in pages.items()}
        self.slot_map = torch.zeros(FULL_PAGES * PAGE_SIZE, dtype=torch.int64)
        group = {"group": "sliding", "slot_map": self.slot_map, "window": WINDOW}
        views = [
            PoolView(name, *self._layers(name), PAGE_SIZE, **(group if name == "sliding" else {})) for name in pages
        ]
        self.canary = CanaryManager(CanaryConfig(**{"mode": "raise", "seed": 7, "content": "full", **config}), views)
        self.canary.arm()
        self.free = {name: list(range(1, count)) for name, count in pages.items()}
        self.tokens: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}
        self.committed: dict[str, int] = {}
        self.step_number = 0
        self.change_read: Callable[[ReadPlan], ReadPlan] = lambda plan: plan
        self.change_write: Callable[[WritePlan], WritePlan] = lambda plan: plan

    def start(self, name: str, prompt: int | Sequence[int], chunk: int = 7) -> None:
        self.tokens[name] = self._draw(prompt) if isinstance(prompt, int) else list(prompt)
        self.pages[name], self.committed[name], length = [], 0, len(self.tokens[name])
        self.canary.admit(name, self.tokens[name])
        while self.committed[name] < length:
            self.begin()
            end = min(self.committed[name] + chunk, length)
            self._chain("prefill", {name: self.tokens[name][self.committed[name] : end]})
            self.canary.collect(self.canary.end_step())
            if end == length:
                self._emit(name, self._draw(1))
            self._commit(name, end)

    def decode(self, *names: str) -> None:
        """One token for each of these requests, or of all."""
        names = names or tuple(self.tokens)
        self.begin()
        self._chain("decode", {name: self.tokens[name][self.committed[name] :] for name in names})
        self.canary.collect(self.canary.end_step())
        for name in names:
            self._emit(name, self._draw(1))
            self._commit(name, self.committed[name] + 1)

    def draft(self, name: str, depth: int = 3) -> None:
        """One branch of `depth` draft forwards in both pools, then a tree of the root and two chains of two."""
        self.begin()
        start = self.committed[name]
        self._reserve(name, start + 5)
        for index in range(depth):
            self._forward("draft", index, {name: ([start + index], self._draw(1), None)}, prefixes={name: start})
        parents = [-1, 0, 1, 0, 3]
        positions = [start + place for place in (0, 1, 2, 1, 2)]
        fed = [self.tokens[name][start], *self._draw(4)]
        self._forward("verify", 0, {name: (positions, fed, parents)})
        self.canary.collect(self.canary.end_step())
        for pool in self.kv:
            self._move(pool, name, [start + 3, start + 4], [start + 1, start + 2])
        self._emit(name, [fed[3], fed[4], *self._draw(1)])
        self._commit(name, start + 3)

    def finish(self, name: str) -> None:
        self.canary.release(name)
        self._evict(self.pages[name])
        self.canary.on_free(name, self.pages[name])
        self.free["target"] += self.pages.pop(name)
        del self.tokens[name], self.committed[name]

    def begin(self) -> None:
        self.step_number += 1
        self.canary.begin_step(self.step_number)

    def slot(self, name: str, position: int) -> int:
        """Of the full group."""
        return self.pages[name][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    # helpers

    def _chain(self, kind: str, fed: dict[str, list[int]]) -> None:
        for name, own in fed.items():
            self._reserve(name, self.committed[name] + len(own))
        starts = self.committed
        self._forward(kind, 0, {n: ([starts[n] + i for i in range(len(own))], own, None) for n, own in fed.items()})

    def _forward(
        self,
        kind: str,
        index: int,
        entries: dict[str, tuple[list[int], list[int], list[int] | None]],
        prefixes: dict[str, int] | None = None,
    ) -> None:
        """By request positions, tokens and parents; the entry of node i lies i slots behind the first."""
        prefixes = prefixes or {name: self.committed[name] for name in entries}
        for pool, kv in self.kv.items():
            view = self.canary.session.state.by_name[pool].view
            reads, starts, slots, tokens, positions, parents = [], [], [], [], [], []
            for name, (places, fed, own) in entries.items():
                start = window_start(view, places[0]) if self.tight else 0
                starts.append(start)
                reads.append(self._slots(name, range(start, places[0] + len(places))))
                slots += reads[-1][len(reads[-1]) - len(places) :]
                tokens += fed
                positions += places
                parents += own or []
            bounds = [sum(map(len, reads[:row])) for row in range(len(reads) + 1)]
            written = ints([len(places) for places, *_ in entries.values()])
            flat = ints([slot for row in reads for slot in row])
            read = ReadPlan(
                ints(bounds), flat, tuple(entries), 1, ints(list(prefixes.values())), written, starts=ints(starts)
            )
            write = WritePlan(ints(slots), ints(tokens), ints(positions), ints(parents) if parents else None)
            if pool == "sliding":
                read, write = self.change_read(read), self.change_write(write)
            substep = self.canary.forward(kind, index, pool)
            _, safe = substep.open(read, write)
            where = self.slot_map[safe] if pool == "sliding" else safe
            for layer in range(len(kv)):
                k, v = torch.randn(2, len(slots), 1, 4)
                substep.store(layer, k, v)
                kv[layer, where, 0], kv[layer, where, 1] = k, v
            substep.close()

    def _move(self, pool: str, name: str, source: Sequence[int], destination: Sequence[int]) -> None:
        src, dst = ints(self._slots(name, source)), ints(self._slots(name, destination))
        lies = self.slot_map if pool == "sliding" else torch.arange(FULL_PAGES * PAGE_SIZE)
        self.kv[pool][:, lies[dst]] = self.kv[pool][:, lies[src]]
        self.canary.on_move(pool, src, dst)

    def _commit(self, name: str, length: int) -> None:
        self.committed[name] = length
        self.canary.commit(name, length)
        view = self.canary.session.state.by_name["sliding"].view
        gone = window_start(view, length) // PAGE_SIZE
        self._evict(self.pages[name][:gone])

    def _evict(self, pages: Sequence[int]) -> None:
        """Whole pages leave the sliding pool; their entries in the map are null."""
        own = {page: int(self.slot_map[page * PAGE_SIZE]) // PAGE_SIZE for page in pages}
        own = {page: place for page, place in own.items() if place}
        if own and self.tells:
            self.canary.on_unmap("sliding", list(own), list(own.values()))
        for page in own:
            self.slot_map[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = 0
        self.free["sliding"] += sorted(own.values())

    def _reserve(self, name: str, length: int) -> None:
        while len(self.pages[name]) * PAGE_SIZE < length:
            page, own = (free.pop(self.random.randrange(len(free))) for free in self.free.values())
            self.pages[name].append(page)
            offsets = torch.arange(PAGE_SIZE)
            self.slot_map[page * PAGE_SIZE + offsets] = own * PAGE_SIZE + offsets
            if self.tells:
                self.canary.on_map("sliding", [page], [own])
            self.canary.on_alloc(name, [page])

    def _emit(self, name: str, tokens: list[int]) -> None:
        self.tokens[name] += tokens
        self.canary.append(name, tokens)

    def _slots(self, name: str, positions: Sequence[int]) -> list[int]:
        return [self.slot(name, position) for position in positions]

    def _draw(self, count: int) -> list[int]:
        return [self.random.randrange(1, VOCABULARY) for _ in range(count)]

    def _layers(self, pool: str) -> tuple[list[Tensor], list[Tensor]]:
        kv = self.kv[pool]
        return [layer[:, 0] for layer in kv], [layer[:, 1] for layer in kv]


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


@pytest.fixture
def make_sliding() -> Iterator[Callable[..., SlidingEngine]]:
    """SlidingEngine by keyword settings; those of CanaryConfig pass through."""
    with torch.inference_mode():
        yield SlidingEngine


@pytest.fixture
def make_engine() -> Iterator[Callable[..., ToyEngine]]:
    """A toy engine by keyword settings; those of ToyShape go there, the others to CanaryConfig."""

    def make(**settings: object) -> ToyEngine:
        shape = {name: settings.pop(name) for name in list(settings) if name in ToyShape.__dataclass_fields__}
        return ToyEngine(CanaryConfig(**{"content": "full", "seed": 7, **settings}), ToyShape(**shape))

    with torch.inference_mode():
        yield make


@pytest.fixture
def engine(make_engine) -> ToyEngine:
    """Two requests, one drafting step behind their prompts."""
    engine = make_engine()
    engine.start("first", 13)
    engine.start("second", 9)
    engine.draft()
    engine.canary.drain()
    return engine
