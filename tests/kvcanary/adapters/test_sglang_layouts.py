"""Pools of SGLang by their class, without SGLang: where bytes lie, what is refused, what ends their entries."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters.sglang import host_tier, lifetimes
from kvcanary.adapters.sglang.layout import NOT_FOLLOWED, parts_of
from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary.adapters.sglang.scheduler import UNFOLLOWED_DRAFTS, watched
from kvcanary.adapters.sglang.windows import MappedRows
from kvcanary.errors import AdapterError
from kvcanary_kernels.record.layout import COLUMNS, STEP_SITE

SIZE, PAGE, HEADS, DIM, LAYERS = 16, 4, 2, 8, 3


class MHATokenToKVPool:
    """As SGLang's: [slots, heads, dim] for K and for V; 8-bit floats are kept as bytes, what padding stores nowhere."""

    def __init__(self, dtype: torch.dtype = torch.float32, layers: int = LAYERS, shift: int = 0) -> None:
        self.dtype, self.shift, self.page_size, self.start_layer, self.layer_num = dtype, shift, PAGE, 0, layers
        kept = torch.uint8 if dtype.itemsize == 1 else dtype
        self.k_buffer, self.v_buffer = (
            [torch.ones(SIZE + PAGE, HEADS, DIM).to(kept) for _ in range(layers)] for _ in "kv"
        )
        self.use_hnd, self.kv_cache_layout = False, "nhd"

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **told: int) -> None:
        stored = loc != 0
        for buffers, value in (self.k_buffer, k), (self.v_buffer, v):
            buffer = buffers[told["layer_id_override"]]
            buffer[loc[stored] + self.shift] = value.view(buffer.dtype)[stored]


class MLATokenToKVPool:
    """As SGLang's: one row a slot, [slots, 1, dim]."""

    def __init__(self) -> None:
        self.dtype, self.page_size, self.start_layer, self.layer_num = torch.float32, PAGE, 1, LAYERS
        self.kv_buffer = [torch.zeros(SIZE + PAGE, 1, DIM) for _ in range(LAYERS)]

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: Any, layer_id_override: int) -> None:
        self.kv_buffer[layer_id_override - 1][loc] = k


def windowed(*is_windowed: bool) -> Any:
    """A pool of layers, each with a window or without."""
    numbers, mapping = {False: 0, True: 0}, {}
    for layer, kind in enumerate(is_windowed):
        mapping[layer] = (numbers[kind], kind)
        numbers[kind] += 1
    pools = {kind: MHATokenToKVPool(layers=number) for kind, number in numbers.items()}
    slot_map = torch.arange(SIZE + PAGE + 1)
    return type("SWAKVPool", (), {})(), pools, mapping, slot_map


def two_pools(*is_windowed: bool) -> Any:
    pool, pools, pool.layers_mapping, pool.full_to_swa_index_mapping = windowed(*is_windowed)
    pool.full_kv_pool, pool.swa_kv_pool = pools[False], pools[True]
    return pool


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_plain_pool_is_read_by_the_type_that_its_elements_mean(dtype: torch.dtype, page_size: int) -> None:
    """What was probed with is put back, and a view shows the same bytes as elements of the pool's type."""
    pool = MHATokenToKVPool(dtype)
    pool.page_size = page_size
    before = [tensor.clone() for tensor in (*pool.k_buffer, *pool.v_buffer)]
    [part] = parts_of(pool, "target")
    assert (part.view.dtype, part.view.num_slots, part.names) == (dtype, SIZE + PAGE, ("layer 0", "layer 1", "layer 2"))
    assert part.view.k[0].data_ptr() == pool.k_buffer[0].data_ptr()
    assert all(map(torch.equal, before, (*pool.k_buffer, *pool.v_buffer)))


def test_latent_rows_are_one_part_of_one_head() -> None:
    """There is no V, and layers have the numbers that the model gives them."""
    [part] = parts_of(MLATokenToKVPool(), "target")
    assert [own.name for own in part.view.parts] == ["K"]
    assert (part.view.kv_heads, part.view.head_dim, part.names[0]) == (1, DIM, "layer 1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_pool_that_stores_elsewhere_than_it_is_read_is_refused(dtype: torch.dtype) -> None:
    """The class alone is not believed, of 8-bit floats neither."""
    with pytest.raises(
        AdapterError, match="where K and V of target lie is not known: it does not show what was stored"
    ):
        parts_of(MHATokenToKVPool(dtype, shift=1), "target")


def test_layers_with_windows_are_a_part_of_their_own() -> None:
    """With the slots of SGLang's map, the model's numbers, and one token more than how far back they look."""
    pool = two_pools(True, False, True)
    full, windows = parts_of(pool, "target", window=15)
    assert (full.names, full.window, full.slot_map) == (("layer 1",), 0, None)
    assert (windows.names, windows.window) == (("layer 0", "layer 2"), 16)
    assert windows.slot_map is pool.full_to_swa_index_mapping


def test_layers_with_windows_alone_are_refused() -> None:
    """The slots of rows are then those of no pool that is followed."""
    with pytest.raises(AdapterError, match="windows alone are not followed"):
        parts_of(two_pools(True, True), "target", window=15)


def test_attention_beside_states_has_the_numbers_of_the_model() -> None:
    """The others keep states, which are no entries."""
    pool = type("HybridLinearKVPool", (), {})()
    pool.full_kv_pool = MHATokenToKVPool(layers=2)
    pool.full_attention_layer_id_mapping = {3: 0, 7: 1}
    [part] = parts_of(pool, "target")
    assert part.names == ("layer 3", "layer 7")


@pytest.mark.parametrize("kind", [*NOT_FOLLOWED, "UnifiedMHATokenToKVPool"])
@pytest.mark.parametrize("within", [False, True])
def test_other_classes_are_refused_by_name_with_the_remedy(kind: str, within: bool) -> None:
    """Also where such a pool lies within one that is followed, and where it derives from one."""
    pool = type(kind, (MHATokenToKVPool,), {})()
    if within:
        pool, inner = two_pools(True, False), pool
        pool.full_kv_pool = inner
    with pytest.raises(AdapterError, match=f"pools of class {kind} .*unset KVCANARY_MODE to serve without a canary"):
        parts_of(pool, "target", window=15)


def test_a_pool_that_lacks_a_name_is_refused() -> None:
    """A release that renamed a field ends the start with a sentence, not with AttributeError."""
    pool = MHATokenToKVPool()
    del pool.v_buffer
    with pytest.raises(AdapterError, match=r"MHATokenToKVPool is not as known: .*'v_buffer'.*unset KVCANARY_MODE"):
        parts_of(pool, "target")


def test_rows_are_shown_by_the_map_and_wild_slots_are_nowhere() -> None:
    """Only rows of the forward, as far as they reach; a slot that no map has must not end the engine."""
    rows = torch.arange(12, dtype=torch.int32).view(3, 4)
    slot_map = torch.cat((torch.arange(12) + 100, torch.tensor([-1])))
    mapped = MappedRows(rows, slot_map, 8)
    rows[1, 0], rows[1, 1] = 1 << 20, -7
    mapped.fill(torch.tensor([1, 2]), 3, torch.tensor([5, -1, 1 << 20]))
    assert mapped.table.tolist() == [[0] * 4, [-1, -1, 106, 0], [108, 109, 110, 0]]
    assert mapped.slots[:3].tolist() == [105, -1, -1]


class Told:
    """A scheduler whose memory comes and goes, and what was heard of it, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        adapter = SimpleNamespace(pause=self.heard.append)
        self.token_to_kv_pool_allocator = SimpleNamespace(clear=lambda: self.heard.append("cleared"))
        self.weight_updater = SimpleNamespace(memory_saver_adapter=adapter)
        self.record_weight_version_change = lambda new_version: self.heard.append(new_version)
        hooks: dict[str, Any] = {}
        lifetimes.follow(self, lambda owner, name, hook: hooks.update({name: (getattr(owner, name), hook)}), self.tell)
        self.hooks = hooks

    def tell(self, what: str, *args: Any) -> None:
        self.heard += [what, *args]

    def call(self, name: str, *args: Any) -> list[Any]:
        method, hook = self.hooks[name]
        hook(method, *args)
        return self.heard


def test_bytes_are_read_a_last_time_before_memory_goes() -> None:
    """A released pool is read before, and forgotten; other memory is not ours."""
    assert Told().call("pause", "kv_cache") == ["flush", "forget", "kv_cache"]
    assert Told().call("pause", "weights") == ["weights"]


def test_every_flush_and_every_change_of_weights_is_heard() -> None:
    """A flush ends in the allocator, whoever asked for it."""
    assert Told().call("clear") == ["flush", "cleared", "forget"]
    assert Told().call("record_weight_version_change", "v2") == ["reweighted", "v2", "v2"]


def test_entries_of_older_weights_are_counted_where_a_request_begins_with_them() -> None:
    """Those that were stored up to the change; newer ones, and rows that begin with nothing, are not."""
    records = torch.zeros(8, COLUMNS, dtype=torch.int64)
    records[:, STEP_SITE] = torch.tensor([0, 3, 4, 5, 6, 7, 8, 9]) | (1 << 40)
    runner = SimpleNamespace(
        tier=None, _samples=None, _reweighted=0, _older=torch.zeros((), dtype=torch.int64), _generations={},
        name_offset=0, _uids={},
        canary=SimpleNamespace(step=5, groups=[SimpleNamespace(records=records)], admit=lambda new: [1] * len(new)),
        rows=SimpleNamespace(req_to_token=torch.tensor([[1, 2, 3, 4, 5]]), req_generation=torch.zeros(1)),
    )  # fmt: skip
    request = SimpleNamespace(
        rid="r", kv=SimpleNamespace(req_pool_idx=0), input_embeds=None, origin_input_ids=[1] * 5, output_ids=[]
    )
    WatchedRunner.admit(runner, [request], [5])
    assert int(runner._older) == 0
    WatchedRunner.reweighted(runner, "v2")
    runner._generations.clear()
    WatchedRunner.admit(runner, [request], [5])
    assert int(runner._older) == 3


@pytest.mark.parametrize("kind", [*UNFOLLOWED_DRAFTS, "DFlashWorkerV2"])
def test_drafts_of_other_kinds_are_refused_by_flag_and_class(kind: str) -> None:
    """Before anything is attached, with what stands against it where that is known."""
    scheduler = SimpleNamespace(
        draft_worker=type(kind, (), {})(), server_args=SimpleNamespace(speculative_algorithm="OTHER"),
        max_prefill_tokens=1, max_req_len=1, max_running_requests=1,
    )  # fmt: skip
    why = UNFOLLOWED_DRAFTS.get(kind, "what it stores is not known here")
    with pytest.raises(AdapterError) as refused:
        watched(scheduler, CanaryConfig())
    start = f"speculative_algorithm 'OTHER' drafts by {kind}, which is not followed: {why}; only EAGLEWorkerV2, "
    followed = "StandaloneWorkerV2, NGRAMWorker are"
    assert str(refused.value) == f"{start}{followed}; unset KVCANARY_MODE to serve without a canary"


def tiered(**changed: Any) -> Any:
    """A scheduler with a host tier."""
    runner = SimpleNamespace(token_to_kv_pool=MHATokenToKVPool())
    own = {"tree_cache": SimpleNamespace(cache_controller=object()), "draft_worker": None}
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), **(own | changed))


def test_a_host_tier_is_followed_for_one_plain_pool_without_drafts() -> None:
    """Else it is refused by its flag; where there is no tier nothing is said."""
    assert host_tier.unfollowed(tiered()) == []
    assert host_tier.unfollowed(tiered(draft_worker=object()))[0].startswith("enable_hierarchical_cache is not")
    assert host_tier.unfollowed(tiered(draft_worker=object(), tree_cache=object())) == []
    scheduler = tiered()
    scheduler.tp_worker.model_runner.token_to_kv_pool = two_pools(True, False)
    assert host_tier.unfollowed(scheduler)[0].endswith("got SWAKVPool")


class Counter:
    """As SGLang's: which load a forward waits for, and layers that were waited for."""

    def __init__(self) -> None:
        self.num_layers, self.consumer_index, self.producer_index = 3, -1, 0
        self.landed: list[int] = []
        self.events = [SimpleNamespace(wait=self.landed.append)]


@pytest.mark.parametrize(
    ("consumer", "waits", "missed"),
    [(0, (0, 1, 2), 0), (0, (2,), 0), (0, (0, 1), 0b100), (0, (), 0b111), (-1, (0, 1, 2), 0b111)],
)
def test_layers_of_a_load_that_a_forward_did_not_wait_for_are_known(consumer: int, waits: Any, missed: int) -> None:
    """A wait for a later layer covers those before it; one for no load covers nothing. Ours wait for every layer."""
    counter, steps = Counter(), [SimpleNamespace(events=[])]
    memory = SimpleNamespace(total=torch.zeros(1, dtype=torch.int64), device=torch.device("cpu"))
    group = SimpleNamespace(records=torch.ones(8, COLUMNS, dtype=torch.int64), layers=[None])
    canary = SimpleNamespace(poison=object(), fed={"P1", "R9"}, groups=[group], steps=steps, memory=memory)
    told: list[Any] = []
    owners = SimpleNamespace(loaded=lambda slots: told.append(slots.tolist()), on_freed=1, on_granted=1)
    own = SimpleNamespace(canary=canary, owners=owners, flush=lambda: told.append("flush"))
    own.rows = SimpleNamespace(req_to_token=torch.tensor([[3, 4, 5]]))
    tier = host_tier.HostTier(own, SimpleNamespace(layer_done_counter=counter), contextlib.nullcontext)
    tier._loads = SimpleNamespace(expect=lambda new: None, arrived=lambda lines: told.append("arrived"))
    assert (canary.poison, canary.fed, owners.on_freed) == (None, {"R9", "O1"}, None)
    tier.queued(torch.tensor([4, 5]))
    tier.starts()
    tier.admitted([(0, "r", [1, 2, 3], 3, "")])
    tier.arrive([])
    assert (told, counter.landed) == ([[4, 5], "flush", "arrived"], [0, 1, 2])
    assert group.records[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
    counter.consumer_index = consumer
    for layer in waits:
        tier.waits(layer)
    tier.ran()
    tier.ran()
    assert int(memory.total) == (2 if missed else 0)
    assert [int(event.mismatch[0, 0]) for event in steps[0].events] == ([missed] if missed else [])
    assert all(event.requests == {3: "r", 4: "r", 5: "r"} for event in steps[0].events)
