"""A paged engine whose K and V are made of more than tokens, weights and images, and the canary that is told of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count

import torch

from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan

PAGE = 4
Span = tuple[int, int, str]


class FlavouredEngine:
    """Rows in pages, a prefix cache by tokens, images and, unless it forgets them, versions of the weights.

    cache: by key, the page;  spans: by request, (start, end, image);  is_told: whether `admit` is told of spans
    """

    def __init__(self, pages: int = 32, forgets: str = "", layers: int = 2, **config: object) -> None:
        self.k, self.v = ([torch.zeros(pages * PAGE, 2, 8) for _ in range(layers)] for _ in range(2))
        self.free, self.version, self.forgets = list(range(1, pages)), 0, forgets
        self.cache: dict[object, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.spans: dict[str, list[Span]] = {}
        self.adapters: dict[str, str] = {}
        self.hits: dict[str, int] = {}
        settings = {"content": "full", "seed": 7, **config}
        self.canary = CanaryManager(CanaryConfig(**settings), [self.view()])
        self.canary.arm()
        self.steps = count(1)

    def view(self) -> PoolView:
        return PoolView("target", self.k, self.v, page_size=PAGE, vocab_size=100)

    def key(self, name: str, end: int) -> object:
        """Under which the page that ends there is cached."""
        images = [span for span in self.spans[name] if span[0] < end and self.forgets != "images"]
        version = None if self.forgets == "weights" else self.version
        return tuple(self.tokens[name][:end]), tuple(images), version, self.adapters[name]

    def start(
        self, name: str, prompt: list[int], spans: Sequence[Span] = (), adapter: str = "", salt: str = ""
    ) -> None:
        self.tokens[name], self.spans[name], self.adapters[name] = list(prompt), list(spans), adapter
        self.canary.admit(name, prompt, salt, adapter, spans)
        self.tables[name] = []
        self.prefill(name)

    def prefill(self, name: str) -> None:
        """All tokens of the row that the cache does not give."""
        for end in range(PAGE, len(self.tokens[name]), PAGE):
            page = self.cache.get(self.key(name, end))
            if page is None:
                break
            self.tables[name].append(page)
        self.hits[name] = len(self.tables[name])
        if self.tables[name]:
            self.canary.on_acquire(name, self.tables[name])
        self.lengths[name] = PAGE * len(self.tables[name])
        self.forward({name: self.tokens[name][self.lengths[name] :]}, "prefill")

    def decode(self, *names: str) -> None:
        fed = {}
        for name in names or list(self.tables):
            fed[name] = [(sum(self.tokens[name]) + len(self.tokens[name])) % 97]
            self.tokens[name] += fed[name]
            self.canary.append(name, fed[name])
        self.forward(fed, "decode")

    def forward(self, fed: dict[str, list[int]], kind: str) -> None:
        self.canary.begin_step(next(self.steps))
        before = [self.lengths[name] for name in fed]
        for name, tokens in fed.items():
            self.lengths[name] += len(tokens)
            new = [self.free.pop(0) for _ in range(-(-self.lengths[name] // PAGE) - len(self.tables[name]))]
            self.tables[name] += new
            self.canary.on_alloc(name, new)
        rows = [[self.slot(name, p) for p in range(self.lengths[name])] for name in fed]
        sizes = torch.tensor([0, *map(len, rows)])
        positions = [p for name, first in zip(fed, before, strict=True) for p in range(first, self.lengths[name])]
        slots = torch.tensor([slot for row, first in zip(rows, before, strict=True) for slot in row[first:]])
        tokens = torch.tensor([token for own in fed.values() for token in own])
        read = ReadPlan(
            sizes.cumsum(0), torch.tensor([slot for row in rows for slot in row]), tuple(fed), 1, torch.tensor(before),
            torch.tensor([len(own) for own in fed.values()]),
        )  # fmt: skip
        forward = self.canary.forward(kind, 0, "target")
        forward.open(read, WritePlan(slots, tokens, torch.tensor(positions)))
        flavours = [
            self.flavour(name, p) for name, f in zip(fed, before, strict=True) for p in range(f, self.lengths[name])
        ]
        for layer in range(len(self.k)):
            x = torch.sin(tokens * 0.7 + torch.tensor(positions) * 0.3 + layer + torch.tensor(flavours))
            k = x[:, None, None].expand(-1, 2, 8).contiguous()
            forward.store(layer, k, k.cos())
            self.k[layer][slots], self.v[layer][slots] = k, k.cos()
        forward.close()
        for name in fed:
            self.canary.commit(name, self.lengths[name])
        self.canary.check()

    def flavour(self, name: str, position: int) -> float:
        images = [hash(image) % 9 for start, end, image in self.spans[name] if start <= position < end]
        return 0.9 * self.version + sum(images) + 3 * len(self.adapters[name])

    def slot(self, name: str, position: int) -> int:
        return self.tables[name][position // PAGE] * PAGE + position % PAGE

    def share(self, name: str) -> None:
        shared = []
        for number in range(self.lengths[name] // PAGE):
            page = self.tables[name][number]
            if self.cache.setdefault(self.key(name, (number + 1) * PAGE), page) == page:
                shared.append(page)
        self.canary.on_share(name, shared)

    def preempt(self, name: str) -> None:
        """Its pages are free, and it computes its row again."""
        pages, self.tables[name] = self.tables[name], []
        self.canary.on_free(name, pages)
        self.give_back(pages)

    def end(self, name: str, shares: bool = True) -> None:
        self.canary.release(name)
        if shares:
            self.share(name)
        pages = self.tables.pop(name)
        self.canary.on_free(name, pages)
        self.give_back(pages)

    def give_back(self, pages: list[int]) -> None:
        held = {*self.cache.values(), *(page for own in self.tables.values() for page in own)}
        self.free += [page for page in pages if page not in held]

    def update(self, keeps: Collection[str] | bool = (), clears: bool = True, version: int | None = None) -> None:
        """Other weights; the prefix cache is cleared, as it should be, or keeps pages under their version."""
        self.version = self.version + 1 if version is None else version
        if clears:
            held = {page for own in self.tables.values() for page in own}
            gone = {key: page for key, page in self.cache.items() if page not in held}
            self.canary.on_evict(list(dict.fromkeys(gone.values())))
            self.free += dict.fromkeys(gone.values())
            self.cache = {key: page for key, page in self.cache.items() if key not in gone}
        self.canary.on_weights(self.version, keeps=keeps)
