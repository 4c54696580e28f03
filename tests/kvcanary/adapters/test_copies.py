"""What several workers hold alike is compared as it is stored: fingerprints, summed up where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs

from kvcanary import CanaryConfig, PoolView
from kvcanary.adapters.hosted.cells import Shard
from kvcanary.adapters.hosted.copies import StoredCopies
from kvcanary.adapters.hosted.sampled import SampledByRanks, of_one_seed
from kvcanary.adapters.observed.report import pool_of
from kvcanary.ranks import Agreement, Level, Levels, RanksDisagreeError
from kvcanary.ranks.copies import by_share

from .row_engine import BLOCK, BLOCKS, DIM, HEADS, RowEngine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POOL = "copies of the target pool"


class Rank:
    """One of two workers, each of which holds all heads."""

    def __init__(self, device: str = "cpu", late: bool = False) -> None:
        self.engine = RowEngine(device, whole_heads=HEADS, prepares=False)
        if late:
            self.late = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM, device=device).transpose(1, 2)
            k, v = [self.late[..., :DIM]], [self.late[..., DIM:]]
            view = PoolView("draft", k, v, page_size=BLOCK, layout="HND", whole_heads=HEADS)
            self.engine.canary.memory.add_layers(self.engine.canary.groups[0], view, ["d0"], is_late=True)
        self.copies = StoredCopies(self.engine.canary, num_ranks=2)
        self.engine.prepare()
        for number in range(3):
            self.engine.begin(number, [])

    def step(self, batch: dict[int, list[int]]) -> Levels:
        self.engine.step(batch)
        return self.copies.levels(self.engine.canary.step)

    def flip(self, position: int, layer: int = 1, row: int = 1) -> Callable[[], None]:
        """One bit of what a forward stores, before anything is taken of it: it was computed so."""

        def spoil() -> None:
            block = int(self.engine.table[row, position // BLOCK])
            self.engine.kv[layer].view(torch.int32)[block, 1, position % BLOCK, DIM + 3] ^= 1

        return spoil


def alike(one: Levels, other: Levels) -> bool:
    assert one.keys() == other.keys()
    return all(own.digest == other[name].digest for name, own in one.items())


PROMPTS = {n: [(7 * n + i) % 50 for i in range(9 + 5 * n)] for n in range(3)}


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_stored_alike_has_one_sum_and_what_is_not_has_two(device: str) -> None:
    """Prefill and decode; then one bit of one entry in one layer: from that step on, with layer, slot and request."""
    ranks = Rank(device), Rank(device)
    assert alike(*(rank.step(PROMPTS) for rank in ranks))
    for step in range(6):
        levels = [rank.step({2: [step], 0: [step + 1], 1: [step + 2]}) for rank in ranks]
        assert alike(*levels)
        assert all(own.digest is not None for own in levels[0].values())
    position = len(ranks[1].engine.tokens[1])
    ranks[1].engine.spoil = ranks[1].flip(position)
    batch = {0: [4], 1: [5], 2: [6]}
    one, other = (rank.step(batch) for rank in ranks)
    assert not alike(one, other)
    rows, others = one[POOL].rows(), other[POOL].rows()
    assert [name for name in rows if rows[name] != others[name]] == ["layer 1"]
    [place] = [n for n, pair in enumerate(zip(rows["layer 1"], others["layer 1"], strict=True)) if len(set(pair)) > 1]
    canary = ranks[1].engine.canary
    error = RanksDisagreeError("", step=canary.step, code="X2", level=POOL, name="layer 1", position=place)
    found = ranks[1].copies.violation_of(error, pool_of(canary, canary.groups[0]))
    block = int(ranks[1].engine.table[1, position // BLOCK])
    assert (found.code, found.slot, found.layers) == ("X2", block * BLOCK + position % BLOCK, (1,))
    assert (found.request_id, found.position) == ("r1", position)
    assert found.notes[-1].endswith("layer l1")
    ranks[1].engine.spoil = lambda: None
    assert not alike(*(rank.step(batch) for rank in ranks))  # the sum says of all steps so far


@pytest.mark.parametrize(
    ("code", "level", "name", "position"),
    [
        ("X1", "tokens", "r1", 0),
        ("X2", POOL, "layer 1", sum(map(len, PROMPTS.values()))),  # another rank has stored one more
        ("X2", POOL, None, None),  # what differs came before this step
    ],
)
def test_what_lies_in_no_entry_is_told_without_a_slot(
    code: str, level: str, name: str | None, position: int | None
) -> None:
    rank = Rank()
    rank.step(PROMPTS)
    error = RanksDisagreeError("", step=1, code=code, level=level, name=name, position=position)
    found = rank.copies.violation_of(error, pool_of(rank.engine.canary, rank.engine.canary.groups[0]))
    assert (found.code, found.slot, found.request_id) == (code, -1, name)


def test_what_lies_in_null_slots_is_not_compared() -> None:
    """Padding writes there, in each rank what it likes."""
    ranks = Rank(), Rank()
    for value, rank in enumerate(ranks):
        rank.engine.table[1] = 0
        rank.engine.spoil = lambda rank=rank, value=value: [kv[0].fill_(value) for kv in rank.engine.kv]
    assert alike(*(rank.step(PROMPTS) for rank in ranks))


def test_a_look_between_forwards_stores_nothing() -> None:
    """A row that goes is read once more, as a step of its own: behind it lies what lay there before."""
    rank = Rank()
    before = rank.step(PROMPTS)
    canary, step = rank.engine.canary, rank.engine.canary.step
    rank.engine.end(1)
    canary.flush(rank.engine.forward_of([], 0, [1]))
    assert canary.step == step + 1
    looked = rank.copies.levels(canary.step)
    assert alike(looked, before)
    assert looked[POOL].rows() == before[POOL].rows() != {"layer 0": [], "layer 1": []}
    assert not alike(rank.step({0: [3]}), before)
    assert alike(rank.copies.levels(step), before)  # as it was, while the device is ahead


def test_late_layers_are_compared_with_the_next_step() -> None:
    """A draft stores behind the target's forward; what it takes back is nobody's."""
    ranks = Rank(late=True), Rank(late=True)
    for step in range(2):
        for number, rank in enumerate(ranks):
            rank.engine.step(PROMPTS if step == 0 else {1: [3]})
            slot = int(rank.engine.slots[0, 0])
            rank.late[slot // BLOCK, :, slot % BLOCK] = 1.0 + number * step
            rank.engine.canary.took(torch.zeros(3, dtype=torch.int64))
    step = ranks[0].engine.canary.step
    assert alike(*(rank.copies.levels(step) for rank in ranks))
    levels = [rank.step({1: [4]}) for rank in ranks]
    draft = [own["copies of the draft pool"] for own in levels]
    assert alike(*({POOL: own[POOL]} for own in levels))
    assert draft[0].digest != draft[1].digest
    rows = [own.rows()["layer 0"] for own in draft]
    assert len(rows[0]) == 1
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    ("shard", "heads", "is_whole", "expected"),
    [
        (Shard(3, 4, 8), 2, False, (0, 0)),  # two heads each: nobody else's
        (Shard(3, 4, 4), 1, False, (0, 0)),
        (Shard(3, 4, 2), 1, False, (1, 2)),
        (Shard(1, 4, 2), 1, False, (0, 2)),
        (Shard(3, 4, 1), 1, False, (0, 1)),
        (Shard(3, 4, 2), 2, False, (0, 0)),  # a layer that is cut otherwise than its model says
        (Shard(3, 4, 16), 1, True, (0, 1)),  # latent rows are whole everywhere
    ],
)
def test_which_heads_several_workers_hold(shard: Shard, heads: int, is_whole: bool, expected: tuple[int, int]) -> None:
    assert shard.heads(heads, is_whole) == expected


def test_heads_that_others_hold_are_levels_of_theirs() -> None:
    """Every rank names all shares; one that holds a share alone among these ranks compares nothing."""
    engine = RowEngine("cpu", whole_heads=2 * HEADS, prepares=False)
    assert StoredCopies(engine.canary, num_ranks=2).levels(0) == {}
    levels = StoredCopies(engine.canary, num_ranks=4).levels(0)
    assert [(name, own.digest is None) for name, own in levels.items()] == [
        (f"{POOL}, heads 0 to 1", False),
        (f"{POOL}, heads 2 to 3", True),
    ]
    assert StoredCopies(RowEngine("cpu").canary, num_ranks=2).levels(0) == {}  # nobody said what others hold


def test_a_level_is_of_the_share_that_a_rank_holds() -> None:
    """The second of two."""
    k = torch.zeros(BLOCKS, BLOCK, HEADS, DIM)
    view = PoolView("target", [k], [k.clone()], page_size=BLOCK, first_head=HEADS, whole_heads=2 * HEADS)
    own = Level(5, dict)
    assert list(by_share(POOL, view, own).values()) == [Level(None, dict, "X2"), own]


@pytest.fixture
def group(tmp_path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def compared(group, monkeypatch) -> Callable[[int], tuple[SampledByRanks, Rank, list[RanksDisagreeError]]]:
    """Make(step in which another rank stores otherwise) a comparison, this rank, and what it tells."""

    def make(wrong: int) -> tuple[SampledByRanks, Rank, list[RanksDisagreeError]]:
        class Other(Agreement):
            """Its copies are the third level, behind the step and its tokens."""

            def _greatest(self, numbers, step):
                greatest = super()._greatest(numbers, step)
                return [own + (step >= wrong and place == 4) for place, own in enumerate(greatest)]

        monkeypatch.setattr("kvcanary.adapters.hosted.sampled.Agreement", Other)
        told: list[RanksDisagreeError] = []
        sampled, rank = SampledByRanks(group, told.append), Rank()
        sampled.copies = rank.copies
        return sampled, rank, told

    return make


def run(sampled: SampledByRanks, rank: Rank, steps: int = 4) -> None:
    for step in range(steps):
        rank.engine.step(PROMPTS if step == 0 else {0: [step]})
        given = SimpleNamespace(req_ids=["r0"], sampled_token_ids=[[step]])
        sampled.compare(rank.engine.canary.step, given)


def test_the_first_step_is_a_test_of_the_ranks(compared) -> None:
    """Ranks that compute otherwise from the first step on are no alarm: it is said once, and tokens are compared."""
    sampled, rank, told = compared(1)
    with capture_logs() as events:
        run(sampled, rank)
    assert told == []
    assert [(event["event"], event["step"]) for event in events] == [("kvcanary.copies_not_compared", 1)]
    assert (sampled.copies, rank.copies.is_armed, sampled._number) == (None, False, 4)
    assert "X2" not in rank.engine.canary.fed


def test_a_later_step_is_told_once_and_tokens_are_compared_on(compared) -> None:
    """X2 decides nothing: histories are one."""
    sampled, rank, told = compared(3)
    run(sampled, rank, 5)
    assert [(error.code, error.level, error.step) for error in told] == [("X2", POOL, 3)]
    assert (rank.copies.is_armed, sampled._number) == (True, 5)
    assert "X2" in rank.engine.canary.fed


def test_all_have_the_seed_of_the_first(group) -> None:
    """So that equal bytes have equal fingerprints; one that was given stays."""
    drawn = of_one_seed(CanaryConfig(), group).seed
    assert isinstance(drawn, int)
    assert of_one_seed(CanaryConfig(seed=5), group).seed == 5
    assert of_one_seed(CanaryConfig(), None).seed is None
