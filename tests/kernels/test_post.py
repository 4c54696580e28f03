"""Post: numbers of the device lie in the host's box when what was launched is over, in the line of their turn."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.post import post, post_torch

POISON = -77
both = pytest.mark.parametrize("operation", [post, post_torch], ids=["triton", "torch"])


def box_of(lines: int, n: int, device: str) -> torch.Tensor:
    return torch.full((lines, n), POISON).pin_memory() if device == "cuda" else torch.full((lines, n), POISON)


@both
@pytest.mark.parametrize("n", [0, 1, 1023, 2500])
def test_post_writes_the_line_of_its_turn(operation, n: int, device: str, tensor) -> None:
    """Turns go around; what is below their 32 bits, and every other line, is left alone."""
    box = box_of(3, n, device)
    for turn, expected in ((1, [None, 0, None]), (5, [None, 0, 1]), (4, [None, 2, 1])):
        add = {1: 0, 5: 1, 4: 2}[turn]
        operation(torch.arange(n, device=device) + add, tensor([turn << 32 | 2**32 - 1]), box=box)
        if device == "cuda":
            torch.cuda.synchronize()
        for line, start in zip(box.tolist(), expected, strict=True):
            assert line == ([POISON] * n if start is None else list(range(start, start + n)))


@both
def test_post_refuses_what_does_not_fit(operation, device: str, tensor) -> None:
    """A box of another width or type, numbers of another type, several turns."""
    numbers, turn = tensor([1, 2]), tensor([0])
    words = r"box must be contiguous \[lines, 2\] int64 in host memory, got"
    with pytest.raises(ValueError, match=words + r" \[3, 1\] torch.int64 on cpu"):
        operation(numbers, turn, box=torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=words + r" \[3, 2\] torch.float32 on cpu"):
        operation(numbers, turn, box=torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"numbers must be contiguous \[2\] int64, got \[2\] torch.int32"):
        operation(numbers.int(), turn, box=torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"turn must be contiguous \[1\] int64"):
        operation(numbers, numbers, box=torch.zeros(3, 2, dtype=torch.int64))
