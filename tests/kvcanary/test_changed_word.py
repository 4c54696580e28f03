"""The one word of a slot that changed is named exactly, and nothing else is ever named as one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcanary import PoolView
from kvcanary.provenance.changed_word import WordChange, fingerprint_differences, fitting_changes, locate_word
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import CONTENT_B, LAYERS_LOW
from kvcanary_kernels.record.seal import seal_torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "float8": torch.float8_e4m3fn,
}
LAYERS, HEADS, DIM, PAGE_SIZE = 3, 2, 8, 4
MASK_32 = (1 << 32) - 1
Words = list[list[int]]  # by layer, the K row's then the V row's


@dataclass
class Bench:
    """Sealed slots of random bytes: `words` [layers, slots, words of K then V] is the pool's own memory."""

    pool: PoolState
    words: Tensor

    @property
    def slots(self) -> range:
        return range(PAGE_SIZE, self.pool.view.num_slots)

    def seal(self) -> None:
        """Take the bytes as they are for the truth."""
        slots = torch.arange(self.pool.view.num_slots)
        one = torch.ones_like(slots)
        identity = dict.fromkeys(("tokens", "chains", "requests", "generations", "step", "sites"), one)
        seal_torch(
            self.pool.records, slots, positions=slots, **identity, pool_id=self.pool.pool_id, keys=self.pool.keys
        )
        fingerprint_a, fingerprint_b = fingerprints_of_slots(self.pool, slots)
        self.pool.content_a.copy_(fingerprint_a)
        self.pool.records[:, CONTENT_B] = fingerprint_b
        self.pool.records[:, LAYERS_LOW] = (1 << self.pool.view.num_layers) - 1

    def put(self, slot: int, rows: Words) -> None:
        self.words[:, slot] = as_int32(rows)


def as_int32(rows: Words) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def make_bench(dtype: str = "float32", num_slots: int = 64, seed: int = 0, two_pools: bool = False) -> Bench:
    """A pool of random bits, NaNs and infinities among them; the second of two pools where asked."""
    generator = torch.Generator().manual_seed(seed)
    row = HEADS * DIM * DTYPES[dtype].itemsize // 4
    shape = (LAYERS, PAGE_SIZE + num_slots, 2, row)
    memory = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
    values = memory.view(DTYPES[dtype]).unflatten(3, (HEADS, DIM))
    k, v = (tuple(values[layer, :, part] for layer in range(LAYERS)) for part in (0, 1))
    views = [PoolView("target", k, v, PAGE_SIZE)]
    if two_pools:
        views.insert(
            0, PoolView("other", [torch.zeros_like(t) for t in k], [torch.zeros_like(t) for t in v], PAGE_SIZE)
        )
    bench = Bench(CanaryState(views, seed + 1).pools[-1], memory.flatten(2))
    bench.seal()
    return bench


def keys_of(bench: Bench, layer: int) -> tuple[list[int], list[int]]:
    keys = bench.pool.keys
    fingerprint_a, fingerprint_b = keys.fingerprint_a[layer].tolist(), keys.fingerprint_b[layer].tolist()
    return [key & MASK_32 for key in fingerprint_a], [key & MASK_32 for key in fingerprint_b]


# one changed word


def named(dtype: str, count: int, seed: int) -> int:
    """Change one word in each of `count` slots; how many are named, with their old bytes."""
    rng, bench = random.Random(f"{dtype}:{seed}"), make_bench(dtype, count, seed)
    original, places = bench.words.clone(), {}
    for slot in bench.slots:
        layer, word = rng.randrange(LAYERS), rng.randrange(bench.words.shape[2])
        change = rng.choice([1 << rng.randrange(32), rng.randrange(1, 1 << 32)])
        places[slot] = layer, word
        bench.words[layer, slot, word] ^= change - (1 << 32) if change >> 31 else change
    return sum(
        (change := the_change(bench, slot)) is not None
        and (change.layer, change.number) == place
        and change.old == int(original[change.layer, slot, change.number]) & MASK_32
        and place_of(bench, slot) == place
        for slot, place in places.items()
    )


def the_change(bench: Bench, slot: int) -> WordChange | None:
    """The only change of one word that explains both fingerprints of a slot, in whichever layer; None where there is
    none.
    """
    differs_a, differs_b = fingerprint_differences(bench.pool, slot)
    fits = [
        change
        for layer in range(LAYERS)
        if differs_a[layer]
        for change in fitting_changes(bench.pool, slot, layer, differs_a[layer], differs_b)
    ]
    return fits[0] if len(fits) == 1 else None


def place_of(bench: Bench, slot: int) -> tuple[int, int]:
    """(layer, word) from the names that a report gives."""
    size, half = bench.pool.view.k[0].element_size(), bench.words.shape[2] // 2
    found = [locate_word(bench.pool, slot, layer) for layer in range(LAYERS)]
    (word,) = [word for word in found if word is not None]
    return word.layer, ((word.head * DIM + word.dim) * size + word.byte) // 4 + half * "KV".index(word.part)


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_every_single_changed_word_is_named(count):
    """All layers, K and V, heads, dims and dtypes, one bit or many: 3000 of 3000 in the long run."""
    assert sum(named(dtype, count, seed=count) for dtype in DTYPES) == count * len(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("old", "new"), [(0, MASK_32), (MASK_32, 0), (0, 1), (0, 1 << 31), (1 << 31, 0)])
def test_the_largest_and_the_smallest_changes_are_named(dtype, old, new):
    """From all bits off to all on and back, the lowest bit and the top bit, in the first and the last word."""
    bench = make_bench(dtype, 2)
    for value in (old, new):
        bench.seal()
        for slot, word in zip(bench.slots, (0, -1), strict=True):
            bench.words[1, slot, word] = as_int32([[value]])
    last = bench.words.shape[2] - 1
    for slot, word in zip(bench.slots, (0, last), strict=True):
        assert the_change(bench, slot) == WordChange(1, word, old, new)


def test_old_and_new_are_what_was_there_and_what_is_there_now():
    """In the type of the part."""
    bench = make_bench("float32")
    bench.pool.view.k[2][9, 1, 5] = 1.5
    bench.seal()
    bench.pool.view.k[2][9, 1, 5] = -1.5
    word = locate_word(bench.pool, 9, 2)
    assert (word.layer, word.part, word.head, word.dim) == (2, "K", 1, 5)
    assert (word.byte, word.bit, word.old_value, word.new_value) == (3, 31, 1.5, -1.5)


def test_the_second_of_two_pools_is_judged_by_its_own_records():
    """Records of all pools lie in one tensor; a pool reads its own."""
    bench = make_bench(two_pools=True)
    bench.words[0, 11, 3] ^= 1 << 20
    assert (bench.pool.pool_id, place_of(bench, 11)) == (1, (0, 3))


# more than one changed word


def two_words(rng: random.Random, old: Words, bench: Bench) -> Words:
    """Two random words of one row."""
    new = [list(row) for row in old]
    layer = rng.randrange(LAYERS)
    for word in rng.sample(range(len(old[0])), 2):
        new[layer][word] ^= rng.choice([1 << rng.randrange(32), rng.randrange(1, 1 << 32)])
    return new


def two_layers(rng: random.Random, old: Words, bench: Bench) -> Words:
    """The same word in two layers, by the same bits or by others."""
    new = [list(row) for row in old]
    word, change = rng.randrange(len(old[0])), rng.randrange(1, 1 << 32)
    for layer in rng.sample(range(LAYERS), 2):
        new[layer][word] ^= rng.choice([change, rng.randrange(1, 1 << 32)])
    return new


def sign_bits(rng: random.Random, old: Words, bench: Bench) -> Words:
    """Two top bits of one row."""
    new = [list(row) for row in old]
    layer = rng.randrange(LAYERS)
    for word in rng.sample(range(len(old[0])), 2):
        new[layer][word] ^= 1 << 31
    return new


def swapped(rng: random.Random, old: Words, bench: Bench) -> Words:
    """Two words of a row have changed places."""
    new = [list(row) for row in old]
    row = new[rng.randrange(LAYERS)]
    i, j = rng.sample(range(len(row)), 2)
    row[i], row[j] = row[j], row[i]
    return new


def shifted(rng: random.Random, old: Words, bench: Bench) -> Words:
    """A row that begins some words late."""
    new = [list(row) for row in old]
    layer, by = rng.randrange(LAYERS), rng.randrange(1, len(old[0]))
    new[layer] = old[layer][by:] + old[layer][:by]
    return new


def zeroed(rng: random.Random, old: Words, bench: Bench) -> Words:
    """K, V or both of one layer, or of all layers, are zero."""
    new = [list(row) for row in old]
    half = len(old[0]) // 2
    start, end = rng.choice([(0, half), (half, 2 * half), (0, 2 * half)])
    for layer in rng.choice([[rng.randrange(LAYERS)], range(LAYERS)]):
        new[layer][start:end] = [0] * (end - start)
    return new


def of_another_slot(rng: random.Random, old: Words, bench: Bench) -> Words:
    """One layer's row, or all of them, are those of another slot."""
    other = [[word & MASK_32 for word in row] for row in bench.words[:, rng.randrange(PAGE_SIZE)].tolist()]
    layer = rng.randrange(LAYERS)
    return rng.choice([other, [other[i] if i == layer else list(row) for i, row in enumerate(old)]])


def exchanged(rng: random.Random, old: Words, bench: Bench) -> Words:
    """K and V of a layer, or two layers, have changed places."""
    new = [list(row) for row in old]
    half = len(old[0]) // 2
    i, j = rng.sample(range(LAYERS), 2)
    if rng.random() < 0.5:
        new[i] = old[i][half:] + old[i][:half]
    else:
        new[i], new[j] = old[j], old[i]
    return new


def opposite(rng: random.Random, old: Words, bench: Bench) -> Words:
    """One word grew by what another one lost: a plain sum stays."""
    new = [list(row) for row in old]
    row = new[rng.randrange(LAYERS)]
    i, j = rng.sample(range(len(row)), 2)
    change = rng.randrange(1, min(MASK_32 - row[i], row[j]))
    row[i], row[j] = row[i] + change, row[j] - change
    return new


def cancels(rng: random.Random, old: Words, bench: Bench) -> Words:
    """Two words changed by each other's keys: one fingerprint's difference is zero. `old` is chosen so that both
    fit.
    """
    layer = rng.randrange(LAYERS)
    keys = rng.choice(keys_of(bench, layer))
    i, j = rng.sample(range(len(keys)), 2)
    old[layer][i] = rng.randrange(0, MASK_32 - keys[j] + 1)
    old[layer][j] = rng.randrange(keys[i], 1 << 32)
    new = [list(row) for row in old]
    new[layer][i] += keys[j]
    new[layer][j] -= keys[i]
    return new


def looks_like_one(rng: random.Random, old: Words, bench: Bench) -> Words:
    """Two words whose sum in one fingerprint is just that of one of them changed alone; only the other lane tells."""
    layer = rng.randrange(LAYERS)
    keys = rng.choice(keys_of(bench, layer))
    i, j = rng.sample(range(len(keys)), 2)
    change = rng.randrange(-keys[i], MASK_32 - keys[i] + 1) or 1  # keys[i] + change fits into a word
    old[layer][i] = rng.randrange(0, MASK_32 - keys[j] + 1)
    old[layer][j] = rng.randrange(keys[i], min(MASK_32, MASK_32 - change) + 1)  # so that the lone old word would do
    new = [list(row) for row in old]
    new[layer][i] += keys[j]
    new[layer][j] += change
    return new


def burst(rng: random.Random, old: Words, bench: Bench) -> Words:
    """Three to nine neighbouring words are overwritten."""
    new = [list(row) for row in old]
    layer, size = rng.randrange(LAYERS), rng.randrange(3, 10)
    start = rng.randrange(len(old[0]) - min(size, len(old[0])) + 1)
    for word in range(start, min(start + size, len(old[0]))):
        new[layer][word] = rng.randrange(1 << 32)
    return new


KINDS = [
    two_words,
    two_layers,
    sign_bits,
    swapped,
    shifted,
    zeroed,
    of_another_slot,
    exchanged,
    opposite,
    cancels,
    looks_like_one,
    burst,
]


def damage_all(bench: Bench, rng: random.Random, kinds: list[Callable[..., Words]]) -> None:
    """Choose old and new bytes of every slot, seal the old ones, then write the new ones."""
    damaged: dict[int, Words] = {}
    rows = bench.words.transpose(0, 1).tolist()
    for slot in bench.slots:
        old = [[word & MASK_32 for word in row] for row in rows[slot]]
        damaged[slot] = rng.choice(kinds)(rng, old, bench)
        assert int((as_int32(old) != as_int32(damaged[slot])).sum()) >= 2
        rows[slot] = old
    bench.words.copy_(as_int32(rows).transpose(0, 1))
    bench.seal()
    bench.words[:, PAGE_SIZE:] = as_int32(list(damaged.values())).transpose(0, 1)


def num_named(dtype: str, count: int, seed: int, kinds: list[Callable[..., Words]]) -> int:
    """Of `count` slots with several changed words, those of which one word is named."""
    bench = make_bench(dtype, count, seed)
    damage_all(bench, random.Random(f"{dtype}:{seed}"), kinds)
    return sum(the_change(bench, slot) is not None for slot in bench.slots)


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.slow)])
def test_several_changed_words_are_never_one(count):
    """Twelve kinds of damage to several words in every dtype: 0 of 20,000 are named in the long run."""
    assert [num_named(dtype, count, count, KINDS) for dtype in DTYPES] == [0] * len(DTYPES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_kind_of_damage_is_one_word(kind):
    """None hides behind the others of a random choice."""
    assert num_named("float32", 20, 3, [kind]) == 0


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_a_violation_fingerprint_is_no_word(layers):
    """Fingerprint a disagrees and fingerprint b over all layers is right: the bytes are those that were written."""
    bench = make_bench()
    for layer in layers:
        bench.pool.content_a[layer, 8] ^= 1 << 40
    assert the_change(bench, 8) is None


def test_several_words_that_fit_are_none():
    """Equal keys, which real ones never are, make two words fit; nobody guesses."""
    bench = make_bench()
    for fingerprint in (bench.pool.keys.fingerprint_a, bench.pool.keys.fingerprint_b):
        fingerprint[1, 4] = fingerprint[1, 2]
    bench.words[1, 8, 2] = 1000
    bench.words[1, 8, 4] = 1000
    bench.seal()
    bench.words[1, 8, 2] += 1
    assert [locate_word(bench.pool, 8, layer) for layer in range(LAYERS)] == [None] * LAYERS
