"""The line of a step, read by the device itself, and block tables that are kept by number."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.watch.fetch import BLOCK, SPLITS, fetch, fetch_torch, keep, keep_torch, send, send_torch
from kvcanary_kernels.watch.walk import NO_VIOLATION, Rows

POISON = -77


@pytest.mark.parametrize("width", [1, 7, BLOCK, BLOCK + 3])
@pytest.mark.parametrize("act", [fetch, fetch_torch], ids=["triton", "torch"])
def test_fetch_copies_the_line_of_the_step_and_clears_its_cells(act, width: int, device: str) -> None:
    """The ring comes round, what is not the step's stays, and lines may lie in pinned memory of the host."""
    lines, ticks = torch.arange(3 * 200).view(3, 200) << 33, torch.zeros(2, dtype=torch.int64, device=device)
    held = lines.pin_memory() if device == "cuda" else lines
    for tick in range(1, 8):
        out = torch.full((201,), POISON, device=device)[1:]
        cells = torch.full((3, 150), POISON, device=device)
        act(held, ticks, out, width=width, cells=cells)
        assert ticks.tolist() == [tick, 0]
        assert out.tolist() == [*lines[tick % 3, :width].tolist(), *[POISON] * (200 - width)]
        wanted = [NO_VIOLATION if place == tick % 3 else POISON for place in range(3)]
        assert torch.equal(cells.cpu(), torch.tensor(wanted)[:, None].expand(3, 150))


@pytest.mark.gpu
def test_a_captured_fetch_reads_what_the_host_wrote_since() -> None:
    """Each replay reads its own line, as it is when it runs, and the host finds the count where it was sent."""
    lines, ticks = torch.zeros(4, 64, dtype=torch.int64).pin_memory(), torch.zeros(2, dtype=torch.int64, device="cuda")
    out, graph = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    cells, counts = (
        torch.zeros(4, 8, dtype=torch.int64, device="cuda"),
        torch.zeros(4, dtype=torch.int64).pin_memory(),
    )

    def launch() -> None:
        fetch(lines, ticks, out, width=64, cells=cells)
        send(ticks[:1], out, counts)

    launch()
    ticks.zero_()
    with torch.cuda.graph(graph):
        launch()
    for step in range(1, 11):
        lines[step % 4] = step * 1000
        lines[step % 4, 4] = step % 4
        graph.replay()
        assert out.tolist() == [*[step * 1000] * 4, step % 4, *[step * 1000] * 59]
        assert int(counts[step % 4]) == step + step * 1000


@pytest.mark.parametrize("act", [send, send_torch], ids=["triton", "torch"])
def test_send_stamps_a_count(act, device: str) -> None:
    """At the place that the step says, and nowhere else."""
    out = torch.full((4,), POISON)
    out = out.pin_memory() if device == "cuda" else out
    now = torch.tensor([9, 9, 9, 9, 2, 1 << 40], device=device)
    act(torch.tensor([5], device=device), now, out)
    if device == "cuda":
        torch.cuda.synchronize()
    assert out.tolist() == [POISON, POISON, (1 << 40) + 5, POISON]


@pytest.mark.parametrize("act", [keep, keep_torch], ids=["triton", "torch"])
def test_keep_copies_live_rows_to_their_numbers(act, device: str) -> None:
    """Blocks that its entries are in, however many; padding is copied nowhere, what lies behind a row stays."""
    wide = SPLITS * BLOCK + 5
    table = torch.arange(5 * wide, dtype=torch.int32, device=device).view(5, wide)
    numbers = torch.tensor([5, 0, 3, 2, 2], device=device)
    lengths = torch.tensor([1, 16 * (BLOCK + 5), 16 * wide + 1, 0, 99], dtype=torch.int32, device=device)
    kept = torch.full((6, wide), POISON, dtype=torch.int32, device=device)
    now = torch.tensor([4, 0, 9, 0, 0, 0], device=device)
    act(Rows(numbers, table, lengths, numbers), now=now, kept=kept, block_size=16)
    wanted = torch.full((6, wide), POISON, dtype=torch.int32)
    for row, (number, width) in enumerate(((5, 1), (0, BLOCK + 5), (3, wide))):
        wanted[number, :width] = table[row, :width].cpu()
    assert torch.equal(kept.cpu(), wanted)
