"""Where K and V lie in vLLM's tensors: read off shapes and strides, and believed when the backend's store shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.adapters.vllm.layout import pools_of
from kvcanary.adapters.vllm.permuted import order_of
from kvcanary.errors import AdapterError

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 6, 2, 8, 4
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": SIZE, "C": 2 * DIM}
#: vLLM's, by the order of their axes in memory.
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SPEC = SimpleNamespace(num_kv_heads=HEADS, head_size=DIM)


def packed(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As FlashAttention stores: K and V of an entry beside each other."""
    cache[slots // SIZE, :, slots % SIZE] = torch.cat((key, value), -1).to(cache.dtype)


def turned(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As backends for CPUs do: within a block and head first K with its entries innermost, then V in tiles of two."""
    pages = cache.view(len(cache), HEADS, 2, DIM * SIZE)
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        block, offset = divmod(slot, SIZE)
        pages[block, :, 0].view(HEADS, DIM, SIZE)[:, :, offset] = k.to(cache.dtype)
        pages[block, :, 1].view(HEADS, DIM // 2, SIZE, 2)[:, :, offset] = v.view(HEADS, DIM // 2, 2).to(cache.dtype)


def layers_of(store: Any, order: str = "LBHNC", dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, Any]]:
    memory = torch.randn([AXES[axis] for axis in order], generator=torch.Generator().manual_seed(1)).to(dtype)
    caches = memory.permute([order.index(axis) for axis in "LBHNC"])
    impl = SimpleNamespace(do_kv_cache_update=store)
    return [
        (f"l{n}", SimpleNamespace(impl=impl, kv_cache=cache, kv_cache_torch_dtype=dtype))
        for n, cache in enumerate(caches)
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_the_axes_is_read(order: str) -> None:
    """One generic view, six orders in memory: rows are those that the store wrote, and its bytes are put back."""
    layers = layers_of(packed, order)
    before = [layer.kv_cache.clone() for _, layer in layers]
    [(view, names)] = pools_of(layers, SPEC, (), null_slots=SIZE)
    assert names == ["l0", "l1", "l2"]
    assert (view.page_size, view.num_slots, view.null_slots) == (SIZE, BLOCKS * SIZE, SIZE)
    assert all(torch.equal(layer.kv_cache, old) for (_, layer), old in zip(layers, before, strict=True))
    expect_stored(view, layers, packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pages_in_an_order_of_their_own_are_learnt(dtype: torch.dtype) -> None:
    """K turned round and V tiled in each block: every element of a slot's row is found where the store put it."""
    layers = layers_of(turned, dtype=dtype)
    before = [layer.kv_cache.clone() for _, layer in layers]
    [(view, _)] = pools_of(layers, SPEC, (), null_slots=SIZE)
    assert all(torch.equal(layer.kv_cache, old) for (_, layer), old in zip(layers, before, strict=True))
    expect_stored(view, layers, turned)


def expect_stored(view: Any, layers: list[tuple[str, Any]], store: Any) -> None:
    slots = torch.tensor([SIZE + 3, 2 * SIZE, 4 * SIZE + 7])
    for number, (_, layer) in enumerate(layers):
        key, value = (torch.randn(3, HEADS, DIM).to(layer.kv_cache.dtype) for _ in "kv")
        store(layer, key, value, layer.kv_cache, slots)
        words = torch.cat([part.flatten(1).contiguous().view(torch.int32) for part in (key, value)], 1)
        assert torch.equal(view.rows.gather_layer(number, slots), words)
        assert torch.equal(view.rows.gather(slots)[number], words)


def test_rows_in_an_order_of_their_own_are_written_alone() -> None:
    """Overwriting a row changes this slot of this layer, and gathering it gives what was written."""
    layers = layers_of(turned)
    [(view, _)] = pools_of(layers, SPEC, (), null_slots=SIZE)
    every = torch.arange(BLOCKS * SIZE)
    before, words = view.rows.gather(every), torch.arange(view.rows.words_per_row, dtype=torch.int32)
    view.rows.scatter_layer(1, torch.tensor([13]), words[None])
    after = view.rows.gather(every)
    assert torch.equal(after[1, 13], words)
    assert ((before != after).any(2).nonzero()).tolist() == [[1, 13]]


def test_a_store_that_is_no_permutation_is_refused() -> None:
    """A scaled copy, or one that leaves elements out, is no reading: refused with the shape."""

    def scaled(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        packed(layer, key, value / 2, cache, slots)

    def halved(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // SIZE, :, slots % SIZE, :DIM] = key.to(cache.dtype)

    for store in (scaled, halved):
        layers = layers_of(store)
        assert order_of(layers[0][1], HEADS, DIM) is None
        with pytest.raises(
            AdapterError, match=r"where K and V of target lie is not known, its tensor is \[6, 2, 8, 8\]"
        ):
            pools_of(layers, SPEC, (), null_slots=SIZE)
