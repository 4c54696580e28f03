"""Where K and V lie in vLLM's tensors: read off shapes and strides, and believed when the backend's store shows it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.report import report_step
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.vllm.layout import pools_of
from kvcanary.adapters.vllm.permuted import order_of
from kvcanary.adapters.vllm.stores import store_of
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


# cells that are no halves

LATENT_RANK, ROPE = 16, 8


def latent(kv_c: Any, k_pe: Any, cache: Any, slots: torch.Tensor, cache_dtype: str, scale: Any) -> None:
    """As `concat_and_cache_mla`: both parts of a token side by side, in the type of the cache."""
    cell = torch.cat((kv_c, k_pe[:, 0]), -1)
    cache[slots // SIZE, slots % SIZE] = bytes_of(cell.to(FP8)) if cache_dtype == "fp8" else cell.to(cache.dtype)


def latent_scaled(kv_c: Any, k_pe: Any, cache: Any, slots: torch.Tensor, cache_dtype: str, scale: Any) -> None:
    """As `fp8_ds_mla`: 512 numbers of 8 bits, four scales, 64 numbers of 16 bits."""
    scales = kv_c.float().unflatten(1, (4, 128)).abs().amax(2) / 448
    numbers = (kv_c.float() / scales.repeat_interleave(128, 1)).to(FP8)
    parts = numbers, scales, k_pe[:, 0].to(torch.bfloat16)
    cache[slots // SIZE, slots % SIZE] = torch.cat([bytes_of(part) for part in parts], 1)


def scaled_by_token(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As the Triton backend does for `int8_per_token_head`: K, its scale, V, its scale."""
    halves = []
    for values in (key, value):
        scale = values.float().abs().amax(2, keepdim=True) / 127
        halves += [bytes_of((values.float() / scale).round().to(torch.int8)), bytes_of(scale)]
    cache[slots // SIZE, :, slots % SIZE] = torch.cat(halves, -1).view(cache.dtype)


def plain_fp8(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    cache[slots // SIZE, :, slots % SIZE] = bytes_of(torch.cat((key, value), -1).to(FP8))


def packed_otherwise(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Numbers of which each byte has something of K and of V."""
    cell = bytes_of(key.to(torch.float8_e4m3fn)) ^ bytes_of(value.to(torch.float8_e4m3fn)).flip(-1)
    cache[slots // SIZE, :, slots % SIZE] = cell


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


FP8 = torch.float8_e4m3fn
MLA = {"kv_lora_rank": LATENT_RANK, "qk_rope_head_dim": ROPE, "_k_scale": torch.ones(1)}
DS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "_k_scale": torch.ones(1)}
BF16, U8 = torch.bfloat16, torch.uint8
#: By kind: how it stores, heads and cells of its tensor, their type, vLLM's name of that, fields of layer and spec, and
#: the parts of its rows, each with its type.
KINDS = {
    "mla": (latent, 1, 24, BF16, "auto", MLA, {}, {"K": BF16}),
    "mla fp8": (latent, 1, 24, U8, "fp8", MLA, {}, {"K": FP8}),
    "fp8_ds_mla": (latent_scaled, 1, 656, U8, "fp8_ds_mla", DS, {}, {"K": FP8, "scales": torch.float32, "rope": BF16}),
    "scales by token and head": (
        *(scaled_by_token, HEADS, 2 * (DIM + 4), torch.int8, "int8_per_token_head", {}, {}),
        {"K": torch.int8, "V": torch.int8, "K scale": torch.float32, "V scale": torch.float32},
    ),
    "V is smaller": (packed, HEADS, DIM + 2, BF16, "auto", {}, {"head_size_v": 2}, {"K": BF16, "V": BF16}),
    "fp8": (plain_fp8, HEADS, 2 * DIM, U8, "fp8", {}, {}, {"K": FP8, "V": FP8}),
    "packed otherwise": (packed_otherwise, HEADS, DIM, U8, "turboquant_4bit_nc", {}, {}, {"K": U8}),
}


def layers_of_kind(kind: str, order: str = "LBHNC") -> tuple[list[tuple[str, Any]], Any]:
    store, heads, cell, dtype, name, own, fields, _ = KINDS[kind]
    sizes = AXES | {"H": heads, "C": cell}
    memory = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    caches = memory.permute([order.index(axis) for axis in "LBHNC"])
    caches = caches.squeeze(2) if heads == 1 else caches  # as MLA layers are bound
    impl, kind_of = SimpleNamespace(do_kv_cache_update=store), BF16 if dtype.itemsize == 1 else dtype
    make = lambda cache: SimpleNamespace(  # noqa: E731
        impl=impl, kv_cache=cache, kv_cache_torch_dtype=kind_of, kv_cache_dtype=name, **own
    )
    spec = SimpleNamespace(num_kv_heads=heads, head_size=DIM, **fields)
    return [(f"l{n}", make(cache)) for n, cache in enumerate(caches)], spec


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cell_is_read_in_every_order(kind: str, order: str) -> None:
    """Parts by name and type; what a store changes is the row of its slot and layer; bytes are put back."""
    layers, spec = layers_of_kind(kind, order)
    store = store_of(layers[1][1], spec)
    store([torch.randn(2, *shape) for shape in store.shapes], torch.tensor([SIZE + 1, 3 * SIZE + 2]))
    before = [layer.kv_cache.clone() for _, layer in layers]
    [(view, names)] = pools_of(layers, spec, (), null_slots=SIZE)
    assert names == ["l0", "l1", "l2"]
    assert all(same(layer.kv_cache, old) for (_, layer), old in zip(layers, before, strict=True))
    assert {part.name: part.dtype for part in view.parts} == KINDS[kind][-1]
    assert (view.page_size, view.num_slots, view.null_slots) == (SIZE, BLOCKS * SIZE, SIZE)
    every = torch.arange(BLOCKS * SIZE)
    rows = view.rows.gather(every)
    store([torch.randn(2, *shape) for shape in store.shapes], torch.tensor([SIZE + 5, 4 * SIZE]))
    changed = (view.rows.gather(every) != rows).any(2).nonzero().tolist()
    assert changed == [[1, SIZE + 5], [1, 4 * SIZE]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_each_part_is_named(kind: str) -> None:
    """Part, layer, head and element of one bit in the middle of every part, through the canary of a worker."""
    layers, spec = layers_of_kind(kind, "BLNHC")
    [(view, names)] = pools_of(layers, spec, (), null_slots=SIZE)
    for number, part in enumerate(view.parts):
        assert flipped_in(view, names, number) == ("R9", 1, part.name), part.name


def flipped_in(view: Any, names: list[str], number: int) -> tuple[str, int, str]:
    """Code, layer and part of what is said of a bit in a part of an entry that was taken before."""
    canary = PagedCanary(CanaryConfig(mode="log", content="full", seed=3), 2, 1, 16, "cpu")
    group = canary.memory.add_group(0, SIZE, BLOCKS * SIZE, null_slots=SIZE)
    canary.memory.add_layers(group, view, names)
    table, starts = torch.tensor([[2, 3]], dtype=torch.int32), torch.tensor([0, 0])
    both = torch.arange(2 * SIZE, 4 * SIZE)
    for layer in range(LAYERS):  # as a forward would have
        view.rows.scatter_layer(layer, both, torch.ones_like(view.rows.gather_layer(layer, both)))
    for step, (first, count) in enumerate([(0, 10), (10, 1)]):
        positions = torch.arange(first, first + count)
        slots, ends = table[0, positions // SIZE] * SIZE + positions % SIZE, torch.tensor([first + count])
        starts = torch.tensor([0, count])
        if not step:
            canary.admit([(0, "a", [], 0, "")])
        canary.read(
            Forward(
                ["a"], np.array([0]), ("decode", 0), ends, count, [table], ends, starts, positions, positions, [slots]
            )
        )
        canary.wrote()
        if not step:
            piece, slot = view.rows.pieces[number], torch.tensor([2 * SIZE + 5])
            words = view.rows.gather_layer(1, slot)
            words[0, piece.first + piece.words // 2] ^= 1 << 9
            view.rows.scatter_layer(1, slot, words)
    assert canary.count_at(canary.step) == 1
    report_step(canary, canary.steps[-1])
    [found] = canary.log.findings
    assert (found.slot, found.position, found.reader) == (2 * SIZE + 5, 5, "a")
    return found.code, found.layer, found.part


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class DeepseekV32IndexerCache:
    """The index cache of sparse attention: no attention layer, and its pages are split."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.kv_cache, self.head_dim = cache, cache.shape[2]


@pytest.mark.parametrize("order", ORDERS)
def test_the_split_index_cache_is_read(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page first all numbers, then all scales: both parts in every order, and a bit in each is named."""

    def index(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, block: int, scales: str) -> None:
        assert (block, scales) == (128, "ue8m0")
        scale = k.float().abs().amax(1, keepdim=True) / 448
        pages = cache.as_strided((BLOCKS, SIZE * 132), (cache.stride(0), 1), cache.storage_offset())
        for slot, own, number in zip(slots.tolist(), scale, (k.float() / scale).to(FP8), strict=True):
            page, offset = pages[slot // SIZE], slot % SIZE
            page[offset * 128 : offset * 128 + 128] = bytes_of(number)
            page[SIZE * 128 + 4 * offset : SIZE * 128 + 4 * offset + 4] = bytes_of(own)

    monkeypatch.setitem(sys.modules, "vllm._custom_ops", SimpleNamespace(indexer_k_quant_and_cache=index))
    sizes = AXES | {"H": 1, "C": 132}
    memory = torch.zeros([sizes[axis] for axis in order], dtype=U8)
    caches = memory.permute([order.index(axis) for axis in "LBHNC"]).squeeze(2)
    layers = [(f"i{n}", DeepseekV32IndexerCache(cache)) for n, cache in enumerate(caches)]
    spec = SimpleNamespace(num_kv_heads=1, head_size=132, cache_role=SimpleNamespace(name="INDEXER"))
    [(view, names)] = pools_of(layers, spec, (), null_slots=SIZE)
    assert {part.name: part.dtype for part in view.parts} == {"K": FP8, "scales": torch.float32}
    assert not memory.any()
    assert [flipped_in(view, names, number)[2] for number in range(2)] == ["K", "scales"]


def test_layers_of_one_group_may_be_of_several_kinds() -> None:
    """MLA layers and those of their index share a block table; each kind is a pool of its own."""
    latent_layers, spec = layers_of_kind("mla")
    scaled_layers, _ = layers_of_kind("fp8_ds_mla")
    layers = [*latent_layers, *((f"s{name}", layer) for name, layer in scaled_layers)]
    pools = pools_of(layers, spec, ("sl1",), null_slots=SIZE)
    assert [(view.name, names) for view, names in pools] == [
        ("target", ["l0", "l1", "l2"]), ("target 1", ["sl0", "sl2"]), ("draft", ["sl1"]),
    ]  # fmt: skip


def test_a_latent_store_that_does_not_fit_is_refused() -> None:
    """Cells that come out scaled, or shifted by a slot, are told apart from those that were given."""

    def scaled(kv_c: Any, *rest: Any) -> None:
        latent(kv_c / 2, *rest)

    def shifted(kv_c: Any, k_pe: Any, cache: Any, slots: torch.Tensor, *rest: Any) -> None:
        latent(kv_c, k_pe, cache, slots ^ 1, *rest)

    for store, words in (scaled, "it does not show what was stored"), (shifted, "it does not show what was stored"):
        layers, spec = layers_of_kind("mla")
        for _, layer in layers:
            layer.impl = SimpleNamespace(do_kv_cache_update=store)
        with pytest.raises(AdapterError, match=words):
            pools_of(layers, spec, (), null_slots=SIZE)


def test_exchanged_halves_of_fp8_are_no_reading_of_k_and_v() -> None:
    """Where values cannot be compared, K is what other keys change: a backend with V first is one part a cell."""

    def v_first(layer: Any, key: Any, value: Any, *rest: Any) -> None:
        plain_fp8(layer, value, key, *rest)

    layers, spec = layers_of_kind("fp8", "BLNHC")  # no page of which an order could be learnt
    for _, layer in layers:
        layer.impl = SimpleNamespace(do_kv_cache_update=v_first)
    [(view, _)] = pools_of(layers, spec, (), null_slots=SIZE)
    assert [part.name for part in view.parts] == ["K"]
    assert view.head_dim == 2 * DIM


@pytest.mark.parametrize(
    ("fields", "layer_fields", "words"),
    [
        ({}, {"kv_cache_dtype": "nvfp4"}, r"layer l0 keeps NVFP4 \(nvfp4\)"),
        ({}, {"kv_cache_dtype": "nvfp4_ds_mla"}, r"layer l0 keeps NVFP4 \(nvfp4_ds_mla\)"),
        ({"model_version": "deepseek_v4"}, {}, "as DeepSeek V4 does: that is not followed yet"),
        ({"tokens_per_state": 128}, {}, "as DeepSeek V4 does: that is not followed yet"),
        ({}, {"kv_cache": [torch.zeros(3)]}, "layer l0 keeps a state, not K and V"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(fields: dict, layer_fields: dict, words: str) -> None:
    """DeepSeek V4, NVFP4 and recurrent states: one sentence, before anything is stored."""
    layers, spec = layers_of_kind("mla")
    for name, value in fields.items():
        setattr(spec, name, value)
    for name, value in layer_fields.items():
        setattr(layers[0][1], name, value)
    with pytest.raises(AdapterError, match=words):
        pools_of(layers, spec, (), null_slots=SIZE)
