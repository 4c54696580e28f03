"""Compiled loops: what they are given, and that they give what the torch references and the plain rules give."""

from __future__ import annotations

import pytest
import torch

from kvcanary import PoolView, ReadPlan, WritePlan
from kvcanary.lanes import lanes_of_slots

SLOTS = 40


def stored(values, dtype=torch.float32):
    """The canary's lanes of values [n, 2, 8] that went through a store, and those of the same bytes in the pool."""
    from kvcanary import CanaryConfig, CanaryManager

    kv = torch.zeros(2, SLOTS, 2, 8, dtype=dtype)
    view = PoolView("target", [kv[0]], [kv[1]], 4)
    canary = CanaryManager(CanaryConfig(mode="raise", content="full", seed=1), [view])
    canary.arm()
    canary.begin_step(1)
    n = len(values[0])
    canary.admit("only", list(range(n)))
    canary.on_alloc("only", [1, 2])
    substep, slots = canary.substep("prefill", 0, "target"), torch.arange(4, 4 + n)
    read = ReadPlan(torch.tensor([0, n]), slots, ("only",), 1, torch.tensor([0]), n)
    substep.open(read, WritePlan(slots, slots - 4, slots - 4))
    substep.store(0, *values)
    for part, value in zip(kv, values, strict=True):
        part[slots] = value.to(dtype)
    substep.close()
    canary.check()
    pool = canary._state.pools[0]
    canary.detach()
    return (pool.content_a[:, slots], pool.records[slots, 4]), lanes_of_slots(pool, slots)


def split(product):
    return product[:, 1:3], product[:, 4:6]


VALUES = {
    "dense": lambda x: (x[:, :2].contiguous(), x[:, 2:4].contiguous()),
    "views of one product": split,
    "transposed": lambda x: tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in split(x)),
    "of another type": lambda x: tuple(part.double() for part in split(x)),
    "a row repeated": lambda x: (x[:1, :2].expand(len(x), 2, 8), x[:, 2:4]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("given", VALUES)
@pytest.mark.parametrize("n", [1, 5])
def test_values_of_any_strides_have_the_lanes_of_the_bytes_that_they_become(given, dtype, n):
    """Rows that lie apart, in another order or in another type are fingerprinted as the pool will hold them."""
    product = torch.randint(0, 250, (n, 6, 8), generator=torch.Generator().manual_seed(3)).to(dtype)
    taken, lie = stored(VALUES[given](product), dtype)
    assert all(torch.equal(a, b) for a, b in zip(taken, lie, strict=True))


def test_values_at_an_address_that_is_no_word_are_read_all_the_same():
    """Half-word elements may begin in the middle of a 32-bit word."""
    flat = torch.arange(1 + 5 * 34, dtype=torch.bfloat16)[1:].view(5, 34)
    taken, lie = stored((flat[:, :16].view(5, 2, 8), flat[:, 16:32].view(5, 2, 8)), torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(taken, lie, strict=True))
