"""Captured substeps as a CUDA graph holds them: what their hooks may run, in which order, and the registry that has
them.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcanary import CanaryConfig, CanaryManager, HookOrderError, PlanError, ReadPlan, WritePlan
from kvcanary.captured import kernel_launches as launches_module
from kvcanary.captured import registry as registry_module
from kvcanary.captured.buffers import StaticBuffers
from kvcanary.records.dispatch import KERNELS
from kvcanary_kernels.record import layout as record
from static_rig import StaticRig

ANN, BOB = 11, 22


# nothing that a CUDA graph could not hold


class _Launched:
    """Stands in for a kernel: takes any launch."""

    def __getitem__(self, grid: object):
        return lambda *arguments, **options: None


class _Watch(TorchDispatchMode):
    """Every torch operation that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


VIEWS = {"view", "detach", "slice", "select", "unsqueeze", "as_strided", "_reshape_alias", "_unsafe_view", "unbind"}


@pytest.mark.parametrize("settings", [{}, {"is_tree": True, "max_depth": 3}])
def test_hooks_run_no_torch_operation_but_launches(make_static, monkeypatch, settings):
    """Around the kernels there are views: no look at a value."""
    monkeypatch.setattr(launches_module, "ops_for", lambda device: KERNELS)
    modules = {inspect.getmodule(kernel) for kernel in vars(KERNELS).values()}
    kernels = [(module, name) for module in modules for name in vars(module) if name.endswith("_kernel")]
    assert len(kernels) >= 12
    for module, name in kernels:
        monkeypatch.setattr(module, name, _Launched())
    rig = make_static()
    substep = rig.add("verify", has_truths=True, **settings)
    k, v = rig.values(0, substep.forward.tokens, substep.forward.positions)
    with _Watch() as watch:
        substep.open()
        for layer in range(rig.LAYERS):
            substep.store(layer, k, v)
        substep.close()
    assert not watch.names - VIEWS


@pytest.mark.gpu
def test_eager_hooks_on_a_gpu_wait_for_nothing(make_static, static_row):
    """The hooks in eager mode: no synchronisation and not one allocation once they are warm."""
    rig = make_static("cuda")
    rig.grant(ANN, 1, 2)
    substep = rig.add("prefill")
    batch = rig.batch([static_row(ANN, [4, 5, 6], [50, 51, 52])])
    rig.run(substep, batch)
    k, v = rig.values(0, substep.forward.tokens, substep.forward.positions)
    rig.registry.load(substep, batch)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        substep.open()
        for layer in range(rig.LAYERS):
            substep.store(layer, k, v)
        substep.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert rig.read_back().violations == []


# the same records as the eager path


def test_records_are_those_of_the_eager_path(make_static, static_row):
    """A prefill and a decode leave the records and fingerprints that CanaryManager leaves."""
    eager, rig = make_static(), make_static()
    manager = CanaryManager(CanaryConfig(seed=7, content="full"), [eager.pool.view])
    manager.arm()
    ints = torch.tensor
    manager.begin_step(1)
    manager.admit("ann", [50, 51, 52])
    manager.on_alloc("ann", [1])
    uid = manager.session.ledger.known(["ann"])[0].uid
    rig.grant(uid, 1, generation=int(manager.session.ledger.generations[1]))
    steps = [("prefill", [4, 5, 6], [50, 51, 52], 0), ("decode", [4, 5, 6, 7], [53], 3)]
    for step, (kind, ids, tokens, prefix) in enumerate(steps, 1):
        if step > 1:
            manager.begin_step(step)
            manager.append("ann", tokens)
        positions = ints(list(range(prefix, len(ids))))
        read = ReadPlan(ints([0, len(ids)]), ints(ids), ("ann",), 1, ints([prefix]), len(tokens))
        substep = manager.forward(kind, 0, "target")
        _, slots = substep.open(read, WritePlan(ints(ids[prefix:]), ints(tokens), positions))
        for layer in range(rig.LAYERS):
            k, v = eager.values(layer, ints(tokens), positions)
            substep.store(layer, k, v)
            eager.kv[layer, slots, 0], eager.kv[layer, slots, 1] = k, v
        substep.close()
        manager.collect(manager.end_step())
        manager.commit("ann", len(ids))
        batch = rig.batch([static_row(uid, ids, tokens)])
        assert rig.run(rig.add(kind), batch, step).violations == []
    theirs = manager.session.state.pools[0]
    assert torch.equal(rig.kv, eager.kv)
    assert torch.equal(rig.pool.records[4:8], theirs.records[4:8])
    assert torch.equal(rig.pool.content_a[:, 4:8], theirs.content_a[:, 4:8])


# order of hooks, and the registry


def refused(error, call, *arguments: object, **settings: object) -> str:
    with pytest.raises(error) as caught:
        call(*arguments, **settings)
    return str(caught.value)


def test_hooks_have_one_order(make_static):
    """open, store, close; anything else is refused, and so is reading back between them."""
    rig = make_static()
    substep = rig.add("draft", 2)
    name = "draft[2] of the target pool, bucket of 4 rows"
    assert refused(HookOrderError, substep.close) == f"close() must follow open(): {name} is closed"
    values = rig.values(0, substep.forward.tokens, substep.forward.positions)
    words = refused(HookOrderError, substep.store, 0, *values)
    assert words == f"store(layer=0) belongs between open() and close(): {name} is closed"
    substep.open()
    assert refused(HookOrderError, substep.open) == f"open() must follow close(): {name} is open"
    assert refused(HookOrderError, rig.read_back) == f"read_back() must wait for close() of {name}"
    assert refused(HookOrderError, rig.registry.arm) == f"arm() must wait for close() of {name}"
    assert refused(PlanError, substep.store, 2, *values) == f"layer must be in [0, 2) for {name}, got 2"
    substep.close()


def test_a_body_that_raised_is_abandoned(make_static, static_row):
    """The forward after it is judged as if nothing had been; what was left out is R12 and H1, never W4."""
    rig = make_static()
    rig.grant(ANN, 1)
    substep = rig.add("prefill")
    prompt, longer = static_row(ANN, [4, 5], [50, 51]), static_row(ANN, [4, 5, 6], [52])
    rig.grant(BOB, 3)
    rig.registry.load(substep, rig.batch([prompt]))
    substep.open()
    for _ in range(2):
        substep.store(0, *rig.values(0, substep.forward.tokens, substep.forward.positions))
    substep.abandon()
    assert len(rig.read_back().gaps) == 1
    assert {violation.code for violation in rig.run(rig.add("decode"), rig.batch([longer])).violations} == {"R12"}
    assert rig.run(substep, rig.batch([static_row(BOB, [12], [30]), prompt])).violations == []
    substep.abandon()
    assert not substep.is_open


def test_records_are_sealed_behind_the_store_of_the_middle_layer(make_static, static_row):
    """Not before: what runs beside a body begins late in its graph. Fingerprints come with close()."""
    rig = make_static()
    rig.grant(ANN, 1)
    substep = rig.add("prefill")
    rig.registry.load(substep, rig.batch([static_row(ANN, [4, 5], [50, 51])]))
    record_, seen = rig.pool.records[4], []
    substep.open()
    for layer in range(rig.LAYERS):
        substep.store(layer, *rig.values(layer, substep.forward.tokens, substep.forward.positions))
        seen.append((int(record_[record.TOKEN_POSITION]) & record.MASK_32, int(record_[record.LAYERS_LOW])))
    substep.close()
    assert (seen, int(record_[record.LAYERS_LOW])) == ([(0, 0), (50, 0)], 0b11)


def test_a_registry_is_filled_before_it_is_armed(make_static):
    """A repeated or late substep is refused."""
    rig = make_static()
    substep = rig.add("decode", rows=2)
    assert list(rig.registry) == [substep]
    words = refused(PlanError, rig.add, "decode", rows=2)
    assert words == "a registry holds each substep once, got decode of the target pool, bucket of 2 rows twice"
    assert refused(PlanError, rig.add, "dance").startswith("kind must be one of prefill, decode, draft")
    rig.registry.arm()
    words = refused(HookOrderError, rig.add, "decode", rows=4)
    assert words == "add() must come before arm(): decode of the target pool is late"


def test_a_registry_has_a_capacity(make_static, monkeypatch):
    """Headers lie in one tensor that never grows."""
    monkeypatch.setattr(registry_module, "CAPACITY", 1)
    registry = make_static().registry
    buffers = StaticBuffers.allocate(1, 1, 1)
    assert refused(PlanError, registry.add, "other", "decode", 0, buffers) == "pool must be one of target, got 'other'"
    registry.add("target", "decode", 0, buffers)
    words = refused(PlanError, registry.add, "target", "verify", 0, buffers)
    assert words == "a registry of 1 substeps is full: capture fewer buckets"


def test_attention_asks_for_every_layer_once(make_static):
    """Sums that lack a layer would be taken for damage: hooks that come out of order are errors at once."""
    rig = make_static()
    rig.registry.compares_reads = True
    substep = rig.add("verify", attends=True)
    with pytest.raises(HookOrderError, match=r"reads\(layer=0\) belongs between open\(\) and close\(\)"):
        substep.reads(0)
    substep.open()
    with pytest.raises(HookOrderError, match=r"reads\(layer=99\)"):
        substep.reads(99)
    assert substep.reads(0).sums is substep.work.sums
    with pytest.raises(HookOrderError, match=r"reads\(\) must come once for each of \d+ layers.* was read 1 times"):
        substep.close()
    substep.work.sums.fill_(1)
    substep.abandon()
    assert not substep.work.sums.any()


def test_attention_of_rows_that_it_does_not_read_whole_is_asked_for_nothing(make_static, monkeypatch):
    """Nor is one that never said that it can, nor any where not all bytes are compared."""
    rig = make_static()
    assert rig.add("prefill", attends=True).reads(0) is None
    rig.registry.compares_reads = True
    assert rig.add("decode").reads(0) is None
    monkeypatch.setattr("kvcanary.captured.registry.reads_fit", lambda rows, kv_heads: False)
    assert rig.add("verify", attends=True).reads(0) is None


class DeepRig(StaticRig):
    LAYERS = 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_was_postponed_is_spread_over_layers(device, static_row, monkeypatch):
    """From the middle of a forward on, behind each store its share; its own look comes behind all of it."""
    rig = DeepRig(device)
    rig.grant(ANN, 1, 2)
    decode, order = rig.add("decode"), []
    for name in ("store", "verify_prefixes", "settle"):
        launch = getattr(decode._launch, name)

        def note(*arguments: object, name=name, launch=launch, **more: object) -> None:
            order.append(name)
            launch(*arguments, **more)

        monkeypatch.setattr(decode._launch, name, note)
    rig.registry.shared.side_stream.defer("draft", *(lambda part=part: order.append(part) for part in "abcde"))
    assert rig.run(decode, rig.batch([static_row(ANN, [4, 5], [50, 51])])).violations == []
    spread = ["store", "a", "b", "store", "c", "d", "store", "e", "store", "verify_prefixes", "settle"]
    assert order == ["store"] * 4 + spread
