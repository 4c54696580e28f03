"""Draft steps of SGLang, one by one and in one graph of its own: positions and slots are those of each branch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, PoolView
from kvcanary.adapters.observed import moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.sglang.compatibility import DRAFT_GRAPH
from kvcanary.adapters.sglang.draft import WITHIN, WatchedByPosition, WatchedDraft
from kvcanary.adapters.sglang.scheduler import watch_of
from kvcanary.adapters.sglang.step_trace import TRACE, traced_graphs


class DraftGraph:
    """SGLang's graph of draft steps: it reads its own buffers, padded to a bucket, and `harm` is what goes wrong."""

    def __init__(self, topk: int, steps: int, bucket: int = 4) -> None:
        self.topk, self.steps = topk, steps
        places, positions = bucket * topk * steps, bucket * topk
        self.buffers = SimpleNamespace(
            out_cache_loc=torch.zeros(places).long(), positions=torch.zeros(positions).long()
        )
        self.moves_on = steps - 1  # times

    def execute(self, batch: Any) -> str:
        count = batch.batch_size * self.topk
        self.buffers.out_cache_loc[: count * self.steps] = batch.out_cache_loc
        self.buffers.positions[:count] = batch.positions
        self.buffers.positions += self.moves_on - (self.steps - 1)
        return "drafts"


TOPK, STEPS, LENGTHS = 2, 3, [5, 2]


@pytest.fixture
def draft() -> Any:
    """A watched draft over a pool of single entries, whose second row begins in the table's second line."""
    canary = PagedCanary(CanaryConfig(mode="log", seed=3), 4, 2, 16, "cpu")
    group = canary.memory.add_group(0, 1, 64, null_slots=1)
    view = PoolView("draft", [torch.zeros(64, 1, 8)], [torch.zeros(64, 1, 8)], page_size=1)
    canary.memory.add_layers(group, view, ["l0"])
    own = WatchedDraft.__new__(WatchedDraft)
    own.canary, own._topk, own._steps, own._page, own._flush = canary, TOPK, STEPS, 1, lambda: None
    own.rows = SimpleNamespace(req_to_token=torch.arange(1, 61).view(3, 20))
    own._round, own._step = None, 0
    return own


def round_of(draft: Any) -> Any:
    """A round of two rows as SGLang plans it: slots [rows, topk, steps], positions of the first step."""
    lengths = torch.tensor(LENGTHS)
    rows = torch.tensor([2, 1])
    first = lengths[:, None, None] + torch.arange(TOPK)[:, None] * STEPS + torch.arange(STEPS)
    slots = draft.rows.req_to_token[rows].gather(1, first.flatten(1)).flatten()
    return SimpleNamespace(
        batch_size=2, seq_lens=lengths, req_pool_indices=rows, rids=["a", "b"], out_cache_loc=slots,
        positions=lengths.repeat_interleave(TOPK),
    )  # fmt: skip


def told(draft: Any) -> list[tuple[Any, ...]]:
    """What the events of a round say: code, request, draft step, position, what was expected and found."""
    return [
        (one.code, one.request_id, one.site, one.position, one.expected, one.found)
        for event in draft.canary.events
        for one in event.violations(1)
    ]


def test_a_graph_of_sound_draft_steps_is_silent(draft) -> None:
    """Padded or not, its slots and positions are those of the rows; what it gives is what SGLang gets."""
    graph, batch = DraftGraph(TOPK, STEPS), round_of(draft)
    assert draft.replayed(graph, graph.execute, batch) == "drafts"
    assert told(draft) == []
    assert int(draft.canary.memory.total) == 0
    assert draft.canary.coverage.unchecked == {WITHIN: STEPS - 1}


@pytest.mark.parametrize("moves_on", [STEPS, STEPS - 2])
def test_positions_that_a_graph_moves_wrongly_are_found(draft, moves_on: int) -> None:
    """Each step adds one, and the last takes all of it back: what is left over is W5 of every row."""
    graph = DraftGraph(TOPK, STEPS)
    graph.moves_on = moves_on
    draft.replayed(graph, graph.execute, round_of(draft))
    off = moves_on - (STEPS - 1)
    assert told(draft) == [
        ("W5", name, ("draft", 0), length, {"position": length}, {"position": length + off})
        for name, length in zip("ab", LENGTHS, strict=True)
    ]


def test_a_slot_that_a_graph_stores_to_is_named_with_its_step_and_branch(draft) -> None:
    """The second draft step of the second branch of the second row goes to another slot."""
    graph, batch = DraftGraph(TOPK, STEPS), round_of(draft)
    place = (1 * TOPK + 1) * STEPS + 1
    right = int(batch.out_cache_loc[place])
    batch.out_cache_loc[place] = 9
    draft.replayed(graph, graph.execute, batch)
    assert told(draft) == [("W5", "b", ("draft", 1), LENGTHS[1] + 1, {"slot": right}, {"slot": 9})]
    [event] = [event for event in draft.canary.events if event.wrong.any()]
    assert "branch 1 of its row" in next(event.violations(1)).notes


def test_the_slots_of_a_step_that_stores_nothing_are_not_asked(draft) -> None:
    """SGLang plans slots for as many steps as it drafts tokens, and runs one forward less."""
    graph, batch = DraftGraph(TOPK, STEPS), round_of(draft)
    batch.out_cache_loc.view(2, TOPK, STEPS)[..., -1] = 0
    draft.replayed(graph, graph.execute, batch)
    assert told(draft) == []


def test_draft_steps_one_by_one_are_judged_alike(draft) -> None:
    """Where SGLang has no graph its runner runs each step; the second of them stores where the first should."""
    batch = round_of(draft)
    slots = batch.out_cache_loc.view(2, TOPK, STEPS)
    batch.out_cache_loc, batch.positions = slots[..., 0].flatten(), batch.positions.clone()
    draft._draft_step(batch)
    assert told(draft) == []
    batch.positions += 1
    draft._draft_step(batch)
    first = slots[:, 0]
    assert told(draft) == [
        ("W5", name, ("draft", 1), length + 1, {"slot": int(own[1])}, {"slot": int(own[0])})
        for name, length, own in zip("ab", LENGTHS, first, strict=True)
    ]


class EAGLEDraftCudaGraphRunner:
    """SGLang's graph of draft steps as it comes into being: what its steps ran while it was captured, it runs again."""

    def __init__(self, runner: Any) -> None:
        self.model_runner, self.device = runner, "cpu"
        self.speculative_num_steps, self.max_num_token = STEPS, 4 * TOPK
        self.harm: Callable[[int, Any], None] = lambda step, fed: None
        for size in (4, 2):
            self.capture_one_shape(size)

    def capture_one_shape(self, size: int) -> None:
        self.captured = self.model_runner.forward
        zeros = torch.zeros(size * TOPK).long()
        for _warm_up in range(3):
            for _step in range(STEPS - 1):
                self.captured(SimpleNamespace(positions=zeros, out_cache_loc=zeros))

    def execute(self, batch: Any) -> str:
        """Padded to four rows, as what lies behind the batch's own is anything."""
        padding = torch.full(((4 - batch.batch_size) * TOPK,), 63)
        slots = batch.out_cache_loc.view(batch.batch_size, TOPK, STEPS)
        for step in range(STEPS - 1):
            own = batch.positions + step, slots[..., step].flatten()
            positions, places = (torch.cat([fed, padding]) for fed in own)
            fed = SimpleNamespace(positions=positions, out_cache_loc=places)
            self.harm(step, fed)
            self.captured(fed)
        return "drafts"


DRAFTING = SimpleNamespace(speculative_algorithm="EAGLE")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Such a graph, captured while the plug-in stands around the start of a server that drafts."""
    module = ModuleType(DRAFT_GRAPH.name.partition(":")[0])
    module.EAGLEDraftCudaGraphRunner = EAGLEDraftCudaGraphRunner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with traced_graphs(DRAFTING):
        return EAGLEDraftCudaGraphRunner(SimpleNamespace(forward=lambda batch: "logits"))


def test_every_step_in_a_graph_is_judged_where_the_plug_in_was_there_first(draft, traced) -> None:
    batch = round_of(draft)
    assert draft.replayed(traced, traced.execute, batch) == "drafts"
    assert told(draft) == []
    assert draft.canary.coverage.unchecked == {}


@pytest.mark.parametrize("step", range(STEPS - 1))
def test_a_step_in_a_graph_that_is_off_and_put_right_again_is_found(draft, traced, step: int) -> None:
    """Nothing is left over behind the graph: only its trace has what the step was fed."""

    def harm(now: int, fed: Any) -> None:
        if now == step:
            fed.positions[TOPK:] -= 1  # of the second row
            fed.out_cache_loc[0] = 11

    traced.harm = harm
    batch = round_of(draft)
    draft.replayed(traced, traced.execute, batch)
    first, second = LENGTHS
    right = int(batch.out_cache_loc.view(2, TOPK, STEPS)[0, 0, step])
    assert sorted(told(draft)) == [
        ("W5", "a", ("draft", step), first + step, {"slot": right}, {"slot": 11}),
        ("W5", "b", ("draft", step), second + step, {"position": second + step}, {"position": second + step - 1}),
    ]


def test_the_runner_and_the_class_are_as_before_when_the_server_is_built(traced) -> None:
    assert hasattr(traced, TRACE)
    assert traced.model_runner.forward(None) == "logits"
    assert not hasattr(EAGLEDraftCudaGraphRunner.capture_one_shape, "kvcanary_replaces")
    assert not hasattr(EAGLEDraftCudaGraphRunner(traced.model_runner), TRACE)


@pytest.mark.parametrize("lacks", ["drafts", "names"])
def test_without_drafts_or_without_the_names_nothing_is_captured(monkeypatch, lacks: str) -> None:
    if lacks == "names":
        monkeypatch.setitem(sys.modules, DRAFT_GRAPH.name.partition(":")[0], ModuleType("empty"))
    with traced_graphs(DRAFTING if lacks == "names" else SimpleNamespace()):
        assert not hasattr(EAGLEDraftCudaGraphRunner(SimpleNamespace(forward=lambda batch: 0)), TRACE)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moves_and_copies_are_judged_without_a_wait(device: str, kind: torch.dtype) -> None:
    """SGLang moves accepted nodes in every step, by either kind of numbers: a wait would end its overlap schedule."""
    canary = PagedCanary(CanaryConfig(mode="log", seed=3), 4, 2, 16, device)
    group = canary.memory.add_group(0, 1, 64, null_slots=1)
    keys, values = ([torch.randn(64, 1, 8, device=device)] for _ in range(2))
    canary.memory.add_layers(group, PoolView("draft", keys, values, page_size=1), ["l0"])
    src, dst = (torch.tensor(own, device=device, dtype=kind) for own in ([3, 4], [7, 8]))
    judged = torch.tensor([True, False], device=device)
    for is_compiled in (False, True):
        torch.cuda.set_sync_debug_mode("error") if is_compiled and device == "cuda" else None
        try:
            moves.moved(canary, group, src, dst, lambda: keys[0].index_copy_(0, dst.long(), keys[0][src]))
            moves.expect_equal(canary, group, dst, src, judged, "copies")
        finally:
            torch.cuda.set_sync_debug_mode("default") if device == "cuda" else None
    assert int(canary.memory.total) == 2 * (2 + 1), "the values stayed where they were"
    assert [event.mismatch.tolist() for event in canary.events] == 2 * [[[1, 0], [1, 0]], [[1, 0], [0, 0]]]


@pytest.mark.parametrize(
    ("kind", "cache", "watch"),
    [
        ("EAGLEWorkerV2", SimpleNamespace(is_eagle=True), WatchedDraft),
        ("EAGLEWorkerV2", SimpleNamespace(tree_core=SimpleNamespace(is_eagle=True)), WatchedDraft),
        ("EAGLEWorkerV2", SimpleNamespace(tree_core=SimpleNamespace(is_eagle=False)), WatchedByPosition),
        ("EAGLEWorkerV2", SimpleNamespace(), WatchedDraft),
        ("StandaloneWorkerV2", SimpleNamespace(is_eagle=False), WatchedByPosition),
        ("NGRAMWorker", SimpleNamespace(is_eagle=False), None),
    ],
)
def test_names_of_a_drafts_entries_are_those_of_the_prefix_cache(kind: str, cache: Any, watch: Any) -> None:
    """Of pairs of tokens where that has pairs as keys: EAGLE's has, but not beside recurrent states."""
    assert watch_of(kind, cache) is watch
