"""Content check: the bitmap names exactly the layers whose bytes differ from the stored fingerprint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content.check import check_content, check_content_torch, mismatched_layers
from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.rows import PoolRows
from stored_pool import dense_words

POISON = -77
both = pytest.mark.parametrize("operation", [check_content, check_content_torch], ids=["triton", "torch"])


def stored_fingerprints(rows: PoolRows, keys: Keys) -> Tensor:
    slots = torch.arange(rows.num_slots, device=rows.ptrs.device)
    content_a = torch.empty(rows.num_layers, rows.num_slots, dtype=torch.int64, device=slots.device)
    fingerprint_torch(rows, slots, keys, fingerprint_a=content_a)
    return content_a


def run(operation, rows: PoolRows, slots: Tensor, keys: Keys, content_a: Tensor, **kwargs) -> Tensor:
    mismatch = torch.full((slots.numel(), 2), POISON, device=slots.device)
    operation(rows, slots, keys, content_a, mismatch=mismatch, **kwargs)
    return mismatch


@both
@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_check_content_names_the_layers(operation, layout: str, pool, tensor) -> None:
    """Flipped bits in layers 0, 63, 64 and 66 set these bits of their slots; clean slots have none."""
    rows, keys = pool(layout, torch.float16, layers=67, slots=8)
    content_a = stored_fingerprints(rows, keys)
    for slot, layer, tensors in (
        (7, 0, dense_words(rows, 0)),
        (2, 63, dense_words(rows, 1)),
        (2, 64, dense_words(rows, 0)),
        (2, 66, dense_words(rows, 1)),
    ):
        tensors[layer][slot, 1] ^= 1 << 30
    mismatch = run(operation, rows, tensor([7, 3, 2]), keys, content_a)
    assert mismatch.tolist() == [[1, 0], [0, 0], [-(2**63), 0b101]]
    named = mismatched_layers(mismatch, 67).nonzero().tolist()
    assert named == [[0, 0], [63, 2], [64, 2], [66, 2]]


@both
@pytest.mark.parametrize("n", [0, 1])
def test_check_content_takes_few_slots(operation, n: int, pool, tensor) -> None:
    """None and one."""
    rows, keys = pool()
    mismatch = run(operation, rows, tensor([31][:n]), keys, stored_fingerprints(rows, keys))
    assert mismatch.tolist() == [[0, 0]][:n]


@both
def test_check_content_writes_nothing_for_padding_and_bad_slots(operation, pool, tensor) -> None:
    """Entries at and after the live count, and ids outside the pool, keep their outputs."""
    rows, keys = pool()
    slots = tensor([-1, 4, 32, 5, 6])
    mismatch = run(operation, rows, slots, keys, stored_fingerprints(rows, keys), num_live=tensor([4]))
    assert mismatch[:, 0].tolist() == [POISON, 0, POISON, 0, POISON]
    assert torch.equal(mismatch[:, 0], mismatch[:, 1])


@both
@pytest.mark.parametrize(
    ("slots", "live", "differs"), [([3, 7], 2, 1), ([7, 3], 1, 1), ([3, 7], 1, 0), ([3, -1, 8], 3, 0)]
)
def test_check_content_says_only_whether_something_differs(
    operation, device, slots, live, differs, pool, tensor
) -> None:
    """In one number, which stays as it is where nothing does; padding and slots outside are nobody's."""
    rows, keys = pool("fused", torch.float16, layers=67, slots=8)
    content_a = stored_fingerprints(rows, keys)
    dense_words(rows, 0)[66][7, 1] ^= 1
    found = tensor([0])
    operation(rows, tensor(slots), keys, content_a, differs=found, num_live=tensor([live]))
    assert found.tolist() == [differs]
    with pytest.raises(ValueError, match="either mismatch or differs must be given"):
        operation(rows, tensor(slots), keys, content_a)


@pytest.mark.gpu
def test_a_number_of_the_host_tells_whether_something_differs(pool, tensor) -> None:
    """The kernel writes there."""
    rows, keys = pool()
    content_a, found = stored_fingerprints(rows, keys), torch.zeros(1, dtype=torch.int64, pin_memory=True)
    for wanted in (0, 1):
        dense_words(rows, 1)[0][5, 0] ^= wanted
        check_content(rows, tensor([4, 5]), keys, content_a, differs=found)
        torch.cuda.synchronize()
        assert int(found) == wanted


@both
def test_zeroed_bytes_under_zeroed_fingerprints_are_a_mismatch(operation, pool, tensor) -> None:
    """A pool and a canary that were both wiped do not vouch for each other."""
    rows, keys = pool()
    for row in (*dense_words(rows, 0), *dense_words(rows, 1)):
        row.zero_()
    content_a = torch.zeros(3, 32, dtype=torch.int64, device=rows.ptrs.device)
    assert run(operation, rows, tensor([4]), keys, content_a).tolist() == [[0b111, 0]]


@both
def test_check_content_refuses_a_bitmap_of_the_wrong_shape(operation, pool, tensor) -> None:
    """The message shows the shape that it wants and the one that it got."""
    rows, keys = pool()
    with pytest.raises(ValueError, match=r"mismatch must be contiguous \[1, 2\] int64, got \[1\]"):
        operation(rows, tensor([4]), keys, stored_fingerprints(rows, keys), mismatch=tensor([0]))
