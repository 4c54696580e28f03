"""repair_slot restores one changed word exactly, and refuses everything else with a sentence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvcanary import PoolView
from kvcanary.errors import KVCanaryError, RepairRefusedError
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub import repair
from kvcanary.scrub.repair import repair_slot
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


def refusal(bench: Bench, slot: int) -> RepairRefusedError:
    """The refusal of this slot, which left every byte and every record as it was."""
    before = bench.words.clone(), bench.pool.records.clone(), bench.pool.content_a.clone()
    with pytest.raises(RepairRefusedError) as caught:
        repair_slot(bench.pool, slot)
    after = bench.words, bench.pool.records, bench.pool.content_a
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return caught.value


# one changed word


def restored(dtype: str, count: int, seed: int) -> int:
    """Change one word in each of `count` slots, repair them all; how many have their old bytes and are named."""
    rng, bench = random.Random(f"{dtype}:{seed}"), make_bench(dtype, count, seed)
    original, places = bench.words.clone(), {}
    for slot in bench.slots:
        layer, word = rng.randrange(LAYERS), rng.randrange(bench.words.shape[2])
        change = rng.choice([1 << rng.randrange(32), rng.randrange(1, 1 << 32)])
        places[slot] = layer, word
        bench.words[layer, slot, word] ^= change - (1 << 32) if change >> 31 else change
    repairs = {slot: repair_slot(bench.pool, slot) for slot in bench.slots}
    same = (bench.words == original).all(2).all(0).tolist()
    return sum(same[slot] and place_of(bench, repairs[slot]) == places[slot] for slot in bench.slots)


def place_of(bench: Bench, done: repair.Repair) -> tuple[int, int]:
    """(layer, word) from the names that the repair gives."""
    size, half = bench.pool.view.k[0].element_size(), bench.words.shape[2] // 2
    word = ((done.word.head * DIM + done.word.dim) * size + done.word.byte) // 4
    return done.word.layer, word + half * "KV".index(done.word.part)


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_every_single_changed_word_is_restored(count):
    """All layers, K and V, heads, dims and dtypes, one bit or many: 3000 of 3000 in the long run."""
    assert sum(restored(dtype, count, seed=count) for dtype in DTYPES) == count * len(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("old", "new"), [(0, MASK_32), (MASK_32, 0), (0, 1), (0, 1 << 31), (1 << 31, 0)])
def test_the_largest_and_the_smallest_changes_are_restored(dtype, old, new):
    """From all bits off to all on and back, the lowest bit and the top bit, in the first and the last word."""
    bench = make_bench(dtype, 2)
    for slot, word in zip(bench.slots, (0, -1), strict=True):
        bench.words[1, slot, word] = as_int32([[old]])
    bench.seal()
    original = bench.words.clone()
    for slot, word in zip(bench.slots, (0, -1), strict=True):
        bench.words[1, slot, word] = as_int32([[new]])
        repair_slot(bench.pool, slot)
    assert torch.equal(bench.words, original)


def test_the_repair_says_what_was_there_and_what_is_there_now():
    """The value found is `new`, the value put back is `old`, as locate names them."""
    bench = make_bench("float32")
    bench.pool.view.k[2][9, 1, 5] = 1.5
    bench.seal()
    bench.pool.view.k[2][9, 1, 5] = -1.5
    done = repair_slot(bench.pool, 9)
    assert (done.pool, done.slot) == ("target", 9)
    assert (done.word.layer, done.word.part, done.word.head, done.word.dim) == (2, "K", 1, 5)
    assert (done.word.byte, done.word.bit, done.word.old_value, done.word.new_value) == (3, 31, 1.5, -1.5)
    assert bench.pool.view.k[2][9, 1, 5] == 1.5


def test_the_second_of_two_pools_is_repaired_by_its_own_records():
    """Records of all pools lie in one tensor; a pool reads its own."""
    bench = make_bench(two_pools=True)
    original = bench.words.clone()
    bench.words[0, 11, 3] ^= 1 << 20
    repair_slot(bench.pool, 11)
    assert (bench.pool.pool_id, torch.equal(bench.words, original)) == (1, True)


def test_a_pool_made_in_inference_mode_is_repaired_outside_of_it():
    """Serving pools are inference tensors, which torch lets nobody write outside of that mode."""
    with torch.inference_mode():
        bench = make_bench()
        original = bench.words.clone()
        bench.words[1, 7, 2] ^= 5
    repair_slot(bench.pool, 7)
    assert torch.equal(bench.words, original)


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


def patched_and_refused(dtype: str, count: int, seed: int, kinds: list[Callable[..., Words]]) -> tuple[int, int]:
    """Of `count` slots with several changed words: those whose bytes were touched, and those refused."""
    bench = make_bench(dtype, count, seed)
    damage_all(bench, random.Random(f"{dtype}:{seed}"), kinds)
    found, refused = bench.words.clone(), 0
    for slot in bench.slots:
        try:
            repair_slot(bench.pool, slot)
        except RepairRefusedError:
            refused += 1
    patched = (bench.words != found).any(2).any(0).sum()
    return int(patched), refused


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.slow)])
def test_several_changed_words_are_never_patched(count):
    """Twelve kinds of damage to several words in every dtype: 0 of 20,000 are patched in the long run."""
    results = [patched_and_refused(dtype, count, count, KINDS) for dtype in DTYPES]
    assert sum(patched for patched, _ in results) == 0
    assert sum(refused for _, refused in results) == count * len(DTYPES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_damage_is_refused(kind):
    """No kind of damage hides behind the others of a random choice."""
    assert patched_and_refused("float32", 20, 3, [kind]) == (0, 20)


# refusals and their sentences


def test_an_untouched_slot_is_refused():
    """Nothing to repair is said, not passed over."""
    error = refusal(make_bench(), 8)
    assert str(error) == "slot 8 of pool 'target' is not repaired, both fingerprints agree with its bytes: leave it"
    assert (error.pool, error.slot, error.reason) == ("target", 8, "nothing_differs")
    assert isinstance(error, KVCanaryError)
    assert isinstance(error, ValueError)


def test_two_words_of_a_layer_are_refused():
    """No single word explains both fingerprints."""
    bench = make_bench()
    bench.words[1, 8, 0] ^= 1
    bench.words[1, 8, 5] ^= 1
    error = refusal(bench, 8)
    assert error.reason == "many_words"
    assert str(error) == (
        "slot 8 of pool 'target' is not repaired, no single word of layer 1 explains both fingerprints: "
        "drop its page and recompute it from token ids"
    )


def test_two_layers_are_refused():
    """The layers that differ are named."""
    bench = make_bench()
    bench.words[0, 8, 0] ^= 1
    bench.words[2, 8, 0] ^= 1
    error = refusal(bench, 8)
    assert error.reason == "many_layers"
    assert "layers 0, 2 differ, one word lies in one layer: drop its page" in str(error)


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_a_violation_fingerprint_is_refused(layers):
    """Fingerprint a disagrees and fingerprint b over all layers is right: the bytes are those that were written."""
    bench = make_bench()
    for layer in layers:
        bench.pool.content_a[layer, 8] ^= 1 << 40
    error = refusal(bench, 8)
    named = ", ".join(map(str, layers))
    assert error.reason == "fingerprint_hit"
    assert f"fingerprint a differs in layer {named}, fingerprint b is right: it was damaged, not the bytes" in str(
        error
    )


def test_a_violation_fingerprint_b_is_refused():
    """Fingerprint b alone disagrees: the record was damaged outside of what its seal covers."""
    bench = make_bench()
    bench.pool.records[8, CONTENT_B] += 1
    error = refusal(bench, 8)
    assert error.reason == "fingerprint_hit"
    assert "fingerprint b alone differs: the record was damaged: take fingerprint b from the bytes" in str(error)


@pytest.mark.parametrize("column", [0, 1, 2, 3, 7])
def test_a_damaged_record_is_refused(column):
    """A changed word under a broken seal is not repaired: the fingerprints may be somebody else's."""
    bench = make_bench()
    bench.words[1, 8, 0] ^= 1
    bench.pool.records[8, column] ^= 1 << 33
    error = refusal(bench, 8)
    assert error.reason == "record_damaged"
    assert "its record has the seal 0x" in str(error)


def test_a_record_of_another_slot_is_refused():
    """A whole record in the wrong place is damage: the seal covers the slot number."""
    bench = make_bench()
    bench.words[1, 8, 0] ^= 1
    bench.pool.records[8] = bench.pool.records[9]
    assert refusal(bench, 8).reason == "record_damaged"


def test_a_slot_that_was_not_written_by_every_layer_is_refused():
    """Without all layers' stores fingerprint b is no sum of them."""
    bench = make_bench()
    bench.pool.records[8, LAYERS_LOW] = 0b011
    error = refusal(bench, 8)
    assert error.reason == "unwritten"
    assert "its record names layers 0x3 as written, all are 0x7" in str(error)


@pytest.mark.parametrize("slot", [-1, 68, 1 << 40])
def test_a_slot_outside_of_the_pool_is_refused(slot):
    """No index wraps around."""
    error = refusal(make_bench(), slot)
    assert error.reason == "out_of_range"
    assert str(error) == f"slot {slot} of pool 'target' is not repaired, the pool has slots 0 to 67: name one of them"


def test_a_null_slot_is_refused():
    """Padding's slots hold nothing that could be restored."""
    bench = make_bench()
    bench.words[1, 3, 0] ^= 1
    assert refusal(bench, 3).reason == "null_slot"


def test_several_words_that_fit_are_refused():
    """Equal keys, which real ones never are, make two words fit; a guess is refused."""
    bench = make_bench()
    for fingerprint in (bench.pool.keys.fingerprint_a, bench.pool.keys.fingerprint_b):
        fingerprint[1, 4] = fingerprint[1, 2]
    bench.words[1, 8, 2] = 1000
    bench.words[1, 8, 4] = 1000
    bench.seal()
    bench.words[1, 8, 2] += 1
    error = refusal(bench, 8)
    assert error.reason == "ambiguous"
    assert "words 2, 4 of layer 1 each explain both fingerprints, one must" in str(error)


def test_a_patch_that_does_not_verify_is_undone(monkeypatch):
    """Where the fingerprints disagree after the write, the bytes are as found: here locate names the wrong old word."""
    bench = make_bench()
    bench.words[1, 8, 2] ^= 1
    right = repair.fitting_changes
    monkeypatch.setattr(repair, "fitting_changes", lambda *a: [replace(c, old=c.old ^ 6) for c in right(*a)])
    error = refusal(bench, 8)
    assert error.reason == "not_verified"
    assert "layer 1 still disagrees after the patch, which was undone: drop its page" in str(error)
