"""Looks that travel with a step: each has its answer there, and nobody waits for one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from kvcanary.calls.forward import on_host
from kvcanary.calls.violation import Violation
from kvcanary.native import loops
from kvcanary.pools.views import PoolView
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.mailbox import MAX_IN_FLIGHT, NUM_MESSAGES
from kvcanary.records.side_stream import LAST, SideStream
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.rereads import ROOM, Rereads, StepRereads
from kvcanary_kernels.record.layout import REQUEST_GENERATION

CPU = torch.device("cpu")


def sealed(device: str) -> PoolState:
    """12 pages of 4 slots in two layers, every fingerprint as its bytes are."""
    k, v = ([torch.randn(48, 2, 8).to(device) for _ in range(2)] for _ in range(2))
    pool = CanaryState([PoolView("target", k, v, 4)], 3).pools[0]
    pool.content_a.copy_(fingerprints_of_slots(pool, torch.arange(48, device=device))[0])
    return pool


def judge(number: int, judged: list[int]) -> list[Violation]:
    judged.append(number)
    return []


def asked(looks: Rereads, differs: bool, number: int, judged: list[int], count: int = 2) -> torch.Tensor:
    """A look whose kernel says in the last of its numbers whether it has found something."""
    found = looks.room(count)
    assert not found.any()
    found[-1] = int(differs)
    looks.ask(found, partial(judge, number, judged))
    return found


def sent_of(looks: Rereads) -> StepRereads:
    sent = looks.send()
    assert sent is not None
    return sent


def test_as_many_looks_as_a_batch_has_requests_go_with_one_step():
    """Each answer lies in its own place, and those alone are judged that differ, once the step is heard."""
    looks, judged = Rereads(CPU, at_once=False), list[int]()
    differing = {0, 17, 299}
    for number in range(300):
        asked(looks, number in differing, number, judged)
    assert (looks.waits, judged) == (True, [])
    sent_of(looks).violations()
    assert (looks.waits, set(judged), looks.send()) == (False, differing, None)


@pytest.mark.parametrize("differing", [0, 1, 2])
def test_what_a_line_has_no_room_for_lies_in_another_block(differing):
    """Nothing is skipped, moved or overwritten where a step has more of them than places."""
    looks, judged = Rereads(CPU, at_once=False), list[int]()
    found = [asked(looks, number == differing, number, judged, count) for number, count in enumerate((ROOM, 1, 9999))]
    sent_of(looks).violations()
    assert judged == [differing]
    assert [int(own.sum()) for own in found] == [int(number == differing) for number in range(3)]


def test_a_step_that_finds_nothing_forgets_what_the_last_one_found():
    """Places are taken again from the first on, whatever lay there."""
    looks, judged = Rereads(CPU, at_once=False), list[int]()
    for number in range(3 * MAX_IN_FLIGHT):
        asked(looks, number < MAX_IN_FLIGHT, number, judged)
        sent_of(looks).violations()
    assert judged == list(range(MAX_IN_FLIGHT))


def test_numbers_between_answers_say_nothing():
    """What a finding has left in a place that is given away with another's is no finding."""
    looks, judged = Rereads(CPU, at_once=False), list[int]()
    for _ in range(NUM_MESSAGES):
        asked(looks, True, 0, judged, 4).fill_(1)
        sent_of(looks).violations()
    asked(looks, False, 1, judged, 1)
    asked(looks, False, 1, judged, 1)
    sent = sent_of(looks)
    assert sent._are_zero(len(sent.answers) // 2, sent.answers.buffer_info()[0])
    assert (sent.violations(), judged) == ([], [0] * NUM_MESSAGES)


@pytest.mark.parametrize("differing", range(MAX_IN_FLIGHT + 1))
def test_answers_stay_until_the_step_is_collected(differing):
    """Kernels answer beside later steps: what is told and asked for meanwhile lies elsewhere."""
    looks, judged = Rereads(CPU, at_once=False), list[int]()
    flights, places = [], []
    for number in range(MAX_IN_FLIGHT):
        places.append(asked(looks, False, number, judged))
        flights.append(sent_of(looks))
    places.append(asked(looks, False, MAX_IN_FLIGHT, judged))
    places[differing].fill_(1)
    flights.append(sent_of(looks))
    for sent in flights:
        sent.violations()
    assert judged == [differing]


def test_a_step_allocates_nothing_once_lines_have_grown():
    """The same memory is given away every time that a line's turn comes."""
    looks, judged = Rereads(CPU, at_once=False), list[int]()

    def addresses() -> set[int]:
        found = set[int]()
        for number in range(MAX_IN_FLIGHT + 1):
            place = asked(looks, False, number, judged, 3 * ROOM)
            found.add(place.data_ptr())
            sent_of(looks).violations()
        return found

    assert len(addresses()) == MAX_IN_FLIGHT + 1
    assert addresses() == addresses()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_looks_are_launched_again_over_the_same_places(device):
    """Whatever a step looks at, and however many slots: what fires are those that differ, of that step alone."""
    pool, draws, reported = sealed(device), np.random.default_rng(7), list[tuple[int, list[int]]]()
    looks, slots_of = Rereads(torch.device(device), at_once=False), range(1, pool.view.num_slots)
    damaged = [5, 11]
    pool.content_a[1, damaged] += 1
    sent = deque[tuple[int, list[list[int]], StepRereads]]()
    for step in range(40):
        wanted = list[list[int]]()
        for count in draws.choice([1, 2, 16, 17, 40], draws.integers(1, 4)):
            slots = draws.choice(slots_of, count, replace=False)
            wanted.append(slots.tolist())
            looks.reread(pool, slots, lambda own, step=step: reported.append((step, own.tolist())) or [])
        sent.append((step, wanted, sent_of(looks)))
        while len(sent) > (MAX_IN_FLIGHT if step < 39 else 0):
            step_of, looked, flight = sent.popleft()
            if device == "cuda":
                torch.cuda.synchronize()
            reported.clear()
            flight.violations()
            assert reported == [(step_of, own) for own in looked if set(own) & set(damaged)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_finite_is_told_by_slot(device):
    """But of slots that were written in the grant that the host names."""
    pool, found = sealed(device), list[list[int]]()
    looks, slots = Rereads(torch.device(device), at_once=False), np.array([3, 9, 4, 20])
    for slot in (9, 20):
        rows = pool.rows.gather_layer(1, torch.tensor([slot], device=device))
        pool.rows.scatter_layer(1, torch.tensor([slot], device=device), torch.full_like(rows, -1))
    grants = on_host(pool.expected[:, REQUEST_GENERATION] >> 32)[slots]
    for own in (None, grants, np.where(slots == 20, grants + 1, grants)):
        for _ in range(3):
            part = (slots, own, lambda bits: found.append(slots[bits.any(1).numpy()].tolist()) or [])
            looks.check_finite(pool, [part])
            sent = sent_of(looks)
            if device == "cuda":
                torch.cuda.synchronize()
            sent.violations()
    assert found == 3 * [[9, 20]] + 3 * [[20]]


@pytest.mark.gpu
@pytest.mark.parametrize("differing", [0, 1])
def test_the_next_step_asks_before_the_last_one_is_answered(differing):
    """A page is granted, and its poison looked at, while bytes of the step before are still being read beside it."""
    device, judged = torch.device("cuda"), list[int]()
    looks, beside = Rereads(device, at_once=False), SideStream(device, LAST)
    answers = [torch.full((2,), int(number == differing), device=device) for number in range(2)]
    with beside.behind():
        torch.cuda._sleep(20_000_000)
        asked(looks, False, 0, judged).copy_(answers[0], non_blocking=True)
        first = sent_of(looks)
    asked(looks, False, 1, judged).copy_(answers[1], non_blocking=True)
    with beside.behind():
        second = sent_of(looks)
    torch.cuda.synchronize()
    for sent in (first, second):
        sent.violations()
    assert judged == [differing]


@pytest.mark.parametrize("size", [1, 3, 16])
def test_slots_of_pages_are_listed_with_the_grant_that_each_is_in(size):
    """All of some pages, and those behind rows that end at any place of a page, none of them included."""
    generations = np.arange(100, 120)
    pages, lens = np.array([7, 2, 19]), np.array([5 * size, size + size // 2, size - 1])
    slots, grants = np.full((2, 3 * size), -9)
    loops.list_slots(3, pages.ctypes.data, size, generations.ctypes.data, slots, grants)
    assert slots.tolist() == [page * size + offset for page in pages for offset in range(size)]
    assert grants.tolist() == (100 + pages).repeat(size).tolist()
    loops.list_slots(3, pages.ctypes.data, size, 0, slots, grants)
    assert not grants.any()
    slots, grants, positions, rows = listed = np.full((4, 3 * size), -9)
    ends = np.ascontiguousarray(np.stack([np.arange(3), lens, pages], 1))
    last = zip(lens, pages, strict=True)
    behind = [[page * size + offset for offset in range(length % size, size)] for length, page in last]
    found = loops.list_ends(3, ends.ctypes.data, size, generations.ctypes.data, listed)
    assert slots[:found].tolist() == [slot for own in behind for slot in own]
    assert grants[:found].tolist() == (100 + pages).repeat([*map(len, behind)]).tolist()
    assert rows[:found].tolist() == [row for row, own in enumerate(behind) for _ in own]
    assert positions[:found].tolist() == [n + i for n, own in zip(lens, behind, strict=True) for i in range(len(own))]
    assert (slots[found:] == -9).all()


@pytest.mark.parametrize("grants", [[], [-1], [7, 8, 9]], ids=["none", "one", "each"])
def test_slots_are_told_behind_those_that_a_place_has(grants):
    """With a grant each, one for all or none; how many they are together, and no answer of before."""
    live, slots, own, answers = np.full(1, -9), np.full(6, -9), np.full(6, -9), np.full(5, -9)
    at = *(part.ctypes.data for part in (live, slots, own, answers)), 4
    loops.put_slots(*at, 2, np.array([5, 3, 4]), np.array(grants, np.int64))
    assert (live.tolist(), slots.tolist(), answers.tolist()) == ([5], [-9, -9, 5, 3, 4, -9], [0, 0, 0, 0, -9])
    reported = {0: [-9] * 3, 1: grants * 3, 3: grants}[len(grants)]
    assert own.tolist() == [-9, -9, *reported, -9]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("damaged", [[], [3], [20], [9, 21], [3, 9, 20, 21]], ids=str)
def test_parts_are_looked_at_together_and_named_one_by_one(device, damaged, monkeypatch):
    """One launch over all of them, and each is told what was found of its own slots alone."""
    pool, found = sealed(device), dict[str, list[int]]()
    looks, launched = Rereads(torch.device(device), at_once=False), []
    run = looks._replays.run
    monkeypatch.setattr(looks._replays, "run", lambda *reported: (launched.append(reported), run(*reported)))
    for slot in damaged:
        rows = pool.rows.gather_layer(1, torch.tensor([slot], device=device))
        pool.rows.scatter_layer(1, torch.tensor([slot], device=device), torch.full_like(rows, -1))
    written = on_host(pool.expected[:, REQUEST_GENERATION] >> 32)
    parts = {"null": ([4, 3, 9], None), "tail": ([30, 20], [20]), "granted": ([21, 22, 8, 7], [])}

    def reported(name: str, slots: np.ndarray) -> Callable[[torch.Tensor], list[Violation]]:
        return lambda bits: found.update({name: slots[bits.any(1).numpy()].tolist()}) or []

    for _ in range(2 * NUM_MESSAGES):
        asked = []
        for name, (own, wrote) in parts.items():
            slots = np.array(own)
            grants = None if wrote is None else written[slots] + 1 - np.isin(slots, wrote)
            asked.append((slots, grants, reported(name, slots)))
        looks.check_finite(pool, asked)
        sent = sent_of(looks)
        if device == "cuda":
            torch.cuda.synchronize()
        found.clear()
        sent.violations()
        asks = {name: sorted(set(own) & set(damaged) - set(wrote or [])) for name, (own, wrote) in parts.items()}
        assert {name: sorted(slots) for name, slots in found.items()} == {n: own for n, own in asks.items() if own}
    assert [place for place, _ in launched[NUM_MESSAGES:]] == [place for place, _ in launched[:NUM_MESSAGES]]


@pytest.mark.parametrize("where", [None, 0, 4, 5, 9])
def test_answers_are_quiet_where_every_number_is_zero(where):
    """Any number of any part says that something fired; parts of no numbers say nothing."""
    numbers = np.zeros(10, np.int64)
    if where is not None:
        numbers[where] = -1
    parts = np.array([[numbers.ctypes.data, 5], [0, 0], [numbers[5:].ctypes.data, 5]])
    assert loops.are_zero(3, parts.ctypes.data) == (where is None)
    assert loops.are_zero(0, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_preparing_asks_nothing_and_changes_nothing(device):
    """No byte, no answer, and nothing that waits for a step; then looks are as they would have been."""
    pool, judged = sealed(device), list[int]()
    looks = Rereads(torch.device(device), at_once=False)
    tensors = *pool.view.k, *pool.view.v, pool.content_a
    before = [own.clone() for own in tensors]
    looks.prepare(pool)
    assert looks.send() is None
    assert all(map(torch.equal, before, tensors))
    looks.reread(pool, np.arange(3), lambda slots: judge(1, judged))
    right = looks.send()
    pool.view.k[0][2] += 1
    looks.reread(pool, np.arange(3), lambda slots: judge(int(slots[-1]), judged))
    wrong = looks.send()
    if device == "cuda":
        torch.cuda.synchronize()
    assert (right.violations(), judged) == ([], [])
    assert (wrong.violations(), judged) == ([], [2])
