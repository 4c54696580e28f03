"""Groups of layers that lie over each other, as in engines that hand out one pool of blocks to all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig, PoolView
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.report import report_step
from kvcanary.adapters.observed.state import Forward

HEADS, DIM, BLOCK, BLOCKS, ROWS, TOKENS, WIDTH = 2, 8, 4, 12, 6, 16, 4
TOLD = [3, 1, 4, 1, 5]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Engine:
    """Two groups of one layer each over one tensor: what a forward stores of a row depends on the group as well."""

    def __init__(self, device: str, layers: tuple[str, str] = ("l0", "l1"), owns: bool = False) -> None:
        """layers: of each group, as the model has them;  owns: grants and frees of blocks are told"""
        self.canary = PagedCanary(CanaryConfig(mode="log", content="full", seed=3), ROWS, 2, TOKENS, device)
        memory, self.device = self.canary.memory, device
        self.k, self.v = (torch.zeros(BLOCKS, BLOCK, HEADS, DIM, device=device) for _ in range(2))
        for number in range(2):
            group = memory.add_group(number, BLOCK, BLOCKS * BLOCK, null_slots=BLOCK)
            view = PoolView(f"target {number}", [self.k], [self.v], page_size=BLOCK)
            memory.add_layers(group, view, layers[number : number + 1])
        if owns:
            self.canary.follow_blocks([BLOCK, BLOCK])
        self.factor = 1.0  # of what is stored
        zeros = torch.zeros
        self.tables = [zeros(ROWS, WIDTH, dtype=torch.int32, device=device) for _ in range(2)]
        self.lengths = zeros(ROWS, dtype=torch.int32, device=device)
        self.starts = zeros(ROWS + 1, dtype=torch.int32, device=device)
        self.fed, self.positions = zeros(TOKENS, dtype=torch.int32, device=device), zeros(TOKENS, device=device).long()
        self.slots = zeros(2, TOKENS, device=device).long()
        self.canary.prepare(self._forward([], [], [WIDTH * BLOCK]))

    def _forward(self, numbers: list[int], tokens: list[int], ends: list[int]) -> Forward:
        return Forward(
            [f"r{number}" for number in numbers], np.array(numbers, dtype=np.int32), ("prefill", 0),
            torch.tensor(ends), len(tokens), self.tables, self.lengths, self.starts, self.fed, self.positions,
            list(self.slots),
        )  # fmt: skip

    def step(self, *rows: tuple[int, int, tuple[int, int]]) -> list[str]:
        """Each row (number, entries that it has, its first block in each group) gets the rest of TOLD; what fired."""
        numbers, past, ends = [row[0] for row in rows], [row[1] for row in rows], [len(TOLD)] * len(rows)
        self.canary.admit([(number, f"r{number}", TOLD, length, "") for number, length, _ in rows])
        places = [place for length in past for place in range(length, len(TOLD))]
        tokens, owners = [TOLD[p] for p in places], [n for n, own in enumerate(past) for _ in range(own, len(TOLD))]
        starts = np.cumsum([0, *(len(TOLD) - length for length in past)])
        for group, table in enumerate(self.tables):
            lines = torch.tensor([[first, first + 1, 0, 0] for first in (row[2][group] for row in rows)])
            table[: len(rows)] = lines.to(table)
            slots = lines[owners, torch.tensor(places) // BLOCK] * BLOCK + torch.tensor(places) % BLOCK
            self.slots[group, : len(slots)] = slots.to(self.device)
        for out, values in (
            (self.fed, tokens), (self.positions, places), (self.lengths, ends),
            (self.starts, [*starts, *[starts[-1]] * (ROWS - len(rows))]),
        ):  # fmt: skip
            out[: len(values)] = torch.as_tensor(values).to(out)
        self.canary.read(self._forward(numbers, tokens, ends))
        for group in range(2):
            values = self.factor * (torch.tensor(tokens, device=self.device)[:, None, None] + 100.0 * group)
            own = self.slots[group, : len(tokens)]
            for cache in self.k, self.v:
                cache[own // BLOCK, own % BLOCK] = values.expand(-1, HEADS, DIM)
        self.canary.wrote()
        found = len(self.canary.log.findings)
        if self.canary.count_at(self.canary.step):
            report_step(self.canary, self.canary.steps[-1])
        return [finding.code for finding in self.canary.log.findings[found:]]

    def end(self, number: int) -> None:
        self.canary.leave([number], [f"r{number}"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_went_to_another_group_and_came_back_is_judged_as_new(device: str) -> None:
    """Its old record names the same prefix, its bytes are the other group's, until this very step stores it anew."""
    engine = Engine(device)
    assert engine.step((0, 0, (1, 3))) == []
    engine.end(0)
    assert engine.step((1, 0, (5, 1))) == []  # block 1 is the second group's now
    engine.end(1)
    # block 1 is the first group's again; a row that shares its prefix is admitted in the step that computes it
    assert engine.step((2, 0, (1, 7)), (3, BLOCK, (1, 7))) == []


@pytest.mark.parametrize("device", DEVICES)
def test_who_still_reads_a_block_that_went_to_another_group_is_told(device: str) -> None:
    """The row has its first block still, and the bytes of it are another group's: nobody has written this entry."""
    engine = Engine(device)
    assert engine.step((0, 0, (1, 3))) == []
    engine.end(0)
    assert engine.step((1, 0, (5, 1))) == []
    assert engine.step((2, BLOCK, (1, 9)))[:1] == ["R12"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [("l0", "l1"), ("l1", "l0"), ("l10", "l9")])
def test_the_first_layer_that_stored_nan_is_that_of_the_model(device: str, layers: tuple[str, str]) -> None:
    """Layers run in the order of their numbers, whichever group they are in: one finding for a row, of the first."""
    engine = Engine(device, layers)
    engine.factor = torch.nan
    assert engine.step((0, 0, (1, 3))) == ["N1"]
    [found] = engine.canary.log.findings
    first = min(layers, key=lambda name: int(name[1:]))
    group = layers.index(first)
    assert (found.writer, found.position, found.slot) == ("r0", 0, (1, 3)[group] * BLOCK)
    assert any(f"group {group}" in note and note.endswith(f"layer {first}") for note in found.evidence)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_free_is_free_in_every_group(device: str) -> None:
    """A block that one group gave back is filled, and looked at when another is granted it: P1 of who has written."""
    engine = Engine(device, owns=True)
    poison, slots = engine.canary.poison, torch.arange(5 * BLOCK, 6 * BLOCK, device=device)
    poison.freed(slots)
    assert engine.step((0, 0, (1, 3))) == []
    assert poison.filled.nonzero()[:, 0].tolist() == slots.tolist()
    engine.v[5, 2, 1, 3] += 1
    poison.granted(slots, torch.zeros_like(slots))
    assert engine.step((1, 0, (7, 5))) == ["P1"]  # the second group's now
    [found] = engine.canary.log.findings
    assert (found.slot, found.layers) == (5 * BLOCK + 2, (0,))


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_is_freed_and_goes_to_another_group_in_one_step_is_its_own(device: str) -> None:
    """What is filled in between is nobody's bytes; the record is that of whom this step will store for."""
    engine = Engine(device, owns=True)
    poison, slots = engine.canary.poison, torch.arange(5 * BLOCK, 7 * BLOCK, device=device)
    poison.freed(slots)
    poison.granted(slots, torch.zeros_like(slots))
    assert engine.step((0, 0, (7, 5))) == []
    engine.end(0)
    assert engine.step((1, BLOCK, (7, 5))) == []


def test_groups_that_lie_apart_have_no_poison() -> None:
    """No group's bytes are all that a block has."""
    canary = PagedCanary(CanaryConfig(mode="log", content="full", seed=3), ROWS, 2, TOKENS, "cpu")
    for number in range(2):
        group = canary.memory.add_group(number, BLOCK, BLOCKS * BLOCK, null_slots=BLOCK)
        k, v = (torch.zeros(BLOCKS, BLOCK, HEADS, DIM) for _ in range(2))
        canary.memory.add_layers(group, PoolView(f"target {number}", [k], [v], page_size=BLOCK), [f"l{number}"])
    canary.follow_blocks([BLOCK, BLOCK])
    assert canary.poison is None


def test_groups_whose_blocks_are_other_bytes_have_no_poison() -> None:
    """A free block of the one lies in a block of the other that somebody may have."""
    canary = Engine("cpu", owns=True).canary
    assert canary.poison is not None
    canary.follow_blocks([BLOCK, 2 * BLOCK])
    assert canary.poison is None
