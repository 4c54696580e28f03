"""The likeliest candidates of long rows."""

from __future__ import annotations

import math

import pytest
import torch

from kvcanary_kernels.engine.candidates import BLOCK, candidates, candidates_torch

INF, NAN = float("inf"), float("nan")
both = pytest.mark.parametrize("operation", [candidates, candidates_torch], ids=["triton", "torch"])


def found(operation, logits: torch.Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Probabilities and places, from outputs that were poisoned."""
    probs = torch.full((len(logits), k), -7.0, device=logits.device)
    ids = torch.full((len(logits), k), -7, device=logits.device)
    operation(logits, probs=probs, ids=ids)
    return probs.tolist(), ids.tolist()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "k"), [(1, 1), (5, 5), (BLOCK, 3), (2 * BLOCK + 2, 4)])
def test_the_likeliest_with_their_probabilities(operation, dtype, size: int, k: int, device: str) -> None:
    """Rows of few values, so that there are equals in every part; a last part of fewer than k; rows at any stride."""
    values = torch.randint(0, 9, (3, size + 3), generator=torch.Generator().manual_seed(size)).to(device, dtype)
    logits = values[:, :size]
    probs, ids = found(operation, logits, k)
    for row, own_probs, own_ids in zip(logits.tolist(), probs, ids, strict=True):
        assert own_ids == sorted(range(size), key=lambda place: (-row[place], place))[:k]
        total = math.fsum(math.exp(x) for x in row)
        assert own_probs == pytest.approx([math.exp(row[place]) / total for place in own_ids], rel=1e-5)


@both
@pytest.mark.parametrize(
    ("row", "places", "expected"),
    [
        ([-INF, 0.0, -INF, 0.0], [1, 3, 0], [0.5, 0.5, 0.0]),
        ([-INF] * BLOCK + [3.0, 3.0, -INF], [BLOCK, BLOCK + 1, 0], [0.5, 0.5, 0.0]),
        ([1e30, -1e30, 1e30], [0, 2, 1], [0.5, 0.5, 0.0]),
        ([1.0, NAN, 2.0], [2, 0, 1], None),
        ([1.0, INF, 2.0], [1, 2, 0], None),
        ([-INF] * (BLOCK + 2), [0, 1, 2], None),
        ([NAN] * 4, [0, 1, 2], None),
    ],
)
def test_numbers_that_are_none(operation, row: list[float], places: list[int], expected, device: str) -> None:
    """What cannot be summed has no probability, and places all the same; -inf has probability 0."""
    probs, ids = found(operation, torch.tensor([row], device=device), 3)
    assert ids == [places]
    if expected is None:
        assert all(math.isnan(value) for value in probs[0])
    else:
        assert probs == [pytest.approx(expected)]


@both
def test_no_rows(operation, device: str) -> None:
    """Nothing is asked of nothing."""
    assert found(operation, torch.zeros(0, 9, device=device), 2) == ([], [])


@both
def test_operands_that_do_not_fit_are_refused(operation) -> None:
    """Each refusal shows what was wanted and what came."""
    with pytest.raises(ValueError, match=r"logits must be \[n, size >= 3\] with dense rows, got \[2, 2\]"):
        found(operation, torch.zeros(2, 2), 3)
    with pytest.raises(ValueError, match=r"probs must be contiguous \[2, 1\] fp32, got \[2, 2\] torch.float32"):
        operation(torch.zeros(2, 4), probs=torch.zeros(2, 2), ids=torch.zeros(2, 1, dtype=torch.int64))
    for probs, ids_shape in (
        (torch.zeros(2, 1, dtype=torch.float64), (2, 1)),
        (torch.zeros(2, 1), (1, 2, 1)),
        (torch.zeros(2, 2)[:, :1], (2, 1)),
    ):
        with pytest.raises(ValueError, match=r"probs must be contiguous \[2, 1\] fp32, got \[2, 1\]"):
            operation(torch.zeros(2, 4), probs=probs, ids=torch.zeros(ids_shape, dtype=torch.int64))
