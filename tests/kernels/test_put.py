"""Put: what is reported of slots that are stored twice, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.content.put import put, put_torch
from kvcanary_kernels.record.layout import make_keys
from stored_pool import POISON, by_put

both = pytest.mark.parametrize("operation", [put, put_torch], ids=["triton", "torch"])


@both
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_stored_again_is_reported(operation, layer: int, make_stored, make_content) -> None:
    """Its slots alone are reported; bytes and fingerprints are those of the new values, the start is not doubled."""
    pool, first, second = make_stored(12, "hnd", 4), make_content(2, seed=1), make_content(3, seed=2)
    for either in (0, 1):
        assert by_put(operation)(pool, either, [5, 10], first) == [POISON] * 2
    assert by_put(operation)(pool, layer, [10, 3, 5], second) == [1, POISON, 1]
    assert by_put(operation)(pool, 1 - layer, [10, 3, 5], second) == [1, POISON, 1]
    pool.expect([10, 3, 5], second, [0, 1])


@both
@pytest.mark.parametrize("stored", [False, True])
def test_entries_that_share_a_slot_are_reported(operation, stored: bool, device, make_stored, make_content) -> None:
    """All but the first of them; one after the other, the last one's values stay."""
    pool, values = make_stored(12, "hnd", 4), make_content(6, seed=1)
    if stored:
        assert by_put(operation)(pool, 0, [5], make_content(1, seed=2)) == [POISON]
    twice = by_put(operation)(pool, 0, [5, 3, 5, -1, 3, 5], values, num_live=torch.tensor([6], device=device))
    if device == "cpu":  # on a GPU they race: which one is first, and whose bytes stay, is open
        assert twice == [1 if stored else POISON, POISON, 1, POISON, 1, 1]
        for part in (values.k, values.v):
            part[:] = [t[[5, 4]] for t in part]
        pool.expect([5, 3], values, [0])
    assert twice.count(1) == 3 + stored


@both
def test_the_entries_of_one_slot_alone(operation, device, make_stored, make_content) -> None:
    """Nothing else is stored: the later one is reported, and stays."""
    pool, values = make_stored(12, "hnd", 4), make_content(2, seed=1)
    twice = by_put(operation)(pool, 0, [5, 5], values)
    if device == "cpu":  # on a GPU they race
        assert twice == [POISON, 1]
        for part in (values.k, values.v):
            part[:] = [t[[1]] for t in part]
        pool.expect([5], values, [0])
    assert twice.count(1) == 1


@both
def test_a_layer_of_the_highest_bits_is_reported(operation, make_stored, make_content) -> None:
    """Bits 63 and 127 of the bitmap are looked at as any other."""
    pool, values = make_stored(4, dim=2, layers=128), make_content(1, dim=2, layers=128, seed=1)
    for layer in (63, 127):
        assert [by_put(operation)(pool, layer, [2], values) for _ in range(2)] == [[POISON], [1]]


@both
def test_put_refuses_what_does_not_fit(operation, make_stored, make_content) -> None:
    """Each refusal shows what was wanted and what came, and nothing has been written."""
    pool, values = make_stored(), make_content(2, seed=1)
    before, slots = pool.state(), torch.tensor([1, 2], device=pool.device)

    def refused(match: str, **changed) -> None:
        given = {**pool.tables, "twice": slots.clone(), **changed}
        with pytest.raises(ValueError, match=match):
            operation(pool.rows, 0, slots, values.k[0], values.v[0], **given)

    refused(r"twice must be contiguous \[2\] int64", twice=slots[:1])
    refused(r"num_live must be contiguous \[1\] int64", num_live=slots)
    refused("records must have a row a slot, got 11 for 12 slots", records=pool.records[:11])
    refused(r"content_a must be \[2, 12\] int64", content_a=pool.content_a[:1])
    refused("keys are for 2 layers of 8 words", keys=make_keys(1, 2, 8))
    assert pool.state() == before
