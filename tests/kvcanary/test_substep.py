"""The hooks of a forward: their only order, and plans that contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import (
    CanaryConfig,
    CanaryManager,
    HookOrderError,
    KVCanaryError,
    KVCorruptionError,
    PlanError,
    PoolView,
    ReadPlan,
    SubstepCanary,
    WritePlan,
)
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.host_pool import MOST_GEOMETRIES, DensePart, Steps

HEADS, DIM, PROMPT = 2, 4, [11, 12, 13]
PAGE_SIZE, NUM_SLOTS = 4, 32


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pool_view(name: str = "target", layers: int = 2, page_size: int = PAGE_SIZE, **changes: object) -> PoolView:
    k, v = ([torch.zeros(NUM_SLOTS, HEADS, DIM) for _ in range(layers)] for _ in range(2))
    return PoolView(**{"name": name, "k": k, "v": v, "page_size": page_size, **changes})


def read_plan(**changes: object) -> ReadPlan:
    """A prefill of the whole prompt into page 1."""
    plan = {
        "indptr": ints(0, 3),
        "indices": ints(4, 5, 6),
        "requests": ("only",),
        "rows_per_request": 1,
        "prefix_lens": ints(0),
        "num_written": 3,
    }
    return ReadPlan(**plan | changes)


def write_plan(**changes: object) -> WritePlan:
    return WritePlan(**{"slots": ints(4, 5, 6), "tokens": ints(*PROMPT), "positions": ints(0, 1, 2)} | changes)


def values(n: int = 3) -> torch.Tensor:
    return torch.ones(n, HEADS, DIM)


@pytest.fixture
def canary() -> CanaryManager:
    """A manager of one pool with one request that owns page 1, in step 1."""
    manager = CanaryManager(CanaryConfig(seed=7), [pool_view()])
    manager.arm()
    manager.begin_step(1)
    manager.admit("only", PROMPT)
    manager.on_alloc("only", [1])
    return manager


def refused(error: type[Exception], call, *arguments: object, **settings: object) -> str:
    """The words with which a call is refused."""
    with pytest.raises(error) as caught:
        call(*arguments, **settings)
    return str(caught.value)


def run_forward(canary: CanaryManager) -> None:
    """One prefill, all its hooks, bytes included."""
    substep = canary.forward("prefill", 0, "target")
    _, slots = substep.open(read_plan(), write_plan())
    view = canary.session.state.by_name["target"].view
    for layer in range(view.num_layers):
        substep.store(layer, values(), values())
        view.k[layer][slots], view.v[layer][slots] = values(), values()
    substep.close()


# the order of the hooks


def test_the_right_order_finds_nothing(canary):
    """Open, one store a layer, close, check: a clean forward."""
    run_forward(canary)
    canary.collect(canary.end_step())
    assert canary.findings == []
    assert canary.certificate()["forwards"] == 1


def test_open_gives_the_plans_arrays_untouched(canary):
    """Where nothing is refused the forward reads and writes the very tensors of the plans."""
    read, write = read_plan(), write_plan()
    indices, slots = canary.forward("prefill", 0, "target").open(read, write)
    assert indices is read.indices
    assert slots is write.slots


def test_open_replaces_ids_outside_the_pool(canary):
    """Ids past the pool and below zero are null slot 0 in what the forward gets; the plans stay as they were."""
    read, write = read_plan(indices=ints(4, -2, 6)), write_plan(slots=ints(4, 5, NUM_SLOTS))
    indices, slots = canary.forward("prefill", 0, "target").open(read, write)
    assert indices.tolist() == [4, 0, 6]
    assert slots.tolist() == [4, 5, 0]
    assert read.indices.tolist() == [4, -2, 6]
    assert write.slots.tolist() == [4, 5, NUM_SLOTS]


def test_open_comes_once(canary):
    """A second open of an open forward is refused."""
    substep = canary.forward("verify", 0, "target")
    substep.open(read_plan(), write_plan())
    words = refused(HookOrderError, substep.open, read_plan(), write_plan())
    assert words == "open() comes once: verify of the target pool is open"


def test_a_closed_forward_is_not_opened_again(canary):
    """A substep is one forward: after close another one is needed."""
    substep = canary.forward("draft", 2, "target")
    substep.open(read_plan(), write_plan())
    substep.close()
    words = refused(HookOrderError, substep.open, read_plan(), write_plan())
    assert words == "open() comes once: draft[2] of the target pool is closed"


def test_store_before_open_is_refused(canary):
    """Nothing is stored by a forward that has not begun."""
    words = refused(HookOrderError, canary.forward("prefill", 0, "target").store, 1, values(), values())
    assert words == "store(layer=1) belongs between open() and close(): prefill of the target pool is not opened"


def test_store_after_close_is_refused(canary):
    """Nothing is stored by a forward that has ended."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    substep.close()
    assert "prefill of the target pool is closed" in refused(HookOrderError, substep.store, 0, values(), values())


def test_close_before_open_is_refused(canary):
    """What was not opened cannot be closed."""
    words = refused(HookOrderError, canary.forward("prefill", 0, "target").close)
    assert words == "close() follows open(): prefill of the target pool is not opened"


def test_close_comes_once(canary):
    """A second close is refused."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    substep.close()
    assert refused(HookOrderError, substep.close) == "close() follows open(): prefill of the target pool is closed"


@pytest.mark.parametrize(
    ("hook", "arguments", "what"),
    [
        ("end_step", (), "end_step()"),
        ("drain", (), "drain()"),
        ("begin_step", (2,), "begin_step()"),
        ("release", ("only",), "release()"),
        ("before_move", (), "before_move()"),
        ("on_move", ("target", ints(4), ints(5)), "on_move()"),
        ("forward", ("verify", 0, "target"), "forward('verify')"),
    ],
)
def test_hooks_wait_for_close(canary, hook, arguments, what):
    """While a forward is open, what would judge or follow it is refused."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    words = refused(HookOrderError, getattr(canary, hook), *arguments)
    assert words == f"{what} must wait for close() of prefill of the target pool"


@pytest.mark.parametrize("step", [0, 1])
def test_steps_count_upwards(canary, step):
    """A step number that stands still or goes back is refused once forwards have been judged."""
    run_forward(canary)
    canary.collect(canary.end_step())
    words = refused(HookOrderError, canary.begin_step, step)
    assert words == f"begin_step() must count upwards: step {step} follows step 1"


def test_hook_order_errors_are_runtime_errors_of_the_package():
    """Callers may catch RuntimeError or the base of the package."""
    assert issubclass(HookOrderError, RuntimeError)
    assert issubclass(HookOrderError, KVCanaryError)


# stores


def test_a_layer_outside_the_pool_is_refused(canary):
    """The message has the range and the layer."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    words = refused(PlanError, substep.store, 2, values(), values())
    assert words == "layer must be in [0, 2) for prefill of the target pool, got 2"


@pytest.mark.parametrize(("k", "v"), [((2, 2, 4), (2, 2, 4)), ((3, 2, 5), (3, 2, 5)), ((3, 2, 4), (3, 4, 2))])
def test_values_of_another_shape_are_refused(canary, k, v):
    """A store that does not fit the write plan is refused with both shapes."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    words = refused(PlanError, substep.store, 0, torch.ones(k), torch.ones(v))
    assert words == f"prefill of the target pool stores [3, 2, 4] a layer, got k {list(k)} and v {list(v)}"


def test_a_layer_stored_twice_is_a_duplicate_write(canary):
    """The second store of a layer is W4 with that layer."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    for layer in (0, 1, 1):
        substep.store(layer, values(), values())
    substep.close()
    with pytest.raises(KVCorruptionError) as caught:
        canary.collect(canary.end_step())
    finding = caught.value.findings[0]
    assert (finding.code, finding.layers, finding.writer, finding.reader) == ("W4", (1,), "only", None)


def test_a_layer_that_stores_nothing_is_an_unwritten_slot(canary):
    """A forward that skips a layer is R12 at its own check, with the layer that is missing."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    substep.store(0, values(), values())
    substep.close()
    with pytest.raises(KVCorruptionError) as caught:
        canary.collect(canary.end_step())
    finding = caught.value.findings[0]
    assert (finding.code, finding.slot, finding.layers, finding.found["missing"]) == ("R12", 4, (1,), [1])


def test_a_layer_that_stores_nothing_is_found_by_release(canary):
    """A request that ends before anyone reads what a layer left out does not end in silence."""
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan())
    substep.store(1, values(), values())
    substep.close()
    with pytest.raises(KVCorruptionError) as caught:
        canary.release("only")
    assert (caught.value.findings[0].code, caught.value.findings[0].layers) == ("R12", (0,))


# plans


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("indptr", ints(0, 1, 3), "indptr must be [2] int64, got [3] torch.int64"),
        ("indptr", ints(0, 3).int(), "indptr must be [2] int64, got [2] torch.int32"),
        ("indices", ints(4, 5, 6).int(), "indices must be [n] int64, got [3] torch.int32"),
        ("indices", ints(4, 5, 6)[None], "indices must be [n] int64, got [1, 3] torch.int64"),
        ("prefix_lens", ints(0, 0), "prefix_lens must be [1] int64, got [2] torch.int64"),
        ("prefix_lens", torch.zeros(1), "prefix_lens must be [1] int64, got [1] torch.float32"),
        ("num_written", ints(1, 2), "num_written must be [1] int64, got [2] torch.int64"),
        ("num_written", -1, "num_written must not be negative, got -1"),
    ],
)
def test_a_read_plan_of_wrong_shapes_is_refused(field, value, words):
    """Every array of a read plan is checked, and the message has what was given."""
    assert refused(PlanError, read_plan, **{field: value}) == words


def test_a_read_plan_has_a_row_for_each_branch():
    """Rows are requests times branches: indptr has one bound more."""
    assert "indptr must be [3] int64" in refused(PlanError, read_plan, rows_per_request=2)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("slots", ints(4, 5, 6).int(), "slots must be [n] int64, got [3] torch.int32"),
        ("slots", ints(4), "tokens must be [1] int64, got [3] torch.int64"),
        ("tokens", ints(1, 2), "tokens must be [3] int64, got [2] torch.int64"),
        ("positions", torch.zeros(3), "positions must be [3] int64, got [3] torch.float32"),
        ("parents", ints(-1), "parents must be [3] int64, got [1] torch.int64"),
    ],
)
def test_a_write_plan_of_wrong_shapes_is_refused(field, value, words):
    """Every array of a write plan is checked, and the message has what was given."""
    assert refused(PlanError, write_plan, **{field: value}) == words


@pytest.mark.parametrize(
    ("read", "write", "words"),
    [
        ({"indptr": ints(0, 2)}, {}, "indptr must run from 0 to the 3 indices, got 0 to 2"),
        ({"indptr": ints(1, 3)}, {}, "indptr must run from 0 to the 3 indices, got 1 to 3"),
        ({"num_written": 2}, {}, "the rows write 2 entries, the write plan has 3"),
        ({"prefix_lens": ints(-1)}, {}, "prefix_lens must not be negative, got -1 for row 0 of 'only'"),
    ],
)
def test_plans_that_contradict_each_other_are_refused(canary, read, write, words):
    """Open compares the plans' sizes, and the message has the numbers; the canary goes on with a right plan."""
    substep = canary.forward("prefill", 0, "target")
    assert words in refused(PlanError, substep.open, read_plan(**read), write_plan(**write))
    run_forward(canary)
    canary.collect(canary.end_step())
    assert canary.findings == []


def test_plan_errors_are_value_errors_of_the_package():
    """Callers may catch ValueError or the base of the package."""
    assert issubclass(PlanError, ValueError)
    assert issubclass(PlanError, KVCanaryError)


# pools


def test_a_manager_needs_a_pool():
    """Nothing to watch is a mistake."""
    words = refused(PlanError, CanaryManager, CanaryConfig(), [])
    assert words == "a manager needs at least one pool"


def test_pools_have_different_names():
    """Reports name pools, so two may not share a name."""
    words = refused(PlanError, CanaryManager, CanaryConfig(), [pool_view(), pool_view()])
    assert words == "pools must have different names, got target, target"


def test_pools_share_one_page_size():
    """Pools share page ids, so one page size is asked of all."""
    pools = [pool_view(), replace(pool_view("draft"), page_size=2)]
    assert "'target' has 4, 'draft' has 2" in refused(PlanError, CanaryManager, CanaryConfig(), pools)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 300])
@pytest.mark.parametrize("is_latent", [False, True])
def test_values_may_be_expanded(dtype, n, is_latent):
    """Values without memory of their own, in short forwards and in long ones, are fingerprinted as what they say."""
    heads = 1 if is_latent else HEADS
    k, v = (torch.zeros(n + 7, heads, DIM, dtype=dtype)[: (n + 7) // 4 * 4] for _ in range(2))
    view = PoolView("target", [k], None if is_latent else [v], PAGE_SIZE)
    canary = CanaryManager(CanaryConfig(seed=7, content="full"), [view])
    canary.arm()
    canary.begin_step(1)
    canary.admit("only", range(n))
    canary.on_alloc("only", range(1, 1 + -(-n // PAGE_SIZE)))
    slots = torch.arange(n) + PAGE_SIZE
    substep = canary.forward("prefill", 0, "target")
    read = read_plan(indptr=ints(0, n), indices=slots, num_written=n)
    substep.open(read, write_plan(slots=slots, tokens=torch.arange(n), positions=torch.arange(n)))
    stored = torch.ones(1, dtype=dtype).expand(n, heads, DIM)
    substep.store(0, stored, None if is_latent else stored)
    k[slots] = v[slots] = 1
    substep.close()
    canary.collect(canary.end_step())
    canary.commit("only", n)
    k[4, 0, 0] = 2
    with pytest.raises(KVCorruptionError, match="R9"):
        canary.release("only")


# values that the canary stores


def opened(canary: CanaryManager, **plans: object) -> SubstepCanary:
    substep = canary.forward("prefill", 0, "target")
    substep.open(read_plan(), write_plan(**plans))
    return substep


def test_what_the_canary_stores_itself_is_proved(canary):
    """Bytes lie where they were planned, fingerprints are theirs, and the certificate says that no store went
    elsewhere.
    """
    view = canary.session.state.by_name["target"].view
    substep = opened(canary)
    slots = write_plan().slots
    for layer in range(view.num_layers):
        assert substep.put(layer, slots, values() + layer, values() - layer)
        assert torch.equal(view.k[layer][slots], values() + layer)
        assert torch.equal(view.v[layer][slots], values() - layer)
    substep.close()
    canary.collect(canary.end_step())
    assert canary.findings == []
    assert canary.certificate()["store"] == "proved"
    pool = canary.session.state.by_name["target"]
    assert torch.equal(fingerprints_of_slots(pool, slots)[0], pool.content_a[:, slots])
    run_forward(canary)
    canary.collect(canary.end_step())
    assert canary.certificate()["store"] == "not proved"


@pytest.mark.parametrize(
    "asked",
    {
        "another slot": lambda k, v: (ints(4, 5, 7), k, v),
        "a slot outside": lambda k, v: (ints(4, 5, NUM_SLOTS), k, v),
        "fewer slots": lambda k, v: (ints(4, 5), k, v),
        "another type": lambda k, v: (ints(4, 5, 6), k.double(), v),
        "another shape": lambda k, v: (ints(4, 5, 6), k[:, :1], v),
        "gaps within a row": lambda k, v: (ints(4, 5, 6), k, v.transpose(1, 2).contiguous().transpose(1, 2)),
        "slots of another type": lambda k, v: (ints(4, 5, 6).int(), k, v),
        "fewer values": lambda k, v: (ints(4, 5, 6), k[:2], v[:2]),
        "values elsewhere": lambda k, v: (ints(4, 5, 6), k.to("meta"), v),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_the_loop_does_not_know_is_left_to_the_engine(canary, asked):
    """Where slots or values are not as they were planned nothing is written, and nothing counts as stored."""
    pool = canary.session.state.by_name["target"]
    view, seen = pool.view, values()[:2]
    geometry = seen.shape, seen.stride(), seen.dtype
    assert pool.host.steps[*geometry, *geometry, True] is not None  # two entries of another forward
    before = view.k[0].clone(), view.v[0].clone()
    substep = opened(canary)
    k = torch.arange(values().numel(), dtype=values().dtype).view(values().shape)
    assert not substep.put(0, *asked[1](k, k + 1))
    assert torch.equal(view.k[0], before[0])
    assert torch.equal(view.v[0], before[1])
    substep.store(0, k, k)  # not a second store


def test_what_was_written_into_a_page_is_sealed_before_its_next_grant(canary):
    """By the pages that forwards write, and not before another page is granted."""
    substep, checks = opened(canary), canary.session.checks
    slots = write_plan().slots
    for layer in range(canary.session.state.by_name["target"].view.num_layers):
        assert substep.put(layer, slots, values(), values())
    substep.close()
    page = int(slots[0]) // canary.session.state.page_size
    checks.judge_writes_into([page + 1, page + 2])
    assert checks.waits
    checks.judge_writes_into([page + 2, page])
    assert not checks.waits


def test_how_values_lie_is_kept_of_what_was_asked_lately():
    """Bytes from row to row, None for what no loop can read; never of more kinds than that."""
    part = DensePart(torch.float16, (2, 4), (4, 1), 2, 4)
    steps = Steps((part, part))
    for n in range(2 * MOST_GEOMETRIES + 3):
        own, gaps = ((n, 2, 4), (8, 4, 1), torch.float16), ((n, 2, 4), (24, 4, 1), torch.float16)
        assert steps[*own, *gaps, True] == (16, 48)
        assert len(steps) <= MOST_GEOMETRIES
    assert steps[*own, *own, False] is None
    assert steps[*own, *own[:2], torch.float32, True] is None
    assert Steps((part,))[*own, *own, True] is None


def test_a_layer_that_is_stored_twice_is_left_to_the_engine_and_found(canary):
    """The second store of a layer is W4, whoever made the first."""
    substep = opened(canary)
    slots = write_plan().slots
    assert substep.put(0, slots, values(), values())
    assert not substep.put(0, slots, values(), values())
    assert not substep.put(7, slots, values(), values())
    substep.store(0, values(), values())
    substep.put(1, slots, values(), values())
    substep.close()
    assert not substep.put(0, slots, values(), values())
    with pytest.raises(KVCorruptionError):
        canary.collect(canary.end_step())
    assert [finding.code for finding in canary.findings] == ["W4"]
