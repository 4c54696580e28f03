"""Aliasing: do two tensors of a pool share memory? What is written into one would then damage the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcanary_kernels.record.rows import WORD_BYTES

Steps = list[tuple[int, int, int]]  # (stride, lowest and highest multiple of it), largest stride first


def first_overlap(views: Sequence[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Names of the first two of these int32 views that share a word, or of one twice that overlaps itself."""
    for name, view in views:
        if _overlaps_itself(view):
            return name, name
    pairs: list[tuple[int, int]] = []
    reaching: list[tuple[int, int]] = []  # (end, number) of the views that reach beyond the start of this one
    for start, end, number in sorted((*_span(view), number) for number, (_, view) in enumerate(views)):
        reaching = [(other_end, other) for other_end, other in reaching if other_end > start]
        pairs += [
            (min(number, other), max(number, other))
            for _, other in reaching
            if share_words(views[number][1], views[other][1])
        ]
        reaching.append((end, number))
    if not pairs:
        return None
    first, second = min(pairs)
    return views[first][0], views[second][0]


def share_words(first: Tensor, second: Tensor) -> bool:
    """Whether two strided int32 views, neither of which overlaps itself, have a word in common.

    Word x of the first is word y of the second where sum(stride * x) - sum(stride * y) is the distance between them.
    """
    digits: dict[int, tuple[int, int]] = {}
    for stride, size in _dims(first):
        low, high = digits.get(stride, (0, 0))
        digits[stride] = low, high + size - 1
    for stride, size in _dims(second):
        low, high = digits.get(stride, (0, 0))
        digits[stride] = low - size + 1, high
    steps = [(stride, *bounds) for stride, bounds in sorted(digits.items(), reverse=True)]
    return _reaches(steps, (second.data_ptr() - first.data_ptr()) // WORD_BYTES)


def _reaches(steps: Steps, distance: int) -> bool:
    """Whether `distance` is a sum of multiples within these bounds: few of the largest leave what the rest can give."""
    if not steps:
        return distance == 0
    (stride, low, high), *rest = steps
    least, most = sum(s * bound for s, bound, _ in rest), sum(s * bound for s, _, bound in rest)
    low, high = max(low, -(-(distance - most) // stride)), min(high, (distance - least) // stride)
    return any(_reaches(rest, distance - stride * digit) for digit in range(low, high + 1))


def _overlaps_itself(view: Tensor) -> bool:
    """Whether a step is shorter than what it steps over; layouts whose words mesh like teeth are none that we take."""
    reach = 1
    for stride, size in sorted(_dims(view)):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _span(view: Tensor) -> tuple[int, int]:
    start = view.data_ptr() // WORD_BYTES
    return start, start + 1 + sum(stride * (size - 1) for stride, size in _dims(view))


def _dims(view: Tensor) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1]
