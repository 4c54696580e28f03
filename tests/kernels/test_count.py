"""Count: totals by check and by row, and the first finding of each check, kept for good."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.judge.count import UNSET, count, count_torch, unset_first

POISON = -77
R1, R3, R4, R5, R12, W9 = 1, 4, 8, 16, 2048, 1 << 40
both = pytest.mark.parametrize("operation", [count, count_torch], ids=["triton", "torch"])


@dataclass
class Header:
    """What the tests expect of the three outputs; rows of `first` that are set, by bit."""

    num_rows: int
    counts: list[int] = field(default_factory=lambda: [0] * 64)
    first: dict[int, list[int]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = self.rows or [0] * self.num_rows

    def add(self, violations: list[tuple[int, int, int, int]], step: int) -> None:
        """Violations are (entry, slot, row, code) in any order."""
        new: dict[int, list[int]] = {}
        for entry, slot, row, code in sorted(violations):
            for bit in range(64):
                if code >> bit & 1:
                    self.counts[bit] += 1
                    new.setdefault(bit, [entry, slot, row, step % 2**32])
            if 0 <= row < self.num_rows:
                self.rows[row] += 1
        self.first = new | self.first


class Device:
    """The three outputs on the device, between guards where there is room for them."""

    def __init__(self, num_rows: int, device: str) -> None:
        self.counts = torch.zeros(64, dtype=torch.int64, device=device)
        self.first = unset_first(device)
        self.arrivals = torch.zeros(1, dtype=torch.int64, device=device)
        self.around = torch.full((num_rows + 2,), POISON, dtype=torch.int64, device=device)
        self.rows = self.around[1:-1]
        self.rows.zero_()

    def outputs(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "first": self.first, "row_violations": self.rows, "arrivals": self.arrivals}

    def equals(self, header: Header) -> bool:
        first = [header.first.get(bit, list(UNSET)) for bit in range(64)]
        assert not self.arrivals.any()
        found = self.counts.tolist(), self.first.tolist(), self.around.tolist()
        return found == (header.counts, first, [POISON, *header.rows, POISON])


@both
def test_count_adds_up_and_keeps_the_first(operation, device: str, tensor) -> None:
    """Three launches: nothing, then findings, then more of them at smaller entries: the first ones stay."""
    slots = list(range(100, 112))
    header, found = Header(3), Device(3, device)
    given = {"starts": tensor([1, 6, 6]), "lengths": tensor([4, 0, 5])}

    def launch(codes: dict[int, int], step: int) -> None:
        row_codes = tensor([codes.get(i, POISON if i in (0, 5, 11) else 0) for i in range(12)])
        operation(row_codes, tensor(slots), **given, step=tensor([step]), **found.outputs())
        header.add([(i, slots[i], 0 if i < 5 else 2, code) for i, code in codes.items()], step)
        assert found.equals(header)

    launch({}, 4)
    assert header.first == {}
    launch({3: R4, 8: R4 | R5, 7: R5, 10: R5}, 5)
    assert header.first == {3: [3, 103, 0, 5], 4: [7, 107, 2, 5]}
    launch({1: R4 | R5 | R12, 10: W9 | R12}, 6)
    assert header.first[11] == [1, 101, 0, 6]
    assert header.first[40] == [10, 110, 2, 6]
    assert header.first[3] == [3, 103, 0, 5]
    assert (header.rows, sum(header.counts)) == ([2, 0, 4], 10)
    launch({3: R4}, 7)  # the very entry of the first one


@both
def test_count_takes_every_bit(operation, device: str, tensor) -> None:
    """Bit 63 is a bit as every other; the step is stored as unsigned 32 bits, so that it never looks unset."""
    header, found = Header(1), Device(1, device)
    given = {"starts": tensor([0]), "lengths": tensor([2]), "step": tensor([-1])}
    operation(tensor([0, 2**64 - 1]), tensor([4, 5]), **given, **found.outputs())
    header.add([(1, 5, 0, 2**64 - 1)], 2**32 - 1)
    assert found.equals(header)


@both
@pytest.mark.parametrize("slot", [-5, 2**41, -(2**62)])
def test_count_shows_the_slot_that_was_asked_for(operation, slot: int, device: str, tensor) -> None:
    """An index out of range stands in the header as the index array has it."""
    found = Device(1, device)
    given = {"starts": tensor([1]), "lengths": tensor([1]), "step": tensor([1])}
    operation(tensor([R1, R1]), tensor([3, slot]), **given, **found.outputs())
    assert found.first[0].tolist() == [1, slot, 0, 1]


@both
def test_segments_of_one_row_count_together(operation, device: str, tensor) -> None:
    """Branches of a row add up in it; what is no row counts for its check, for no row, and is not new forever."""
    header, found = Header(2), Device(2, device)
    given = {"starts": tensor([0, 2, 4, 5]), "lengths": tensor([2, 2, 1, 1]), "row_ids": tensor([1, 1, -1, 2])}
    for step in (3, 4):
        operation(
            tensor([R4, 0, R4, R4, R5, R12]), tensor(list(range(6))), **given, step=tensor([step]), **found.outputs()
        )
        header.add([(0, 0, 1, R4), (2, 2, 1, R4), (3, 3, 1, R4), (4, 4, -1, R5), (5, 5, 2, R12)], step)
        assert found.equals(header)
    assert header.first[4] == [4, 4, -1, 3]
    assert header.rows == [0, 6]


@both
@pytest.mark.parametrize("live", [0, 1, 2, 9])
def test_count_leaves_padding_alone(operation, live: int, device: str, tensor) -> None:
    """Stale codes of segments at and after the live count are not counted."""
    header, found = Header(2), Device(2, device)
    given = {"starts": tensor([1, 0]), "lengths": tensor([1, 1]), "step": tensor([1]), "num_live": tensor([live])}
    operation(tensor([R5, R5]), tensor([8, 9]), **given, **found.outputs())
    header.add([(1, 9, 0, R5), (0, 8, 1, R5)][:live], 1)
    assert found.equals(header)


@both
@pytest.mark.parametrize("lengths", [[], [0]], ids=["none", "empty"])
def test_count_takes_few_segments(operation, lengths: list[int], device: str, tensor) -> None:
    """No segment, and one without entries."""
    found = Device(1, device)
    given = {"starts": tensor([0] * len(lengths)), "lengths": tensor(lengths), "step": tensor([1])}
    operation(tensor([R5]), tensor([8]), **given, **found.outputs())
    assert found.equals(Header(1))


@both
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_count_of_many_findings(operation, seed: int, device: str, tensor) -> None:
    """Rows longer than one program's share, in an order of their own, over three launches."""
    draw = random.Random(seed)
    lengths, starts = [700, 1, 0, 129], [130, 830, 900, 0]
    header, found = Header(4), Device(4, device)
    slots = [draw.randrange(5000) for _ in range(900)]
    for step in range(3):
        codes = [draw.choice([0, 0, 0, 1 << draw.randrange(step * 10, step * 10 + 9), R4 | W9]) for _ in range(900)]
        given = {"starts": tensor(starts), "lengths": tensor(lengths), "step": tensor([step])}
        operation(tensor(codes), tensor(slots), **given, **found.outputs())
        segments = list(enumerate(zip(starts, lengths, strict=True)))
        entries = [(i, row) for row, (start, length) in segments for i in range(start, start + length)]
        header.add([(i, slots[i], row, codes[i]) for i, row in entries if codes[i]], step)
        assert found.equals(header)


@both
def test_count_refuses_wrong_sizes(operation, device: str, tensor) -> None:
    """Each output is named with the shape that it should have."""
    found = Device(1, device)
    given = {"starts": tensor([0]), "lengths": tensor([1]), "step": tensor([1])}
    with pytest.raises(ValueError, match=r"counts must be contiguous \[64\] int64, got \[63\]"):
        operation(tensor([0]), tensor([8]), **given, **(found.outputs() | {"counts": found.counts[:63]}))
    with pytest.raises(ValueError, match=r"first must be contiguous \[64, 4\] int64, got \[64, 3\]"):
        operation(tensor([0]), tensor([8]), **given, **(found.outputs() | {"first": found.first[:, :3]}))
    with pytest.raises(ValueError, match=r"codes must be contiguous \[1\] int64, got \[2\]"):
        operation(tensor([0, 0]), tensor([8]), **given, **found.outputs())
