"""PoolView: what it derives for each layout, and what it refuses when it is described, with value, rule and remedy."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, PlanError, PoolView
from kvcanary.pools.aliasing import share_words
from kvcanary.records.state import CanaryState

HEADS, DIM, PAGE_SIZE, NUM_SLOTS = 2, 4, 4, 32
SLOTS, PAGES, BY_HEAD = (NUM_SLOTS, HEADS, DIM), (8, PAGE_SIZE, HEADS, DIM), (8, HEADS, PAGE_SIZE, DIM)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Two layers."""
    return [torch.zeros(shape, dtype=dtype) for _ in range(2)]


def pool_view(**changes: object) -> PoolView:
    return PoolView(**{"name": "target", "k": zeros(*SLOTS), "v": zeros(*SLOTS), "page_size": PAGE_SIZE, **changes})


def refused(*views: PoolView, **changes: object) -> str:
    """The words with which a view, or the state of several, is refused."""
    with pytest.raises(PlanError) as caught:
        CanaryState(views, 1) if views else pool_view(**changes)
    return str(caught.value)


# what is derived


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("page_size", [1, 3, 512])
def test_the_numbers_of_every_layout(layout, dtype, page_size, make_fake_pool):
    """Slots, pages, heads, dim, bytes and the shapes of values, whatever the layout."""
    view = make_fake_pool(layout, page_size=page_size, num_pages=2, dtype=getattr(torch, dtype), null_slots=1).view
    size, latent = getattr(torch, dtype).itemsize, layout.startswith("latent")
    assert (view.num_layers, view.num_slots, view.num_pages) == (2, 2 * page_size, 2)
    dim = 16 if layout == "wide_k" else 8
    assert (view.kv_heads, view.head_dim, view.dtype) == (1 if latent else 2, dim, getattr(torch, dtype))
    heads = (view.kv_heads, dim)
    others = {"latent_index": [heads], "nhd_scales": [(2, 8), (2,), (2,)], "hnd_scales": [(2, 8), (2,), (2,)]}
    shapes = [heads, *others.get(layout, [] if latent else [(2, 8)])]
    assert view.value_shapes(7) == [(7, *shape) for shape in shapes]
    elements = [torch.Size(shape).numel() * (4 if len(shape) == 1 else size) for shape in shapes]
    assert view.slot_bytes == 2 * sum(elements)
    assert view.rows.words_per_row == sum(elements) // 4


def test_parts_have_names(make_fake_pool):
    """K, V, and extras by the engine's names or by their number."""
    assert [part.name for part in make_fake_pool("hnd_scales").view.parts] == ["K", "V", "k_scale", "v_scale"]
    assert [part.name for part in pool_view(extras=[zeros(NUM_SLOTS)]).parts] == ["K", "V", "extra 0"]
    assert [part.name for part in make_fake_pool("latent").view.parts] == ["K"]


def test_an_extra_may_have_neither_heads_nor_dim():
    """One number a slot is one head of one element."""
    view = pool_view(extras={"scale": zeros(NUM_SLOTS)})
    assert (view.parts[2].heads, view.parts[2].dim, view.value_shapes(3)[2]) == (1, 1, (3,))


def test_a_stacked_tensor_is_its_layers():
    """[layers, ...] is taken as one tensor a layer."""
    assert pool_view(k=torch.zeros(2, *SLOTS), v=torch.zeros(2, *SLOTS)).num_layers == 2


def test_the_null_page_is_page_0_unless_stated():
    """Padding's slots are the first page, or as many as the engine says."""
    assert pool_view().null_slots == PAGE_SIZE
    assert pool_view(null_slots=1).null_slots == 1


def test_a_view_can_be_changed_in_one_field():
    """`replace` checks and derives anew."""
    view = replace(pool_view(), page_size=8, k=zeros(NUM_SLOTS, HEADS, 2 * DIM))
    assert (view.num_pages, view.head_dim) == (4, 2 * DIM)


# what is refused

SHARED = torch.zeros(NUM_SLOTS, 2, HEADS, DIM)
ALIKE = zeros(*SLOTS)
BAD = {
    "page size": ({"page_size": 0}, "page_size must be at least 1, got 0: 1 where the pool has no pages"),
    "token offset": ({"token_offset": -1}, "token_offset must be at least 0, got -1: 1 for a draft"),
    "null slots below": ({"null_slots": -2}, "null_slots must be at least -1, got -2: leave it out"),
    "no null slot": ({"null_slots": 0}, "null_slots must be at least 1, got 0: refused ids and padding need a slot"),
    "all null slots": ({"null_slots": NUM_SLOTS}, "null_slots must be at most 31, got 32: a pool has slots"),
    "smaller than a page": ({"page_size": 64}, "null_slots must be at most 31, got 64"),
    "layout": ({"layout": "NDH"}, "layout must be one of NHD, HND, got 'NDH': name the one its rows lie in"),
    "nothing": ({"k": None, "v": None}, "k and v must have one tensor a layer, got 0 and 0"),
    "no layers": ({"k": ()}, "k and v must have one tensor a layer, got 0 and 2: leave v empty only where"),
    "a layer of v is missing": ({"v": zeros(*SLOTS)[:1]}, "k and v must have one tensor a layer, got 2 and 1"),
    "a layer of an extra is missing": (
        {"extras": {"scale": zeros(NUM_SLOTS)[:1]}},
        "extra 'scale' must have one tensor a layer, 2, got 1: give all",
    ),
    "an extra called K": (
        {"extras": {"K": zeros(NUM_SLOTS)}},
        "extras must not be named k or v, got K: choose other names",
    ),
    "no tensor": ({"k": [None, None]}, "k[0] must be a tensor, got NoneType: give one a layer"),
    "another device": (
        {"v": [torch.zeros(SLOTS), torch.zeros(SLOTS, device="meta")]},
        "v[1] is on meta, k[0] on cpu: a pool lies on one device",
    ),
    "another type in a layer": (
        {"v": [torch.zeros(SLOTS), torch.zeros(SLOTS).half()]},
        "v[1] is [32, 2, 4] torch.float16, k[0] is [32, 2, 4] torch.float32: layers are alike",
    ),
    "another type in V": ({"v": zeros(*SLOTS, dtype=torch.bfloat16)}, "v[0] is [32, 2, 4] torch.bfloat16, k[0] is"),
    "another shape in a layer": (
        {"k": [torch.zeros(SLOTS), torch.zeros(NUM_SLOTS, 1, DIM)]},
        "k[1] is [32, 1, 4] torch.float32, k[0] is [32, 2, 4] torch.float32: layers are alike",
    ),
    "complex numbers": (
        {"k": zeros(*SLOTS, dtype=torch.complex64), "v": None},
        "elements of k must be numbers of 1, 2, 4, 8 bytes, got torch.complex64: view it as bytes",
    ),
    "packed halves of a byte": (
        {"k": [t.view(torch.float4_e2m1fn_x2) for t in zeros(*SLOTS, dtype=torch.uint8)], "v": None},
        "elements of k must be numbers of 1, 2, 4, 8 bytes, got torch.float4_e2m1fn_x2: view it as bytes",
    ),
    "no heads": (
        {"k": zeros(NUM_SLOTS, DIM), "v": ()},
        "k[0] must be [num_slots, kv_heads, head_dim], got [32, 4]: a latent row has one head, k.unsqueeze(-2)",
    ),
    "flat HND": (
        {"layout": "HND"},
        "k[0] must be [pages, kv_heads, page_size, head_dim], got [32, 2, 4]",
    ),
    "NHD said to be HND": (
        {"layout": "HND", "k": zeros(*PAGES), "v": zeros(*PAGES)},
        "k[0] must be [pages, kv_heads, page_size, head_dim] with page_size 4, got [8, 4, 2, 4]: the layout is HND",
    ),
    "HND said to be NHD": (
        {"k": zeros(*BY_HEAD), "v": zeros(*BY_HEAD)},
        "k[0] must be [pages, page_size, kv_heads, head_dim] with page_size 4, got [8, 2, 4, 4]: the layout is NHD",
    ),
    "flat V of a paged K": (
        {"k": zeros(*PAGES)},
        "v[0] must be [pages, page_size, kv_heads, head_dim], got [32, 2, 4]",
    ),
    "an extra without pages": (
        {"k": zeros(*PAGES), "v": zeros(*PAGES), "extras": [zeros(NUM_SLOTS)]},
        "extra 0[0] must be [pages, page_size, kv_heads, ...], got [32]: lay it out like k",
    ),
    "fewer slots in V": ({"v": zeros(16, HEADS, DIM)}, "v has [16] slots, k has [32]: parts of a pool"),
    "fewer heads in V": (
        {"v": zeros(NUM_SLOTS, 1, DIM)},
        "v[0] must have the heads of k, 2, got 1: only their dim may differ",
    ),
    "no slots": (
        {"k": zeros(0, HEADS, DIM), "v": None},
        "k[0] must not be empty, got [0] slots of [2, 4]: leave it out",
    ),
    "no dim": ({"k": zeros(4, HEADS, 0), "v": None}, "k[0] must not be empty, got [4] slots of [2, 0]"),
    "rows that are not dense": (
        {"v": [t.transpose(1, 2) for t in zeros(NUM_SLOTS, DIM, HEADS)]},
        "v rows must be dense, got strides (8, 2, 2, 1, 2): give views in which each row is dense",
    ),
    "half a word": (
        {"k": zeros(8, 1, 1, dtype=torch.bfloat16), "v": None},
        "k[0] rows must be whole aligned 32-bit words, got 2 bytes at strides of [2] bytes: give views",
    ),
    "heads of half a word": (
        {"k": zeros(8, 3, 4, 2, dtype=torch.uint8), "v": None, "layout": "HND"},
        "k[0] heads must be whole aligned 32-bit words, got 2 bytes",
    ),
    "layers of other strides": (
        {"k": [torch.zeros(SLOTS), torch.zeros(NUM_SLOTS, 3, DIM)[:, :2]]},
        "k[1] differs from k[0] in shape, dtype or strides: give views",
    ),
    "one tensor twice": ({"k": [ALIKE[0], ALIKE[0]]}, "k[0] and k[1] share memory: give a layer once"),
    "V is K": ({"k": ALIKE, "v": ALIKE}, "k[0] and v[0] share memory: give a layer once, and a latent row without v"),
    "layers that overlap": (
        {"k": [SHARED[:31, 0], SHARED[1:, 0]], "v": None},
        "k[0] and k[1] share memory",
    ),
    "V inside K": (
        {
            "k": [s[:, 0] for s in (SHARED[:], torch.zeros_like(SHARED))],
            "v": [SHARED[:, 0], torch.zeros_like(SHARED)[:, 0]],
        },
        "k[0] and v[0] share memory",
    ),
    "slots that overlap": (
        {"k": [torch.zeros(1, HEADS, DIM).expand(SLOTS) for _ in range(2)], "v": None},
        "slots of k[0] overlap, got strides of",
    ),
    "too many layers": (
        {"k": torch.zeros(129, 8, 1, 1), "v": None},
        "layers must be at most 128, got 129: watch them as",
    ),
    "window": ({"window": 0}, "window must be at least 1, got 0: leave it out where attention sees all"),
    "a map of the full group": (
        {"slot_map": torch.zeros(64, dtype=torch.int64)},
        "a pool with a slot_map must be in a group of its own, got 'full': name another group",
    ),
    "a map of another type": (
        {"group": "sliding", "slot_map": torch.zeros(64, dtype=torch.int32)},
        "slot_map must be contiguous [full slots] int64, got [64] torch.int32: give the engine's own tensor",
    ),
    "a map of another shape": (
        {"group": "sliding", "slot_map": torch.zeros(64, 1, dtype=torch.int64)},
        "slot_map must be contiguous [full slots] int64, got [64, 1] torch.int64",
    ),
    "a map on another device": (
        {"group": "sliding", "slot_map": torch.zeros(64, dtype=torch.int64, device="meta")},
        "slot_map is on meta, the pool on cpu: both lie on one device",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_pool_view_that_contradicts_itself_is_refused(name):
    """Each rule of a pool is checked when it is described, in words that name value, rule and remedy."""
    changes, words = BAD[name]
    found = refused(**changes)
    assert found.startswith("pool 'target': ")
    assert words in found


def test_pools_of_one_group_share_no_memory():
    """Two pools over the same bytes would take turns in damaging each other's records."""
    first = pool_view()
    words = refused(first, pool_view(name="draft", k=first.k))
    assert words == "k[0] of 'target' and k[0] of 'draft' share memory: watch it as one pool"


def test_groups_may_lie_in_the_same_memory():
    """Engines that hand pages of one memory to several groups give each group its own pool view."""
    first = pool_view()
    state = CanaryState([first, pool_view(name="sliding", k=first.k, v=first.v, group="sliding")], 1)
    assert [pool.base for pool in state.pools] == [0, NUM_SLOTS]


def test_pools_lie_on_one_device():
    """A manager's records are on the device of its pools."""
    other = pool_view(name="draft")
    object.__setattr__(other, "k", (torch.zeros(SLOTS, device="meta"),) * 2)
    words = refused(pool_view(), other)
    assert words == "pools of a manager lie on one device: 'target' is on cpu, 'draft' on meta"


def test_nothing_half_installed_remains():
    """A refused attach keeps no tensor of the engine, and the same pools attach once they are right."""
    views = [pool_view(), pool_view(name="draft", page_size=2)]
    with pytest.raises(PlanError, match="page_size must be one"):
        CanaryManager(CanaryConfig(), views)
    watched = weakref.ref(views[0].k[0])
    right = [pool_view()]
    CanaryManager(CanaryConfig(), right)
    del views
    gc.collect()
    assert watched() is None
    tensors = zeros(*SLOTS)
    with pytest.raises(PlanError):
        PoolView("target", tensors, tensors, PAGE_SIZE)
    watched = weakref.ref(tensors[0])
    del tensors
    gc.collect()
    assert watched() is None


# shared words


def words_of(view: torch.Tensor) -> set[int]:
    """Addresses of all words, one by one."""
    offsets = [0]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = [offset + stride * i for offset in offsets for i in range(size)]
    return {view.data_ptr() // 4 + offset for offset in offsets}


def test_shared_words_are_those_of_the_addresses():
    """Random strided views of one memory share a word exactly when their addresses do."""
    generator, memory, shared = torch.Generator().manual_seed(3), torch.zeros(600, dtype=torch.int32), 0
    for _ in range(600):
        pair = []
        for _ in range(2):
            inner, heads, slots = (int(n) for n in torch.randint(1, 5, (3,), generator=generator))
            gap, spread, start = (int(n) for n in torch.randint(0, 9, (3,), generator=generator))
            stride = inner + gap
            pair.append(memory.as_strided((slots, heads, inner), (heads * stride + spread, stride, 1), 5 * start))
        expected = bool(words_of(pair[0]) & words_of(pair[1]))
        shared += expected
        assert share_words(*pair) == expected
    assert 50 < shared < 550


def test_many_layers_that_mesh_are_compared_in_time():
    """128 layers inside each slot of one tensor: every pair is compared, and none shares a word."""
    memory = torch.zeros(1 << 12, 64, 2, 1, 4)
    view = pool_view(k=[memory[:, i, 0] for i in range(64)], v=[memory[:, i, 1] for i in range(64)])
    assert (view.num_layers, view.num_slots) == (64, 1 << 12)
