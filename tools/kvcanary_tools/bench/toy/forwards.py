"""The forwards of the toy engine: plans of right rows and random K and V, past the canary into the pools."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan
from kvcanary_tools.bench.toy.pages import ToyPages

VOCABULARY = 1000
SMALL = 0.05
Slots = np.ndarray  # int64


@dataclass(frozen=True)
class ToyShape:
    """Pools and draft trees: `topk` branches of `num_steps` selections, `num_nodes` nodes a verified tree."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 4
    dtype: torch.dtype = torch.float32
    page_size: int = 4
    num_pages: int = 128
    topk: int = 2
    num_steps: int = 3
    num_nodes: int = 6

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def window(self) -> int:
        """Slots that one drafting step may touch behind the committed ones."""
        return max(self.topk * self.num_steps, self.num_nodes)


@dataclass
class ToyRow:
    """One request.

    slots:       by position the slot, of all pages of the row
    prefill_len: positions that prefill computes; one token is sampled behind them unless it is known
    """

    tokens: list[int]
    prefill_len: int
    pages: list[int] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    committed: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether its prompt is computed."""
        return self.committed >= self.prefill_len


@dataclass
class ToyPool:
    """kv: [layers, num_slots, 2, heads, head_dim]"""

    view: PoolView
    kv: Tensor


class ToyForwards:
    """Pools, rows and what reads and writes them.

    `change_read`, `change_write` and `change_store` see every plan and every store on its way and may return another
    one: this is where a test puts a fault. `change_store` gives (slots, k, v), or None for a store that is lost.
    `distinct` counts the different (slot, grant) that target forwards have read.
    """

    def __init__(self, config: CanaryConfig, shape: ToyShape, seed: int) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.pools = {"target": self._pool("target", self.shape.layers, 0), "draft": self._pool("draft", 1, 1)}
        self.canary = CanaryManager(config, [pool.view for pool in self.pools.values()], holds_back=True)
        self.canary.arm()
        self.pages = ToyPages(self.shape.num_pages, self.shape.page_size, config.quarantine, self.random)
        self.rows: dict[str, ToyRow] = {}
        self.num_steps = 0
        self.distinct = 0
        self._read_under = np.zeros(self.shape.num_slots, dtype=np.int64)
        self.change_read: Callable[[str, int, str, ReadPlan], ReadPlan] = lambda kind, index, pool, plan: plan
        self.change_write: Callable[[str, int, str, WritePlan], WritePlan] = lambda kind, index, pool, plan: plan
        self.change_store: Callable[..., tuple[Tensor, Tensor, Tensor] | None] = lambda *store: store[-3:]

    def _draft_forward(self, index: int, branches: dict[str, list[list[int]]]) -> None:
        """Survivors may descend from other branches than their own."""
        reads, slots, positions = [], [], []
        for name, ancestors in branches.items():
            row = self.rows[name]
            if index:
                ancestors[:] = [list(self.random.choice(ancestors)) for _ in ancestors]
            for branch, path in enumerate(ancestors):
                path.append(int(row.slots[row.committed + branch * self.shape.num_steps + index]))
                reads += [row.slots[: row.committed], np.array(path)]
                slots.append(path[-1])
                positions.append(row.committed + index)
        lengths = [len(prefix) + len(path) for prefix, path in zip(reads[::2], reads[1::2], strict=True)]
        starts = {name: self.rows[name].committed for name in branches}
        read = self._read_plan(reads, lengths, starts, 1, width=self.shape.topk)
        write = WritePlan(_ints(slots), _ints(self._tokens(len(slots))), _ints(positions))
        self._forward("draft", index, "draft", read, write)

    def _verify(self, rows: Mapping[str, ToyRow]) -> dict[str, list[tuple[int, int]]]:
        """One tree a request; gives for each the path accepted, as (slot, token that follows) pairs."""
        reads, slots, tokens, positions, parents, masks, paths = [], [], [], [], [], [], {}
        for name, row in rows.items():
            own, depths = self._tree()
            masks.append(_tree_mask(own))
            window = row.slots[row.committed : row.committed + len(own)]
            fed = [row.tokens[row.committed], *self._tokens(len(own) - 1)]
            first = len(parents)
            reads.append(row.slots[: row.committed + len(own)])
            slots.append(window)
            tokens += fed
            positions += [row.committed + depth for depth in depths]
            parents += [-1 if parent < 0 else first + parent for parent in own]
            path, node = [], self.random.randrange(len(own))
            while node >= 0:
                path.insert(0, node)
                node = own[node]
            following = [*(fed[node] for node in path[1:]), *self._tokens(1)]
            paths[name] = [(int(window[node]), token) for node, token in zip(path, following, strict=True)]
        starts = {name: row.committed for name, row in rows.items()}
        read = self._read_plan(reads, [len(part) for part in reads], starts, self.shape.num_nodes)
        read = replace(read, tree_mask=torch.from_numpy(np.stack(masks)))
        write = WritePlan(torch.from_numpy(np.concatenate(slots)), _ints(tokens), _ints(positions), _ints(parents))
        self._forward("verify", 0, "target", read, write)
        return paths

    def _tree(self) -> tuple[list[int], list[int]]:
        """Parents and depths of the nodes of a random tree."""
        parents, depths = [-1], [0]
        for node in range(1, self.shape.num_nodes):
            parents.append(self.random.choice([p for p in range(node) if depths[p] < self.shape.num_steps]))
            depths.append(depths[parents[-1]] + 1)
        return parents, depths

    def _chain(self, kind: str, pool: str, fed: Mapping[str, Sequence[int]], starts: Mapping[str, int]) -> None:
        """Rows that each continue where they end."""
        ends = {name: starts[name] + len(own) for name, own in fed.items()}
        reads = [self.rows[name].slots[:end] for name, end in ends.items()]
        written = [self.rows[name].slots[starts[name] : end] for name, end in ends.items()]
        positions = [np.arange(starts[name], end) for name, end in ends.items()]
        read = self._read_plan(reads, list(ends.values()), starts, _ints([len(own) for own in fed.values()]))
        slots, places = (torch.from_numpy(np.concatenate(parts)) for parts in (written, positions))
        tokens = _ints([token for own in fed.values() for token in own])
        self._forward(kind, 0, pool, read, WritePlan(slots, tokens, places))

    def _forward(self, kind: str, index: int, pool: str, read: ReadPlan, write: WritePlan) -> None:
        read, write = self.change_read(kind, index, pool, read), self.change_write(kind, index, pool, write)
        if pool == "target":
            self._count_distinct(read.indices)
        substep = self.canary.forward(kind, index, pool)
        _, slots = substep.open(read, write)
        kv = self.pools[pool].kv
        values = torch.randn(2, *kv.shape[:1], len(slots), *kv.shape[3:], generator=self._generator)
        values *= values.abs() > SMALL  # zeros of both signs, as a model has them
        for layer, (k, v) in enumerate(zip(*values.to(kv.dtype), strict=True)):
            store = self.change_store(kind, index, pool, layer, slots, k, v)
            if store is not None:
                substep.store(layer, k, v)
                where, stored_k, stored_v = store
                kv[layer, where, 0], kv[layer, where, 1] = stored_k, stored_v
        substep.close()

    # helpers

    def _read_plan(
        self,
        reads: Sequence[Slots],
        lengths: Sequence[int],
        starts: Mapping[str, int],
        written: int | Tensor,
        width: int = 1,
    ) -> ReadPlan:
        indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
        indices = torch.from_numpy(np.concatenate(reads))
        return ReadPlan(indptr, indices, tuple(starts), width, _ints(list(starts.values())), written)

    def _count_distinct(self, indices: Tensor) -> None:
        slots = indices.numpy()
        slots = slots[(slots >= 0) & (slots < self.shape.num_slots)]
        fresh = np.unique(slots[self._read_under[slots] != self.pages.grants[slots // self.shape.page_size]])
        self._read_under[fresh] = self.pages.grants[fresh // self.shape.page_size]
        self.distinct += len(fresh)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1, VOCABULARY) for _ in range(count)]

    def _pool(self, name: str, layers: int, token_offset: int) -> ToyPool:
        shape = self.shape
        kv = torch.zeros(layers, shape.num_slots, 2, shape.heads, shape.head_dim, dtype=shape.dtype)
        k, v = (tuple(kv[layer, :, part] for layer in range(layers)) for part in (0, 1))
        return ToyPool(PoolView(name, k, v, shape.page_size, token_offset=token_offset), kv)


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _tree_mask(parents: Sequence[int]) -> np.ndarray:
    """[N, N] bool: each node sees itself and its ancestors."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
