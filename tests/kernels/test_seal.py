"""Seal: what a slot's record says after a write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.record.layout import Keys, make_keys, read_record, seal_host
from kvcanary_kernels.record.seal import seal, seal_torch

MASK = 2**64 - 1
POISON = -77
NUM_SLOTS = 24
both = pytest.mark.parametrize("operation", [seal, seal_torch], ids=["triton", "torch"])


def oracle(fields: dict[str, int], slot: int, pool_id: int, keys: Keys) -> list[int]:
    """The 16 words of a record, the seal summed by hand."""
    chain = fields["chain"]
    words = [fields["token"], fields["position"], chain & 0xFFFFFFFF, chain >> 32]
    words += [fields["request"], fields["generation"], fields["step"], fields["site"]]
    words = [w & 0xFFFFFFFF for w in words]
    value = keys.seal_start
    for key, word in zip(keys.seal_keys, [*words, slot, pool_id], strict=True):
        value += key * word
    value &= MASK
    return [*words, 0, 0, 0, 0, 0, 0, value & 0xFFFFFFFF, value >> 32]


def words_of(records: Tensor) -> list[list[int]]:
    return [[w & 0xFFFFFFFF for w in row] for row in records.view(torch.int32).tolist()]


def arguments(n: int, broadcast: bool) -> dict[str, list[int]]:
    """Plain values with every sign and size that 32-bit fields see; step beyond 2^31 as a long run has it."""
    some = [0, 1, 2**31, 2**32 - 1, 12345, 77, 4096, 151000, 2**31 - 1]
    values = {
        name: [some[(i * 5 + offset) % len(some)] for i in range(n)]
        for offset, name in enumerate(("tokens", "positions", "requests", "generations", "step", "sites"))
    }
    if broadcast:
        values.update({name: values[name][:1] for name in ("requests", "generations", "step", "sites")})
    values["chains"] = [(i + 1) * 0xF123456789ABCDEF & MASK for i in range(n)]
    return values


def fields_of(values: dict[str, list[int]], i: int) -> dict[str, int]:
    names = {"tokens": "token", "positions": "position", "chains": "chain", "requests": "request"}
    names.update({"generations": "generation", "sites": "site"})
    return {names.get(name, name): v[i if len(v) > 1 else 0] for name, v in values.items()}


@both
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_seal_writes_the_record(operation, n: int, broadcast: bool, device: str, tensor) -> None:
    """Every word of every written record, and not a word of any other slot."""
    if n == 0 and broadcast:
        pytest.skip("nothing to broadcast to")
    keys = make_keys(2, 1, 4, device)
    slots, values = [23, 0, 5, 7, 6, 2, 19, 11, 13][:n], arguments(n, broadcast)
    records = torch.full((NUM_SLOTS, 8), POISON, device=device)
    given = {name: tensor(v) for name, v in values.items()}
    operation(records, tensor(slots), **given, pool_id=1, keys=keys)
    found = words_of(records)
    for slot in range(NUM_SLOTS):
        if slot in slots:
            assert found[slot] == oracle(fields_of(values, slots.index(slot)), slot, 1, keys)
        else:
            assert (records[slot] == POISON).all()


@both
def test_seal_writes_nothing_for_padding_and_bad_slots(operation, device: str, tensor) -> None:
    """A refused slot keeps its old record; padding writes nothing."""
    keys = make_keys(2, 1, 4, device)
    records = torch.full((NUM_SLOTS, 8), POISON, device=device)
    given = {name: tensor(v) for name, v in arguments(6, False).items()}
    slots = tensor([-1, 24, 3, 2**40, 4, 5])
    operation(records, slots, **given, pool_id=0, keys=keys, num_live=tensor([5]))
    changed = (records != POISON).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [3, 4]


@both
def test_seal_of_pools_and_slots_differ(operation, device: str, tensor) -> None:
    """The same identity in another slot or another pool carries another seal, and the host's twin agrees."""
    keys = make_keys(2, 1, 4, device)
    records = torch.zeros(NUM_SLOTS, 8, dtype=torch.int64, device=device)
    given = {name: tensor(v * 2) for name, v in arguments(1, False).items()}
    operation(records, tensor([3, 4]), **given, pool_id=0, keys=keys)
    other = torch.zeros_like(records)
    operation(other, tensor([3, 4]), **given, pool_id=1, keys=keys)
    seals = [read_record(r, s).seal for r in (records, other) for s in (3, 4)]
    assert len(set(seals)) == 4
    assert seals == [seal_host(read_record(r, s), s, p, keys) for p, r in enumerate((records, other)) for s in (3, 4)]


@both
def test_seal_refuses_wrong_shapes(operation, device: str, tensor) -> None:
    """Each argument is named with the shape that it should have."""
    given = {name: tensor(v) for name, v in arguments(2, False).items()}
    keys = make_keys(2, 1, 4, device)
    records = torch.zeros(NUM_SLOTS, 8, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"slots must be contiguous \[1\] int64|tokens must be contiguous \[1\] int64"):
        operation(records, tensor([3]), **given, pool_id=0, keys=keys)
    with pytest.raises(ValueError, match=r"records must be \[num_slots, 8\] int64, got \[24, 7\]"):
        operation(records[:, :7], tensor([3, 4]), **given, pool_id=0, keys=keys)
