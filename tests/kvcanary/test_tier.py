"""Tier: objects that go to a store come back as they left, or are told of as what came in their place."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig, Finding, ForeignSnapshotError, KVCorruptionError, PlanError, Seal, SealError, Tier
from kvcanary.transfers import ObjectSeal
from kvcanary_tools.bench.toy.engine import ToyEngine
from seal_fuzz import fuzz, resealed
from toy_tier import Tier as ToyTier

LAYERS, PAGES, SLOTS, HEADS, DIM = 3, 6, 4, 2, 16


def kv(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, list[torch.Tensor]]:
    """K and V of some pages, [pages, slots, heads, dim] a layer."""
    generator = torch.Generator().manual_seed(seed)
    shape = (PAGES, SLOTS, HEADS, DIM)
    return {
        part: [(8 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(LAYERS)] for part in ("k", "v")
    }


def found(run: Callable[[], object]) -> Finding:
    """The one finding with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run()
    [finding] = caught.value.findings
    assert finding.code == "T1"
    return finding


def verdict(finding: Finding) -> tuple[str, str]:
    """The kind, and what the first cause says."""
    cause = finding.causes[0]
    assert cause.family == "transfer"
    assert cause.text.startswith(f"{finding.found['verdict']}: ")
    return finding.found["verdict"], cause.text


# what may be put


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, not contiguous."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


OBJECTS: dict[str, Callable[[], Any]] = {
    "mapping of layers": kv,
    "list of layers": lambda: kv()["k"],
    "tuples a layer": lambda: list(zip(*kv().values(), strict=True)),
    "mappings a layer": lambda: [dict(zip("kv", pair, strict=True)) for pair in zip(*kv().values(), strict=True)],
    "one tensor": lambda: torch.stack(kv()["k"]),
    "not contiguous": lambda: {name: [strided(t) for t in layers] for name, layers in kv().items()},
    "a slice": lambda: torch.arange(1000)[3:-1:2],
    "one of a slice": lambda: torch.arange(10)[3:4].as_strided((1,), (2,)),
    "float8": lambda: kv(dtype=torch.float8_e4m3fn),
    "float8 fnuz": lambda: kv(dtype=torch.float8_e5m2fnuz)["v"],
    "uint8, odd": lambda: torch.arange(1_003, dtype=torch.uint8),
    "uint8, odd rows": lambda: torch.arange(105, dtype=torch.uint8).view(5, 21),
    "an unaligned view": lambda: torch.arange(1_003, dtype=torch.uint8)[1:],
    "bool": lambda: torch.arange(77) % 3 == 0,
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "float64": lambda: kv(dtype=torch.float64),
    "a number": lambda: torch.tensor(4.5),
    "nothing": lambda: torch.empty(0, 4),
    "no tensors": dict,
    "needs a gradient": lambda: torch.randn(9, requires_grad=True) * 2,
    "large entries": lambda: torch.arange(2 * 50_001, dtype=torch.int64).view(2, 50_001),
    "numpy": lambda: np.arange(4_000, dtype=np.float16).reshape(10, 20, 20),
    "numpy, reversed": lambda: np.arange(4_000, dtype=np.uint16)[::-1],
    "numpy, big endian": lambda: np.arange(400, dtype=">f4"),
    "numpy, of Fortran": lambda: np.asfortranarray(np.arange(600, dtype=np.int64).reshape(20, 30)),
    "numpy, read only": lambda: np.frombuffer(bytes(range(200)), np.int16),
    "bytes": lambda: bytes(range(256)) * 3,
    "bytearray": lambda: bytearray(range(99)),
    "memoryview": lambda: memoryview(bytes(range(99))),
    "zeros": lambda: [torch.zeros(64, 64), torch.zeros(64, 64)],
}


def flip(value: Any) -> bool:
    """One bit of the last tensor in it that has bytes, in place or in a copy that takes its place; whether it could."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(flip(inner) for inner in reversed(value))
    if isinstance(value, torch.Tensor) and value.numel():
        value = value.detach()
        own = value.resolve_conj() if value.is_complex() else value
        one = torch.stack([own.flatten()[-1]]).view(torch.uint8)
        one[-1] ^= 1
        if value.dim():
            value[tuple(size - 1 for size in value.shape)] = one.view(value.dtype)[0]
        else:
            value.copy_(one.view(value.dtype)[0])
        return True
    if isinstance(value, np.ndarray) and value.size and value.flags.writeable:
        value[(-1,) * value.ndim] += 64
        return True
    if isinstance(value, bytearray):
        value[-1] ^= 1
        return True
    return False


@pytest.mark.parametrize("name", OBJECTS)
def test_any_object_is_known_again(name):
    """As it is, after its seal was bytes, in another tier of the seed; and its last bit is looked at."""
    value, tier = OBJECTS[name](), Tier(5)
    seal = tier.put("key", value)
    assert isinstance(seal, ObjectSeal)
    assert Tier(5).check("key", OBJECTS[name]() if "complex" not in name and "gradient" not in name else value, seal)
    assert Tier(5).check("key", value, seal.to_bytes())
    assert Seal.from_bytes(seal.to_bytes()).to_bytes() == seal.to_bytes()
    assert tier.check("key", value)
    if flip(value):
        with pytest.raises(KVCorruptionError):
            tier.check("key", value, seal)


def test_bytes_alone_are_compared_with_what_had_shapes():
    """A file gives all tensors one after the other, or an array of bytes for each."""
    value, tier = kv(), Tier(5)
    seal = tier.put("key", value)
    parts = [tensor.view(torch.uint8).numpy() for layers in value.values() for tensor in layers]
    data = b"".join(part.tobytes() for part in parts)
    assert tier.check("key", data, seal)
    assert tier.check("key", parts, seal)
    assert tier.check("key", np.frombuffer(data, np.uint8), seal)
    assert tier.check("key", {"k": [t.view(torch.int16) for t in value["k"]], "v": value["v"]}, seal)


def test_layers_may_come_in_another_container():
    """A list for a tuple, an array for a tensor: names and layers are what count."""
    value, tier = kv(dtype=torch.float16), Tier(5)
    seal = tier.put("key", value)
    assert tier.check("key", {"v": tuple(value["v"]), "k": [t.numpy() for t in value["k"]]}, seal)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "an object must be a tensor, an array or bytes, got object"),
        ({"k": [1.5]}, "k.0 must be a tensor, an array or bytes, got float"),
        ("text", "got str"),
        (np.array([{}, {}]), "got an array of object"),
        (torch.eye(3).to_sparse(), "a tensor must be dense, got torch.sparse_coo"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "must have different names"),
    ],
)
def test_what_has_no_bytes_is_refused(value, words):
    with pytest.raises(PlanError, match=words):
        Tier(5).put("key", value)


def test_a_key_is_whatever_has_a_name():
    """Text, bytes, numbers and tuples; an object without a repr of its own has none in another process."""
    tier, value = Tier(5), torch.arange(9)
    for key in ("key", b"\x00\xff", 7, (1, "a"), CanaryConfig()):
        assert tier.check(key, value, tier.put(key, value))
    with pytest.raises(PlanError, match="a key must be text, bytes, or have a repr that names it, got object"):
        tier.put(object(), value)


# what came in their place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8], ids=str)
def test_one_bit_is_named(dtype):
    """Part, layer, page, head, dim, bit, and both values."""
    value, tier = kv(dtype=dtype), Tier(5)
    seal = tier.put("key", value)
    element = value["v"][1].view(torch.uint8).view(PAGES, SLOTS, HEADS, DIM, -1)[4, 2, 1, 7]
    element[-1] ^= 1 << 3
    finding = found(lambda: tier.check("key", value, seal))
    assert verdict(finding)[0] == "one word"
    place = (finding.part, finding.layer, finding.page, finding.head, finding.dim, finding.byte, finding.bit)
    bits = 8 * dtype.itemsize - 5
    assert place == ("v", 1, 4, 1, 7, dtype.itemsize - 1, bits)
    assert "element [4, 2, 1, 7] of v of layer 1" in finding.evidence[-1]
    assert finding.reader == "key"
    assert "key 'key', v of layer 1" in finding.sentence
    assert finding.expected["bits"] != finding.found["bits"]


def one_word_in_two_layers(value: dict[str, list[torch.Tensor]]) -> None:
    for layer in (0, 2):
        value["k"][layer].view(torch.int16)[1, 1, 1, 1] ^= 5


def zeroed_pages(value: dict[str, list[torch.Tensor]]) -> None:
    for layers in value.values():
        for tensor in layers:
            tensor[3:] = 0


def no_scales(value: dict[str, list[torch.Tensor]]) -> None:
    del value["v"]


def half_a_layer(value: dict[str, list[torch.Tensor]]) -> None:
    value["k"][1] = value["k"][1][: PAGES // 2].clone()


def exchanged_parts(value: dict[str, list[torch.Tensor]]) -> None:
    value["k"], value["v"] = value["v"], value["k"]


def layers_in_another_order(value: dict[str, list[torch.Tensor]]) -> None:
    value["v"].reverse()


def read_as_hnd(value: dict[str, list[torch.Tensor]]) -> None:
    """Bytes of [pages, heads, slots, dim] where [pages, slots, heads, dim] left."""
    for part, layers in value.items():
        value[part] = [t.transpose(1, 2).contiguous().view(PAGES, SLOTS, HEADS, DIM) for t in layers]


def heads_shifted(value: dict[str, list[torch.Tensor]]) -> None:
    value["k"] = [t.roll(1, 2) for t in value["k"]]


def bytes_swapped(value: dict[str, list[torch.Tensor]]) -> None:
    value["k"][0] = (
        value["k"][0]
        .view(torch.uint8)
        .view(-1, 2)
        .flip(1)
        .contiguous()
        .view(-1)
        .view(torch.bfloat16)
        .view(PAGES, SLOTS, HEADS, DIM)
    )


def another_shape(value: dict[str, list[torch.Tensor]]) -> None:
    value["v"] = [t.view(PAGES, HEADS, SLOTS, DIM) for t in value["v"]]


def another_type(value: dict[str, list[torch.Tensor]]) -> None:
    value["v"] = [t.view(torch.float16) for t in value["v"]]


def one_more(value: dict[str, list[torch.Tensor]]) -> None:
    value["scale"] = [torch.ones(2)]


def longer(value: dict[str, list[torch.Tensor]]) -> None:
    value["k"][0] = torch.cat([value["k"][0], value["k"][0][:1]])


def noise(value: dict[str, list[torch.Tensor]]) -> None:
    value["k"][0][2] = torch.randn(SLOTS, HEADS, DIM).bfloat16()


CAME: dict[Callable[[dict[str, list[torch.Tensor]]], None], tuple[str, str]] = {
    one_word_in_two_layers: ("one word", "one word changed in each of 2 rows"),
    zeroed_pages: ("short", "holds zeros"),
    no_scales: ("short", "v of layer 0 did not come back, and 2 more"),
    half_a_layer: ("short", "768 of 1536 bytes of k of layer 1 came back"),
    exchanged_parts: ("other layout", "k of layer 0 holds the bytes of v of layer 0"),
    layers_in_another_order: ("other layout", "v of layer 0 holds the bytes of v of layer 2"),
    read_as_hnd: (
        "other layout",
        r"k of layer 0: its axes lie in the order \[0, 2, 1, 3\], and were read as \[0, 1, 2, 3\]",
    ),
    heads_shifted: ("other layout", r"k of layer 0: axis 2 of \[6, 4, 2, 16\] is"),
    bytes_swapped: ("other layout", "the bytes of each element, 2 of them, are in the reverse order"),
    another_shape: ("other layout", r"v of layer 0 left as \[6, 4, 2, 16\] bfloat16, and came back as \[6, 2, 4, 16\]"),
    another_type: ("other layout", r"left as \[6, 4, 2, 16\] bfloat16, and came back as \[6, 4, 2, 16\] float16"),
    one_more: ("other layout", "1 tensors came back that did not leave: scale"),
    longer: ("other layout", "1792 bytes came back for the 1536 of k of layer 0"),
    noise: ("unknown", "k of layer 0 are those of nothing that is known"),
}


@pytest.mark.parametrize("strike", CAME, ids=lambda strike: strike.__name__)
def test_what_came_back_is_named(strike):
    """One finding for the object, whose first cause says what the way did."""
    value, tier = kv(), Tier(5)
    seal = tier.put("key", value)
    assert tier.check("key", value, seal)
    strike(value)
    kind, text = verdict(found(lambda: Tier(5).check("key", value, seal)))
    wanted, words = CAME[strike]
    assert kind == wanted
    assert re.search(words, text), text


def test_pages_in_another_order_are_misrouted():
    """Entries of the first dimension are pages, whose bytes are known by name."""
    value, tier = torch.randn(8, 16, 2, 16), Tier(5)
    seal = tier.put("key", value)
    kind, text = verdict(found(lambda: tier.check("key", value.roll(1, 0), seal)))
    assert kind == "misrouted"
    assert "entry 0 of tensor came back with the bytes of entry 7 of tensor" in text


def test_the_object_of_another_key_is_misrouted():
    """By its bytes, by its seal, or by both, and the key is named; also where it has another size."""
    tier, one, two = Tier(5), kv(1), torch.randn(70, 3)
    seals = {"one": tier.put("one", one), "two": tier.put("two", two)}
    for value, seal in ((kv(1), "two"), (two, "one"), (two, "two")):
        kind, text = verdict(found(lambda v=value, s=seal: tier.check("one", v, seals[s])))
        assert kind == "misrouted"
        assert "'two'" in text
    tier.put("three", kv(3))
    kind, text = verdict(found(lambda: tier.check("one", kv(3), seals["one"])))
    assert (kind, "of key 'three'" in text) == ("misrouted", True)


def test_one_page_of_another_key_is_misrouted():
    """All else is its own; the page and its key are named."""
    tier, one, two = Tier(5), torch.randn(8, 16, 2, 16), torch.randn(8, 16, 2, 16)
    seals = [tier.put(name, value) for name, value in (("one", one), ("two", two))]
    one[3] = two[5]
    kind, text = verdict(found(lambda: tier.check("one", one, seals[0])))
    assert kind == "misrouted"
    assert "entry 3 of tensor came back with the bytes of entry 5 of tensor of key 'two'" in text


def test_an_earlier_object_of_the_key_is_stale():
    """With the later one's seal, or with its own; the same bytes put twice are never stale."""
    tier = Tier(5)
    old = tier.put("key", kv(1))
    again = tier.put("key", kv(1))
    for seal in (old, again):
        assert tier.check("key", kv(1), seal)
    new = tier.put("key", kv(2))
    for seal in (new, old):
        kind, text = verdict(found(lambda s=seal: tier.check("key", kv(1), s)))
        assert kind == "stale"
        assert "put 3 followed" in text
    assert tier.check("key", kv(2), new)


def test_a_load_that_began_before_the_key_was_put_again_is_not_stale():
    """It was issued when the old object was the newest one."""
    tier = Tier(5)
    old = tier.put("key", kv(1))
    tier.issued("key")
    tier.put("key", kv(2))
    tier.landed("key")
    assert tier.check("key", kv(1), old)
    tier.issued("key")
    with pytest.raises(KVCorruptionError):
        tier.check("key", kv(1), old)


def test_a_load_that_was_never_issued_is_told():
    """When it is said to have landed, and when its bytes are wrong; right bytes are right."""
    tier, value = Tier(5), kv()
    seal = tier.put("key", value)
    tier.landed("key")  # of loads nobody tells
    tier.issued("key")
    assert tier.landed("key")
    assert tier.check("key", value, seal)
    assert tier.check("key", value, seal)
    kind, text = verdict(found(lambda: tier.landed("key")))
    assert kind == "never issued"
    assert "a load of 'key' is said to have landed, and was never issued" in text
    blank = {part: [torch.zeros_like(t) for t in layers] for part, layers in value.items()}
    finding = found(lambda: tier.check("key", blank, seal))
    assert verdict(finding) == ("never issued", "never issued: no load of 'key' was issued")
    assert any("holds zeros" in line for line in finding.evidence)


def test_bytes_that_are_used_before_they_landed_are_short():
    """Where it is told what lands; the cause says that nobody waited."""
    tier, value = Tier(5), kv()
    seal = tier.put("key", value)
    tier.issued("key")
    tier.landed("key")
    assert tier.check("key", value, seal)
    tier.issued("key")
    value["k"][2][3:] = 7
    kind, text = verdict(found(lambda: tier.check("key", value, seal)))
    assert (kind, "had not landed when its bytes were used" in text) == ("short", True)


# seals


def test_a_seal_of_another_seed_model_or_identity_is_refused_with_both():
    """It says nothing of these bytes: an error in mode raise, an L1 and False in log."""
    value = kv()
    seal = Tier(5, model="m@1").put("key", value, identity={"adapter": "french"})
    others = [
        (Tier(6, model="m@1"), {}, f"of seed id {Tier(5).seed_id} for {Tier(6).seed_id}"),
        (Tier(5, model="m@2"), {}, "got one of 'm@1' for 'm@2'"),
        (Tier(5, model="m@1"), {"adapter": "german"}, "the adapter that it left, got one of 'french' for 'german'"),
    ]
    for tier, identity, words in others:
        with pytest.raises(ForeignSnapshotError, match=words):
            tier.check("key", value, seal, identity)
        log = Tier(6 if tier.seed_id == Tier(6).seed_id else 5, model=tier.config.model, mode="log")
        assert not log.check("key", value, seal, identity)
        assert words in log.findings[0].sentence
    assert Tier(5, model="m@1").check("key", value, seal, {"adapter": "french"})


def test_seals_of_pages_and_of_objects_are_not_each_other():
    """Each is refused where the other is asked for, with both names."""
    with torch.inference_mode():
        pages = ToyTier(ToyEngine(CanaryConfig(seed=5, content="full")))
        seal = Tier(5).put("key", torch.ones(4))
        with pytest.raises(ForeignSnapshotError, match="with a seal of a tier, got a snapshot"):
            Tier(5).check("key", torch.ones(4), pages.snapshot)
        pages.snapshot = seal
        with pytest.raises(ForeignSnapshotError, match="with a snapshot of pages, got a seal of a tier"):
            pages.bring_back()


def test_a_seal_that_came_back_damaged_is_a_finding():
    """Its bytes are part of what a store gives; nothing else is raised in mode log."""
    tier, value = Tier(5, mode="log"), kv()
    data = tier.put("key", value).to_bytes()
    for damaged in (data[:-1], b"", data[:50] + b"x" + data[51:]):
        assert not tier.check("key", value, damaged)
    assert [finding.found["verdict"] for finding in tier.findings] == ["short"] * 3
    assert "the seal of 'key' did not come back whole" in tier.findings[0].causes[0].text
    with pytest.raises(SealError):
        Seal.from_bytes(data[:-1])
    with pytest.raises(PlanError, match="seal must be what put"):
        tier.check("key", value, "seal")


@pytest.mark.parametrize("count", [2000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_hostile_seals_never_crash(count):
    """Those of objects as those of pages."""
    data = Tier(5, model="m").put("key", kv(), identity={"salt": "tenant"}).to_bytes()
    read, refused = fuzz(data, count)
    assert read > count // 20
    assert refused > count // 20


def test_a_forged_seal_is_a_finding_and_nothing_else():
    """Shapes, sizes and types of anything: what is raised is typed."""
    chance, data = random.Random(3), Tier(5).put("key", kv()).to_bytes()
    tier, told = Tier(5, mode="log"), 0
    for _ in range(400):
        mutant = bytearray(data)
        for _ in range(3):
            place = chance.randrange(32, len(mutant) - 24)
            mutant[place : place + 2] = chance.choice((b"\xff\xff", b"\0\0", chance.randbytes(2)))
        told += not tier.check("key", kv(), resealed(mutant))
    assert told > 200


# modes, threads, counters


def test_modes_are_those_of_everywhere(monkeypatch):
    """Raise stops, log and abort tell and give False, off and content write compare nothing; the environment says."""
    value, wrong = kv(1), kv(2)
    for mode in ("log", "abort"):
        tier = Tier(5, mode=mode)
        seal = tier.put("key", value)
        assert [tier.check("key", wrong, seal), tier.check("key", value, seal)] == [False, True]
        assert [finding.code for finding in tier.findings] == ["T1"]
    for settings in ({"mode": "off"}, {"content": "write"}, {"disable": {"T1"}}):
        tier = Tier(5, **settings)
        assert tier.check("key", wrong, tier.put("key", value))
    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setenv("KVCANARY_SEED", "9")
    tier = Tier()
    assert (tier.config.mode, tier.seed_id) == ("log", Tier(9).seed_id)
    monkeypatch.delenv("KVCANARY_SEED")
    assert Tier().seed_id != Tier().seed_id


def test_the_certificate_says_what_was_compared():
    """Puts, checks, bytes; and an object of which there was no seal is counted as not judged."""
    tier, value = Tier(5, mode="log"), torch.arange(256)
    seal = tier.put("key", value)
    assert tier.check("key", value, seal)
    assert tier.check("other", value)
    assert not tier.check("key", value + 1, seal)
    told = tier.certificate()
    assert (told["puts"], told["checks"], told["bytes_checked"]) == (1, 3, 2 * 2048)
    assert told["unchecked"] == {"objects without a seal": 1}
    assert (told["fired"], told["classes"]) == ({"T1": 1}, ["L1", "T1"])


def test_a_seal_of_a_tier_that_was_off_says_nothing():
    """It has no fingerprints: its objects are not judged."""
    seal = Tier(5, mode="off").put("key", torch.ones(9))
    tier = Tier(5)
    assert tier.check("key", torch.zeros(9), Seal.from_bytes(seal.to_bytes()))
    assert tier.certificate()["unchecked"] == {"objects without a seal": 1}


def test_a_tier_may_be_used_from_many_threads():
    """Every damaged load is told, every right one is right."""
    tier, barrier = Tier(5, mode="log"), threading.Barrier(4)

    def work(number: int) -> list[bool]:
        barrier.wait()
        answers = []
        for turn in range(8):
            value = torch.arange(300) + 1000 * number + turn
            seal = tier.put(f"{number}-{turn}", value)
            answers.append(tier.check(f"{number}-{turn}", value + (turn % 2), seal))
        return answers

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[True, False] * 4] * 4
    assert len(tier.findings) == 16
    assert tier.certificate()["checks"] == 32


def test_what_is_remembered_is_bounded(monkeypatch):
    """Of very many puts the oldest are forgotten; seals go on comparing."""
    monkeypatch.setattr("kvcanary.tier.recent.MOST_SEALS", 3)
    tier = Tier(5, mode="log")
    seals = [tier.put(str(n), torch.full((8,), n)) for n in range(10)]
    assert len(tier._recent.last) == len(tier._recent.newest) == 3
    assert tier.check("0", torch.full((8,), 0), seals[0])
    assert not tier.check("0", torch.full((8,), 1), seals[0])


def test_tensors_elsewhere_have_the_fingerprints_that_they_have_here():
    """By torch as by the compiled loop, bit for bit: what left a GPU is compared on the host."""
    from kvcanary.tier.row_sums import RowSums

    sums = RowSums(5)
    data = torch.randint(256, (3 * 64 * 1024 + 8,), dtype=torch.uint8)
    for words in (1, 2, 1024, 16_384):
        n = len(data) // (4 * words)
        here = sums._sums(data[: 4 * words * n].numpy(), words, n)
        assert np.array_equal(here, sums._on_device(data[: 4 * words * n], words, n))
