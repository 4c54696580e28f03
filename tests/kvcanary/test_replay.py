"""Replay: one captured forward, run with every batch that its bucket holds, on the CPU and as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from kvcanary import PlanError
from kvcanary.captured.buffers import StaticBuffers
from kvcanary.captured.readback import Amounts, CoverageGap
from spec_engine.graphs.program import Recorder
from static_replay import StaticReplay

BUCKET, POISON = 5, -77
PROMPTS = {uid: [4 * uid, 4 * uid + 1] for uid in range(1, BUCKET + 1)}  # request uid owns page uid


@pytest.fixture
def rig(make_static):
    made = make_static()
    for uid in PROMPTS:
        made.grant(uid, uid)
    return made


def prefill(rig, static_row) -> None:
    """Two tokens of every request."""
    prompts = [static_row(uid, slots, [uid, uid + 1]) for uid, slots in PROMPTS.items()]
    substep = rig.add("prefill", rows=BUCKET, entries=2 * BUCKET)
    assert rig.run(substep, rig.batch(prompts)).violations == []


def rows_of(static_row, live: int) -> list:
    """The third token of the first requests."""
    return [static_row(uid, [*slots, slots[-1] + 1], [9]) for uid, slots in list(PROMPTS.items())[:live]]


def capture(rig, replay, rows: int = BUCKET, kind: str = "decode"):
    """A body of one forward with room for padding."""
    substep = rig.add(kind, rows=rows, entries=rows + 1, indices=3 * rows + 4)
    replay.capture([substep], lambda: rig.body(substep))
    return substep


@pytest.mark.parametrize("live", range(BUCKET + 1))
def test_a_replay_verifies_exactly_the_live_rows(rig, static_row, live):
    """Codes of live rows are written, poison elsewhere stays; counters are what was planned, to the entry."""
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry)
    substep = capture(rig, replay)
    rig.registry.arm()
    replay.replay([rig.batch(rows_of(static_row, BUCKET))])  # a fuller batch leaves its rests
    substep.work.codes.fill_(POISON)
    kv, records = rig.kv.clone(), rig.pool.records.clone()
    rig.registry.begin_step(2)
    assert replay.replay([rig.batch(rows_of(static_row, live))]) == BUCKET
    codes = substep.work.codes.tolist()
    assert codes == [0] * (3 * live) + [POISON] * (len(codes) - 3 * live)
    readback = rig.read_back()
    assert (readback.violations, readback.gaps) == ([], [])
    runs = BUCKET + live, BUCKET + live, 3 * (BUCKET + live)
    assert tuple(rig.registry._headers[substep.number, -3:].tolist()) == runs
    written = (records != rig.pool.records).any(1).nonzero().flatten().tolist()
    assert written == [4 * uid + 2 for uid in range(1, live + 1)]
    assert torch.equal(kv, rig.kv)


def test_replay_takes_the_smallest_bucket_that_fits(rig, static_row):
    """Buckets of several sizes, captured in any order."""
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry)
    for rows in (4, 1, 2):
        capture(rig, replay, rows)
    for live, bucket in ((1, 1), (2, 2), (3, 4), (4, 4)):
        assert replay.replay([rig.batch(rows_of(static_row, live))]) == bucket
    with pytest.raises(PlanError) as caught:
        replay.replay([rig.batch(rows_of(static_row, 5))])
    words = "batches must fit a captured bucket, got 5 rows for 1, 2, 4: capture a larger one"
    assert str(caught.value) == words


def test_damage_between_replays_is_found(rig, static_row):
    """The replay reads records as they are, and says where."""
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry)
    capture(rig, replay)
    rig.registry.arm()
    rig.registry.begin_step(2)
    replay.replay([rig.batch(rows_of(static_row, 3))])
    assert rig.read_back().violations == []
    rig.pool.records[9, 0] ^= 1 << 40
    replay.replay([rig.batch(rows_of(static_row, 3))])
    violations = rig.read_back().violations
    assert ("R3", 1, 1, 9) in [
        (violation.code, violation.row, violation.place, violation.slot) for violation in violations
    ]
    assert {violation.row for violation in violations} == {1}


def test_a_body_without_hooks_is_a_gap(rig, static_row):
    """H1: a counter that stood still where rows were planned, told once."""
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry)
    substep = rig.add("decode", rows=BUCKET)
    replay.capture([substep], lambda: None)
    rig.registry.arm()
    replay.replay([rig.batch(rows_of(static_row, 2))])
    gap = CoverageGap("target", ("decode", 0), BUCKET, Amounts(2, 2, 6), Amounts(0, 0, 0))
    assert rig.read_back().gaps == [gap]
    assert rig.read_back().gaps == []


def test_a_body_that_runs_too_often_is_a_gap(rig, static_row):
    """H1 too: more entries ran than the host planned, though no launch is missing."""
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry)
    substep = rig.add("decode", rows=BUCKET)
    replay.capture([substep], lambda: [rig.body(substep) for _ in range(2)])
    rig.registry.arm()
    replay.replay([rig.batch(rows_of(static_row, 2))])
    assert rig.read_back().gaps == [CoverageGap("target", ("decode", 0), BUCKET, Amounts(2, 2, 6), Amounts(4, 4, 12))]


def test_a_live_count_of_another_batch_is_a_gap(rig, static_row):
    """H1 counts entries: the hooks ran, but over fewer rows than were planned."""
    prefill(rig, static_row)
    substep = rig.add("decode", rows=BUCKET)
    rig.registry.load(substep, rig.batch(rows_of(static_row, 3)))
    substep.buffers.num_live.fill_(2)
    rig.body(substep)
    (gap,) = rig.read_back().gaps
    assert (gap.planned[:2], gap.run[:2]) == ((3, 3), (2, 2))


def test_two_forwards_in_one_body(rig, static_row):
    """A captured step holds several substeps, each with its own batch and counters."""
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry)
    first, second = (rig.add("draft", index, rows=BUCKET, ancestors=index) for index in range(2))

    def body() -> None:
        rig.body(first)
        rig.body(second)

    replay.capture([first, second], body)
    rig.registry.arm()
    deeper = [static_row(uid, [4 * uid, 4 * uid + 1, 4 * uid + 2, 4 * uid + 3], [8], None, 2) for uid in (1, 2)]
    replay.replay([rig.batch(rows_of(static_row, 2)), rig.batch(deeper)])
    readback = rig.read_back()
    assert (readback.violations, readback.gaps) == ([], [])
    assert [rig.registry._headers[substep.number, -3].item() for substep in (first, second)] == [2, 2]


def test_capture_touches_nothing_live(rig, static_row):
    """Whatever the buffers hold, the body is recorded over padding."""
    substep = rig.add("prefill", rows=BUCKET, entries=2 * BUCKET)
    substep.buffers.fill(rig.batch([static_row(uid, slots, [1, 2]) for uid, slots in PROMPTS.items()]))
    records = rig.pool.records.clone()
    StaticReplay(rig.registry).capture([substep], lambda: rig.body(substep))
    assert torch.equal(records, rig.pool.records)


def test_capture_needs_buffers_of_ours(rig):
    """A batch can only be copied into StaticBuffers."""
    replay = StaticReplay(rig.registry)
    with pytest.raises(PlanError) as caught:
        replay.capture([], lambda: None)
    assert str(caught.value) == "capture() needs at least one substep: a batch is copied into its buffers"
    plan = StaticBuffers.allocate(2, 2, 2).plan()
    with pytest.raises(PlanError) as caught:
        replay.capture([rig.registry.add("target", "decode", 0, plan)], lambda: None)
    words = "capture() needs substeps over StaticBuffers, got decode of the target pool, bucket of 2 rows"
    assert str(caught.value) == f"{words} over others' tensors"


def test_a_batch_is_refused_whole(rig, static_row):
    """Too large, or with truths where the bucket has none: the buffers stay as they were."""
    buffers = StaticBuffers.allocate(2, 2, 6)
    buffers.fill(rig.batch(rows_of(static_row, 1)))
    before = buffers.indices.clone()
    with pytest.raises(PlanError) as caught:
        buffers.fill(rig.batch(rows_of(static_row, 3)))
    words = "a batch must fit its bucket of 2 rows, 2 entries and 6 indices, got 3, 3 and 9"
    assert str(caught.value) == words
    with pytest.raises(PlanError) as caught:
        buffers.fill(rig.batch(rows_of(static_row, 2), truths=[1, 2]))
    assert str(caught.value) == "truths must be given in every batch of a bucket or in none, got a batch with truths"
    assert torch.equal(buffers.indices, before)


@pytest.mark.gpu
def test_a_cuda_graph_of_the_hooks(make_static, static_row):
    """Replays verify the live rows alone, wait for nothing, allocate nothing, and find what changed between them."""
    rig = make_static("cuda")
    for uid in PROMPTS:
        rig.grant(uid, uid)
    prefill(rig, static_row)
    replay = StaticReplay(rig.registry, Recorder(rig.pool.records.device).record)
    substep = capture(rig, replay)
    rig.registry.arm()
    for step, live in enumerate((BUCKET, 3, 1, 0, BUCKET), 2):
        batch = rig.batch(rows_of(static_row, live))
        substep.work.codes.fill_(POISON)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rig.registry.begin_step(step)
            replay.replay([batch])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() <= allocated  # less: what earlier tests left was collected
        readback = rig.read_back()
        assert (readback.violations, readback.gaps) == ([], [])
        codes = substep.work.codes.tolist()
        assert codes == [0] * (3 * live) + [POISON] * (len(codes) - 3 * live)
    rig.pool.records[9, 0] ^= 1 << 40
    rig.registry.begin_step(9)
    replay.replay([rig.batch(rows_of(static_row, 3))])
    violations = rig.read_back().violations
    assert ("R3", 1, 1, 9) in [
        (violation.code, violation.row, violation.place, violation.slot) for violation in violations
    ]
    assert {violation.row for violation in violations} == {1}
