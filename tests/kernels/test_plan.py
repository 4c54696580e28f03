"""Plan and settle: the kernels give the bits of their references, whatever a forward's arrays hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.judge.forward import NO_SLOT, ForwardPlan, Planned, new_planned
from kvcanary_kernels.judge.plan import NO_CLAIM, plan, plan_torch
from kvcanary_kernels.judge.settle import settle, settle_torch
from kvcanary_kernels.record.layout import CODE_BITS, LOAD_FAILED, RESERVED, WRITTEN, layers_bitmap

NUM_SLOTS, PAGE_SIZE, NULL_SLOTS, LAYERS, POISON = 64, 4, 4, 3, -77
NUM_PAGES = NUM_SLOTS // PAGE_SIZE
CHAINS_BEFORE = torch.tensor(
    [3, 5, 2**62 + 1, -7]
)  # by row of the draft forward before; the last of two requests' rows
both = pytest.mark.parametrize("operation", [plan, plan_torch], ids=["triton", "torch"])


@dataclass
class World:
    """A pool's truth, and everything that both operations write."""

    records: Tensor
    expected: Tensor
    truth: dict[str, Tensor]
    claims: Tensor
    twice: Tensor
    codes: Tensor
    runs: Tensor
    planned: Planned

    def outputs(self) -> list[Tensor]:
        derived = [getattr(self.planned, field.name) for field in fields(Planned)]
        return [self.records, self.expected, self.claims, self.twice, self.codes, self.runs, *derived]


def make_world(forward: ForwardPlan, device: str, seed: int = 0) -> World:
    """Random records and pages of every state and owner; outputs hold poison."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    planned = new_planned(forward)
    for field in fields(Planned):
        if not field.name.startswith("counted"):
            getattr(planned, field.name).fill_(POISON)
    return World(
        records=draw(0, 8, NUM_SLOTS, 8),
        expected=draw(0, 8, NUM_SLOTS, 8),
        truth={"generations": draw(1, 9, NUM_PAGES), "states": draw(0, 9, NUM_PAGES), "owners": draw(-2, 3, NUM_PAGES)},
        claims=torch.full((NUM_SLOTS,), NO_CLAIM, device=device),
        twice=draw(0, 2, forward.num_entries),
        codes=torch.full((forward.capacity,), POISON, device=device),
        runs=torch.zeros(3, dtype=torch.int64, device=device),
        planned=planned,
    )


def run_plan(operation, forward: ForwardPlan, world: World, **changes: int) -> None:
    options = {"site": 3, "width": 2, "page_size": PAGE_SIZE, "null_slots": NULL_SLOTS} | changes
    roots = 99 + torch.arange(forward.num_rows, device=world.records.device)
    before = None if forward.lineage is None else CHAINS_BEFORE.to(world.records.device)
    arrays = {"records": world.records, "claims": world.claims, "roots": roots, "before": before}
    operation(forward, world.planned, **(arrays | world.truth | options))


def run_settle(operation, forward: ForwardPlan, world: World) -> None:
    operation(
        forward,
        world.planned,
        records=world.records,
        expected=world.expected,
        layers=layers_bitmap(LAYERS, world.records.device),
        claims=world.claims,
        twice=world.twice,
        codes=world.codes,
        runs=world.runs,
        null_slots=NULL_SLOTS,
    )


def make_forward(device: str, seed: int, is_tree: bool, live: int | None = None) -> ForwardPlan:
    """A random forward of five rows, with ids, bounds of rows, parents and positions right and wrong."""
    draw = random.Random(seed)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    written = [draw.choice([0, 1, 3]) for _ in range(5)]
    lengths = [count + draw.randrange(6) for count in written]
    bounds = [sum(written[:row]) for row in range(6)]
    n = bounds[-1] + draw.randrange(3)
    num_ids = sum(lengths) + 2
    ids = [
        draw.choice([draw.randrange(NUM_SLOTS), draw.randrange(NUM_SLOTS), 0, -1, NUM_SLOTS]) for _ in range(num_ids)
    ]
    starts = [sum(lengths[:row]) for row in range(5)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    if draw.random() < 0.5:
        broken = draw.randrange(5)
        ends[broken] = draw.choice([-3, starts[broken] - 1, 10**12, ends[broken]])
    return ForwardPlan(
        indices=ints(ids),
        row_starts=ints(starts),
        row_ends=ints(ends),
        bounds=ints(bounds),
        slots=ints([draw.choice([draw.randrange(4, NUM_SLOTS), 1, -5, NUM_SLOTS, 2**40, 7]) for _ in range(n)]),
        tokens=ints([draw.randrange(99) for _ in range(n)]),
        positions=ints([draw.randrange(6) for _ in range(n)]),
        parents=ints([draw.choice([-1, -1, 0, entry - 1, n + 5, -9]) for entry in range(n)]) if is_tree else None,
        prefix_lens=ints([draw.randrange(-1, 5) for _ in range(5)]),
        truths=ints([draw.randrange(8) for _ in range(5)]),
        uids=ints([draw.randrange(3) for _ in range(5)]),
        num_live=ints([draw.randrange(6) if live is None else live]),
        ancestors=draw.randrange(4),
        lineage=ints([draw.choice([0, 1, 0, 1, -1, 2, 2**40, -(2**40)]) for _ in range(5)]) if seed % 2 else None,
    )


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", range(9))
def test_kernels_equal_their_references(device, seed, is_tree):
    """Every output of both, poison where nothing is written included, over forwards full of wrong numbers."""
    forward = make_forward(device, seed + 10 * is_tree, is_tree)
    ours, twin = (make_world(forward, device, seed) for _ in range(2))
    run_plan(plan, forward, ours)
    run_plan(plan_torch, forward, twin)
    assert all(torch.equal(a, b) for a, b in zip(ours.outputs(), twin.outputs(), strict=True))
    run_settle(settle, forward, ours)
    run_settle(settle_torch, forward, twin)
    assert all(torch.equal(a, b) for a, b in zip(ours.outputs(), twin.outputs(), strict=True))


def one_row(device: str, **changes: list[int] | None) -> tuple[ForwardPlan, World]:
    """One row of request 7: entries 8 and 9 written before, 10 and 11 written now, on pages that are its own."""
    arrays = {
        "row_starts": [0],
        "row_ends": [4],
        "bounds": [0, 2],
        "slots": [10, 11],
        "tokens": [50, 51],
        "positions": [2, 3],
        "parents": None,
        "prefix_lens": [2],
        "truths": None,
        "uids": [7],
        "num_live": [1],
    } | {name: values for name, values in changes.items() if name != "ids"}
    tensors = {name: None if v is None else torch.tensor(v, device=device) for name, v in arrays.items()}
    forward = ForwardPlan(torch.tensor(changes.get("ids", [8, 9, 10, 11]), device=device), **tensors)
    world = make_world(forward, device)
    world.truth["states"].fill_(5)
    world.truth["owners"].fill_(7)
    return forward, world


CASES = {
    "clean": ({}, [0, 0], 0),
    "W1": ({"slots": [10, NUM_SLOTS]}, [0, CODE_BITS["W1"]], 0),
    "R2": ({"slots": [3, 11]}, [CODE_BITS["R2"], 0], 0),
    "W2": ({"uids": [6]}, [CODE_BITS["W2"]] * 2, 0),
    "W4": ({"slots": [10, 10]}, [0, CODE_BITS["W4"]], 0),
    "W5 in a chain": ({"positions": [2, 4]}, [0, CODE_BITS["W5"]], 0),
    "W5 in a tree": ({"parents": [-1, -1]}, [0, CODE_BITS["W5"]], 0),
    "W5 of a later parent": ({"parents": [1, -1], "positions": [2, 2]}, [CODE_BITS["W5"], 0], 0),
    "W5 of no parent": ({"parents": [-1, -7]}, [0, CODE_BITS["W5"]], 0),
    "W5 of a parent outside": ({"parents": [-1, 5]}, [0, CODE_BITS["W5"]], 0),
    "a tree": ({"parents": [-1, 0]}, [0, 0], 0),
    "R10": ({"prefix_lens": [1]}, [0, 0], CODE_BITS["R10"]),
    "R10 of a row outside": ({"row_ends": [5]}, [0, 0], CODE_BITS["R10"]),
    "unknown prefix": ({"prefix_lens": [-1]}, [0, 0], 0),
    "W9 of a padding row": ({"num_live": [0], "slots": [0, 3]}, [0, 0], CODE_BITS["W9"]),
    "W9 of padding entries": ({"num_live": [0], "ids": [0, 1, 2, 3]}, [CODE_BITS["W9"]] * 2, 0),
}


@both
@pytest.mark.parametrize("case", CASES)
def test_each_code_of_the_plan(operation, device, case):
    """One thing wrong gives its code, at the entry or the row that has it, and refuses the write unless it is W5."""
    changes, entry_codes, row_code = CASES[case]
    forward, world = one_row(device, **changes)
    run_plan(operation, forward, world)
    assert world.planned.codes.tolist() == [*entry_codes, row_code]
    if int(forward.num_live):
        refused = [code not in (0, CODE_BITS["W5"]) for code in entry_codes]
        wanted = [NO_SLOT if no else slot for no, slot in zip(refused, forward.slots.tolist(), strict=True)]
        assert world.planned.safe_slots.tolist() == wanted


@both
@pytest.mark.parametrize(
    ("what", "value", "code"),
    [("states", 8, "W3"), ("owners", -2, "W3"), ("states", 1, "W7"), ("states", 2, "W8"), ("states", 7, "W8")],
)
def test_pages_that_nobody_may_write(operation, device, what, value, code):
    """A shared page is W3, a quarantined one W7, whoever owns it; an own one that is final or loads is W8."""
    forward, world = one_row(device)
    world.truth[what].fill_(value)
    run_plan(operation, forward, world)
    assert world.planned.codes.tolist() == [CODE_BITS[code]] * 2 + [0]


@both
@pytest.mark.parametrize("state", [RESERVED, WRITTEN, LOAD_FAILED])
def test_pages_that_their_owner_may_write(operation, device, state):
    """What was granted, was written and is not final yet, or has to be written since its load failed."""
    forward, world = one_row(device)
    world.truth["states"].fill_(state)
    run_plan(operation, forward, world)
    assert not world.planned.codes.any()


@both
def test_a_stray_padding_row_names_its_first_slot(operation, device):
    """The row code of a padding row comes with the first slot outside the null slots, in the pool or not."""
    forward, world = one_row(device, num_live=[0], slots=[0, 0], ids=[0, 1, -6, 9])
    run_plan(operation, forward, world)
    assert world.planned.asked.tolist() == [0, 0, -6]


def test_settle_withdraws_every_claim(device):
    """After a forward no slot is claimed, so that the next one may write it."""
    forward, world = one_row(device, slots=[10, 10])
    run_plan(plan_torch, forward, world)
    assert int((world.claims != NO_CLAIM).sum()) == 1
    run_settle(settle_torch, forward, world)
    assert bool((world.claims == NO_CLAIM).all())


@both
def test_a_row_reads_what_it_writes_at_its_end(operation, device) -> None:
    """Entries stand behind the prefix, in order; a row of nothing else is whole too."""
    forward, world = one_row(device)
    run_plan(operation, forward, world)
    assert world.planned.places.tolist() == [2, 3]
    forward, world = one_row(device, ids=[10, 11], row_ends=[2], prefix_lens=[0], positions=[0, 1])
    run_plan(operation, forward, world)
    assert (world.planned.codes.tolist(), world.planned.places.tolist()) == ([0, 0, 0], [0, 1])
    assert world.planned.seeds.tolist() == [99]
    forward, world = one_row(device, row_ends=[5])
    run_plan(operation, forward, world)
    assert world.planned.places.tolist() == [-1, -1]


@both
@pytest.mark.parametrize(
    ("before", "found"), [(9, True), (4, True), (3, False), (63, True), (64, False), (-1, False), (-1000, False)]
)
def test_a_row_continues_the_entry_before_what_it_writes(operation, device, before: int, found: bool) -> None:
    """Its chain, where that is a slot that may be read."""
    forward, world = one_row(device, ids=[8, before, 10, 11])
    world.records[:, 1] = torch.arange(NUM_SLOTS, device=device) + 1000
    run_plan(operation, forward, world)
    assert world.planned.seeds.tolist() == [1000 + before if found else 0]


@both
@pytest.mark.parametrize(("count", "named"), [(0, []), (1, [9]), (2, [8, 9]), (3, [NO_SLOT, 8, 9])])
def test_what_a_row_names_in_front_of_what_it_writes(operation, device, count: int, named: list[int]) -> None:
    """The last entries of its prefix, as many as it has; nothing of a row that is not whole. No violation yet."""
    forward, _ = one_row(device)
    forward = replace(forward, ancestors=count)
    world = make_world(forward, device)
    run_plan(operation, forward, world)
    assert (world.planned.ancestors.tolist(), world.planned.row_violations.tolist()) == ([named], [0])
    forward.row_ends.fill_(5)
    run_plan(operation, forward, world)
    assert world.planned.ancestors.tolist() == [[NO_SLOT] * count]


def branches(device: str, **changes) -> tuple[ForwardPlan, World]:
    """Two requests of two rows each in the second draft forward: row r reads slot 8 + r and writes slot 16 + r."""
    arrays = {
        "row_starts": [0, 2, 4, 6],
        "row_ends": [2, 4, 6, 8],
        "bounds": [0, 1, 2, 3, 4],
        "slots": [16, 17, 18, 19],
        "tokens": [50, 51, 52, 53],
        "positions": [1, 1, 1, 1],
        "parents": None,
        "prefix_lens": [0, 0, 0, 0],
        "truths": None,
        "uids": [7, 7, 7, 7],
        "num_live": [4],
        "lineage": [0, 1, 0, 1],
    } | {name: values for name, values in changes.items() if name != "ids"}
    tensors = {name: None if v is None else torch.tensor(v, device=device) for name, v in arrays.items()}
    ids = changes.get("ids", [8, 16, 9, 17, 10, 18, 11, 19])
    forward = ForwardPlan(torch.tensor(ids, device=device), **tensors, ancestors=1)
    world = make_world(forward, device)
    world.truth["states"].fill_(5)
    world.truth["owners"].fill_(7)
    world.records[:, 1] = torch.arange(NUM_SLOTS, device=device) + 1000
    world.records[8:12, 1] = CHAINS_BEFORE.to(device)
    return forward, world


FIRST, SECOND, THIRD, FOURTH = CHAINS_BEFORE.tolist()
LINEAGES = {  # what is wrong, the chains that rows go on from, and which of them do not read that
    "clean": ({}, [FIRST, SECOND, THIRD, FOURTH], []),
    "survivors of other branches": (
        {"lineage": [1, 1, 1, 0], "ids": [9, 16, 9, 17, 11, 18, 10, 19]},
        [SECOND, SECOND, FOURTH, THIRD],
        [],
    ),
    "columns": ({"lineage": [1, 1, 0, 0]}, [SECOND, SECOND, THIRD, THIRD], [0, 3]),
    "a copy of the parent's entry": ({"ids": [20, 16, 9, 17, 10, 18, 11, 19]}, [FIRST, SECOND, THIRD, FOURTH], []),
    "no branch": ({"lineage": [-1, 2, 2**40, -(2**40)]}, [0, 0, 0, 0], [0, 1, 2, 3]),
    "a branch of the other request": ({"lineage": [2, 1, -1, 1]}, [0, SECOND, 0, FOURTH], [0, 2]),
    "a null slot is another check's": ({"ids": [1, 16, 9, 17, 10, 18, 11, 19]}, [FIRST, SECOND, THIRD, FOURTH], []),
    "so is one outside": ({"ids": [NUM_SLOTS, 16, 9, 17, -1, 18, 11, 19]}, [FIRST, SECOND, THIRD, FOURTH], []),
    "padding is not judged": ({"lineage": [1, 0, 1, 0], "num_live": [2]}, [SECOND, FIRST, None, None], [0, 1]),
    "rows without a parent": (
        {"row_starts": [1, 3, 5, 7], "lineage": [1, 0, 1, 0]},
        [99, 100, 101, 102],
        [],
    ),
}


@pytest.mark.parametrize(("planner", "prover"), [(plan, settle), (plan_torch, settle_torch)], ids=["triton", "torch"])
@pytest.mark.parametrize("case", LINEAGES)
def test_rows_go_on_from_what_their_lineage_names(planner, prover, device, case: str) -> None:
    """From its chain, whatever they read; R5 where they read an entry of another chain, wherever that one lies."""
    changes, seeds, astray = LINEAGES[case]
    forward, world = branches(device, **changes)
    world.records[20, 1] = FIRST
    run_plan(planner, forward, world)
    live = len([seed for seed in seeds if seed is not None])
    assert world.planned.seeds.tolist()[:live] == seeds[:live]
    assert world.planned.entry_seeds.tolist()[:live] == seeds[:live]
    world.codes.zero_()
    world.records[16:20, 1] = torch.arange(4, device=device)
    run_settle(prover, forward, world)
    starts = forward.row_starts.tolist()
    assert world.codes.nonzero().flatten().tolist() == [starts[row] for row in astray]
    assert set(world.codes.tolist()) <= {0, CODE_BITS["R5"]}


def test_a_lineage_and_the_chains_before_belong_together(device) -> None:
    """One without the other says nothing."""
    forward, world = branches(device)
    words = "a lineage and the chains of the forward before must be given together, got only one of them"
    with pytest.raises(ValueError, match=words):
        run_plan(plan, forward, world, before=None)
    with pytest.raises(ValueError, match=words):
        run_plan(plan, replace(forward, lineage=None), world, before=world.claims)


settles = pytest.mark.parametrize("operation", [settle, settle_torch], ids=["triton", "torch"])


def settled(operation, device: str, **changes) -> tuple[ForwardPlan, World]:
    """One row of slots 8 to 11 that writes the last two; slot s has chain 100 + s and all layers."""
    forward, world = one_row(device, **changes)
    run_plan(plan if operation is settle else plan_torch, forward, world)
    world.records[:, 1] = torch.arange(NUM_SLOTS, device=device) + 100
    world.records[:, 5:7] = layers_bitmap(LAYERS, world.records.device)
    world.codes.zero_()
    world.twice.zero_()
    return forward, world


@settles
@pytest.mark.parametrize(("truth", "code"), [(109, 0), (108, CODE_BITS["R6"])])
def test_a_row_is_compared_with_its_truth(operation, device, truth: int, code: int) -> None:
    """At the last entry of its prefix; what was judged is added up."""
    forward, world = settled(operation, device, truths=[truth])
    for turn in (1, 2):
        run_settle(operation, forward, world)
        assert world.codes.tolist() == [0, code, 0, 0]
        assert world.runs.tolist() == [turn, 2 * turn, 4 * turn]


@settles
@pytest.mark.parametrize(("truth", "code"), [(100 + NUM_SLOTS - 1, 0), (100 + NUM_SLOTS - 2, CODE_BITS["R6"])])
def test_a_prefix_of_one_entry_has_a_truth_too(operation, device, truth: int, code: int) -> None:
    """Here in the last slot of the pool."""
    forward, world = settled(operation, device, ids=[NUM_SLOTS - 1, 9, 10, 11], prefix_lens=[1], truths=[truth])
    run_settle(operation, forward, world)
    assert int(world.codes[0]) == code


@settles
@pytest.mark.parametrize(("read", "wrong"), [(10, False), (12, True), (3, False), (63, True), (64, False), (-1, False)])
def test_a_row_reads_as_its_own_what_it_wrote(operation, device, read: int, wrong: bool) -> None:
    """Another slot with another chain is R5; what is no slot is judged elsewhere."""
    forward, world = settled(operation, device, ids=[8, 9, read, 11])
    run_settle(operation, forward, world)
    assert world.codes.tolist() == [0, 0, CODE_BITS["R5"] if wrong else 0, 0]
    if wrong:
        forward, world = settled(operation, device, ids=[8, 9, read, 11])
        world.records[read, 1] = world.records[10, 1]
        run_settle(operation, forward, world)
        assert not world.codes.any()


@both
def test_a_row_that_writes_nothing_reads_all_of_itself(operation, device) -> None:
    """Its prefix is the whole row; the entry behind it is padding."""
    forward, world = one_row(device, bounds=[0, 0], slots=[0], tokens=[0], positions=[0], prefix_lens=[4])
    run_plan(operation, forward, world)
    assert (world.planned.read_lengths.tolist(), world.planned.codes.tolist()) == ([4], [0, 0])


@both
def test_a_padding_row_is_looked_at_from_its_first_place(operation, device) -> None:
    """Also where it begins before the index array does."""
    forward, world = one_row(device, num_live=[0], slots=[0, 0], row_starts=[-2], row_ends=[1], ids=[9, 0, 1, 2])
    run_plan(operation, forward, world)
    assert world.planned.codes.tolist() == [0, 0, CODE_BITS["W9"]]


@settles
def test_a_missing_layer_is_that_of_its_entry(operation, device) -> None:
    """R12 where a layer has not stored, and nowhere else."""
    forward, world = settled(operation, device)
    world.records[10, 5] = 0
    run_settle(operation, forward, world)
    assert world.planned.codes.tolist() == [CODE_BITS["R12"], 0, 0]
