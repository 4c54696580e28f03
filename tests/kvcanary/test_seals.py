"""Seals as bytes: what one process wrote another reads, and bytes that are none are one typed error."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvcanary import CanaryConfig, ForeignSnapshotError, KVCanaryError, KVCorruptionError, Seal, SealError
from kvcanary.transfers import PageSnapshot
from kvcanary_tools.bench.toy.engine import ToyEngine
from seal_fuzz import fuzz, resealed
from toy_tier import Tier

COUNTS = [3000, pytest.param(1_000_000, marks=pytest.mark.slow)]


@pytest.fixture
def make_toy() -> Iterator[Callable[..., ToyEngine]]:
    """A toy engine by settings of CanaryConfig."""
    with torch.inference_mode():
        yield lambda **settings: ToyEngine(CanaryConfig(**{"content": "full", "seed": 7, **settings}))


@pytest.fixture(scope="module")
def good() -> bytes:
    """The seal of two pages in two pools."""
    with torch.inference_mode():
        return Tier(ToyEngine(CanaryConfig(content="full", seed=7, model="toy@1"))).snapshot.to_bytes()


def test_a_seal_is_the_same_after_a_trip_as_bytes(good):
    """Every field, and the bytes of what was read are those that were."""
    seal = Seal.from_bytes(good)
    assert isinstance(seal, PageSnapshot)
    assert (seal.num_pages, seal.first, seal.model, len(seal.layouts)) == (2, 0, "toy@1", 2)
    assert seal.to_bytes() == good
    assert Seal.from_bytes(bytearray(good)).to_bytes() == Seal.from_bytes(memoryview(good)).to_bytes() == good
    assert [part.num_pages for part in seal.each()] == [1, 1]
    assert Seal.from_bytes(seal.behind(1).to_bytes()).first == 1


def test_a_seal_has_no_seed(good):
    """Its public name alone, at a fixed place of a head that says what this is."""
    assert good[:12] == b"kvcseal\n\x01\x00\x01\x00"
    assert int.from_bytes(good[16:24], "little") == len(good)
    assert good[24:32].hex() == Seal.from_bytes(good).seed_id
    engine = ToyEngine(CanaryConfig(seed=0xDEADBEEFCAFEF00D))
    with torch.inference_mode():
        data = Tier(engine).snapshot.to_bytes()
    for order in ("little", "big"):
        assert (0xDEADBEEFCAFEF00D).to_bytes(8, order) not in data


@pytest.mark.parametrize("content", ["full", "rolling"])
def test_pages_come_back_under_a_seal_that_was_bytes(make_toy, content):
    """Into another canary of the same seed: right bytes are right, a flipped bit is T1 where it is."""
    sent = Tier(make_toy(content=content))
    data = sent.snapshot.to_bytes()
    for flips in (0, 1):
        tier = Tier(make_toy(content=content))
        tier.snapshot, tier.bytes = Seal.from_bytes(data), {name: kept.clone() for name, kept in sent.bytes.items()}
        tier.bytes["target"].view(torch.int32)[1, 5, 0, 0, 2] ^= flips << 9
        row = tier.bring_back()
        if not flips:
            tier.go_on()
            assert tier.engine.canary.findings == []
            continue
        with pytest.raises(KVCorruptionError) as caught:
            tier.engine.canary.collect(tier.engine.canary.end_step())
        [finding] = caught.value.findings
        assert (finding.code, finding.slot, finding.layers, finding.bit) == ("T1", int(row.slots[5]), (1,), 9)


CHILD = """
import sys, torch
sys.path[:0] = {path!r}
from kvcanary import CanaryConfig, Seal
from kvcanary_tools.bench.toy.engine import ToyEngine
from seal_fuzz import fuzz, resealed
from toy_tier import Tier
with torch.inference_mode():
    tier = Tier(ToyEngine(CanaryConfig.from_env(content="full")))
    open(sys.argv[1], "wb").write(tier.snapshot.to_bytes())
    torch.save(tier.bytes, sys.argv[2])
"""


@pytest.mark.parametrize("seeds", [("0x123456789abcdef", 0x123456789ABCDEF), ("8", 7)])
def test_a_seal_outlives_its_process(make_toy, tmp_path, seeds):
    """The seed is given to both by KVCANARY_SEED; another one is refused with both names."""
    seal, kept = tmp_path / "seal", tmp_path / "bytes"
    environment = os.environ | {"KVCANARY_SEED": seeds[0]}
    path = [str(Path(__file__).parents[1] / "support")]
    command = [sys.executable, "-c", CHILD.format(path=path), str(seal), str(kept)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    tier = Tier(make_toy(seed=seeds[1]))
    tier.snapshot, tier.bytes = Seal.from_bytes(seal.read_bytes()), torch.load(kept)
    if int(seeds[0], 0) == seeds[1]:
        tier.bring_back()
        tier.go_on()
        assert tier.engine.canary.findings == []
        return
    here = tier.engine.canary.certificate()["seed_id"]
    with pytest.raises(ForeignSnapshotError, match=f"got one of seed id {tier.snapshot.seed_id} for {here}"):
        tier.bring_back()


def test_a_seal_of_another_model_is_refused_with_both(make_toy):
    """A version of the weights is part of the name; nothing has happened."""
    tier, sent = Tier(make_toy(model="toy@2")), Tier(make_toy(model="toy@1"))
    tier.snapshot = Seal.from_bytes(sent.snapshot.to_bytes())
    with pytest.raises(ForeignSnapshotError, match="got one of 'toy@1' for 'toy@2'") as caught:
        tier.bring_back()
    assert (caught.value.found, caught.value.expected) == ("toy@1", "toy@2")


def test_a_seal_of_pools_that_are_laid_out_otherwise_is_refused_with_both(make_toy):
    """Rows of as many words, but of other heads: the card says what they are."""
    tier, sent = Tier(make_toy()), Tier(make_toy())
    data = bytearray(sent.snapshot.to_bytes())
    dims = data.index(b"float32") + len(b"float32")  # K: number of dims, heads, dim
    heads, dim = (int.from_bytes(data[dims + 2 + 4 * n : dims + 6 + 4 * n], "little") for n in (0, 1))
    data[dims + 2 : dims + 10] = (2 * heads).to_bytes(4, "little") + (dim // 2).to_bytes(4, "little")
    tier.snapshot = Seal.from_bytes(resealed(data))
    with pytest.raises(ForeignSnapshotError, match=f"K {2 * heads}x{dim // 2} float32.* for .*K {heads}x{dim} float32"):
        tier.bring_back()


@pytest.mark.parametrize("model", [7, "m" * 1025, None])
def test_a_model_is_a_short_name(model):
    """Every seal carries it."""
    with pytest.raises(KVCanaryError, match="model must be a name of at most 1024 characters"):
        CanaryConfig(model=model)


# hostile bytes


def test_every_flipped_bit_of_a_seal_is_refused(good):
    """The digest covers all of it."""
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        with pytest.raises(SealError):
            Seal.from_bytes(data)


def test_every_seal_that_is_cut_or_goes_on_is_refused(good):
    """Both numbers are in the sentence."""
    for length in range(len(good)):
        with pytest.raises(SealError):
            Seal.from_bytes(good[:length])
    with pytest.raises(SealError, match=f"a seal of {len(good)} bytes came as {len(good) + 1}"):
        Seal.from_bytes(good + b"\0")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "these 0 bytes are no seal"),
        (b"\x80\x05" + b"K" * 100, "are no seal"),
        ("kvcseal", "must be read from bytes, got str"),
        (None, "must be read from bytes, got NoneType"),
    ],
)
def test_what_is_no_seal_is_refused(data, words):
    with pytest.raises(SealError, match=words):
        Seal.from_bytes(data)


@pytest.mark.parametrize(("place", "value", "words"), [(8, 2, "version 1, got 2"), (10, 99, "of kind 1.*, got 99")])
def test_a_seal_of_a_later_release_is_refused(good, place, value, words):
    """Version and kind are numbers that an older release can read."""
    data = bytearray(good)
    data[place] = value
    with pytest.raises(SealError, match=words):
        Seal.from_bytes(resealed(data))


@pytest.mark.parametrize("count", COUNTS)
def test_hostile_bytes_never_crash(good, count):
    """Whatever is in them under a right digest, they are a seal or a SealError."""
    read, refused = fuzz(good, count)
    assert read > count // 20
    assert refused > count // 20


def test_hostile_bytes_allocate_no_more_than_they_are(good):
    """Lengths of exabytes in any field: the peak stays within a small multiple of the bytes that are there."""
    fuzz(good, 10)
    tracemalloc.start()
    try:
        for place in range(32, 400):
            mutant = bytearray(good)
            mutant[place : place + 8] = b"\xff" * 7 + b"\x3f"
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(SealError):
                Seal.from_bytes(resealed(mutant))
            assert tracemalloc.get_traced_memory()[1] - before < 8 * len(good) + 20_000
    finally:
        tracemalloc.stop()


def test_a_forged_seal_is_a_finding_or_a_typed_error(make_toy, good):
    """Records of anything under a right head and card: nothing else is raised when pages come back under them."""
    chance = random.Random(2)
    for _ in range(60):
        mutant = bytearray(good)
        for _ in range(4):
            place = chance.randrange(200, len(mutant) - 24)
            mutant[place : place + 8] = chance.choice((b"\xff" * 8, chance.randbytes(8)))
        tier = Tier(make_toy(model="toy@1"))
        with suppress(KVCanaryError):
            tier.snapshot = Seal.from_bytes(resealed(mutant))
            tier.bring_back()
            tier.engine.canary.collect(tier.engine.canary.end_step())
            tier.go_on()
