"""Rows of an engine whose tables are its own, driven through eager forwards or through captured substeps."""

from __future__ import annotations

import torch

from kvcanary import CanaryConfig, CanaryManager, ReadPlan, WritePlan
from kvcanary.captured.buffers import StaticBuffers
from static_rig import StaticRig, StaticRow

SIZE = StaticRig.PAGE_SIZE


class TwoWays:
    """Every forward goes one way, "eager" or "captured"; tests tell the canary of pages, and may change tables.

    tables: by request, the pages that its row names;  fed: by request, the tokens that forwards have written
    is_late: a step is heard when the next one has run
    """

    def __init__(self, way: str, is_late: bool = False, **settings: object) -> None:
        self.rig, self.is_captured, self.is_late = StaticRig(), way == "captured", is_late
        self.canary = CanaryManager(CanaryConfig(**{"seed": 7, "mode": "log", **settings}), [self.rig.pool.view])
        if self.is_captured:
            buffers = StaticBuffers.allocate(4, 32, 96, has_truths=True)
            self.substep = self.canary.registry.add("target", "decode", 0, buffers)
        self.canary.arm()
        self.tables: dict[str, list[int]] = {}
        self.fed: dict[str, list[int]] = {}
        self.waiting: list[object] = []
        self.spare = list(range(12, 24))  # pages for rows that grow

    def begin(self, name: str, tokens: list[int], pages: list[int], cached: list[int] = ()) -> None:
        """A request with its prompt, of which the cached pages hold the head."""
        head = SIZE * len(cached)
        self.canary.admit(name, tokens)
        if cached:
            self.canary.on_acquire(name, cached)
            self.canary.commit(name, head)
        self.canary.on_alloc(name, pages)
        self.tables[name], self.fed[name] = [*cached, *pages], list(tokens[:head])
        self.forward({name: tokens[head:]})

    def fork(self, name: str, child: str) -> None:
        self.canary.admit(child, self.fed[name])
        self.canary.on_fork(name, child, self.tables[name])
        self.canary.commit(child, len(self.fed[name]))
        self.tables[child], self.fed[child] = list(self.tables[name]), list(self.fed[name])

    def decode(self, *names: str) -> None:
        """A step of one token each."""
        fed = {name: [len(self.fed[name]) % 7 + 30] for name in names}
        for name, tokens in fed.items():
            self.canary.append(name, tokens)
        self.forward(fed)

    def end(self, name: str) -> None:
        self.canary.release(name)
        self.canary.on_free(name, self.tables.pop(name))

    def forward(self, fed: dict[str, list[int]], commits: bool = True) -> None:
        self.canary.begin_step(self.canary.step + 1)
        for name, tokens in fed.items():
            if len(self.fed[name]) + len(tokens) > SIZE * len(self.tables[name]):
                self.tables[name].append(self.spare.pop(0))
                self.canary.on_alloc(name, self.tables[name][-1:])
        ids = {name: self._slots(name, len(self.fed[name]) + len(tokens)) for name, tokens in fed.items()}
        (self._replay if self.is_captured else self._run)(fed, ids)
        for name, tokens in fed.items():
            self.fed[name] += tokens
            if commits:
                self.canary.commit(name, len(self.fed[name]))
        if not (self.is_late and self.is_captured):
            self.canary.collect(self.canary.end_step())
            return
        self.waiting.append(self.canary.end_step())
        if len(self.waiting) > 1:
            self.canary.collect(self.waiting.pop(0))

    def copy(self, page: int, copy: int, count: int = SIZE) -> None:
        """The first so many slots of a page are copied to another, and declared as moved."""
        src, dst = (torch.arange(count) + SIZE * number for number in (page, copy))
        for tensor in (*self.rig.pool.view.k, *self.rig.pool.view.v):
            tensor[dst] = tensor[src]
        self.canary.on_move("target", src, dst)

    def found(self) -> list[tuple[str, int, int | None, str | None, str]]:
        """Code, slot, position, reader and family of the first cause of every finding."""
        self.canary.collect(self.canary.end_step())
        reported = self.canary.findings
        return [(f.code, f.slot, f.position, f.reader, f.causes[0].family) for f in reported]

    def _slots(self, name: str, length: int) -> list[int]:
        return [self.tables[name][place // SIZE] * SIZE + place % SIZE for place in range(length)]

    def _replay(self, fed: dict[str, list[int]], ids: dict[str, list[int]]) -> None:
        counts = [len(tokens) for tokens in fed.values()]
        truth = self.canary.launch(self.substep, [*fed], counts, sum(map(len, ids.values())))
        rows = [StaticRow(uid, ids[name], fed[name]) for uid, name in zip(truth.uids, fed, strict=True)]
        reported = {"truths": truth.truths, "prefix_lens": truth.prefix_lens}
        self.substep.buffers.fill(self.rig.batch(rows, **reported))
        self.rig.body(self.substep)

    def _run(self, fed: dict[str, list[int]], ids: dict[str, list[int]]) -> None:
        before, counts = ([len(own[name]) for name in fed] for own in (self.fed, fed))
        indptr = torch.tensor([0, *(len(ids[name]) for name in fed)]).cumsum(0)
        written = [slot for name, count in zip(fed, counts, strict=True) for slot in ids[name][-count:]]
        slots, tokens = torch.tensor(written), torch.tensor([token for own in fed.values() for token in own])
        positions = torch.cat([torch.arange(b, b + c) for b, c in zip(before, counts, strict=True)])
        indices = torch.tensor([slot for name in fed for slot in ids[name]])
        read = ReadPlan(indptr, indices, tuple(fed), 1, torch.tensor(before), torch.tensor(counts))
        substep, view = self.canary.forward("decode", 0, "target"), self.rig.pool.view
        substep.open(read, WritePlan(slots, tokens, positions))
        for layer in range(view.num_layers):
            k, v = self.rig.values(layer, tokens, positions)
            substep.store(layer, k, v)
            view.k[layer][slots], view.v[layer][slots] = k, v
        substep.close()
