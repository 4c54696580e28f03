"""Dense rows: bytes compared in one compiled loop, and fingerprints that are appended where there is room."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters.transformers.dense_cache import DenseLayer
from kvcanary.adapters.transformers.judging import DenseCanary


def entries(dtype: torch.dtype, is_dense: bool, n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [3, 2, n, 4]; entries of one head lie apart, and those that are not dense dim by dim too."""
    shape = (3, n, 2, 4)
    k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    if not is_dense:
        k, v = (values.transpose(1, 3).contiguous().transpose(1, 3) for values in (k, v))
    return k.transpose(1, 2), v.transpose(1, 2)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_compared_with_both_fingerprints(dtype: torch.dtype, is_dense: bool) -> None:
    """Equal to the fingerprints that are taken one by one; another byte, or another fingerprint of either kind, is
    seen.
    """
    canary = DenseCanary(CanaryConfig(mode="log", seed=3))
    k, v = entries(dtype, is_dense)
    fingerprints = torch.zeros(2, 3, 9, dtype=torch.int64)[:, :, 2:7].copy_(canary.fingerprints(1, k, v))
    assert canary.holds(1, k, v, fingerprints)
    assert not canary.holds(0, k, v, fingerprints)
    assert canary.holds(1, k[:, :, :0], v[:, :, :0], fingerprints[:, :, :0])
    for side in range(2):
        fingerprints[side, 2, 4] ^= 1 << 40
        assert not canary.holds(1, k, v, fingerprints)
        fingerprints[side, 2, 4] ^= 1 << 40
    assert canary.holds(1, k, v, fingerprints)
    v[1, 1, 3, 2] += 1
    assert not canary.holds(1, k, v, fingerprints)
    assert canary.holds(1, k[:, :, :3], v[:, :, :3], fingerprints[:, :, :3])


def test_fingerprints_are_appended_where_there_is_room() -> None:
    """They are copied when there is none, and when rows were cut, chosen or copied since."""
    wanted = torch.arange(2 * 2 * 40).view(2, 2, 40)
    own = DenseLayer(wanted[:, :, :0], torch.empty(0, dtype=torch.int64))
    own.append(wanted[:, :, :7], 1)
    places = set()
    for place in range(7, 20):
        own.append(wanted[:, :, place : place + 1], place)
        places.add(own.fingerprints.data_ptr())
    assert len(places) == 2
    assert torch.equal(own.fingerprints, wanted[:, :, :20])
    assert own.seen.tolist() == [1] * 7 + list(range(7, 20))
    own.fingerprints, own.seen = own.fingerprints[:, :, :9], own.seen[:9]
    held = own.fingerprints.index_select(1, torch.tensor([1, 0, 1]))
    own.append(wanted[:, :, 30:31], 50)
    assert torch.equal(own.fingerprints, torch.cat((wanted[:, :, :9], wanted[:, :, 30:31]), 2))
    assert own.seen.tolist() == [1] * 7 + [7, 8, 50]
    own.fingerprints, own.seen = held, own.seen[:9]
    own.append(wanted[:, [1, 0, 1], 9:10], 51)
    assert torch.equal(own.fingerprints, wanted[:, [1, 0, 1], :10])
    assert own.seen.tolist() == [1] * 7 + [7, 8, 51]


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_entry_that_is_not_finite_is_seen_as_it_is_summed(dtype: torch.dtype, is_dense: bool) -> None:
    """In K or V of any head, with the same fingerprints as without; None where all are finite, or nobody asks."""
    canary = DenseCanary(CanaryConfig(mode="log", seed=3))
    k, v = entries(dtype, is_dense)
    fingerprints, first = canary.stored_fingerprints(1, k, v)
    assert torch.equal(fingerprints, canary.fingerprints(1, k, v))
    assert first is None
    k[2, 1, 3, 2] = torch.nan
    assert canary.stored_fingerprints(1, k, v)[1] == 2 * 5 + 3
    v[1, 0, 4, 3] = -torch.inf
    fingerprints, first = canary.stored_fingerprints(1, k, v)
    assert first == 1 * 5 + 4
    assert torch.equal(fingerprints, canary.fingerprints(1, k, v))
    quiet = DenseCanary(CanaryConfig(mode="log", seed=3, disable=frozenset({"N1"})))
    assert quiet.stored_fingerprints(1, k, v)[1] is None
    assert canary.stored_fingerprints(1, k[:, :, :0], v[:, :, :0])[1] is None
