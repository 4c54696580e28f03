"""Pages of a toy engine that have left it for host memory, and come back."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyRow

TOKENS = list(range(100, 110))


class Tier:
    """The full pages of a request that has ended: their bytes by pool, and the canary's snapshot."""

    def __init__(self, engine: ToyEngine, name: str = "away", tokens: Sequence[int] = TOKENS) -> None:
        self.engine, self.tokens = engine, list(tokens)
        engine.start(name, self.tokens)
        engine.draft()
        self.num_pages = len(tokens) // engine.shape.page_size
        self.length = self.num_pages * engine.shape.page_size
        row = engine.rows[name]
        self.pages, self.slots = row.pages[: self.num_pages], row.slots[: self.length].copy()
        self.snapshot = engine.canary.on_offload(self.pages)
        self.bytes = {name: pool.kv[:, self.slots].clone() for name, pool in engine.pools.items()}
        engine.finish(name)

    def bring_back(
        self, name: str = "back", tokens: Sequence[int] | None = None, pages: Sequence[int] | None = None
    ) -> ToyRow:
        """A request whose first pages are these; `pages`: into which they come, where that is not the engine's choice.

        The bytes of a pool that is left out of `bytes` do not come.
        """
        engine = self.engine
        engine.begin()
        engine.admit(name, list(self.tokens if tokens is None else tokens))
        row = engine.rows[name]
        row.pages = engine.pages.take(self.num_pages, engine.num_steps) if pages is None else list(pages)
        row.slots = engine._slots_of(row.pages)
        engine.canary.on_alloc(name, row.pages, for_load=True)
        for pool, kept in self.bytes.items():
            engine.pools[pool].kv[:, row.slots] = kept
        engine.canary.on_restore(name, row.pages, self.length, self.snapshot)
        return row

    def go_on(self, name: str = "back") -> None:
        self.engine.rows[name].committed = self.length
        self.engine.canary.commit(name, self.length)
        self.engine.prefill({name: len(self.tokens)})
        self.engine.draft()
