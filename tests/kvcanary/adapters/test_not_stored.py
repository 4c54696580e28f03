"""A store that does not arrive in a watched pool: R12 in the step that should have stored, not when somebody reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvcanary import PoolView
from kvcanary.adapters.observed.launches import Launches
from kvcanary.adapters.observed.report import report_step
from kvcanary.report.finding import Finding

from .row_engine import BLOCK, BLOCKS, DIM, HEADS, ROWS, TOKENS, RowEngine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT = list(range(9))
NO_STORE = "a layer did not store its K and V for this entry"
OTHERS = [own + 20 for own in PROMPT]


def told(engine: RowEngine) -> list[Finding]:
    report_step(engine.canary, engine.canary.steps[-1])
    return engine.canary.log.findings


def loses(engine: RowEngine, layer: int, step: Callable[[], int]) -> int:
    """A step in which a layer stores nothing: the count behind it."""
    before = engine.kv[layer].clone()
    engine.spoil = lambda: engine.kv[layer].copy_(before)
    count = step()
    engine.spoil = lambda: None
    return count


def with_draft(
    device: str, names: Sequence[str] = ("d0", "d1"), reads_hidden: bool = False
) -> tuple[RowEngine, list[torch.Tensor]]:
    """An engine whose slots layers of a draft share, and their K and V."""
    engine = RowEngine(device, "write", prepares=False)
    shape = BLOCKS, BLOCK, HEADS, 2 * DIM
    late = [torch.zeros(shape, device=device).transpose(1, 2) for _ in names]
    halves = [kv[..., :DIM] for kv in late], [kv[..., DIM:] for kv in late]
    view = PoolView("draft", *halves, page_size=BLOCK, layout="HND")
    engine.canary.memory.add_layers(engine.canary.groups[0], view, names, is_late=True, reads_hidden=reads_hidden)
    engine.canary.launches = Launches(engine.canary.config, engine.canary.memory, ROWS, TOKENS)
    engine.canary.kept = engine.canary.launches.kept
    engine.canary.violations_of = engine.canary.launches.violations_of
    engine.prepare()
    return engine, late


@pytest.mark.parametrize("content", ["full", "write"])
@pytest.mark.parametrize("device", DEVICES)
def test_another_requests_bytes_that_are_still_there_are_told(device: str, content: str) -> None:
    """Blocks come to another request, whose prompt one layer does not store: its first entry, step, layer and cause."""
    engine = RowEngine(device, content)
    for number in range(2):
        engine.begin(number, [])
    assert engine.step({0: PROMPT, 1: PROMPT}) == 0
    engine.end(0)
    engine.free = [*engine.table[0].tolist(), *engine.free]
    engine.begin(0, [])
    assert engine.step({1: [1]}) == 0  # the last look at who went
    count = loses(engine, 1, lambda: engine.step({1: [2], 0: [PROMPT[0], *OTHERS[1:]]}))
    assert count == len(OTHERS[1:])  # the first token is the one that was there; nobody knows what was in r1's slot
    [found] = told(engine)
    assert (found.code, found.reader, found.position, found.step, found.layers) == ("R12", "r0", 1, 3, (1,))
    assert found.slot == int(engine.table[0, 0]) * BLOCK + 1
    assert found.causes[0].text == NO_STORE


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_where_nobody_has_stored_yet_are_told(device: str) -> None:
    """A pool that was just made: the second token whose entry is nothing but zeros."""
    engine = RowEngine(device, "write")
    engine.begin(0, [])
    engine.spoil = lambda: [kv.zero_() for kv in engine.kv]  # the first layer is not asked
    assert engine.step({0: [7, 7, 5, 6]}) == 2
    [found] = told(engine)
    assert (found.code, found.reader, found.position, found.layers) == ("R12", "r0", 2, (1,))


def test_a_layer_that_goes_on_so_is_one_incident() -> None:
    """Of every request that it strikes, in one step and later ones."""
    engine = RowEngine("cpu", "write")
    for number in range(3):
        engine.begin(number, [])
    loses(engine, 1, lambda: engine.step({0: [7, 8], 1: [7, 9], 2: [7]}))
    [found] = told(engine)
    assert (found.reader, found.position, found.readers) == ("r0", 1, ("r0", "r1"))
    assert (found.expected, found.found) == ({"layers": 2}, {"missing": [1]})
    for token in 4, 5, 6:
        loses(engine, 1, lambda token=token: engine.step({0: [token], 2: [token]}))
        assert len(told(engine)) == 1
    assert engine.canary.coverage.fired == {"R12": 6}  # r0 and r1, r0 and r2, and r0 alone twice
    assert engine.canary.coverage.untold_incidents == 0


def test_the_check_can_be_left_out() -> None:
    """KVCANARY_DISABLE=R12: nothing is counted."""
    engine = RowEngine("cpu", disable=frozenset({"R12"}))
    engine.begin(0, [])
    assert loses(engine, 1, lambda: engine.step({0: PROMPT})) == 0


def test_the_other_check_of_what_was_stored_can_be_left_out_alone() -> None:
    engine = RowEngine("cpu", disable=frozenset({"N1"}))
    engine.begin(0, [])
    assert loses(engine, 1, lambda: engine.step({0: PROMPT})) == len(PROMPT) - 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_that_stores_nothing_is_told_with_the_next_step(device: str) -> None:
    """Layers that a later forward of the step stores; what was rejected was not to be kept."""
    engine, late = with_draft(device)
    engine.begin(0, [])
    assert engine.step({0: PROMPT}) == 0
    for kv in late:
        kv.copy_(engine.kv[0])
    late[1][int(engine.table[0, 1]), :, 1:] = late[1][int(engine.table[0, 2])] = 0
    engine.canary.took(torch.tensor([2]))  # positions 7 and 8 are rejected
    assert engine.step({0: [3]}) == 1
    [found] = told(engine)
    assert (found.code, found.reader, found.position, found.site) == ("R12", "r0", 6, ("draft", 0))
    assert (found.step, found.pool, found.layers) == (1, "draft", (1,))
    for kv in late:
        kv.copy_(engine.kv[0])
    engine.canary.took(torch.tensor([0]))
    engine.tokens[0].pop()  # it was rejected: another token comes into its slot
    assert engine.step({0: [4]}) == 1
    engine.canary.took(torch.tensor([0]))
    assert engine.step({0: [5]}) == 2
    told(engine)
    assert engine.canary.coverage.fired == {"R12": 2}


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_first_layer_is_asked_where_it_does_not_see_the_token_alone(is_asked: bool) -> None:
    """EAGLE drafts have one layer, which goes on from what the target computed."""
    engine, [late] = with_draft("cpu", ["d0"], reads_hidden=is_asked)
    engine.begin(0, [])
    assert engine.step({0: [7, 8]}) == 0
    engine.canary.took(torch.tensor([0]))  # zeros of two tokens
    assert engine.step({0: [9]}) == int(is_asked)
    late.copy_(engine.kv[0])
    engine.canary.took(torch.tensor([0]))
    engine.tokens[0].pop()
    assert engine.step({0: [3]}) == int(is_asked)
    engine.canary.took(torch.tensor([0]))  # 9 is still there
    assert engine.step({0: [4]}) == 2 * int(is_asked)
    assert [own.layers for own in told(engine)] == [(0,)] * is_asked


def test_a_draft_that_did_not_run_knows_nothing_of_its_slots() -> None:
    """The target stored another token there meanwhile, and what was taken of the draft is of the one before."""
    engine, late = with_draft("cpu")
    engine.begin(0, [])
    for number, token in enumerate((3, 4, 5)):
        assert engine.step({0: [*PROMPT[: 8 * (not number)], token]}) == 0
        if not number:
            for kv in late:
                kv.copy_(engine.kv[0])
        if number != 1:
            engine.canary.took(torch.tensor([0]))
        engine.tokens[0].pop()
    assert engine.step({0: [6]}) == 0


@pytest.mark.parametrize("layer", [0, 1])
def test_a_pattern_that_filled_a_free_slot_and_is_still_there_is_told(layer: int) -> None:
    """Content full fills what is freed: a store that does not arrive there shows, whatever the token and layer."""
    engine = RowEngine("cpu")
    owners = engine.canary.follow_owners()
    engine.prepare()
    for number in range(2):
        engine.begin(number, [])
    uids = {name: uid for uid, name in engine.canary.writers.items()}
    slots = [(engine.table[n].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten() for n in range(2)]
    for number in range(2):
        owners.granted(slots[number], torch.full((len(slots[number]),), uids[f"r{number}"]))
    assert engine.step({0: PROMPT, 1: PROMPT}) == 0
    owners.freed(slots[1][12:16])
    assert engine.step({0: [1]}) == 0
    owners.granted(slots[1][12:16], torch.full((4,), uids["r1"]))
    assert engine.step({0: [1], 1: [1, 2, 3]}) == 0
    assert loses(engine, layer, lambda: engine.step({1: [4]})) == 1
    [found] = told(engine)
    assert (found.code, found.reader, found.position, found.layers) == ("R12", "r1", 12, (layer,))
