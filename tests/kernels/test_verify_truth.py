"""Verify against the device's truth (grants, states, owners, steps), along index arrays and along page tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.judge.verify import ROOT, verify, verify_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import Keys, make_keys, signed
from kvcanary_kernels.record.table import PageTable

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
read_by = pytest.mark.parametrize("layout", ["indices", "tokens", "pages", "csr"])


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
    grants: list[list[int]] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [FREE] * NUM_PAGES)
    owners: list[int] = field(default_factory=lambda: [NONE] * NUM_PAGES)
    step: int = STEP
    fed: frozenset[str] = frozenset({"grants", "states", "owners", "step"})

    def __post_init__(self) -> None:
        self.grants = [[page + 2**33 for page in row] for row in self.table]  # the same low 32 bits
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
    stale = "grants" in world.fed and (
        world.grants[row][(world.first[row] + j) // PAGE_SIZE] % 2**32 != world.generations[page] % 2**32
    )
    stale |= "states" in world.fed and world.states[page] not in (*range(NEVER_WRITTEN, SHARED + 1),)
    missing = words[5] != world.generations[page] % 2**32 or words[10] % 2**LAYERS != 2**LAYERS - 1
    missing |= "states" in world.fed and world.states[page] in (NEVER_WRITTEN, LOADING, LOAD_FAILED)
    code |= R7 if stale else R12 if missing else 0
    if "owners" in world.fed and world.owners[page] not in (NONE, ANYONE, world.readers[row]):
        code |= R8
    if "step" in world.fed and 0 < (words[6] - world.step) % 2**32 < 2**31:
        code |= R11
    return code


def run(operation, world: World, layout: str, device: str, live: int | None = None) -> list[list[int]]:
    """Codes by row, read as an index array, a table of slots, a page table of int32, or flat pages; with guards."""

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor([signed(v) for v in values], dtype=torch.int64, device=device)

    lengths, width = world.lengths, len(world.table[0])
    code_starts = [2, 3 + lengths[0]]
    codes = tensor([POISON] * (4 + sum(lengths)))
    if layout == "indices":
        flat = [POISON] * codes.numel()
        grants = [POISON] * codes.numel()
        for row in range(2):
            for j in range(lengths[row]):
                flat[code_starts[row] + j] = world.slot(row, j)
                grants[code_starts[row] + j] = world.grants[row][(world.first[row] + j) // PAGE_SIZE]
        indices, granted, starts = tensor(flat), tensor(grants), code_starts
    elif layout == "tokens":  # a table of slots, a row for each row, with the entries at places 1, 2, ...
        slots = torch.full((3, 8), POISON, dtype=torch.int64, device=device)
        granted = torch.full_like(slots, POISON)
        for row in range(2):
            for j in range(lengths[row]):
                slots[2 - row, 1 + j] = world.slot(row, j)
                granted[2 - row, 1 + j] = world.grants[row][(world.first[row] + j) // PAGE_SIZE]
        indices = PageTable(slots, 1, rows=tensor([2, 1]), code_starts=tensor(code_starts))
        starts = [1, 1]
    elif layout == "pages":  # rows of a wider table, the second row first
        pages = torch.full((3, width + 2), POISON, dtype=torch.int32, device=device)[:, :width]
        granted = torch.full((3, width), POISON, dtype=torch.int64, device=device)
        for row in range(2):
            pages[1 - row] = tensor(world.table[row])
            granted[1 - row] = tensor(world.grants[row])
        indices = PageTable(pages, PAGE_SIZE, rows=tensor([1, 0]), code_starts=tensor(code_starts))
        starts = world.first
    else:
        pages, granted = tensor(world.table[0] + world.table[1])[None], tensor(world.grants[0] + world.grants[1])[None]
        indices = PageTable(pages, PAGE_SIZE, code_starts=tensor(code_starts))
        starts = [world.first[0], width * PAGE_SIZE + world.first[1]]
    truth = {
        "grants": granted,
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
    rows = [found[start : start + length] for start, length in zip(code_starts, lengths, strict=True)]
    assert [*found[:2], found[code_starts[1] - 1], found[-1]] == [POISON] * 4
    return [row if row != [POISON] * len(row) else [] for row in rows]


def columns(world: World, device: str) -> Tensor:
    pairs = [[signed(w[i] | w[i + 1] << 32) for i in range(0, 16, 2)] for w in world.records]
    return torch.tensor(pairs, device=device)


@pytest.fixture
def world(device: str) -> World:
    return World(make_keys(21, LAYERS, 4, device))


CLEAN = [[0] * 5, [0] * 6]


@both
@read_by
def test_verify_finds_nothing_where_truth_agrees(operation, layout: str, world: World, device: str) -> None:
    """Rows that start inside a page and end in a half one; shared, committed, reserved and written pages."""
    assert run(operation, world, layout, device) == oracle(world) == CLEAN


# What is wrong, and the codes of the entries for which anything fires. Row 0: page 2 is its entries 0 to 3, page 12
# entry 4. Row 1: page 7 is its entry 0, page 3 its entries 1 to 4, page 9 entry 5.
FAULTS = {
    "free": (lambda w: put(w.states, 12, FREE), {(0, 4): R7}),
    "quarantined": (lambda w: put(w.states, 7, QUARANTINED), {(1, 0): R7}),
    "no state that exists": (lambda w: put(w.states, 7, 9), {(1, 0): R7}),
    "never written": (lambda w: put(w.states, 9, NEVER_WRITTEN), {(1, 5): R12}),
    "loading": (lambda w: put(w.states, 12, LOADING), {(0, 4): R12}),
    "load failed": (lambda w: put(w.states, 12, LOAD_FAILED), {(0, 4): R12}),
    "granted anew and read with the old grant": (lambda w: put(w.generations, 12, 99), {(0, 4): R7}),
    "granted anew and not yet written": (
        lambda w: (put(w.generations, 12, 99), put(w.grants[0], 1, 99)),
        {(0, 4): R12},
    ),
    "another grant than the page's": (lambda w: put(w.grants[1], 1, 4), {(1, j): R7 for j in range(1, 5)}),
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
        put(w.grants[0], 1, 99),
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
@read_by
@pytest.mark.parametrize("name", FAULTS)
def test_verify_compares_with_the_truth(operation, layout: str, name: str, world: World, device: str) -> None:
    """Each fault sets exactly its bits, for exactly the entries of its page."""
    fault, expected = FAULTS[name]
    fault(world)
    found = run(operation, world, layout, device)
    assert found == oracle(world)
    assert {(row, j): code for row in (0, 1) for j, code in enumerate(found[row]) if code} == expected


@both
@pytest.mark.parametrize("name", TWINS)
def test_verify_finds_nothing_in_the_clean_twins(operation, name: str, world: World, device: str) -> None:
    """What looks like a fault and is none."""
    TWINS[name](world)
    assert run(operation, world, "pages", device) == oracle(world) == CLEAN


@both
@read_by
@pytest.mark.parametrize("differ", ["readers", "grants"])
def test_rows_of_a_group_have_readers_and_grants_of_their_own(operation, layout: str, differ: str, device: str) -> None:
    """Both rows read the same slots: one of them is another request's to the second row, or its grant is another."""
    readers = [70, 71] if differ == "readers" else [70, 70]
    fed = frozenset({"states", "owners", "step"} | ({"grants"} & {differ}))
    pages = [[2, 12, 5], [2, 12, 5]]
    world = World(make_keys(21, LAYERS, 4, device), pages, first=[0, 0], lengths=[6, 6], readers=readers, fed=fed)
    world.owners[12] = readers[0]
    world.grants[1][1] += 1
    codes = run(partial(operation, group=2), world, layout, device)
    assert codes == oracle(world)
    assert codes[1][4] == codes[0][4] | (R8 if differ == "readers" else R7)


@both
@pytest.mark.parametrize("without", ["grants", "states", "owners", "step"])
def test_a_class_that_is_not_fed_is_not_judged(operation, without: str, world: World, device: str) -> None:
    """With everything wrong, the others fire as before."""
    put(world.grants[0], 1, 98)
    put(world.states, 9, QUARANTINED)
    put(world.owners, 3, 70)
    world.step = STEP - 1
    everything = run(operation, world, "pages", device)
    world.fed -= {without}
    found = run(operation, world, "pages", device)
    assert found == oracle(world) != everything


@both
@pytest.mark.parametrize("live", [0, 1, 2, 9])
def test_padding_of_a_page_table_is_left_alone(operation, live: int, world: World, device: str) -> None:
    """Segments at and after the live count keep their codes."""
    put(world.states, 9, FREE)
    assert run(operation, world, "pages", device, live=live) == oracle(world, live)


def table_codes(operation, world: World, table: PageTable, starts: list[int], lengths: list[int], device: str):
    """Codes of segments that start at position 0; nothing but the records is fed."""

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    n, codes = len(starts), tensor([POISON] * 16)
    operation(
        columns(world, device),
        table,
        starts=tensor(starts),
        lengths=tensor(lengths),
        first_positions=tensor([0] * n),
        predecessors=tensor([ROOT] * n),
        seeds=tensor([signed(SEED)] * n),
        generations=tensor(world.generations),
        layers=record.layers_bitmap(LAYERS, device),
        page_size=PAGE_SIZE,
        null_slots=NULL_SLOTS,
        pool_id=POOL_ID,
        keys=world.keys,
        codes=codes,
    )
    return codes.tolist()


@both
def test_what_is_outside_the_table_is_out_of_range(operation, world: World, device: str, tensor) -> None:
    """Before a row, beyond it, and rows that the table does not have; the next row's pages are not read for them."""
    pages = torch.tensor([[2], [12]], dtype=torch.int32, device=device)
    table = PageTable(pages, PAGE_SIZE, rows=tensor([0, -1, 2, 0]), code_starts=tensor([0, 5, 7, 9]))
    found = table_codes(operation, world, table, [0, 0, 0, -2], [5, 2, 2, 2], device)
    assert found[:11] == [0, 0, 0, 0, R1, R1, R1, R1, R1, R1, R1]
    assert found[11:] == [POISON] * 5
    slots = torch.tensor([[8, 9], [10, 11]], device=device)
    for rows in ([0, -1, 2, 0], [1, 2, -1, 1]):  # the first slot of row 1 is at position 2 of its sequence: not 0
        table = PageTable(slots, 1, rows=tensor(rows), code_starts=tensor([0, 5, 7, 9]))
        found = table_codes(operation, world, table, [0, 0, 0, -2], [5, 2, 2, 2], device)
        assert found[:2] == ([0, 0] if rows[0] == 0 else [R4 | R5, R4])
        assert found[2:11] == [R1] * 9


@both
@pytest.mark.parametrize("page", [2**62, 2**62 + 2, -(2**62) + 2, 2**40, -(2**63), 2**31])
def test_a_page_whose_slot_would_wrap_is_out_of_range(operation, page: int, world: World, device: str, tensor) -> None:
    """2^62 + 2 times 4 slots is page 2's first slot in 64 bits."""
    pages = torch.tensor([[page]], device=device)
    found = table_codes(operation, world, PageTable(pages, PAGE_SIZE, code_starts=tensor([3])), [0], [4], device)
    assert found == [POISON] * 3 + [R1] * 4 + [POISON] * 9


@both
def test_verify_takes_an_empty_page_table(operation, world: World, device: str, tensor) -> None:
    """No segments, segments without entries, and a table without pages."""
    empty = torch.empty(0, 0, dtype=torch.int64, device=device)
    none = PageTable(empty, PAGE_SIZE, rows=tensor([]), code_starts=tensor([]))
    assert table_codes(operation, world, none, [], [], device) == [POISON] * 16
    one = PageTable(torch.tensor([[2]], device=device), PAGE_SIZE, code_starts=tensor([0]))
    assert table_codes(operation, world, one, [0], [0], device) == [POISON] * 16
    assert table_codes(operation, world, one, [0], [1], device) == [0] + [POISON] * 15
    bare = PageTable(torch.empty(1, 0, dtype=torch.int64, device=device), PAGE_SIZE, code_starts=tensor([0]))
    assert table_codes(operation, world, bare, [0], [2], device) == [R1, R1] + [POISON] * 14


@both
def test_verify_refuses_half_an_owner_check_and_bad_tables(operation, world: World, device: str, tensor) -> None:
    """The message names the argument and the rule."""
    pages = torch.tensor([[2, 12]], dtype=torch.int16, device=device)
    with pytest.raises(ValueError, match=r"pages must be \[rows, width\] int32 or int64 with dense rows, got \[1, 2\]"):
        table_codes(operation, world, PageTable(pages, PAGE_SIZE), [0], [1], device)
    with pytest.raises(ValueError, match="page_size of the table must be 1 to 4194304, got 0"):
        table_codes(operation, world, PageTable(pages.to(torch.int32), 0), [0], [1], device)
    world.fed = frozenset({"grants"})
    world.grants = [[1], [1]]
    world.table = [[2], [12]]
    world.first, world.lengths = [0, 0], [1, 1]
    given = {"step": tensor([1, 2])}
    with pytest.raises(ValueError, match=r"step must be contiguous \[1\] int64, got \[2\]"):
        run(lambda *a, **k: operation(*a, **(k | given)), world, "pages", device)
    with pytest.raises(ValueError, match="owners and readers must be fed together, got only one of them"):
        run(lambda *a, **k: operation(*a, **(k | {"owners": tensor([1] * 13)})), world, "pages", device)
    with pytest.raises(ValueError, match=r"grants must be contiguous \[3, 1\] int64, got \[3\]"):
        run(lambda *a, **k: operation(*a, **(k | {"grants": tensor([1] * 3)})), world, "pages", device)
