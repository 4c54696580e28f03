"""A paged engine without a model: random K and V through right index arrays, every legal rewrite declared.

It talks to the canary through public calls alone, and is fast enough to have 10^8 slots checked in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvcanary import CanaryConfig
from kvcanary.pools.slot_maps import slots_of_pages
from kvcanary_tools.bench.toy.forwards import Slots, ToyForwards, ToyRow, ToyShape


class ToyEngine(ToyForwards):
    """Each public method is one engine step, or a change of who owns what between two steps.

    `num_copies` counts the shared pages that were copied before a write.
    """

    def __init__(self, config: CanaryConfig, shape: ToyShape | None = None, seed: int = 0) -> None:
        super().__init__(config, shape or ToyShape(), seed)
        self.num_copies = 0

    # requests

    def admit(self, name: str, tokens: Sequence[int] | int) -> None:
        """A request with its prompt, or with one of so many random tokens; nothing is computed yet."""
        prompt = self._tokens(tokens) if isinstance(tokens, int) else list(tokens)
        self.rows[name] = ToyRow(prompt, len(prompt))
        self.canary.admit(name, prompt)

    def start(self, name: str, tokens: Sequence[int] | int, chunks: int = 1) -> None:
        """Admit a request and prefill it in so many chunks."""
        self.admit(name, tokens)
        length = self.rows[name].prefill_len
        for chunk in range(chunks):
            self.prefill({name: length * (chunk + 1) // chunks})

    def fork(self, source: str, name: str, num_tokens: int, copied: int) -> None:
        """A request that begins with tokens of another's, its first `copied` entries copied into pages of its own.

        An entry of the draft pool holds the token behind its position, so that one must be common too.
        """
        parent = self.rows[source]
        row = self.rows[name] = ToyRow(parent.tokens[:num_tokens], num_tokens)
        self.begin()
        self.canary.admit(name, row.tokens)
        self._reserve({name: copied})
        for pool in self.pools:
            self._move(pool, parent.slots[:copied], row.slots[:copied])
        self._commit(name, copied)

    def fork_by_reference(self, source: str, name: str) -> None:
        """A request that goes on where another is: both name its pages, and who writes the last one copies it."""
        parent = self.rows[source]
        row = self.rows[name] = ToyRow(list(parent.tokens), parent.prefill_len)
        self.canary.admit(name, row.tokens)
        pages = parent.pages[: -(-parent.committed // self.shape.page_size)]
        self.canary.on_fork(source, name, pages)
        self._begin_with(row, pages)
        row.committed = parent.committed

    def share(self, name: str) -> int:
        """A prefix cache keeps the full pages of a row; how many it did not have."""
        row = self.rows[name]
        fresh = self.pages.publish(row.tokens, row.pages[: row.committed // self.shape.page_size])
        if fresh:
            self.canary.on_share(name, fresh)
        return len(fresh)

    def acquire(self, name: str) -> int:
        """A row that is still empty begins with what the cache has of it; how many pages these are."""
        row = self.rows[name]
        pages = [] if row.pages else self.pages.match(row.tokens)
        if pages:
            self.canary.on_acquire(name, pages)
            self._begin_with(row, pages)
            row.committed = len(row.slots)
        return len(pages)

    def evict(self, pages: Sequence[int]) -> None:
        """The cache gives up pages that no row names."""
        self.canary.on_evict(pages)
        self.pages.evict(pages, self.num_steps)

    def finish(self, name: str) -> None:
        """The request ends, or is cancelled."""
        row = self.rows.pop(name)
        self.canary.release(name)
        self.canary.on_free(name, row.pages)
        self.pages.drop(row.pages, self.num_steps)

    def preempt(self, name: str) -> None:
        """All pages go back; the request will compute its rows again."""
        row = self.rows[name]
        self.canary.on_free(name, row.pages)
        self.pages.drop(row.pages, self.num_steps)
        known = row.prefill_len if row.committed < row.prefill_len else len(row.tokens) - 1
        self.rows[name] = ToyRow(row.tokens, known)

    # steps

    def begin(self) -> None:
        self.num_steps += 1
        self.canary.begin_step(self.num_steps)

    def prefill(self, ends: Mapping[str, int]) -> None:
        """One forward a pool that computes each of these rows up to this position."""
        self.begin()
        starts, target, draft, sampled = {}, {}, {}, {}
        self._reserve(ends)
        for name, end in ends.items():
            row = self.rows[name]
            is_new = end == row.prefill_len == len(row.tokens)
            sampled[name] = self._tokens(1) if is_new else []
            starts[name], target[name] = row.committed, row.tokens[row.committed : end]
            draft[name] = [*row.tokens[row.committed + 1 : end + 1], *sampled[name]]
        self._chain("prefill", "target", target, starts)
        self._chain("prefill", "draft", draft, starts)
        self.canary.collect(self.canary.end_step())
        for name, end in ends.items():
            self._emit(name, sampled[name])
            self._commit(name, end)

    def decode(self, *names: str) -> None:
        """One token for each of these requests, or of all that are ready."""
        rows = self._ready(names)
        self.begin()
        self._reserve({name: row.committed + 1 for name, row in rows.items()})
        starts = {name: row.committed for name, row in rows.items()}
        self._chain("decode", "target", {name: row.tokens[row.committed :] for name, row in rows.items()}, starts)
        self.canary.collect(self.canary.end_step())
        fed = {name: self._tokens(1) for name in rows}
        for name, row in rows.items():
            self._emit(name, fed[name])
            self._commit(name, row.committed + 1)
        self._chain("extend", "draft", fed, starts)

    def draft(self, *names: str) -> None:
        """One drafting step: T - 1 draft forwards, verify, accept, compact, extend."""
        rows = self._ready(names)
        self.begin()
        self._reserve({name: row.committed + self.shape.window for name, row in rows.items()})
        branches = {name: [[] for _ in range(self.shape.topk)] for name in rows}
        for index in range(self.shape.num_steps - 1):
            self._draft_forward(index, branches)
        paths = self._verify(rows)
        self.canary.collect(self.canary.end_step())
        starts = {name: row.committed for name, row in rows.items()}
        fed = {name: self._accept(name, path) for name, path in paths.items()}
        self._chain("extend", "draft", fed, starts)

    # helpers

    def _accept(self, name: str, path: Sequence[tuple[int, int]]) -> list[int]:
        row, tokens = self.rows[name], [token for _, token in path]
        self._emit(name, tokens)
        self._move("target", np.array([slot for slot, _ in path]), row.slots[row.committed :][: len(path)])
        self._commit(name, row.committed + len(path))
        return tokens

    def _reserve(self, lengths: Mapping[str, int]) -> None:
        """Rows hold so much from now on."""
        for name in lengths:
            self._own_last_page(name)
        granted: dict[str, list[int]] = {}
        for name, length in lengths.items():
            row = self.rows[name]
            count = -(-length // self.shape.page_size) - len(row.pages)
            if count > 0:
                granted[name] = pages = self.pages.take(count, self.num_steps)
                row.pages += pages
                row.slots = np.concatenate([row.slots, self._slots_of(pages)])
        if len(granted) > 1:
            self.canary.on_alloc_all(list(granted), list(granted.values()))
        for name in granted if len(granted) == 1 else ():
            self.canary.on_alloc(name, granted[name])

    def _own_last_page(self, name: str) -> None:
        """Copy on write: the page into which the next entry goes may be another row's too."""
        row, size = self.rows[name], self.shape.page_size
        place = row.committed // size
        if place >= len(row.pages) or self.pages.holders[row.pages[place]] == 1:
            return
        shared, (copy,) = row.pages[place], self.pages.take(1, self.num_steps)
        entries = slice(place * size, row.committed)
        source = row.slots[entries].copy()
        row.pages[place], row.slots[place * size : (place + 1) * size] = copy, self._slots_of([copy])
        self.canary.on_copy(name, shared, copy)
        for pool in self.pools:
            self._move(pool, source, row.slots[entries])
        self.pages.drop([shared], self.num_steps)
        self.num_copies += 1

    def _begin_with(self, row: ToyRow, pages: Sequence[int]) -> None:
        row.pages, row.slots = list(pages), self._slots_of(pages)
        self.pages.hold(pages)

    def _slots_of(self, pages: Sequence[int]) -> Slots:
        return slots_of_pages(pages, self.shape.page_size)

    def _move(self, pool: str, src: Slots, dst: Slots) -> None:
        source, destination = torch.from_numpy(src), torch.from_numpy(dst)
        kv = self.pools[pool].kv
        kv[:, destination] = kv[:, source]
        self.canary.on_move(pool, source, destination)

    def _emit(self, name: str, tokens: Sequence[int]) -> None:
        self.rows[name].tokens += tokens
        self.canary.append(name, tokens)

    def _commit(self, name: str, length: int) -> None:
        self.rows[name].committed = length
        self.canary.commit(name, length)

    def _ready(self, names: Sequence[str]) -> dict[str, ToyRow]:
        return {name: self.rows[name] for name in names or self.rows if self.rows[name].is_ready}
