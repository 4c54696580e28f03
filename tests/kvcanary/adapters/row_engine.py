"""A watched pool without an engine around it: on the CPU by references, on a GPU by captured launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvcanary import CanaryConfig, PoolView
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Forward

LAYERS, HEADS, DIM, BLOCK, BLOCKS, ROWS, TOKENS, WIDTH = 2, 2, 8, 4, 60, 20, 64, 16


class RowEngine:
    """Rows that lie where their numbers are; K and V that depend on token and position."""

    def __init__(
        self,
        device: str,
        content: str = "full",
        whole_heads: int = 0,
        prepares: bool = True,
        keeps: int = 0,
        **settings: Any,
    ) -> None:
        """whole_heads: as of PoolView;  prepares: False: there is more to watch, call `prepare` then
        keeps: tokens of each row on the device, from which it would be fed; 0: none"""
        self.device = device
        config = CanaryConfig(mode="log", content=content, seed=3, **settings)
        self.canary = PagedCanary(config, ROWS, 2, TOKENS, device, has_tokens=keeps > 0)
        self.kv = [torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM, device=device).transpose(1, 2) for _ in range(LAYERS)]
        k, v = [kv[..., :DIM] for kv in self.kv], [kv[..., DIM:] for kv in self.kv]
        group = self.canary.memory.add_group(0, BLOCK, BLOCKS * BLOCK, null_slots=BLOCK)
        view = PoolView("target", k, v, page_size=BLOCK, layout="HND", whole_heads=whole_heads)
        self.canary.memory.add_layers(group, view, ["l0", "l1"])
        self.table, self.batch_table = (self.zeros(ROWS, WIDTH, dtype=torch.int32) for _ in range(2))
        self.lengths, self.starts = self.zeros(ROWS, dtype=torch.int32), self.zeros(ROWS + 1, dtype=torch.int32)
        self.fed, self.positions = self.zeros(TOKENS, dtype=torch.int32), self.zeros(TOKENS)
        self.slots = self.zeros(1, TOKENS)
        self.known = (self.zeros(ROWS, keeps, dtype=torch.int32), self.zeros(ROWS)) if keeps else ()
        self.spoil: Callable[[], None] = lambda: None  # between what a forward stores and what is taken of it
        self.tokens: dict[int, list[int]] = {}
        self.free = list(range(1, BLOCKS))
        if prepares:
            self.prepare()

    def prepare(self) -> None:
        """Compile and capture what forwards launch."""
        self.canary.prepare(self.forward_of([], 0, [WIDTH * BLOCK]))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def forward_of(self, numbers: Sequence[int], num_tokens: int, lengths: Sequence[int]) -> Forward:
        names, ends = [f"r{number}" for number in numbers], torch.tensor(lengths)
        return Forward(
            names, np.array(numbers, dtype=np.int32), ("decode", 0), ends, num_tokens, [self.batch_table],
            self.lengths, self.starts, self.fed, self.positions, list(self.slots), self.known,
        )  # fmt: skip

    def begin(self, number: int, tokens: list[int], length: int = 0) -> None:
        """A row with blocks of its own; its first entries may lie there already."""
        self.tokens[number] = tokens[:length]
        if not length:
            blocks, self.free = self.free[:WIDTH], self.free[WIDTH:]
            self.table[number] = torch.tensor(blocks + [0] * (WIDTH - len(blocks)), dtype=torch.int32)
        self.canary.admit([(number, f"r{number}", tokens, length, "")])

    def step(self, batch: dict[int, list[int]]) -> int:
        """One forward; how many wrong entries there were so far."""
        numbers = list(batch)
        past = [len(self.tokens[number]) for number in numbers]
        tokens = [token for number in numbers for token in batch[number]]
        places = [p for n, before in zip(numbers, past, strict=True) for p in range(before, before + len(batch[n]))]
        rows = [n for n in numbers for _ in batch[n]]
        blocks = self.table.cpu()[rows, [p // BLOCK for p in places]].long()
        slots = blocks * BLOCK + torch.tensor(places) % BLOCK
        lengths = [before + len(batch[n]) for n, before in zip(numbers, past, strict=True)]
        starts = np.cumsum([0, *(len(batch[n]) for n in numbers)])
        for out, values in (
            (self.fed, tokens), (self.positions, places), (self.slots[0], slots), (self.lengths, lengths),
            (self.starts, [*starts, *[starts[-1]] * (ROWS - len(numbers))]),
        ):  # fmt: skip
            values = torch.as_tensor(values)
            out[: len(values)] = values.to(out.dtype).to(self.device)
        self.batch_table[: len(numbers)] = self.table[numbers]
        self.canary.read(self.forward_of(numbers, len(tokens), lengths))
        value = torch.tensor(tokens) * 31.0 + torch.tensor(places)
        for layer, kv in enumerate(self.kv):
            key = torch.sin(value[:, None, None] * (layer + 1) + torch.arange(HEADS * DIM).view(HEADS, DIM))
            kv[blocks, :, slots % BLOCK] = torch.cat((key, key.cos()), -1).to(self.device)
        self.spoil()
        self.canary.wrote()
        for number in numbers:
            self.tokens[number] += batch[number]
        return self.canary.count_at(self.canary.step)

    def end(self, number: int) -> None:
        self.canary.leave([number], [f"r{number}"])
