"""Verify against the device's truth: states, owners, steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.judge.verify import ROOT, verify, verify_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import Keys, make_keys, signed

MASK = 2**64 - 1
M32 = 2**32 - 1
POISON = -77
PAGE_SIZE, NUM_SLOTS, NUM_PAGES, LAYERS, POOL_ID = 4, 50, 13, 3, 1  # the last page is half
NULL_SLOTS = PAGE_SIZE
SEED = 0xDEADBEEFCAFEF00D
STEP = 2**31 + 1
R1, R2, R3, R4, R5, R7, R8, R11, R12 = 1, 2, 4, 8, 16, 64, 128, 1024, 2048
FREE, QUARANTINED, NEVER_WRITTEN, LOADING, LOAD_FAILED, RESERVED, WRITTEN, COMMITTED, SHARED = range(9)
NONE, ANYONE = -1, -2
both = pytest.mark.parametrize("operation", [verify, verify_torch], ids=["triton", "torch"])


@dataclass
class World:
    """Two rows of 4-slot pages and the truth about them: row 0 shares page 2 with everybody, row 1 is private.

    Entry j of row r is in place first[r] + j of `table[r]`, whose pages have PAGE_SIZE slots.
    """

    keys: Keys
    table: list[list[int]] = field(default_factory=lambda: [[2, 12, 5], [7, 3, 9]])
    first: list[int] = field(default_factory=lambda: [0, 3])
    lengths: list[int] = field(default_factory=lambda: [5, 6])
    readers: list[int] = field(default_factory=lambda: [70, 71])
    records: list[list[int]] = field(default_factory=lambda: [[0] * 16 for _ in range(NUM_SLOTS)])
    generations: list[int] = field(default_factory=lambda: [2**32 + page for page in range(NUM_PAGES)])
    states: list[int] = field(default_factory=lambda: [FREE] * NUM_PAGES)
    owners: list[int] = field(default_factory=lambda: [NONE] * NUM_PAGES)
    step: int = STEP
    fed: frozenset[str] = frozenset({"states", "owners", "step"})

    def __post_init__(self) -> None:
        for row, pages in enumerate(self.table):
            for page in pages:
                self.owners[page], self.states[page] = self.readers[row], WRITTEN
        self.owners[2], self.states[2], self.states[12], self.states[7] = ANYONE, SHARED, COMMITTED, RESERVED
        for row in range(2):
            chain = SEED
            for j in range(self.lengths[row]):
                slot = self.slot(row, j)
                token = (j * 2654435761 + row) & M32
                chain = (self.keys.multiplier * chain + mixed(token, j, self.keys)) & MASK
                self.records[slot][:4] = [token, j, chain & M32, chain >> 32]
                self.records[slot][4:8] = [7, slot // PAGE_SIZE, STEP, 2**24 + slot]
                self.records[slot][10] = 2**LAYERS - 1
                self.seal(slot)

    def slot(self, row: int, j: int) -> int:
        place = self.first[row] + j
        page = self.table[row][place // PAGE_SIZE]
        return page * PAGE_SIZE + place % PAGE_SIZE

    def seal(self, slot: int) -> None:
        value = self.seal_of(slot)
        self.records[slot][14:] = [value & M32, value >> 32]

    def seal_of(self, slot: int) -> int:
        words = zip(self.keys.seal_keys, [*self.records[slot][:8], slot, POOL_ID], strict=True)
        return (self.keys.seal_start + sum(key * word for key, word in words)) & MASK


def mixed(token: int, position: int, keys: Keys) -> int:
    z = ((token << 32 | position) + keys.mix_key) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def oracle(world: World, live: int = 2) -> list[list[int]]:
    """Codes by row, from the rules alone."""
    return [[judge(world, row, j) for j in range(world.lengths[row])] if row < live else [] for row in range(2)]


def judge(world: World, row: int, j: int) -> int:
    slot = world.slot(row, j)
    if not 0 <= slot < NUM_SLOTS:
        return R1
    if slot < NULL_SLOTS:
        return R2
    page, words = slot // PAGE_SIZE, world.records[slot]
    code = R3 if world.seal_of(slot) != words[14] | words[15] << 32 else 0
    code |= R4 if words[1] != j else 0
    before = world.slot(row, j - 1) if j else None
    if before is None or NULL_SLOTS <= before < NUM_SLOTS:
        continued = SEED if before is None else world.records[before][2] | world.records[before][3] << 32
        expected = (world.keys.multiplier * continued + mixed(words[0], words[1], world.keys)) & MASK
        code |= R5 if expected != words[2] | words[3] << 32 else 0
    stale = "states" in world.fed and world.states[page] not in (*range(NEVER_WRITTEN, SHARED + 1),)
    missing = words[5] != world.generations[page] % 2**32 or words[10] % 2**LAYERS != 2**LAYERS - 1
    missing |= "states" in world.fed and world.states[page] in (NEVER_WRITTEN, LOADING, LOAD_FAILED)
    code |= R7 if stale else R12 if missing else 0
    if "owners" in world.fed and world.owners[page] not in (NONE, ANYONE, world.readers[row]):
        code |= R8
    if "step" in world.fed and 0 < (words[6] - world.step) % 2**32 < 2**31:
        code |= R11
    return code


def run(operation, world: World, device: str, live: int | None = None) -> list[list[int]]:
    """Codes by row, with guards around the rows of the index array."""

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor([signed(v) for v in values], dtype=torch.int64, device=device)

    lengths = world.lengths
    starts = [2, 3 + lengths[0]]
    codes, indices = (tensor([POISON] * (4 + sum(lengths))) for _ in range(2))
    for row in range(2):
        for j in range(lengths[row]):
            indices[starts[row] + j] = world.slot(row, j)
    truth = {
        "states": tensor(world.states),
        "owners": tensor(world.owners),
        "step": tensor([world.step]),
    }
    truth = {name: value for name, value in truth.items() if name in world.fed}
    if "owners" in truth:
        truth["readers"] = tensor(world.readers)
    operation(
        columns(world, device),
        indices,
        starts=tensor(starts),
        lengths=tensor(lengths),
        first_positions=tensor([0, 0]),
        predecessors=tensor([ROOT, ROOT]),
        seeds=tensor([SEED, SEED]),
        generations=tensor(world.generations),
        layers=record.layers_bitmap(LAYERS, device),
        page_size=PAGE_SIZE,
        null_slots=NULL_SLOTS,
        pool_id=POOL_ID,
        keys=world.keys,
        codes=codes,
        num_live=None if live is None else tensor([live]),
        **truth,
    )
    found = codes.tolist()
    rows = [found[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert [*found[:2], found[starts[1] - 1], found[-1]] == [POISON] * 4
    return [row if row != [POISON] * len(row) else [] for row in rows]


def columns(world: World, device: str) -> Tensor:
    pairs = [[signed(w[i] | w[i + 1] << 32) for i in range(0, 16, 2)] for w in world.records]
    return torch.tensor(pairs, device=device)


@pytest.fixture
def world(device: str) -> World:
    return World(make_keys(21, LAYERS, 4, device))


CLEAN = [[0] * 5, [0] * 6]


@both
def test_verify_finds_nothing_where_truth_agrees(operation, world: World, device: str) -> None:
    """Rows that start inside a page and end in a half one; shared, committed, reserved and written pages."""
    assert run(operation, world, device) == oracle(world) == CLEAN


# What is wrong, and the codes of the entries for which anything fires. Row 0: page 2 is its entries 0 to 3, page 12
# entry 4. Row 1: page 7 is its entry 0, page 3 its entries 1 to 4, page 9 entry 5.
FAULTS = {
    "free": (lambda w: put(w.states, 12, FREE), {(0, 4): R7}),
    "quarantined": (lambda w: put(w.states, 7, QUARANTINED), {(1, 0): R7}),
    "no state that exists": (lambda w: put(w.states, 7, 9), {(1, 0): R7}),
    "never written": (lambda w: put(w.states, 9, NEVER_WRITTEN), {(1, 5): R12}),
    "loading": (lambda w: put(w.states, 12, LOADING), {(0, 4): R12}),
    "load failed": (lambda w: put(w.states, 12, LOAD_FAILED), {(0, 4): R12}),
    "granted anew and not yet written": (lambda w: put(w.generations, 12, 99), {(0, 4): R12}),
    "somebody else's page": (lambda w: put(w.owners, 3, 70), {(1, j): R8 for j in range(1, 5)}),
    "read by another": (lambda w: put(w.readers, 0, 71), {(0, 4): R8}),  # the shared page is nobody's
    "written later": (lambda w: restep(w, 48, STEP + 1), {(0, 4): R11}),
    "read earlier": (lambda w: setattr(w, "step", STEP - 1), {(r, j): R11 for r in (0, 1) for j in range(5 + r)}),
    "a later step across the wrap": (lambda w: (setattr(w, "step", 2**32 - 1), restep(w, 48, 0)), {(0, 4): R11}),
    "free and foreign and later": (
        lambda w: (put(w.states, 12, FREE), put(w.owners, 12, 71), restep(w, 48, STEP + 9)),
        {(0, 4): R7 | R8 | R11},
    ),
    "a page beyond the pool": (lambda w: put(w.table[0], 1, 13), {(0, 4): R1}),
    "a negative page": (lambda w: put(w.table[1], 0, -1), {(1, 0): R1}),
    "the null page": (lambda w: put(w.table[1], 0, 0), {(1, 0): R2}),
    "a null page is not foreign": (
        lambda w: (put(w.table[1], 0, 0), put(w.owners, 0, 5), put(w.generations, 0, 8)),
        {(1, 0): R2},
    ),
    "a damaged record": (lambda w: put(w.records[48], 6, STEP + 2), {(0, 4): R3 | R11}),
}
TWINS = {
    "freed and granted again to the same row": lambda w: (
        put(w.generations, 12, 99),
        put(w.records[48], 5, 99),
        w.seal(48),
    ),
    "unread pages may be anything": lambda w: (put(w.states, 5, FREE), put(w.owners, 5, 1), put(w.generations, 5, 1)),
    "nobody's page is not another's": lambda w: put(w.owners, 3, NONE),
    "a shared page has many readers": lambda w: put(w.owners, 9, ANYONE),
    "written in the reader's own step": lambda w: restep(w, 48, STEP),
    "an unread slot was written later": lambda w: restep(w, 49, STEP + 1),
    "written long ago": lambda w: restep(w, 48, STEP - 2**31),
    "written before the step wrapped": lambda w: (
        setattr(w, "step", 3),
        [restep(w, w.slot(row, j), 2**32 - 2) for row in (0, 1) for j in range(w.lengths[row])],
    ),
}


def put(values: list[int], i: int, value: int) -> None:
    values[i] = value


def restep(world: World, slot: int, step: int) -> None:
    world.records[slot][6] = step % 2**32
    world.seal(slot)


@both
@pytest.mark.parametrize("name", FAULTS)
def test_verify_compares_with_the_truth(operation, name: str, world: World, device: str) -> None:
    """Each fault sets exactly its bits, for exactly the entries of its page."""
    fault, expected = FAULTS[name]
    fault(world)
    found = run(operation, world, device)
    assert found == oracle(world)
    assert {(row, j): code for row in (0, 1) for j, code in enumerate(found[row]) if code} == expected


@both
@pytest.mark.parametrize("name", TWINS)
def test_verify_finds_nothing_in_the_clean_twins(operation, name: str, world: World, device: str) -> None:
    """What looks like a fault and is none."""
    TWINS[name](world)
    assert run(operation, world, device) == oracle(world) == CLEAN


@both
def test_rows_of_a_group_have_readers_of_their_own(operation, device: str) -> None:
    """Both rows read the same slots: one of them is another request's to the second row."""
    pages, fed = [[2, 12, 5], [2, 12, 5]], frozenset({"states", "owners", "step"})
    world = World(make_keys(21, LAYERS, 4, device), pages, first=[0, 0], lengths=[6, 6], readers=[70, 71], fed=fed)
    world.owners[12] = 70
    codes = run(partial(operation, group=2), world, device)
    assert codes == oracle(world)
    assert codes[1][4] == codes[0][4] | R8


@both
@pytest.mark.parametrize("without", ["states", "owners", "step"])
def test_a_class_that_is_not_fed_is_not_judged(operation, without: str, world: World, device: str) -> None:
    """With everything wrong, the others fire as before."""
    put(world.states, 9, QUARANTINED)
    put(world.owners, 3, 70)
    world.step = STEP - 1
    everything = run(operation, world, device)
    world.fed -= {without}
    found = run(operation, world, device)
    assert found == oracle(world) != everything


@both
@pytest.mark.parametrize("live", [0, 1, 2, 9])
def test_padding_is_left_alone(operation, live: int, world: World, device: str) -> None:
    """Segments at and after the live count keep their codes."""
    put(world.states, 9, FREE)
    assert run(operation, world, device, live=live) == oracle(world, live)


@both
def test_verify_refuses_half_an_owner_check(operation, world: World, device: str, tensor) -> None:
    """The message names the argument and the rule."""
    world.fed = frozenset({"step"})
    given = {"step": tensor([1, 2])}
    with pytest.raises(ValueError, match=r"step must be contiguous \[1\] int64, got \[2\]"):
        run(lambda *a, **k: operation(*a, **(k | given)), world, device)
    with pytest.raises(ValueError, match="owners and readers must be fed together, got only one of them"):
        run(lambda *a, **k: operation(*a, **(k | {"owners": tensor([1] * 13)})), world, device)
