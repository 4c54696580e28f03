"""Admit: what it lets be written is what the plan of the same forward lets be written, in kernel and reference."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary_kernels.judge.admit import BLOCK, BLOCK_OTHERS, admit, admit_torch
from kvcanary_kernels.judge.forward import NO_SLOT, ForwardPlan, new_planned
from kvcanary_kernels.judge.plan import NO_CLAIM, plan_torch
from kvcanary_kernels.record import layout as record

NUM_SLOTS, PAGE_SIZE, NULL_SLOTS, POISON = 64, 4, 4, -77
both = pytest.mark.parametrize("operation", [admit, admit_torch], ids=["triton", "torch"])


def make_forward(device: str, written: list[int], slots: list[int], live: int) -> ForwardPlan:
    """Rows of requests 0, 1, 2, 0, ..., each of which reads nothing but what it writes."""
    rows = len(written)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    bounds = [sum(written[:row]) for row in range(rows + 1)]
    positions = [nth for count in written for nth in range(count)]
    positions += [0] * (len(slots) - len(positions))
    tables = {"indices": ints([5] * max(len(slots), 1)), "row_starts": ints(bounds[:-1])}
    own = {"bounds": ints(bounds), "slots": ints(slots), "tokens": ints(positions), "positions": ints(positions)}
    known = {"prefix_lens": ints([0] * rows), "uids": ints([row % 3 for row in range(rows)]), "num_live": ints([live])}
    return ForwardPlan(row_ends=ints(bounds[1:]), parents=None, truths=None, **tables, **own, **known)


def run(operation, forward: ForwardPlan, states: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(forward.slots, POISON)
    sizes = {"num_slots": NUM_SLOTS, "page_size": PAGE_SIZE, "null_slots": NULL_SLOTS}
    operation(forward, states=states, owners=owners, out=out, **sizes)
    return out


@both
@pytest.mark.parametrize("seed", range(4))
def test_the_plan_refuses_the_same(operation, device, seed):
    """Random slots, right, wrong and repeated, on pages of every state and owner; padding is refused."""
    draw = random.Random(seed)
    rows = 7 if seed else BLOCK_OTHERS + 3
    written = [draw.choice([0, 1, 3]) if seed > 1 else 1 for _ in range(rows)]
    n = sum(written) + draw.randrange(3)
    slots = [draw.choice([draw.randrange(4, NUM_SLOTS)] * 4 + [1, -5, NUM_SLOTS, 2**40]) for _ in range(n)]
    forward = make_forward(device, written, slots, live=rows - seed % 2)
    pages = NUM_SLOTS // PAGE_SIZE
    states, owners = (
        torch.tensor([draw.choice(values) for _ in range(pages)], device=device)
        for values in ([*range(9), *[record.RESERVED] * 9], [-2, -1, 0, 0, 1, 1, 2, 2])
    )
    planned = new_planned(forward)
    planned.safe_slots.fill_(NO_SLOT)
    ids = torch.arange(pages, device=device)
    plan_torch(
        forward,
        planned,
        records=torch.zeros(NUM_SLOTS, record.COLUMNS, dtype=torch.int64, device=device),
        generations=torch.ones_like(ids),
        states=states,
        owners=owners,
        claims=torch.full((NUM_SLOTS,), NO_CLAIM, device=device),
        roots=torch.zeros_like(forward.uids),
        site=3,
        width=1,
        page_size=PAGE_SIZE,
        null_slots=NULL_SLOTS,
    )
    assert torch.equal(run(operation, forward, states, owners), planned.safe_slots)


@both
def test_the_first_of_equal_slots_is_admitted(operation, device):
    """However near and far behind the others are, and in whichever row."""
    n = 2 * BLOCK + 1
    forward = make_forward(device, [1] * n, [9, 9, *range(12, 12 + n - 4), 9, 12], live=n)
    states = torch.full((NUM_SLOTS // PAGE_SIZE,), record.RESERVED, device=device)
    forward.uids.zero_()
    found = run(operation, forward, states, torch.zeros_like(states)).tolist()
    assert found == [9, NO_SLOT, *range(12, 12 + n - 4), NO_SLOT, NO_SLOT]


@both
@pytest.mark.parametrize(("written", "live"), [([1, 1], 0), ([1, 1], -3), ([0, 1], 1)])
def test_padding_is_admitted_nowhere(operation, device, written: list[int], live: int):
    """No row is live, or none that writes: their slots would do."""
    forward = make_forward(device, written, [9, 12], live)
    states = torch.full((NUM_SLOTS // PAGE_SIZE,), record.RESERVED, device=device)
    forward.uids.zero_()
    assert run(operation, forward, states, torch.zeros_like(states)).tolist() == [NO_SLOT, NO_SLOT]


@both
def test_a_forward_that_writes_nothing(operation, device):
    """Nothing is launched for it."""
    forward = make_forward(device, [0, 0], [], live=2)
    pages = torch.zeros(NUM_SLOTS // PAGE_SIZE, dtype=torch.int64, device=device)
    assert run(operation, forward, pages, pages).tolist() == []


def test_arrays_of_other_sizes_are_refused(device):
    """Page truth has an entry a page, the output one an entry."""
    forward = make_forward(device, [1], [9], live=1)
    pages = torch.zeros(NUM_SLOTS // PAGE_SIZE, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="states must be"):
        run(admit, forward, pages[1:], pages)
