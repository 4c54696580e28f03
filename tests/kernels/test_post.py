"""Post: numbers of the device lie in the host's box when what was launched is over, in the line of their turn."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.judge.post import parts_of, post, post_torch

POISON = -77
both = pytest.mark.parametrize("operation", [post, post_torch], ids=["triton", "torch"])


def box_of(lines: int, n: int, device: str) -> torch.Tensor:
    return torch.full((lines, n), POISON).pin_memory() if device == "cuda" else torch.full((lines, n), POISON)


@both
@pytest.mark.parametrize("sizes", [[0], [1], [1023], [2500], [3, 0, 1025, 1], [0, 0, 7]])
def test_post_writes_the_line_of_its_turn(operation, sizes: list[int], device: str, tensor) -> None:
    """Parts one behind the other, also empty ones; turns go around; below their 32 bits, and other lines: untouched."""
    n = sum(sizes)
    box, numbers = box_of(3, n, device), torch.zeros(n, dtype=torch.int64, device=device)
    parts = parts_of(numbers.split(sizes))
    for turn, expected in ((1, [None, 0, None]), (5, [None, 0, 1]), (4, [None, 2, 1])):
        torch.arange(n, out=numbers)
        numbers += {1: 0, 5: 1, 4: 2}[turn]
        operation(parts, tensor([turn << 32 | 2**32 - 1]), box=box)
        if device == "cuda":
            torch.cuda.synchronize()
        for line, start in zip(box.tolist(), expected, strict=True):
            assert line == ([POISON] * n if start is None else list(range(start, start + n)))


def test_parts_lie_anywhere(device: str, tensor) -> None:
    """Memory of their own, read when it is posted."""
    first, second = tensor([1, 2, 3]), tensor([4])
    parts, box = parts_of([first, tensor([9])[:0], second]), box_of(1, 4, device)
    second += 1
    post(parts, tensor([0]), box=box)
    if device == "cuda":
        torch.cuda.synchronize()
    assert (parts.numel, box.tolist()) == (4, [[1, 2, 3, 5]])


@both
def test_post_refuses_what_does_not_fit(operation, device: str, tensor) -> None:
    """A box of another width or type, several turns."""
    parts, turn = parts_of([tensor([1]), tensor([2])]), tensor([0])
    words = r"box must be contiguous \[lines, 2\] int64 in host memory, got"
    with pytest.raises(ValueError, match=words + r" \[3, 1\] torch.int64 on cpu"):
        operation(parts, turn, box=torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=words + r" \[3, 2\] torch.float32 on cpu"):
        operation(parts, turn, box=torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"turn must be contiguous \[1\] int64"):
        operation(parts, tensor([1, 2]), box=torch.zeros(3, 2, dtype=torch.int64))


def test_parts_are_flat_int64(device: str, tensor) -> None:
    """Else their words would be read as what they are not."""
    with pytest.raises(ValueError, match=r"part must be contiguous \[2\] int64, got \[2\] torch.int32"):
        parts_of([tensor([1]), tensor([1, 2]).int()])
    with pytest.raises(ValueError, match=r"part must be contiguous \[2\] int64, got \[1, 2\]"):
        parts_of([tensor([1, 2])[None]])
