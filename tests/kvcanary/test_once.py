"""Forwards that come once take buffers of their size, and the next one finds nothing of the last in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvcanary.captured.one_shot
from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan
from kvcanary.captured.arena import ALIGNMENT, Arena
from kvcanary.captured.one_shot import OneShotSubstep, Size
from kvcanary.records.state import CanaryState
from kvcanary_kernels.record.layout import CHAIN

PAGE_SIZE, NUM_PAGES = 4, 96


class Prefills:
    """One pool of a device that judges itself; requests own pages one behind the other."""

    def __init__(self, device: str) -> None:
        self.kv = torch.zeros(2, NUM_PAGES * PAGE_SIZE, 2, 1, 4, device=device)
        k, v = self.kv.unbind(2)
        view = PoolView("target", list(k), list(v), PAGE_SIZE, null_slots=PAGE_SIZE)
        self.canary = CanaryManager(CanaryConfig(mode="log", seed=7, content="write"), [view])
        self.canary.arm()
        self.firsts: dict[str, int] = {}  # by request its first slot, which names its tokens too
        self.step, self._next_page = 0, 1

    def admit(self, name: str, length: int) -> None:
        pages = list(range(self._next_page, self._next_page + -(-length // PAGE_SIZE)))
        self.firsts[name], self._next_page = self._next_page * PAGE_SIZE, pages[-1] + 1
        self.canary.admit(name, [self.firsts[name] + place for place in range(length)])
        self.canary.on_alloc(name, pages)

    def run(
        self, rows: Sequence[tuple[str, int, int]], change: Callable[[ReadPlan], ReadPlan] = lambda plan: plan
    ) -> Tensor:
        """A step in which entries [start, end) of these requests are computed, and not judged; what the body reads."""
        self.step += 1
        self.canary.begin_step(self.step)
        for name, _, end in rows:
            if name not in self.firsts:
                self.admit(name, end)
        reads = [torch.arange(end) + self.firsts[name] for name, _, end in rows]
        own = [slots[start:] for slots, (_, start, _) in zip(reads, rows, strict=True)]
        positions = [torch.arange(start, end) for _, start, end in rows]
        device = self.kv.device
        bounds = torch.tensor([0, *(len(part) for part in reads)]).cumsum(0)
        starts = torch.tensor([start for _, start, _ in rows])
        counts = torch.tensor([end - start for _, start, end in rows])
        names = tuple(name for name, _, _ in rows)
        read = ReadPlan(bounds.to(device), torch.cat(reads).to(device), names, 1, starts.to(device), counts)
        write = WritePlan(*(torch.cat(parts).to(device) for parts in (own, own, positions)))
        substep = self.canary.forward("prefill", 0, "target", puts=True)
        indices, slots = substep.open(change(read), write)
        for layer in range(2):
            k, v = torch.randn(2, len(slots), 1, 4, device=device)
            assert substep.put(layer, slots, k, v)
        substep.close()
        for name, _, end in rows:
            self.canary.commit(name, end)
        return indices

    def codes(self) -> list[tuple[str, int]]:
        """Of all that has fired up to now: code and slot."""
        self.canary.collect(self.canary.end_step())
        return [(finding.code, finding.slot) for finding in self.canary.findings]

    @property
    def idle(self) -> list[OneShotSubstep]:
        return [substep for kind in self.canary.session.checks.captured._singles._idle.values() for substep in kind]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def prefills(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefills]:
    monkeypatch.setattr(CanaryState, "judges_on_device", True)
    with torch.inference_mode():
        yield Prefills(request.param)


def test_the_next_forward_of_a_size_has_the_same_buffers(prefills):
    """When the host has heard of the one before; one that is on its way keeps its own."""
    prefills.run([("a", 0, 30)])
    prefills.run([("b", 0, 20)])
    assert prefills.idle == []
    assert prefills.codes() == []
    before = set(map(id, prefills.idle))
    assert len(before) == 2
    for name in "cdefg":
        prefills.run([(name, 0, 25)])
        assert prefills.codes() == []
    assert set(map(id, prefills.idle)) == before


def test_nothing_is_left_of_a_longer_forward(prefills):
    """Fewer rows, entries and indices than the last one had: what lies behind them is padding, and nobody's."""
    prefills.run([("a", 0, 20), ("b", 0, 20), ("c", 0, 18)])
    assert prefills.codes() == []
    [substep] = prefills.idle
    for rows in ([("d", 0, 21), ("e", 0, 5)], [("f", 0, 9), ("g", 0, 9), ("h", 0, 30)], [("i", 0, 3), ("j", 0, 1)]):
        prefills.run(rows)
        assert prefills.codes() == []
    assert prefills.idle == [substep]
    certificate = prefills.canary.certificate()
    assert certificate["slots_sealed"] == certificate["slots_checked"] == 58 + 26 + 48 + 4


def test_what_lies_behind_a_forward_is_padding(prefills):
    """Rows that never fall and name nothing, entries of the null slot, indices that are no slots."""
    prefills.run([("a", 0, 20), ("b", 0, 20), ("c", 0, 18)])
    assert prefills.codes() == []
    prefills.run([("d", 0, 21), ("e", 0, 5)])
    assert prefills.codes() == []
    [substep] = prefills.idle
    plan = substep.forward
    assert substep.planned == [2, 26, 26]
    assert plan.bounds.tolist() == [0, 21] + [26] * 15
    assert plan.row_starts.tolist() == [0, 21] + [26] * 14
    assert plan.row_ends.tolist() == [21] + [26] * 15
    assert plan.slots[26:].tolist() == [0] * 38
    assert plan.indices[26:].tolist() == [-1] * 38


def test_a_row_that_ends_behind_the_indices_reads_nothing_of_the_last_forward(prefills):
    """The array is as long as it is: what a longer one left in the buffer is no slot."""
    prefills.run([("a", 0, 40)])
    assert prefills.codes() == []

    def beyond(plan: ReadPlan) -> ReadPlan:
        return replace(plan, indptr=plan.indptr + torch.tensor([0, 7]).to(plan.indptr))

    prefills.run([("b", 0, 10)], beyond)
    found = prefills.codes()
    assert {"W5", "H1"} <= {code for code, _ in found}
    assert all(slot == -1 or slot >= prefills.firsts["b"] for _, slot in found)


def test_what_fired_is_not_told_again(prefills):
    """Counts and first findings are those of one forward; the next one of the same buffers is clean."""
    prefills.run([("a", 0, 12)])
    assert prefills.codes() == []
    damaged = prefills.firsts["a"] + 5
    prefills.canary.session.state.by_name["target"].records[damaged, CHAIN] ^= 1 << 40
    prefills.run([("a", 12, 12), ("b", 0, 9)])
    assert prefills.codes() == [("R3", damaged)]
    num_fired = sum(prefills.canary.certificate()["fired"].values())
    prefills.run([("c", 0, 12), ("d", 0, 9)])
    assert prefills.codes() == [("R3", damaged)]
    assert sum(prefills.canary.certificate()["fired"].values()) == num_fired


def test_an_index_outside_the_pool_is_the_null_slot_to_the_body(prefills):
    """As long as the plan's array, whatever size the buffers have."""

    def outside(plan: ReadPlan) -> ReadPlan:
        plan.indices[3], plan.indices[4] = 1 << 40, -2
        return plan

    prefills.run([("a", 0, 30)])
    indices = prefills.run([("b", 0, 11)], outside)
    first = prefills.firsts["b"]
    assert indices.tolist() == [first, first + 1, first + 2, 0, 0, *range(first + 5, first + 11)]
    assert "R1" in {code for code, _ in prefills.codes()}


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ((1, 1, 1), (1, 64, 64)),
        ((2, 64, 65), (16, 64, 128)),
        ((16, 65, 4032), (16, 80, 4096)),
        ((17, 4032, 4096), (32, 4096, 4096)),
        ((64, 4097, 131072), (64, 4608, 131072)),
    ],
)
def test_sizes_are_few(numbers, size):
    """An eighth more at most of what is written, of what is read twice as much, all in numbers that kernels know."""
    assert Size.of(*numbers) == size


def test_idle_buffers_are_bounded(prefills, monkeypatch):
    """The kind that was idle longest goes first."""
    monkeypatch.setattr(kvcanary.captured.one_shot, "MOST_IDLE_BYTES", 2 * 8 * Size.of(1, 1, 1).num_zeros)
    for number, length in enumerate((10, 70, 20, 30)):
        prefills.run([(f"r{number}", 0, length)])
        assert prefills.codes() == []
    assert [substep.size.entries for substep in prefills.idle] == [64]
    assert prefills.canary.session.checks.captured._singles._idle_bytes == sum(
        substep.num_bytes for substep in prefills.idle
    )


def test_an_arena_is_as_it_was_when_it_is_rewound() -> None:
    """Numbers that were asked for come back, the host's own are zeros again; what is no number stays."""
    arena = Arena(torch.device("cpu"), 3 * ALIGNMENT, 4 * ALIGNMENT)
    zeros, reported = arena(5), arena(torch.tensor([7, 8]))
    there, here = arena.numbers(3)
    here[:] = 4
    reported += 1
    zeros += 2
    arena.send()
    assert (there.tolist(), reported.tolist(), zeros.tolist()) == ([4] * 3, [8, 9], [2] * 5)
    arena.rewind()
    arena.send()
    assert (there.tolist(), reported.tolist(), zeros.tolist()) == ([0] * 3, [7, 8], [2] * 5)


def test_what_does_not_fit_into_an_arena_lies_elsewhere() -> None:
    """Zeros and numbers alike."""
    arena = Arena(torch.device("cpu"), ALIGNMENT, ALIGNMENT)
    values: list[Tensor] = [arena(ALIGNMENT), arena(3), arena(torch.arange(ALIGNMENT)), arena(torch.tensor([4, 5]))]
    arena.rewind()
    assert [value.tolist() for value in values] == [[0] * ALIGNMENT, [0] * 3, list(range(ALIGNMENT)), [4, 5]]
