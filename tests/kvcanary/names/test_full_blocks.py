"""Blocks that a forward fills: found on the device, also in a graph, and summed with weights by place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.adapters.hosted.content_names import FullBlocks
from kvcanary.names.sums import undone, weights_of
from kvcanary_kernels.record.layout import signed

SIZE, BLOCKS, LAYERS, ROWS, MOST = 4, 12, 3, 5, 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Kept:
    """Stands for `Published`: takes at once."""

    lost = 0

    def __init__(self) -> None:
        self.names: list[tuple[int, int]] = []

    def give(self, space: str, take: Any) -> bool:
        self.names = take()
        return True


def made(device: str) -> tuple[FullBlocks, Any]:
    """With every buffer poisoned."""
    generator = torch.Generator().manual_seed(3)
    stored = torch.randint(-(1 << 63), (1 << 63) - 1, (LAYERS, BLOCKS * SIZE), generator=generator).to(device)
    layers = SimpleNamespace(fingerprints=(stored,))
    group = SimpleNamespace(block_size=SIZE, null_slots=SIZE, layers=[layers])
    memory = SimpleNamespace(
        device=torch.device(device),
        zeros=lambda *shape: torch.full(shape, -77, device=device),
        pinned=lambda *shape: torch.full(shape, -99, pin_memory=device == "cuda"),
    )
    return FullBlocks(SimpleNamespace(memory=memory, num_rows=ROWS, max_tokens=MOST), group), group


def wanted(group: Any, slots: list[int], chains: list[int]) -> list[tuple[int, int]]:
    """One block after another, in plain Python."""
    sums = [sum(column) for column in zip(*group.layers[0].fingerprints[0].tolist(), strict=True)]
    ends = [(slot, chain) for slot, chain in zip(slots, chains, strict=True) if slot >= SIZE and slot % SIZE == 3]
    weights = weights_of(SIZE).tolist()
    return [
        (chain, signed(sum(sums[slot - 3 + place] * weights[place] for place in range(SIZE)))) for slot, chain in ends
    ]


#: A prefill over two blocks and a half; rows by one token; padding and the null block; each row fills one block.
STEPS = [
    list(range(8, 18)),
    [11, 13, 19, 20, 47],
    [-1, 3, -1, 7, -1, -1],
    [4 * block + 3 for block in range(2, 2 + ROWS)],
    [-1] * 3,
    list(range(8, 48)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", STEPS, ids=range(len(STEPS)))
def test_every_block_that_a_step_fills_is_named(device: str, slots: list[int]) -> None:
    """With the chain of its last token; nothing else is."""
    blocks, group = made(device)
    chains, kept = [1000 + slot for slot in slots], Kept()
    blocks.launch(group, torch.tensor(slots, device=device), torch.tensor(chains, device=device))
    blocks.publish(kept, "space")
    assert kept.names == wanted(group, slots, chains)


@pytest.mark.gpu
def test_it_can_be_captured_once_and_replayed() -> None:
    """Other steps of the same size through one graph."""
    blocks, group = made("cuda")
    slots, chains = (torch.full((16,), -1, device="cuda") for _ in range(2))
    blocks.launch(group, slots, chains)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks.launch(group, slots, chains)
    for step in STEPS[:5]:
        own = step + [-1] * (16 - len(step))
        slots.copy_(torch.tensor(own))
        chains.copy_(torch.tensor(own) + 1000)
        graph.replay()
        kept = Kept()
        blocks.publish(kept, "space")
        assert kept.names == wanted(group, step, [1000 + slot for slot in step])


def test_a_word_that_changed_is_undone_at_one_place() -> None:
    """The inverse of each weight."""
    for place, weight in enumerate(weights_of(16).tolist()):
        assert undone(signed(12345 * weight), place) == 12345


def test_no_buffer_is_lost_where_the_thread_is_slow() -> None:
    """All eight on their way: what comes next is counted, and buffers are used again when they are read."""
    blocks, _ = made("cpu")
    takes: list[Any] = []
    lost: list[int] = []
    slow = SimpleNamespace(lose=lambda: lost.append(1), give=lambda space, take: takes.append(take) or True)
    for _ in range(10):
        blocks.publish(slow, "space")
    assert (len(takes), len(lost)) == (8, 2)
    takes.pop()()
    blocks.publish(slow, "space")
    assert (len(takes), len(lost)) == (8, 2)
