"""The line of a step, read by the device itself, and block tables that are kept by number."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.fetch import BLOCK, fetch, fetch_torch, keep, keep_torch
from kvcanary_kernels.walk import Rows

POISON = -77


@pytest.mark.parametrize("width", [1, 7, BLOCK, BLOCK + 3])
@pytest.mark.parametrize("act", [fetch, fetch_torch], ids=["triton", "torch"])
def test_fetch_copies_the_line_of_the_tick(act, width: int, device: str) -> None:
    """The ring comes round, the rest of `out` stays, and lines may lie in pinned memory of the host."""
    lines = torch.arange(3 * 200).view(3, 200) << 33
    held = lines.pin_memory() if device == "cuda" else lines
    for tick in (1, 2, 3, 7):
        out = torch.full((201,), POISON, device=device)[1:]
        act(held, torch.tensor([tick], device=device), out, width=width)
        assert out.tolist() == [*lines[tick % 3, :width].tolist(), *[POISON] * (200 - width)]


@pytest.mark.gpu
def test_a_captured_fetch_reads_what_the_host_wrote_since() -> None:
    """Each replay reads its own line, as it is when it runs."""
    lines, ticks = torch.zeros(4, 64, dtype=torch.int64).pin_memory(), torch.zeros(1, dtype=torch.int64, device="cuda")
    out, graph = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    fetch(lines, ticks, out, width=64)
    with torch.cuda.graph(graph):
        ticks.add_(1)
        fetch(lines, ticks, out, width=64)
    for step in range(1, 11):
        lines[step % 4] = step * 1000
        graph.replay()
        assert out.tolist() == [step * 1000] * 64


@pytest.mark.parametrize("width", [1, BLOCK, BLOCK + 5])
@pytest.mark.parametrize("act", [keep, keep_torch], ids=["triton", "torch"])
def test_keep_copies_live_rows_to_their_numbers(act, width: int, device: str) -> None:
    """Padding is copied nowhere, other rows and what lies behind the width stay."""
    table = torch.arange(4 * 140, dtype=torch.int32, device=device).view(4, 140)
    numbers = torch.tensor([5, 0, 2, 2], device=device)
    kept = torch.full((6, 135), POISON, dtype=torch.int32, device=device)
    now = torch.tensor([3, 0, 9, 0], device=device)
    act(Rows(numbers, table, numbers, numbers), now=now, kept=kept, width=width)
    wanted = torch.full((6, 135), POISON, dtype=torch.int32)
    for row, number in enumerate((5, 0, 2)):
        wanted[number, :width] = table[row, :width].cpu()
    assert torch.equal(kept.cpu(), wanted)
