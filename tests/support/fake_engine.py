"""A small engine without a model: it drives the canary through every call of an EAGLE drafting step."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fake_pool import make_fake_pool
from kvcanary import CanaryConfig, CanaryManager, ReadPlan, WritePlan

VOCABULARY = 1000


@dataclass
class Row:
    """One request: its tokens, its committed length, its pages and the branches of the running step."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    branches: list[list[int]] = field(default_factory=list)  # by branch, slots of its ancestors


class FakeEngine:
    """Paged tree drafting with random values: T selections, T - 1 draft forwards, verify, accept, move, extend.

    `layout`: "stacked", or one of LAYOUTS, of both pools.
    `change_read`, `change_write` and `change_store` see every plan and every store and may return another one;
    `before_check` runs when the step's forwards are done.
    """

    def __init__(
        self,
        *,
        page_size: int = 4,
        topk: int = 2,
        num_steps: int = 3,
        num_nodes: int = 6,
        layers: int = 3,
        heads: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        num_pages: int = 128,
        seed: int = 0,
        draft_layers: int = 1,
        vocab_size: int | None = None,
        layout: str = "stacked",
        **config: object,
    ) -> None:
        self.page_size, self.topk, self.num_steps, self.num_nodes = page_size, topk, num_steps, num_nodes
        self.random = random.Random(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.num_slots = num_pages * page_size
        shape = {"num_pages": num_pages, "page_size": page_size, "heads": heads, "dim": head_dim, "dtype": dtype}
        shape["vocab_size"] = vocab_size
        self.pools = {
            "target": make_fake_pool(layout, name="target", layers=layers, **shape),
            "draft": make_fake_pool(layout, name="draft", layers=draft_layers, token_offset=1, **shape),
        }
        settings = {"mode": "raise", "seed": 7, **config}
        self.canary = CanaryManager(CanaryConfig(**settings), [pool.view for pool in self.pools.values()])
        self.canary.arm()
        self.free_pages = list(range(1, num_pages))
        self.rows: dict[str, Row] = {}
        self.step_number = 0
        self.tokens_emitted = 0
        self.change_read: Callable[[str, int, str, ReadPlan], ReadPlan] = lambda kind, index, pool, plan: plan
        self.change_write: Callable[[str, int, str, WritePlan], WritePlan] = lambda kind, index, pool, plan: plan
        self.change_store: Callable[..., tuple[Tensor, ...] | None] = lambda *a: a[4:]  # slots and values
        self.before_check: Callable[[], None] = lambda: None

    # lifecycle

    def start(self, name: str, prompt_len: int, chunks: int = 1) -> None:
        """Admit a request and prefill it, in chunks."""
        row = self.rows[name] = Row([self._token() for _ in range(prompt_len)])
        self.canary.admit(name, row.tokens)
        bounds = [prompt_len * chunk // chunks for chunk in range(chunks + 1)]
        for start, end in itertools.pairwise(bounds):
            self._begin()
            self._reserve(name, end)
            following = row.tokens[start + 1 : end + 1]
            first = self._token()
            if end == prompt_len:
                following = [*following, first]
            self._chain("prefill", "target", {name: row.tokens[start:end]}, {name: start})
            self._chain("prefill", "draft", {name: following}, {name: start})
            self.before_check()
            self.canary.collect(self.canary.end_step())
            if end == prompt_len:
                self._emit(name, [first])
            row.committed = end
            self.canary.commit(name, end)

    def step(self, *names: str) -> None:
        """One drafting step of these requests, or of all."""
        rows = {name: self.rows[name] for name in names or self.rows}
        self._begin()
        for name, row in rows.items():
            self._reserve(name, row.committed + max(self.topk * self.num_steps, self.num_nodes))
            row.branches = [[] for _ in range(self.topk)]
        for index in range(self.num_steps - 1):
            self._draft(index, rows)
        accepted = self._verify(rows)
        self.before_check()
        self.canary.collect(self.canary.end_step())
        fed = {name: self._accept(name, path) for name, path in accepted.items()}
        starts = {name: row.committed - len(fed[name]) for name, row in rows.items()}
        self._chain("extend", "draft", self._padded(fed, rows), starts)

    def decode(self, *names: str) -> None:
        """One step without drafting: a target forward of one token a request."""
        rows = {name: self.rows[name] for name in names or self.rows}
        self._begin()
        for name, row in rows.items():
            self._reserve(name, row.committed + 1)
        starts = {name: row.committed for name, row in rows.items()}
        self._chain("decode", "target", {name: [row.tokens[row.committed]] for name, row in rows.items()}, starts)
        self.before_check()
        self.canary.collect(self.canary.end_step())
        fed = {name: [self._token()] for name in rows}
        for name, row in rows.items():
            self._emit(name, fed[name])
            row.committed += 1
            self.canary.commit(name, row.committed)
        self._chain("extend", "draft", fed, starts)

    def finish(self, name: str) -> None:
        row = self.rows.pop(name)
        self.canary.release(name)
        self.canary.on_free(name, row.pages)
        self.free_pages += row.pages

    def slot(self, name: str, position: int) -> int:
        return self.rows[name].pages[position // self.page_size] * self.page_size + position % self.page_size

    # the forwards

    def _draft(self, index: int, rows: dict[str, Row]) -> None:
        """Survivors may descend from other branches: ancestors are shuffled between these, and it says how."""
        reads, slots, tokens, positions, lineage = [], [], [], [], []
        for name, row in rows.items():
            if index:
                parents = [self.random.choice(range(self.topk)) for _ in row.branches]
                row.branches = [list(row.branches[parent]) for parent in parents]
                lineage += parents
            for branch, ancestors in enumerate(row.branches):
                slot = self.slot(name, row.committed + branch * self.num_steps + index)
                reads.append([*self._prefix(name), *ancestors, slot])
                slots.append(slot)
                tokens.append(self._token())
                positions.append(row.committed + index)
                ancestors.append(slot)
        read = self._read(reads, rows, self.topk, 1)
        write = WritePlan(_ints(slots), _ints(tokens), _ints(positions), lineage=_ints(lineage) if index else None)
        self._forward("draft", index, "draft", read, write)

    def _verify(self, rows: dict[str, Row]) -> dict[str, list[tuple[int, int]]]:
        """One tree a request; gives for each the path accepted, as (slot, token that follows) pairs."""
        reads, slots, tokens, positions, parents = [], [], [], [], []
        paths: dict[str, list[tuple[int, int]]] = {}
        for name, row in rows.items():
            first, depth, own = len(slots), [0], [-1]
            for node in range(1, self.num_nodes):
                own.append(self.random.choice([p for p in range(node) if depth[p] < self.num_steps]))
                depth.append(depth[own[-1]] + 1)
            window = [self.slot(name, row.committed + node) for node in range(self.num_nodes)]
            fed = [row.tokens[row.committed], *(self._token() for _ in range(self.num_nodes - 1))]
            reads.append([*self._prefix(name), *window])
            slots += window
            tokens += fed
            positions += [row.committed + d for d in depth]
            parents += [p if p < 0 else first + p for p in own]
            path, node = [], self.random.randrange(self.num_nodes)
            while node >= 0:
                path.insert(0, node)
                node = own[node]
            following = [*(fed[n] for n in path[1:]), self._token()]
            paths[name] = [(window[n], token) for n, token in zip(path, following, strict=True)]
        read = self._read(reads, rows, 1, self.num_nodes)
        write = WritePlan(_ints(slots), _ints(tokens), _ints(positions), _ints(parents))
        self._forward("verify", 0, "target", read, write)
        return paths

    def _accept(self, name: str, path: list[tuple[int, int]]) -> list[int]:
        row = self.rows[name]
        tokens = [token for _, token in path]
        self._emit(name, tokens)
        src = _ints([slot for slot, _ in path])
        dst = _ints([self.slot(name, row.committed + place) for place in range(len(path))])
        self.pools["target"].move(src, dst)
        self.canary.on_move("target", src, dst)
        row.committed += len(path)
        self.canary.commit(name, row.committed)
        return tokens

    def _padded(self, fed: dict[str, list[int]], rows: dict[str, Row]) -> dict[str, list[int]]:
        """Extend forwards are as wide as the tree; entries beyond the accepted length are junk."""
        return {name: [*tokens, *(0 for _ in range(self.num_nodes - len(tokens)))] for name, tokens in fed.items()}

    def _chain(self, kind: str, pool: str, fed: dict[str, list[int]], starts: dict[str, int]) -> None:
        reads, slots, tokens, positions, written = [], [], [], [], []
        for name, own in fed.items():
            start = starts[name]
            end = start + len(own)
            reads.append([self.slot(name, position) for position in range(end)])
            slots += reads[-1][start:]
            tokens += own
            positions += range(start, end)
            written.append(len(own))
        read = self._read(reads, fed, 1, _ints(written), prefixes=[starts[name] for name in fed])
        self._forward(kind, 0, pool, read, WritePlan(_ints(slots), _ints(tokens), _ints(positions)))

    def _forward(self, kind: str, index: int, pool: str, read: ReadPlan, write: WritePlan) -> None:
        read, write = self.change_read(kind, index, pool, read), self.change_write(kind, index, pool, write)
        substep = self.canary.forward(kind, index, pool)
        _, slots = substep.open(read, write)
        view = self.pools[pool].view
        for layer in range(view.num_layers):
            values = [self._values((len(slots), *part.shape)).to(part.dtype) for part in view.parts]
            changed = self.change_store(kind, index, pool, layer, slots, *values)
            if changed is None:
                continue
            where, *stored = changed
            k, *others = values
            is_right = where is slots and all(map(operator.is_, stored, values))
            if layer % 2 == 0 and is_right and len(values) == 2 and substep.put(layer, slots, *values):
                continue
            substep.store(layer, k, *(others if view.v else [None, *others]))
            self.pools[pool].put(layer, where, stored)
        substep.close()

    # helpers

    def _read(
        self,
        reads: list[list[int]],
        names: object,
        width: int,
        written: int | Tensor,
        prefixes: list[int] | None = None,
    ) -> ReadPlan:
        bounds = [0]
        for entries in reads:
            bounds.append(bounds[-1] + len(entries))
        names = tuple(names)
        prefixes = [self.rows[name].committed for name in names] if prefixes is None else prefixes
        flat = [slot for entries in reads for slot in entries]
        return ReadPlan(_ints(bounds), _ints(flat), names, width, _ints(prefixes), written)

    def _prefix(self, name: str) -> list[int]:
        return [self.slot(name, position) for position in range(self.rows[name].committed)]

    def _reserve(self, name: str, length: int) -> None:
        row = self.rows[name]
        count = -(-length // self.page_size) - len(row.pages)
        if count > 0:
            pages = [self.free_pages.pop(self.random.randrange(len(self.free_pages))) for _ in range(count)]
            row.pages += pages
            self.canary.on_alloc(name, pages)

    def _emit(self, name: str, tokens: list[int]) -> None:
        self.rows[name].tokens += tokens
        self.canary.append(name, tokens)
        self.tokens_emitted += len(tokens)

    def _begin(self) -> None:
        self.step_number += 1
        self.canary.begin_step(self.step_number)

    def _token(self) -> int:
        return self.random.randrange(1, VOCABULARY)

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.torch_random, dtype=torch.float32)


def _ints(values: list[int] | range) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
