"""States of rows: kernels and references give equal bits; what each finding means, tests of the adapters say."""

from __future__ import annotations

import pytest
import torch

from kvcanary.pools.launch_site import pack_site
from kvcanary.pools.state_views import StateView
from kvcanary_kernels.record.layout import make_keys
from kvcanary_kernels.watch.states import (
    CHOSEN,
    CODE,
    NOTHING,
    STATE_CODES,
    States,
    Taken,
    leave_states,
    leave_states_torch,
    take_states,
    take_states_torch,
    taken_of,
)
from kvcanary_kernels.watch.walk import TAILS, Rows, Truth

POISON, RING, ENTRIES, LAYERS, MOST, SIZE, ROWS = -77, 8, 36, 3, 8, 8, 6
NEVER_LEFT = ENTRIES - 1
DECODE, MOVE = pack_site("decode", 0), pack_site("move", 0)


class Forwards:
    """Five forwards over states of random bytes that are known in all ways; rows go on from what was left, and the
    bytes of one layer change between the third and the fourth.
    """

    def __init__(self, seed: int, content: str, device: str, counted: bool = True) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device
        self.whole = torch.randn(LAYERS, ENTRIES, 6, generator=self.generator).to(device)
        view = StateView("states", {"conv": list(self.whole[:, :, :2]), "ssm": list(self.whole[:, :, 2:])})
        self.keys, count = make_keys(5, LAYERS, view.slices.words_per_row, device), view.num_slices
        known = torch.stack((self.any(-3, 6), self.any(5, 7), self.any(0, 2) * (MOVE << 32)))
        own = known.to(device), self.any(0, 3).to(device), self.any(0, count).to(device)
        sums = torch.zeros(LAYERS, ENTRIES * count, dtype=torch.int64, device=device)
        compared = {"write": 0, "rolling": 1, "full": count}[content]
        self.states = States(view.slices, self.keys, *own, sums, count, compared, 4, MOVE, counted=counted)
        self.taken = Taken(*(scratch.fill_(POISON) for scratch in taken_of(self.states, RING, MOST)))
        self.truth = Truth(self.any(5, 7, (MOST, TAILS + 2)).to(device))
        self.numbers = torch.randperm(MOST, generator=self.generator)[:ROWS].to(device)
        self.past, self.total = self.any(0, 6, (ROWS,)), torch.zeros(1, dtype=torch.int64, device=device)
        self.table = torch.randperm(ENTRIES + 2, generator=self.generator)[: ROWS * 5].view(ROWS, 5).to(device) - 1
        self.table[self.table == NEVER_LEFT] = -1  # two rows with one entry write it in any order
        self.table[0, 1], self.past[0] = self.table[0, 0], 1
        self.table[1], self.past[1], self.states.known[0, NEVER_LEFT] = NEVER_LEFT, 3, NOTHING.value
        self.stored = self.any(0, 3, (RING, 200)).to(device)

    def any(self, low: int, high: int, shape: tuple[int, ...] = (ENTRIES,)) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def chosen(self) -> torch.Tensor:
        """Where each row goes on from, the entry in which it does, and whether it was copied there."""
        source, entry, moved = self.table[:, 0], self.table[:, 1], self.any(0, 2, (ROWS,)).to(self.device)
        moved[0] = 1
        return torch.stack((torch.where(moved > 0, source, entry), entry, moved), 1)

    def run(self, operations: tuple, block_size: int, checkpoints: int) -> list[torch.Tensor]:
        """All that was written."""
        take, leave = operations
        for step in range(1, 6):
            live, new = ROWS - 2 * (step == 2), self.any(1, 7, (ROWS,))
            lengths, starts = (self.past + new).to(torch.int32), torch.cat((torch.zeros(1), new.cumsum(0)))
            rows = Rows(self.numbers, self.table.to(torch.int32), lengths.to(self.device), starts.int().to(self.device))
            now = torch.tensor([live, 0, step, DECODE, step, 0], device=self.device)
            self.truth.ends[self.numbers], self.truth.tails[:, 0] = lengths.long().to(self.device), step % 2
            seeds = self.any(0, 2, (MOST, 2)).to(self.device)
            if step == 4:
                self.whole[1] += 1
            if block_size == CHOSEN:
                rows = rows._replace(table=self.chosen().to(torch.int32))
            take(
                self.states, rows, self.truth, self.taken, now=now, total=self.total, seeds=seeds,
                block_size=block_size, checkpoints=checkpoints, stored=self.stored if checkpoints else None,
            )  # fmt: skip
            leave(self.states, self.taken, now, n=ROWS, between=checkpoints > 0)
            self.past = lengths.long()
        own = slice(0, ROWS * self.states.compared)
        scratch = self.taken.slices[own], self.taken.found[:, own]
        return [*self.states[2:6], *self.taken[:3], *scratch, self.total]


@pytest.mark.parametrize(
    ("block_size", "checkpoints", "counted"),
    [(0, 0, True), (SIZE, 0, True), (SIZE, 4, True), (CHOSEN, 0, True), (CHOSEN, 0, False)],
)
@pytest.mark.parametrize("content", ["write", "rolling", "full"])
def test_kernels_give_the_bits_of_their_references(
    content: str, block_size: int, checkpoints: int, counted: bool, device: str
) -> None:
    """Tables name entries that the pool does not have, and columns that they do not. Every finding comes up, but that
    words which are not counted have absorbed nothing, and are not compared where they are copied.
    """
    seen, fired = set[int](), 0
    for seed in range(8 if block_size == CHOSEN else 4):
        kernels, references = (
            Forwards(seed, content, device, counted).run(operations, block_size, checkpoints)
            for operations in ((take_states, leave_states), (take_states_torch, leave_states_torch))
        )
        for kernel, reference in zip(kernels, references, strict=True):
            assert torch.equal(kernel, reference)
        codes = kernels[4][1:6, CODE.value, :ROWS].cpu()
        seen |= set(codes[codes != POISON].tolist())
        assert int(kernels[-1]) == int((codes[codes != POISON] > 0).sum())
        fired += int(kernels[-1])
    assert fired
    never = {"T1", "R9"} if content == "write" else set()
    never |= set() if block_size else {"T1", "W3"}
    never |= set() if counted else {"T1", "R4", "R6", "W3"}
    assert {STATE_CODES[code] for code in seen} == set(STATE_CODES) - never
