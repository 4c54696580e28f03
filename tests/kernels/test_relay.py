"""What a plain step takes from the relay and leaves in it."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.engine.relay import BLOCK, leave, leave_torch, take, take_torch

POISON = -77


@pytest.mark.parametrize("n", [0, 1, 5, BLOCK + 3])
@pytest.mark.parametrize("act", [take, take_torch], ids=["triton", "torch"])
def test_take_reads_each_row(act, n: int, device: str) -> None:
    """Lengths past the table are cut to it, rows outside the relay are padding's; each number by hand."""
    num_rows, width = BLOCK + 9, 12
    relay_lens, relay_bonus = torch.arange(num_rows) % 15, 100 + torch.arange(num_rows)
    table = torch.arange(num_rows * width).view(num_rows, width) + 1000
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(n))[:n]
    rows[2:4] = torch.tensor([-1, num_rows])[: len(rows[2:4])]
    out = {name: torch.full((n,), POISON, device=device) for name in ("lens", "bonus", "slots")}
    act(*(tensor.to(device) for tensor in (rows, relay_lens, relay_bonus, table)), **out)
    own = [row if 0 <= row < num_rows else 0 for row in rows.tolist()]
    assert out["lens"].tolist() == [row % 15 for row in own]
    assert out["bonus"].tolist() == [100 + row for row in own]
    assert out["slots"].tolist() == [1000 + row * width + min(row % 15, width - 1) for row in own]


@pytest.mark.parametrize(("live", "decides"), [(0, 1), (3, 1), (BLOCK + 3, 1), (BLOCK + 3, 0)])
@pytest.mark.parametrize("act", [leave, leave_torch], ids=["triton", "torch"])
def test_leave_moves_live_rows_on(act, live: int, decides: int, device: str) -> None:
    """One entry more and the chosen token, for the live ones alone, and only where the program decides."""
    n, num_rows = BLOCK + 3, BLOCK + 9
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))[:n]
    rows[1] = num_rows + 5
    relay_lens, relay_bonus = (torch.full((num_rows,), POISON, device=device) for _ in range(2))
    lens, chosen = torch.arange(n, device=device) * 3, torch.arange(n, device=device) + 500
    counts = {name: torch.tensor([value], device=device) for name, value in (("num_live", live), ("decides", decides))}
    act(rows.to(device), relay_lens, relay_bonus, lens=lens, chosen=chosen, **counts)
    wanted = [[POISON] * num_rows, [POISON] * num_rows]
    for entry, row in enumerate(rows.tolist()[: live if decides else 0]):
        if row < num_rows:
            wanted[0][row], wanted[1][row] = 3 * entry + 1, entry + 500
    assert [relay_lens.tolist(), relay_bonus.tolist()] == wanted


def test_operands_of_other_shapes_are_refused() -> None:
    """With the shape that was given and the one that is due."""
    three, two = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"slots must be contiguous \[3\] int64, got \[2\]"):
        take(three, two, two, two[:, None], lens=three, bonus=three, slots=two)
    with pytest.raises(ValueError, match=r"table must be contiguous \[2, width\], got \[3, 1\]"):
        take(three, two, two, three[:, None], lens=three, bonus=three, slots=three)
    with pytest.raises(ValueError, match=r"relay_bonus must be contiguous \[2\] int64, got \[3\]"):
        leave(three, two, three, lens=three, chosen=three, num_live=two[:1], decides=two[:1])
