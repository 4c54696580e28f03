"""The likeliest token of long rows."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.engine.likeliest import BLOCK, likeliest, likeliest_torch

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 5, BLOCK, 2 * BLOCK + 7])
def test_the_first_of_the_largest(dtype, size: int, device: str) -> None:
    """Rows of few values, so that there are equals in every part; rows at any stride, outputs that were poisoned."""
    logits = torch.randint(0, 9, (4, size + 3), generator=torch.Generator().manual_seed(size)).to(device, dtype)[
        :, :size
    ]
    out, twin = (torch.full((4,), -7, dtype=torch.int64, device=device) for _ in range(2))
    likeliest(logits, out)
    likeliest_torch(logits, twin)
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert out.tolist() == wanted
    assert twin.tolist() == wanted


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ([NAN, 1.0, 2.0], 2),
        ([1.0, INF, INF], 1),
        ([torch.finfo(torch.float32).max, INF, 0.0], 0),
        ([-INF, NAN, -INF], 0),
        ([-INF, NAN, -3.0], 2),
    ],
)
def test_numbers_that_are_none(row: list[float], place: int, device: str) -> None:
    """NaN counts as -inf, inf as the largest finite number; a row without one finite number gives 0."""
    logits, out = torch.tensor([row], device=device), torch.full((1,), -7, device=device)
    likeliest(logits, out)
    assert out.tolist() == [place]
    likeliest_torch(logits, out)
    assert out.tolist() == [place]


def test_operands_of_other_shapes_are_refused() -> None:
    """Rows of nothing have no largest."""
    with pytest.raises(ValueError, match=r"logits must be \[n, size > 0\] with dense rows, got \[2, 0\]"):
        likeliest(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64))
