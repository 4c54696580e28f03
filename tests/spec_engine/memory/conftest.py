"""A small rig: two pools, an allocator and a canary, and forwards that store random values and read whole rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, ReadPlan, WritePlan
from kvcanary.pools.slot_maps import first_visible
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.window_pool import WindowPool, WindowRow
from spec_engine.step.streams import Streams

PAGE_SIZE, NUM_PAGES, WINDOW_PAGES = 4, 24, 9


@dataclass
class Row:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    committed: int = 0


class Rig:
    """Requests of known tokens; the draft pool is one token ahead, as an EAGLE draft is."""

    def __init__(self, seed: int = 0, window: int = 0, **config: object) -> None:
        """``window``: a third pool whose layers see so many tokens; 0: none."""
        self.generator = torch.Generator().manual_seed(seed)
        shape = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "kv_heads": 2, "head_dim": 4}
        shape |= {"dtype": torch.float32, "device": torch.device("cpu")}
        self.pools = [
            KVPool("target", num_layers=3, token_offset=0, **shape),
            KVPool("draft", num_layers=1, token_offset=1, **shape),
        ]
        self.allocator = PageAllocator(NUM_PAGES)
        views = [pool.view() for pool in self.pools]
        if window:
            windows = PageAllocator(WINDOW_PAGES)
            device = shape["device"]
            self.allocator = WindowPool(self.allocator, windows, window=window, page_size=PAGE_SIZE, device=device)
            self.pools.append(KVPool("window", num_layers=2, token_offset=0, **shape | {"num_pages": WINDOW_PAGES}))
            views.append(self.allocator.view(self.pools[-1]))
        settings = {"mode": "log", "seed": 7, "poison": "off", **config}
        self.canary = CanaryManager(CanaryConfig(**settings), views)
        self.canary.arm()
        self.streams = Streams(torch.device("cpu"), self.canary.async_tracker)
        self.rows: dict[str, Row] = {}
        self.step = 0

    def start(self, name: str, length: int) -> Row:
        """A request with ``length`` entries in both pools, and one token more that is known."""
        tokens = torch.randint(1, 1000, (length + 1,), generator=self.generator).tolist()
        row = self.rows[name] = Row(tokens)
        self.canary.admit(name, tokens)
        self.grow(name, length)
        self.forward(name, "prefill", 0, length)
        self.commit(name, length)
        return row

    def decode(self, name: str) -> None:
        """One more token, for which both pools are read whole."""
        self.read(name, self.rows[name].committed)
        self.commit(name, self.rows[name].committed + 1)

    def read(self, name: str, length: int) -> None:
        """A forward that reads ``length`` entries and writes one more."""
        row = self.rows[name]
        row.tokens += torch.randint(1, 1000, (1,), generator=self.generator).tolist()
        self.canary.append(name, row.tokens[-1:])
        self.grow(name, length + 1)
        self.forward(name, "decode", length, 1)

    def grow(self, name: str, length: int) -> None:
        row = self.rows[name]
        pages = self.allocator.allocate(max(0, -(-length // PAGE_SIZE) - len(row.pages)))
        row.pages += pages
        if pages:
            self.canary.on_alloc(name, pages)

    def forward(self, name: str, kind: str, start: int, count: int, *pools: str) -> None:
        """All pools, or those that are named: read ``start`` entries of the row and write ``count`` more."""
        self.step += 1
        self.canary.begin_step(self.step)
        row = self.rows[name]
        slots = torch.tensor([page * PAGE_SIZE + o for page in row.pages for o in range(PAGE_SIZE)])[: start + count]
        self.streams.main.use(kind, row.pages)
        for pool in [pool for pool in self.pools if not pools or pool.name in pools]:
            tokens = torch.tensor(row.tokens)[start + pool.token_offset :][:count]
            substep = self.canary.forward(kind, 0, pool.name)
            first, own = 0, slots[start:]
            if pool.name == "window":
                first, own = first_visible(start, self.allocator.window), self.allocator.translate(own)
            bounds, firsts = torch.tensor([0, start + count - first]), torch.tensor([first])
            read = ReadPlan(bounds, slots[first:], (name,), 1, torch.tensor([start]), count, starts=firsts)
            substep.open(read, WritePlan(slots[start:], tokens, torch.arange(start, start + count)))
            for layer in range(len(pool.kv)):
                k, v = torch.randn(2, count, 2, 4, generator=self.generator)
                substep.store(layer, k, v)
                pool.store(layer, own, k, v)
            substep.close()
        self.canary.collect(self.canary.end_step())
        self.streams.host.wait(self.streams.main.mark())  # its tokens reach the host

    def commit(self, name: str, length: int) -> None:
        self.rows[name].committed = length
        self.canary.commit(name, length)

    def slide(self, name: str) -> None:
        """Window pages that nobody sees any more are given back."""
        row = self.rows[name]
        self.allocator.slide(WindowRow(name, row.pages, row.committed))

    def free(self, name: str) -> None:
        """All pages of a request are given back; it may go on later."""
        row = self.rows[name]
        self.canary.on_free(name, row.pages)
        self.allocator.free(row.pages)
        row.pages, row.committed = [], 0

    def codes(self) -> list[str]:
        """What the canary has found by now."""
        self.canary.drain()
        return [finding.code for finding in self.canary.findings]


@pytest.fixture
def make_rig() -> type[Rig]:
    return Rig
