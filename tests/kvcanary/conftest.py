"""A small engine without a model: it drives the canary through every call of an EAGLE drafting step."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan
from kvcanary.bank import SubstepBank
from kvcanary.buffers import Batch, StaticBuffers
from kvcanary.harvest import Harvest
from kvcanary.lanes import lanes_of_slots
from kvcanary.parts import Part
from kvcanary.state import CanaryState, PoolState
from kvcanary.static import StaticSubstep
from kvcanary_kernels.record import CONTENT_B, FREE, LAYERS_LOW, NO_OWNER, RESERVED
from kvcanary_kernels.seal import seal_torch

VOCABULARY = 1000


@dataclass
class Row:
    """One request: its tokens, its committed length, its pages and the branches of the running step."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    branches: list[list[int]] = field(default_factory=list)  # by branch, slots of its ancestors


LAYOUTS = (
    "nhd",  # [slots, heads, dim], as all that follow each layer for itself
    "nhd_fused",  # [slots, 2, heads, dim]
    "nhd_paged",  # [pages, 2, page_size, heads, dim]
    "hnd",  # [pages, heads, page_size, dim]
    "hnd_fused",  # [pages, 2, heads, page_size, dim]
    "hnd_sides",  # [pages, heads, page_size, 2, dim]
    "wide_k",  # heads of K are longer than those of V
    "nhd_scales",  # K and V with a float32 scale a head each
    "hnd_scales",
    "latent",  # [slots, 1, dim], no V
    "latent_paged",  # [pages, page_size, 1, dim]
    "latent_index",  # latent with index keys
)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass
class FakePool:
    """A pool of any layout.

    kv:    [layers, slots, 2, heads, dim]: all bytes, where `layout` is "stacked"
    parts: by name and layer, the same memory as [pages, page_size, heads, dim] integers of the element's size
    """

    view: PoolView
    kv: Tensor | None = None
    parts: dict[str, list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {part.name: [self._in_order(t, part) for t in part.tensors] for part in self.view.parts}

    def bits(self, layer: int, slot: int, part: str, head: int = 0) -> Tensor:
        """The element bits of one head of one row, as a writable integer view."""
        return self.parts[part][layer][(*divmod(slot, self.view.page_size), head)]

    def put(self, layer: int, slots: Tensor, values: Sequence[Tensor]) -> None:
        """Write one layer's values [n, ...], by part."""
        for part, value in zip(self.parts.values(), values, strict=True):
            rows = part[layer]
            rows[self._places(slots)] = value.contiguous().view(rows.dtype).reshape(-1, *rows.shape[2:])

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy rows in all layers; every source is read before any destination is written."""
        for rows in itertools.chain(*self.parts.values()):
            rows[self._places(dst)] = rows[self._places(src)]

    def fill(self, generator: torch.Generator, most: int = 0xFF) -> None:
        """Random bytes everywhere, NaNs and infinities among them; none where bytes are at most 0x3F."""
        for rows in itertools.chain(*self.parts.values()):
            data = torch.randint(
                0, most + 1, (rows.numel() * rows.element_size(),), dtype=torch.uint8, generator=generator
            )
            rows.copy_(data.view(rows.dtype).view(rows.shape))

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // self.view.page_size, slots % self.view.page_size

    def _in_order(self, tensor: Tensor, part: Part) -> Tensor:
        if self.view.layout == "HND":
            tensor = tensor.transpose(1, 2)
        elif self.view.k[0].dim() == 3:
            tensor = tensor.unflatten(0, (-1, self.view.page_size))
        if len(part.shape) == 1:
            tensor = tensor.unsqueeze(-1)
        return tensor.view(BITS[tensor.element_size()])


def make_fake_pool(
    layout: str,
    *,
    name: str = "target",
    layers: int = 2,
    num_pages: int = 3,
    page_size: int = 4,
    heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    **view: object,
) -> FakePool:
    """A pool of zeros in one of LAYOUTS, or "stacked"."""
    slots = num_pages * page_size
    if layout == "stacked":
        kv = torch.zeros(layers, slots, 2, heads, dim, dtype=dtype)
        k, v = (tuple(kv[layer, :, part] for layer in range(layers)) for part in (0, 1))
        return FakePool(PoolView(name, k, v, page_size, **view), kv)
    shapes = num_pages, page_size, heads, dim
    made = [_layer(layout, *shapes, dtype) for _ in range(layers)]
    k, v = ([layer[part] for layer in made] for part in ("k", "v"))
    extras = {extra: [layer[extra] for layer in made] for extra in made[0] if extra not in ("k", "v")}
    letters = "HND" if layout.startswith("hnd") else "NHD"
    v = None if v[0] is None else v
    return FakePool(PoolView(name, k, v, page_size, layout=letters, extras=extras, **view))


def _layer(layout: str, pages: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """K, V and extras of one layer."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pair(kv: Tensor, place: int) -> dict[str, Tensor | None]:
        return {"k": kv.select(place, 0), "v": kv.select(place, 1)}

    def scales(*shape: int) -> dict[str, Tensor | None]:
        return {name: torch.zeros(shape, dtype=torch.float32) for name in ("k_scale", "v_scale")}

    slots, by_head = (pages * size, heads, dim), (pages, heads, size, dim)
    match layout:
        case "nhd" | "nhd_scales":
            layer = {"k": zeros(*slots), "v": zeros(*slots)}
            return layer | scales(*slots[:2]) if layout == "nhd_scales" else layer
        case "nhd_fused":
            return pair(zeros(slots[0], 2, heads, dim), 1)
        case "nhd_paged":
            return pair(zeros(pages, 2, size, heads, dim), 1)
        case "hnd" | "hnd_scales":
            layer = {"k": zeros(*by_head), "v": zeros(*by_head)}
            return layer | scales(*by_head[:3]) if layout == "hnd_scales" else layer
        case "hnd_fused":
            return pair(zeros(pages, 2, heads, size, dim), 1)
        case "hnd_sides":
            return pair(zeros(pages, heads, size, 2, dim), 3)
        case "wide_k":
            return {"k": zeros(*slots[:2], 2 * dim), "v": zeros(*slots)}
        case "latent":
            return {"k": zeros(slots[0], 1, dim), "v": None}
        case "latent_paged":
            return {"k": zeros(pages, size, 1, dim), "v": None}
        case "latent_index":
            return {"k": zeros(slots[0], 1, dim), "v": None, "index_key": zeros(slots[0], 1, dim)}
    raise ValueError(layout)


def seal_pool(pool: PoolState) -> None:
    """Take the bytes of all slots as they are for the truth, written by all layers."""
    slots = torch.arange(pool.view.num_slots)
    one = torch.ones_like(slots)
    identity = dict.fromkeys(("tokens", "chains", "requests", "generations", "step", "sites"), one)
    seal_torch(pool.records, slots, positions=slots, **identity, pool_id=pool.pool_id, keys=pool.keys)
    lane_a, lane_b = lanes_of_slots(pool, slots)
    pool.content_a.copy_(lane_a)
    pool.records[:, CONTENT_B] = lane_b
    pool.records[:, LAYERS_LOW] = (1 << pool.view.num_layers) - 1


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
            self.canary.check()
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
        self.canary.check()
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
        self.canary.check()
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
        """Survivors may descend from other branches: ancestors are shuffled between branches."""
        reads, slots, tokens, positions = [], [], [], []
        for name, row in rows.items():
            if index:
                row.branches = [list(self.random.choice(row.branches)) for _ in row.branches]
            for branch, ancestors in enumerate(row.branches):
                slot = self.slot(name, row.committed + branch * self.num_steps + index)
                reads.append([*self._prefix(name), *ancestors, slot])
                slots.append(slot)
                tokens.append(self._token())
                positions.append(row.committed + index)
                ancestors.append(slot)
        read = self._read(reads, rows, self.topk, 1)
        self._forward("draft", index, "draft", read, WritePlan(_ints(slots), _ints(tokens), _ints(positions)))

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
        substep = self.canary.substep(kind, index, pool)
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


@pytest.fixture
def make_engine() -> Iterator[Callable[..., FakeEngine]]:
    """FakeEngine by keyword settings; those of CanaryConfig pass through."""
    with torch.inference_mode():
        yield FakeEngine


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Each of LAYOUTS."""
    return request.param


@pytest.fixture(name="make_fake_pool")
def make_fake_pool_fixture() -> Callable[..., FakePool]:
    """:func:`make_fake_pool`, for tests."""
    return make_fake_pool


@pytest.fixture(name="seal_pool")
def seal_pool_fixture() -> Callable[[PoolState], None]:
    """:func:`seal_pool`, for tests."""
    return seal_pool


# the device path: static substeps over one pool


@dataclass
class StaticRow:
    """One row of a static forward: what it reads in position order; the last `tokens` of it are written now."""

    uid: int
    ids: list[int]
    tokens: list[int]
    parents: list[int] | None = None  # by entry of this row, -1: continues the row
    prefix_len: int | None = None  # None: all that is not written now


class StaticRig:
    """A pool with its canary state and a bank; forwards store values that follow from token, position and layer."""

    PAGE_SIZE, NUM_SLOTS, LAYERS, HEADS, DIM = 4, 96, 2, 2, 4

    def __init__(self, device: str = "cpu") -> None:
        shape = self.LAYERS, self.NUM_SLOTS, 2, self.HEADS, self.DIM
        self.kv = torch.zeros(shape, device=device)
        k, v = ([self.kv[layer, :, part] for layer in range(self.LAYERS)] for part in (0, 1))
        self.state = CanaryState([PoolView("target", k, v, self.PAGE_SIZE)], seed=7)
        self.pool = self.state.pools[0]
        self.bank = SubstepBank(self.state)
        self.device = device
        self.skipped_layers: set[int] = set()
        self.before_close: Callable[[], None] = lambda: None

    def add(self, kind: str, index: int = 0, rows: int = 4, entries: int = 8, indices: int = 64, **settings: object):
        """A substep over buffers of its own; settings of both pass through."""
        own = {name: settings.pop(name) for name in ("is_tree", "has_truths", "ancestors") if name in settings}
        buffers = StaticBuffers.allocate(rows, entries, indices, device=self.device, **own)
        return self.bank.add("target", kind, index, buffers, **settings)

    def grant(self, uid: int, *pages: int, generation: int = 1) -> None:
        values = ([generation] * len(pages), [uid] * len(pages), [FREE if uid == NO_OWNER else RESERVED] * len(pages))
        self.state.set_pages(np.array(pages), *(np.array(own) for own in values))

    def batch(self, rows: list[StaticRow], **changes: object) -> Batch:
        """The batch of these rows; `changes` replace whole tensors, given as lists."""
        written = [len(row.tokens) for row in rows]
        bounds = [sum(written[:n]) for n in range(len(rows) + 1)]
        prefixes = [len(row.ids) - count for row, count in zip(rows, written, strict=True)]
        finals = [p if row.prefix_len is None else row.prefix_len for p, row in zip(prefixes, rows, strict=True)]
        own = [row.parents or range(-1, count - 1) for row, count in zip(rows, written, strict=True)]
        parents = [p if p < 0 else first + p for first, row in zip(bounds, own, strict=False) for p in row]
        positions: list[int] = []
        for entry, parent in enumerate(parents):
            row = next(r for r in range(len(rows)) if entry < bounds[r + 1])
            positions.append(prefixes[row] if parent < 0 else positions[parent] + 1)
        arrays: dict[str, object] = {
            "indptr": [sum(len(row.ids) for row in rows[:n]) for n in range(len(rows) + 1)],
            "indices": [slot for row in rows for slot in row.ids],
            "bounds": bounds,
            "slots": [
                slot for row, count in zip(rows, written, strict=True) for slot in row.ids[len(row.ids) - count :]
            ],
            "tokens": [token for row in rows for token in row.tokens],
            "positions": positions,
            "prefix_lens": finals,
            "uids": [row.uid for row in rows],
            "parents": parents if any(row.parents for row in rows) else None,
        } | changes
        return Batch(**{n: None if a is None else _ints(a).to(self.device) for n, a in arrays.items()})

    def values(self, layer: int, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [n, heads, dim] of one layer."""
        seeds = (tokens * 131 + positions * 7 + layer)[:, None, None].float()
        place = torch.arange(self.HEADS * self.DIM, device=tokens.device).view(self.HEADS, self.DIM)
        return (seeds + place).sin(), (seeds - place).cos()

    def body(self, substep: StaticSubstep) -> None:
        """A forward with all its hooks, over static buffers."""
        forward = substep.forward
        substep.open()
        for layer in range(self.LAYERS):
            if layer not in self.skipped_layers:
                substep.store(layer, *self.values(layer, forward.tokens, forward.positions))
        self.before_close()
        substep.close()

    def run(self, substep: StaticSubstep, batch: Batch, step: int = 1) -> Harvest:
        """One forward of this batch in this step, and what it found."""
        self.bank.begin_step(step)
        self.bank.load(substep, batch)
        self.body(substep)
        return self.bank.harvest()


@pytest.fixture
def make_static() -> Callable[..., StaticRig]:
    """StaticRig by device."""
    return StaticRig


@pytest.fixture
def static_row() -> type[StaticRow]:
    return StaticRow
