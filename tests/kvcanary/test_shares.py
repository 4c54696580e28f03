"""Shards and stages: fingerprints of what each rank holds add up to those of the whole model's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcanary import (
    CanaryConfig,
    CanaryManager,
    ForeignSnapshotError,
    KVCorruptionError,
    PlanError,
    PoolView,
    ReadPlan,
    Seal,
    WritePlan,
)
from kvcanary.dumps.reading import read_dump
from kvcanary.errors import ContradictionError
from kvcanary.manager.substep import SubstepCanary
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.state import CanaryState
from kvcanary.replay.replayer import replay
from kvcanary.transfers import PageSnapshot, join_shards, slots_that_differ
from kvcanary_kernels.content.fingerprint import fingerprint, fingerprint_torch
from kvcanary_kernels.record.layout import CHAIN, CONTENT_B, Share, make_keys
from kvcanary_kernels.watch.reread import both_fingerprints

HEADS, DIM, SLOTS, LAYERS, PAGE = 8, 16, 24, 3, 4
DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8"]
PINNED_A = [[-1013591065, 1282817409], [462688885, 2038822261]]
PINNED_STARTS = [-2971293267258592717, 1246474525980989573, 17062308525565149577]
WHERE = torch.tensor([4, 23, 9, 10])


def random_layers(dtype: str, heads: int = HEADS, seed: int = 0, dim: int = DIM) -> list[Tensor]:
    """Random bytes, [slots, heads, dim] a layer."""
    generator, kind = torch.Generator().manual_seed(seed), getattr(torch, dtype)
    shape = (SLOTS, heads, dim * kind.itemsize)
    return [torch.randint(256, shape, dtype=torch.uint8, generator=generator).view(kind) for _ in range(LAYERS)]


def shards(whole: PoolView, world: int) -> list[PoolView]:
    """The views of so many ranks, each with its heads of every part."""
    size = whole.kv_heads // world
    firsts = range(0, whole.kv_heads, size)
    extras = {part.name: part.tensors for part in whole.parts[2:]}
    return [
        replace(
            whole,
            k=[t[:, first : first + size] for t in whole.k],
            v=[t[:, first : first + size] for t in whole.v or ()],
            extras={name: [t[:, first : first + size] for t in tensors] for name, tensors in extras.items()},
            first_head=first,
            whole_heads=whole.kv_heads,
        )
        for first in firsts
    ]


def on_host(view: PoolView) -> tuple[Tensor, Tensor]:
    """By the compiled loop."""
    return fingerprints_of_slots(CanaryState([view], 7).pools[0], WHERE)


def by(operation) -> object:
    def run(view: PoolView) -> tuple[Tensor, Tensor]:
        keys = CanaryState([view], 7).pools[0].keys
        out = torch.zeros(LAYERS, len(WHERE), dtype=torch.int64), torch.zeros(len(WHERE), dtype=torch.int64)
        operation(view.rows, WHERE, keys, fingerprint_a=out[0], fingerprint_b=out[1])
        return out

    return run


def while_watched(view: PoolView) -> tuple[Tensor, Tensor]:
    """As for pools that are only watched: b by layer, which have no start."""
    a, b = both_fingerprints(view.rows, WHERE, CanaryState([view], 7).pools[0].keys)
    return a, b.sum(0)


WAYS = {"host": on_host, "triton": by(fingerprint), "torch": by(fingerprint_torch), "watched": while_watched}


def summed(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([a for a, _ in found]).sum(0), torch.stack([b for _, b in found]).sum(0)


def equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_fingerprints_of_shards_add_up(world, way, dtype):
    """To those of the whole row, to the last bit, and one bit of one shard shows in the sum."""
    scales = {"scale": [torch.rand(SLOTS, HEADS) for _ in range(LAYERS)]}
    whole = PoolView("t", random_layers(dtype), random_layers(dtype, seed=1), PAGE, extras=scales)
    parts = shards(whole, world)
    right = WAYS[way](whole)
    assert equal(summed([WAYS[way](part) for part in parts]), right)
    parts[-1].v[1].view(torch.uint8)[9, 0, 3] ^= 4
    assert not equal(summed([WAYS[way](part) for part in parts]), right)


def test_shards_of_unequal_sizes_add_up():
    """Any cut of the heads will do, also one of an odd number."""
    whole = PoolView("t", random_layers("bfloat16"), random_layers("bfloat16", seed=1), PAGE)
    cuts = [(0, 1), (1, 4), (4, 8)]
    parts = [
        replace(whole, k=[t[:, a:b] for t in whole.k], v=[t[:, a:b] for t in whole.v], first_head=a, whole_heads=HEADS)
        for a, b in cuts
    ]
    assert equal(summed([on_host(part) for part in parts]), on_host(whole))


def test_copies_of_a_head_have_one_fingerprint():
    """Where there are more ranks than heads: the ranks of one head agree, and one of each counts."""
    whole = PoolView("t", random_layers("float32", 2), random_layers("float32", 2, seed=1), PAGE)
    ranks = [shards(whole, 2)[rank * 2 // 4] for rank in range(4)]
    found = [on_host(rank) for rank in ranks]
    assert equal(found[0], found[1])
    assert equal(summed(found[::2]), on_host(whole))
    assert not equal(found[0], found[2])


def test_stages_have_the_fingerprints_of_their_layers():
    """Layer by layer those of the whole model; what all layers add up to is the sum over stages."""
    whole = PoolView("t", random_layers("float16"), random_layers("float16", seed=1), PAGE)
    stages = [
        replace(whole, k=[whole.k[n] for n in own], v=[whole.v[n] for n in own], layer_numbers=own)
        for own in ((1,), (0, 2))
    ]
    (one, b_one), (two, b_two), (every, b) = map(on_host, (*stages, whole))
    assert torch.equal(torch.stack([two[0], one[0], two[1]]), every)
    assert torch.equal(b_one + b_two, b)


def test_what_a_forward_stores_adds_up_too():
    """The canary's own records of shards, written by stores: a load elsewhere may compare with their sum."""
    whole = PoolView("t", random_layers("float32"), random_layers("float32", seed=1), PAGE)
    kept = [stored(view) for view in (whole, *shards(whole, 4))]
    assert equal(summed(kept[1:]), kept[0])


def forward(manager: CanaryManager, view: PoolView) -> SubstepCanary:
    """One prefill that has stored, and is still open."""
    tokens, slots = [5, 6, 7, 8], torch.arange(4, 8)
    manager.arm()
    manager.begin_step(1)
    manager.admit("only", tokens)
    manager.on_alloc("only", [1])
    substep = manager.substep("prefill", 0, "t")
    write = WritePlan(slots, torch.tensor(tokens), torch.arange(4))
    substep.open(ReadPlan(torch.tensor([0, 4]), slots, ("only",), 1, torch.tensor([0]), 4), write)
    for layer in range(LAYERS):
        substep.store(layer, *(part.tensors[layer][slots] for part in view.parts))
    return substep


def stored(view: PoolView) -> tuple[Tensor, Tensor]:
    """Fingerprints of a prefill, as the canary keeps them."""
    manager = CanaryManager(
        CanaryConfig(seed=7, disable=frozenset({"N1"})), [view]
    )  # random bits are numbers of any kind
    forward(manager, view).close()
    manager.commit("only", 4)
    manager.check()
    pool = manager.session.state.pools[0]
    return pool.content_a[:, 4:8].clone(), pool.records[4:8, CONTENT_B].clone()


def test_a_whole_pool_has_the_keys_that_it_had():
    """Numbers of an earlier release: what was stored then still compares."""
    keys = make_keys(7, 2, 8)
    assert keys.fingerprint_a[:, [0, 7]].tolist() == PINNED_A
    assert [*keys.start_a.tolist(), keys.start_b] == PINNED_STARTS
    whole = make_keys(7, 2, 8, share=Share((0, 1), (range(4), range(4, 8)), 0, 2, 2))
    assert torch.equal(whole.fingerprint_a, keys.fingerprint_a)
    assert whole.start_b == keys.start_b


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first_head": 4}, "got 4 to 11 of 8"),
        ({"first_head": -1, "whole_heads": 8}, "got -1 to 6 of 8"),
        ({"whole_heads": 4}, "got 0 to 7 of 4"),
        ({"layer_numbers": [3, 4]}, r"got \[3, 4\] for 3 layers"),
        ({"layer_numbers": [3, 3, 4]}, "must be different"),
        ({"whole_heads": 9, "first_head": 2}, "got 2 to 9 of 9"),
        ({"layer_numbers": [0, 1, 1 << 16]}, "from 0 to 65535"),
        ({"first_head": 8, "whole_heads": 1 << 19}, "words of a row of the whole model"),
    ],
)
def test_a_share_that_is_none_is_refused(changes, words):
    """With the numbers that were given, before anything is kept."""
    with pytest.raises(PlanError, match=words):
        PoolView("t", random_layers("float32"), random_layers("float32"), PAGE, **changes)


def test_heads_that_begin_within_a_word_are_refused():
    """Two heads of bfloat16 scales share a word: no rank has it for itself."""
    scales = {"scale": [torch.zeros(SLOTS, 2, dtype=torch.bfloat16) for _ in range(LAYERS)]}
    k = random_layers("float32", 2)
    PoolView("t", k, random_layers("float32", 2), PAGE, extras=scales, first_head=2, whole_heads=8)
    with pytest.raises(PlanError, match="heads of scale are 2 bytes, so head 1 begins within a word"):
        PoolView("t", k, random_layers("float32", 2), PAGE, extras=scales, first_head=1, whole_heads=8)


def test_a_finding_names_the_layer_of_the_whole_model(tmp_path):
    """The layer counts in the pool, as everywhere; the evidence says what the model calls it, after a replay too."""
    k, v = ([torch.rand(SLOTS, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv")
    view = PoolView("t", k, v, PAGE, layer_numbers=[16, 17, 18])
    manager = CanaryManager(CanaryConfig(seed=7, content="full", dump_dir=str(tmp_path)), [view])
    substep = forward(manager, view)
    view.v[2].view(torch.int32)[5, 0, 0] ^= 1
    substep.close()
    with pytest.raises(KVCorruptionError) as caught:
        manager.check()
    [finding] = caught.value.findings
    assert finding.layers == (2,)
    assert "in the whole model: layer 18" in finding.evidence
    [path] = tmp_path.iterdir()
    dump = read_dump(path)
    assert dump.manifest["pools"][0]["layer_numbers"] == [16, 17, 18]
    assert "in the whole model: layer 18" in replay(dump).findings[0].evidence


# hand-overs between tensor-parallel sizes


def random_view() -> PoolView:
    """Finite numbers, as a model gives them."""
    k, v, scale = ([torch.rand(SLOTS, HEADS, *dim) for _ in range(LAYERS)] for dim in ((DIM,), (DIM,), ()))
    return PoolView("t", k, v, PAGE, extras={"scale": scale})


def sealed(view: PoolView) -> PageSnapshot:
    """The seal of a page that a prefill has written, after a trip as bytes."""
    manager = CanaryManager(CanaryConfig(seed=7, content="full"), [view])
    forward(manager, view).close()
    manager.commit("only", 4)
    manager.check()
    seal = Seal.from_bytes(manager.on_offload([1]).to_bytes())
    assert isinstance(seal, PageSnapshot)
    return seal


def loaded(view: PoolView, seal: PageSnapshot | None) -> CanaryManager:
    """Page 2 of this pool is loaded with what lies there."""
    manager = CanaryManager(CanaryConfig(seed=7, content="full"), [view])
    manager.arm()
    manager.begin_step(1)
    manager.admit("back", [5, 6, 7, 8])
    manager.on_alloc("back", [2], for_load=True)
    manager.on_load_begin("back", [2])
    manager.on_load_end("back", [2], 4, seal)
    manager.commit("back", 4)
    manager.check()
    return manager


def moved(view: PoolView) -> PoolView:
    """A pool of its own, in whose page 2 lies page 1."""
    tensors = [[t.clone() for t in part.tensors] for part in view.parts]
    for layers in tensors:
        for tensor in layers:
            tensor[8:12] = tensor[4:8]
    k, v, scale = tensors
    return replace(view, k=k, v=v, extras={"scale": scale})


@pytest.mark.parametrize(("sent", "received"), [(8, 1), (4, 2), (2, 1), (8, 4), (2, 2)])
def test_seals_of_more_ranks_make_those_of_fewer(sent, received):
    """Pages that left several ranks come into the pool of one under their joined seals; one bit of one rank is T1."""
    whole = random_view()
    seals = [sealed(view) for view in shards(whole, sent)]
    group = sent // received
    for rank, view in enumerate(shards(whole, received) if received > 1 else [whole]):
        seal = join_shards(seals[rank * group : (rank + 1) * group])
        target = moved(view)
        assert loaded(target, seal).findings == []
        target.v[2].view(torch.int32)[9, -1, 3] ^= 1 << 7
        with pytest.raises(KVCorruptionError) as caught:
            loaded(target, seal)
        [finding] = caught.value.findings
        assert (finding.code, finding.slot, finding.layers, finding.part, finding.bit) == ("T1", 9, (2,), "V", 7)


@pytest.mark.parametrize("received", [2, 8])
def test_seals_of_fewer_ranks_are_compared_with_more(received):
    """Each rank seals what has arrived; their joined seal is that of the sender, or says which slots are others."""
    whole = random_view()
    sender, targets = sealed(whole), [moved(view) for view in shards(whole, received)]
    for wrong in (False, True):
        if wrong:
            targets[-1].k[0].view(torch.int32)[10, 0, 0] ^= 1
        arrived = [loaded(target, None).on_offload([2]) for target in targets]
        assert slots_that_differ(sender, join_shards(arrived)) == ({"t": [2]} if wrong else {})


def test_copies_of_heads_count_once_and_must_agree():
    """More ranks than heads: two of each, and one that holds something else is told of."""
    whole = random_view()
    halves = shards(whole, 2)
    seals = [sealed(halves[rank // 2]) for rank in range(4)]
    assert slots_that_differ(sealed(whole), join_shards(seals)) == {}
    other = moved(halves[1])
    other.k[0][4] += 1
    with pytest.raises(ContradictionError, match="copies of head 4 of 't' must hold the same bytes"):
        join_shards([*seals[:3], sealed(other)])


def test_shards_that_do_not_make_a_row_are_refused():
    """A rank that is missing, other rows, other pools, another seed, and parts that every rank holds whole."""
    whole = random_view()
    parts = shards(whole, 4)
    seals = [sealed(view) for view in parts]
    with pytest.raises(ContradictionError, match="without a gap, got 0 to 1 and 4 to 5"):
        join_shards([seals[0], seals[2]])
    with pytest.raises(ForeignSnapshotError, match="differ in their heads alone, got one of other"):
        join_shards([seals[0], replace(seals[1], layouts=(replace(seals[1].layouts[0], name="other"),))])
    with pytest.raises(ForeignSnapshotError, match="seed"):
        join_shards([seals[0], replace(seals[1], seed_id="0" * 16)])
    records = seals[1].contents[0].records.copy()
    records[0, CHAIN] += 1
    with pytest.raises(ContradictionError, match="the same rows of 't'"):
        join_shards([seals[0], replace(seals[1], contents=(replace(seals[1].contents[0], records=records),))])
    flat = [torch.rand(SLOTS, 3) for _ in range(LAYERS)]
    with pytest.raises(ForeignSnapshotError, match="whole on every rank, got bias: watch them as a pool of their own"):
        join_shards([sealed(replace(part, extras={"bias": flat})) for part in parts])
    joined = join_shards(seals)
    with pytest.raises(ForeignSnapshotError, match="heads 0 to 1 of 8"):
        loaded(moved(whole), seals[0])
    assert "heads" not in str(joined.layouts[0])


def test_what_is_loaded_without_a_seal_is_counted():
    """Nothing can tell whether it is right; the certificate says of how many entries."""
    told = loaded(moved(random_view()), None).certificate()["unchecked"]
    assert told["entries that were loaded without a seal"] == 4
