"""Store and attest: what is reported of slots that are stored twice, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.content.attest import attest, attest_torch, kept_rows
from kvcanary_kernels.content.store import store, store_torch
from kvcanary_kernels.record.layout import make_keys
from stored_pool import by_store

OPERATIONS = (store, attest), (store_torch, attest_torch)
both = pytest.mark.parametrize("operation", OPERATIONS, ids=["triton", "torch"])


@both
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_stored_again_is_reported(operation, layer: int, make_stored, make_content) -> None:
    """For every slot; bytes and fingerprints are those of the new values, and nothing is added twice."""
    pool, first, second = make_stored(12, "hnd", 4), make_content(2, seed=1), make_content(2, seed=2)
    second.k[1 - layer], second.v[1 - layer] = first.k[1 - layer], first.v[1 - layer]
    store, attest = operation
    calls = iter([first, first, second])

    def store_next(rows, layer, slots, *_, **options) -> None:
        values = next(calls)
        store(rows, layer, slots, values.k[layer], values.v[layer], **options)

    assert by_store(store_next, attest)(pool, [layer, 1 - layer, layer], [10, 5], first) == [1, 1]
    pool.expect([10, 5], second, [0, 1])


@both
def test_attest_leaves_padding_as_it_is(operation, make_stored, tensor) -> None:
    """An entry that is not live keeps its count, and its slot keeps record and fingerprints."""
    pool, (_, attest) = make_stored(), operation
    layers, before = pool.rows.num_layers, (pool.records[2].tolist(), pool.content_a[:, 2].tolist())
    kept = torch.zeros(layers, 2, pool.rows.words_per_row, dtype=torch.int32, device=pool.device)
    times = torch.ones_like(kept[..., 0], dtype=torch.int64)
    given = {"times": times, "twice": tensor([0, 0]), "num_live": tensor([1]), **pool.tables}
    attest(kept_rows(pool.rows, kept), tensor([1, 2]), **given)
    assert times.tolist() == [[0, 1]] * layers
    assert (pool.records[2].tolist(), pool.content_a[:, 2].tolist()) == before


@both
def test_store_refuses_what_does_not_fit(operation, make_stored, make_content) -> None:
    """Each refusal shows what was wanted and what came, and nothing has been written."""
    pool, values = make_stored(), make_content(2, seed=1)
    before, slots = pool.state(), torch.tensor([1, 2], device=pool.device)
    store, attest = operation
    kept = torch.zeros(2, 2, 24, dtype=torch.int32, device=pool.device)
    times = torch.zeros(2, 2, dtype=torch.int64, device=pool.device)

    def not_stored(match: str, **changed) -> None:
        with pytest.raises(ValueError, match=match):
            store(pool.rows, 0, slots, values.k[0], values.v[0], **{"kept": kept, "times": times, **changed})

    def not_attested(match: str, n: int = 2, **changed) -> None:
        given = {**pool.tables, "times": times, "twice": slots.clone(), **changed}
        with pytest.raises(ValueError, match=match):
            attest(kept_rows(pool.rows, kept[:, :n]), slots, **given)

    not_stored(r"times must be \[2, 2\] int64", times=times[:1])
    not_stored(r"kept must be contiguous \[2, 2, 24\] int32, got \[2, 2, 24\] torch.float32", kept=kept.float())
    not_attested("kept must have a row an entry, got 1 for 2 entries", n=1)
    not_attested(r"times must be \[2, 2\] int64", times=times[:1])
    not_attested(r"twice must be contiguous \[2\] int64", twice=slots[:1])
    not_attested(r"content_a must be \[2, 12\] int64", content_a=pool.content_a[:1])
    not_attested("keys are for 2 layers of 8 words", keys=make_keys(1, 2, 8))
    assert pool.state() == before
