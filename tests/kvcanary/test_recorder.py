"""The flight recorder: what it keeps, how much of it, and that it changes nothing."""

from __future__ import annotations

import os
import signal
from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig, CanaryConfigError, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.errors import DumpError
from kvcanary.pools.event_log import EventLog
from kvcanary.recorder.forward_events import KEPT_STEPS, MOVE_SITE, ForwardEvents
from kvcanary.recorder.recorder import (
    LONG,
    MOST_BYTES,
    Recorder,
)
from kvcanary.recorder.segment import (
    EVENT_BYTES,
    PARTS,
    SPARE,
    Segment,
)
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.traffic import Traffic


def toy(**settings: object) -> ToyEngine:
    return ToyEngine(CanaryConfig(**{"content": "full", "seed": 7, **settings}))


def flip(engine: ToyEngine, name: str = "only", position: int = 3) -> int:
    """Flip one bit of one V element; its slot."""
    slot = int(engine.rows[name].slots[position])
    engine.pools["target"].kv.view(torch.int32)[1, slot, 1, 0, 2] ^= 1 << 9
    return slot


def start_anew(engine: ToyEngine, most_bytes: int) -> Recorder:
    """The recorder of a step that has just been checked, with room for so much from there on."""
    recorder = engine.canary.recorder
    recorder.stop()
    recorder.most_bytes = most_bytes
    recorder.start(engine.canary.step)
    return recorder


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def test_the_ring_keeps_the_steps_it_was_asked_for():
    """At least `ring` steps are there after many more, and never twice as many."""
    engine = toy(ring=8)
    engine.start("only", 6)
    for _ in range(40):
        engine.decode()
        segments = engine.canary.recorder.segments
        kept = engine.canary.step - segments[0].checkpoint.step
        assert kept <= 16
    assert kept >= 8


def test_segments_take_turns_in_memory_that_was_found_at_the_start():
    """Each has records of its own as long as it is there; as many as there ever are at a time were touched by then."""
    engine = toy(ring=8)
    engine.start("only", 6)
    first, seen = {room.ctypes.data for room in engine.canary.recorder._rooms}, set()
    for _ in range(40):
        engine.decode()
        segments = engine.canary.recorder.segments
        own = [segment.checkpoint.records.ctypes.data for segment in segments]
        assert len({*own}) == len(own)
        begun = segments[-1].checkpoint
        if begun.step == engine.canary.step:
            assert np.array_equal(
                begun.records, engine.canary.session.checks.record_store.memory[:, :4].view(np.uint64)
            )
        seen |= {*own}
    assert len(seen) == PARTS + 1
    assert first < seen


def test_the_ring_keeps_to_its_bytes():
    """With fewer bytes than its steps take, the oldest go first."""
    engine = toy(ring=512)
    recorder = start_anew(engine, most_bytes=200_000)
    engine.start("only", 6)
    for _ in range(200):
        engine.decode()
        sizes = [segment.num_bytes for segment in recorder.segments]
        sizes += [room.nbytes for room in recorder._rooms]
        assert sum(sizes) < 200_000, sizes
    assert recorder.segments[0].checkpoint.step > 0
    assert MOST_BYTES == 64 << 20


@pytest.mark.parametrize(("ring", "most_bytes"), [(8, MOST_BYTES), (7, MOST_BYTES), (512, 260_000), (24, 160_000)])
def test_nothing_is_due_behind_a_step(ring: int, most_bytes: int):
    """Whatever ends a segment, its steps or its bytes: behind a step another has begun, and what is over has gone."""
    engine = toy(ring=ring)
    recorder = start_anew(engine, most_bytes)
    assert not recorder.is_due(engine.canary.step)
    engine.start("only", 6)

    def is_over(segment: Segment, step: int) -> bool:
        own, room = segment.num_bytes - segment.start_bytes, most_bytes - most_bytes // SPARE
        is_large = own > room // SPARE and own > room // (PARTS + 1) - segment.start_bytes
        return PARTS * (step - segment.checkpoint.step) >= ring or is_large

    for _ in range(60):
        engine.decode()
        engine.canary.collect(engine.canary.end_step())  # nothing more was told since
        segments, step = list(recorder.segments), engine.canary.step
        assert all(is_over(old, new.checkpoint.step) for old, new in pairwise(segments))
        assert not is_over(segments[-1], step)
        assert recorder.num_bytes <= most_bytes - most_bytes // SPARE or not (recorder._rooms or len(segments) > 1)
        assert not recorder.is_due(step)


def test_damage_of_an_older_segment_counts_at_once(monkeypatch: pytest.MonkeyPatch):
    """What a check finds damaged is part of the launch that read it: that segment grows, and there is no room for it.

    Behind the step the oldest one goes, though nothing more was told of the newest than in other steps.
    """
    engine = toy(ring=8, mode="log")
    engine.start("only", 6)
    recorder = engine.canary.recorder
    while len(recorder.segments) < 3 or recorder.segments[-1].checkpoint.step == engine.canary.step:
        engine.decode()
    oldest, second, _ = recorder.segments
    monkeypatch.setattr("kvcanary.recorder.segment.DAMAGE_BYTES", MOST_BYTES)
    monkeypatch.setattr(recorder.forwards, "event_of", lambda *site: (oldest, 0))
    flip(engine)
    engine.decode()
    assert oldest.damage
    assert recorder.segments[0] is second


def test_a_ring_of_no_steps_records_nothing():
    """`ring=0` keeps no event, and a dump says why there is none."""
    engine = toy(ring=0)
    engine.start("only", 6)
    assert not engine.canary.recorder.segments
    with pytest.raises(DumpError, match="give ring some steps"):
        engine.canary.dump("nowhere.kvdump")


def test_a_ring_of_no_steps_cannot_be_dumped():
    """A folder for dumps and no steps to dump contradict each other."""
    with pytest.raises(CanaryConfigError, match="a ring of 0 steps has nothing to dump"):
        CanaryConfig(ring=0, dump_dir="dumps")
    with pytest.raises(CanaryConfigError, match="ring must be a number of steps"):
        CanaryConfig(ring=-1)


def test_rows_that_follow_from_grants_are_not_kept():
    """A right row is not in the recording; one that names another slot is, whole."""
    engine = toy(ring=64, mode="log")
    engine.start("only", 20)
    engine.decode()
    forwards = [event[1] for event in engine.canary.recorder.segments[-1].events if event[0] == "forward"]
    assert not any(forward.wholes for forward in forwards)
    assert sum(len(forward.tails) for forward in forwards) < 60
    row = engine.rows["only"]
    row.slots[[4, 9]] = row.slots[[9, 4]]
    engine.decode()
    forwards = [event[1] for event in engine.canary.recorder.segments[-1].events if event[0] == "forward"]
    whole = [forward.wholes[0] for forward in forwards if forward.wholes]
    assert whole
    assert np.array_equal(whole[0][:10], row.slots[:10])


def test_tickets_are_kept_as_they_were_said(tmp_path: Path):
    """Whoever fills the list or mapping anew afterwards changes no dump; few and many, with generations and without."""
    engine = toy()
    engine.start("only", 6)
    async_tracker, many = engine.canary.async_tracker, [f"buffer {number}" for number in range(LONG)]
    async_tracker.renew("staging", 3)
    page = engine.rows["only"].pages[0]
    named, planned, long = [page, "staging"], {"staging": 3, page: None}, list(many)
    async_tracker.issue("save", "copies", reads=named)
    async_tracker.use("send", "copies", planned, requests=["only"])
    async_tracker.use("many", "copies", long, writes=True)
    for resources in (named, planned, long):
        resources.clear()
    dump = read_dump(engine.canary.dump(tmp_path / "told"))
    reported = [event for event in dump.events if event["call"] in ("ticket_issue", "ticket_use")]
    issued, used, long_one = ({key: value for key, value in event.items() if key != "n"} for event in reported)
    assert (issued["reads"].tolist(), issued["read_names"], issued.get("read_grants")) == ([page], ["staging"], None)
    assert (issued["writes"].tolist(), issued["write_names"], issued["sequence"]) == ([], [], 1)
    assert (used["pages"].tolist(), used["names"], used["grants"].tolist()) == ([page], ["staging"], [-1, 3])
    assert (used["requests"], used["writes"]) == (["only"], False)
    assert (long_one["names"], long_one["writes"], long_one.get("grants")) == (many, True, None)


def test_what_is_told_in_one_call_is_two_in_a_dump(tmp_path: Path):
    """A buffer that is taken is renewed and filled; a stream that follows another waits for a mark on it."""
    engine = toy()
    engine.start("only", 6)
    async_tracker = engine.canary.async_tracker
    async_tracker.follow("copies", "main")
    async_tracker.take("fill", "host", "staging", 4)
    reported = [event for event in read_dump(engine.canary.dump(tmp_path / "told")).events if "ticket" in event["call"]]
    mark, waits, renewed, filled = reported
    assert (mark["call"], mark["what"], mark["stream"], mark["sequence"]) == ("ticket_issue", "mark", "main", 1)
    assert (waits["call"], waits["stream"], waits["other"], waits["sequence"]) == ("ticket_waits", "copies", "main", 1)
    assert (renewed["call"], renewed["buffer"], renewed["generation"]) == ("ticket_renew", "staging", 4)
    assert (filled["call"], filled["what"], filled["stream"], filled["writes"]) == ("ticket_use", "fill", "host", True)
    assert (filled["names"], filled["grants"].tolist(), filled["requests"]) == (["staging"], [4], [])
    assert [event["n"] for event in reported] == [*range(mark["n"], mark["n"] + 4)]


def test_a_fetch_and_its_end_are_told_as_the_calls_that_they_stand_for(tmp_path: Path):
    """To whoever reads a dump it is one whether an engine makes few calls or many."""

    def reported(name: str, is_one_by_one: bool) -> list[str]:
        engine = toy()
        engine.start("only", 6)
        async_tracker = engine.canary.async_tracker
        if is_one_by_one:
            async_tracker.take("fill", "host", "staging", 4)
            async_tracker.follow("copies", "main")
            op = async_tracker.issue("results", "copies", writes={"staging": 4})
            async_tracker.complete(op)
            async_tracker.use("results", "host", {"staging": 4}, requests=["only"])
        else:
            op = async_tracker.fetch("results", "copies", "main", "staging", 4)
            async_tracker.receive(op, "results", ["only"])
        dump = read_dump(engine.canary.dump(tmp_path / name))
        return [str(event) for event in dump.events if "ticket" in event["call"]]

    assert reported("few", False) == reported("many", True)
    assert len(reported("again", False)) == 7


def test_arguments_are_kept_by_their_places_however_they_were_given(tmp_path: Path):
    """Keywords in any order, and what was left out, are told as a dump has them."""
    engine = toy()
    engine.start("only", 6)
    canary, pages = engine.canary, engine.rows["only"].pages
    canary.admit("other", [1, 2])
    canary.on_alloc(pages=[21], for_load=True, request_id="other")
    canary.on_alloc("other", pages=[22])
    assert not canary.aborted
    dump = read_dump(canary.dump(tmp_path / "told"))
    reported = [event for event in dump.events if event["call"] == "on_alloc"][-2:]
    assert [(event["request_id"], event["pages"].tolist(), event["for_load"]) for event in reported] == [
        ("other", [21], True),
        ("other", [22], False),
    ]
    assert not {21, 22} & {*pages}


@pytest.mark.parametrize("count", [1, LONG])
def test_what_many_are_told_is_kept_as_it_was_told(count: int):
    """Whoever uses his lists again changes no event of pages, tokens or lengths; all of it counts as memory."""
    engine = toy()
    canary, recorder = engine.canary, engine.canary.recorder
    names = [f"request {number}" for number in range(count)]
    for name in names:
        canary.admit(name, [1, 2, 3])
    first, before = len(recorder.segments[-1].events), recorder.num_bytes
    pages, tokens, lens = [[9 + number] for number in range(count)], [[number] for number in range(count)], [0] * count
    canary.on_alloc_all(names, pages)
    canary.append_all(names, tokens)
    canary.commit_all(names, lens)
    names.reverse()
    pages[0][0] = tokens[0][0] = lens[0] = -1
    events = [(name, requests[0], *map(list, rest)) for name, requests, *rest in recorder.segments[-1].events[first:]]
    assert events == [
        ("on_alloc_all", "request 0", [1] * count, [*range(9, 9 + count)]),
        ("append_all", "request 0", [1] * count, [*range(count)]),
        ("commit_all", "request 0", [0] * count),
    ]
    assert recorder.num_bytes == before + 3 * EVENT_BYTES + 5 * 8 * count


def test_launches_are_found_as_long_as_anybody_may_hear(monkeypatch):
    """The last launch of a site, a move, else the departure of the step that lands; what is heard is the launch's."""
    segment, log, last = SimpleNamespace(events=[], array_bytes=0), EventLog(), 3 * KEPT_STEPS
    recorded, log.append = ForwardEvents(deque([segment]), log), segment.events.append
    substep = SimpleNamespace(
        number=0, pool=SimpleNamespace(name="target"), site=("verify", 0), layers=(0,), num_kept=2
    )
    own = substep, slice(1)
    launch_group = SimpleNamespace(
        substeps=(substep, substep), count=2, num_kept=4, places=0, of_each=lambda n: [own, own]
    )
    for step in range(1, last + 1):
        log.append(("begin_step", step))
        both = recorded.launched(launch_group, ("only",), (1,), [5, 6])
        recorded.launched_move(0, "target")
        log.append(("end_step", step))
    for step in range(1, last + 1):
        is_kept, end = step > last - KEPT_STEPS, 5 * step
        asked = recorded.event_of("target", substep.site, step), recorded.event_of("target", MOVE_SITE, step)
        recorded.collecting(step)
        arrived_slots = recorded.event_of("draft", substep.site, step)
        recorded.collecting(None)
        places = [(segment, end - 3), (segment, end - 2), (segment, end - 1)] if is_kept else [None] * 3
        assert [*asked, arrived_slots] == places
        assert recorded.event_of("draft", substep.site, step) is None
    launches = [event[1].launches[event[2]] for event in segment.events[-4:] if event[0] == "launch"]
    accepting = SimpleNamespace(substeps=(substep,), count=1, num_kept=2, places=3, of_each=lambda n: [(substep, None)])
    one = recorded.launched(accepting, ("only",), (), [7])
    launched = [SimpleNamespace(step=last, record=record) for record in (None, both, one)]
    move = recorded.launched_move(0, "target")
    assert move.moved is None
    moves = [SimpleNamespace(move=SimpleNamespace(num_places=4), record=record) for record in (None, move)]
    monkeypatch.setattr("kvcanary.recorder.forward_events._pack", (packed := []).append)
    for most in (13, 12):
        monkeypatch.setattr("kvcanary.recorder.forward_events.MOST_KEPT", most)
        assert packed == []
        log.ints = segment.array_bytes = 0
        recorded.collected(launched, moves, numbers := array("q", [*range(9), 4, -1, 5, 6]))
        assert [one.tolist() for one in move.moved] == [[5], [4]]
        assert 8 * log.ints + segment.array_bytes == 8 * len(numbers)
    assert packed == [both, one]
    substep.layers = ()
    assert [launch.collected for launch in (*both, *one)] == [
        (substep, last, 1, numbers, 0, 2),
        (substep, last, 1, numbers, 2, 4),
        (substep, last, 1, numbers, 4, 9),
    ]
    assert [*both] == launches
    assert [(launch.reads, launch.layers) for launch in launches] == [(5, (0,)), (6, (0,))]


def test_a_launch_is_found_in_a_segment_that_began_within_its_step():
    """Also where no room is left for the one in which the step began; one of any other step is not."""
    segment, log = SimpleNamespace(events=[], checkpoint=SimpleNamespace(step=7)), EventLog()
    recorded, log.append = ForwardEvents(deque([segment]), log), segment.events.append
    substep = SimpleNamespace(number=0, pool=SimpleNamespace(name="target"), site=("verify", 0))
    recorded.launched(SimpleNamespace(substeps=(substep,), count=1, num_kept=2, places=0), ("only",), (1,), [5])
    assert recorded.event_of("target", substep.site, 7) == (segment, 0)
    assert recorded.event_of("target", substep.site, 6) is None
    log.append(("begin_step", 8))
    assert recorded.event_of("target", substep.site, 7) == (segment, 0)


def test_recording_changes_no_certificate():
    """Random traffic is checked the same with a ring that turns over often as with none."""

    def certificate(ring: int) -> dict:
        engine = toy(ring=ring)
        Traffic(engine, seed=5).run(60)
        engine.canary.drain()
        return engine.canary.certificate()

    assert certificate(4) == certificate(0)


def test_a_finding_writes_a_dump_and_the_report_names_it(tmp_path: Path):
    """With `dump_dir` a finding leaves a file, of which the report gives the path; without it there is none."""
    engine = toy(dump_dir=str(tmp_path / "dumps"))
    engine.start("only", 8)
    flip(engine)
    with pytest.raises(KVCorruptionError) as caught:
        engine.decode()
    [path] = (tmp_path / "dumps").iterdir()
    assert caught.value.report.dump == str(path)
    assert f"dump      {path}" in str(caught.value)
    assert read_dump(path).manifest["trigger"] == "finding"
    assert path.stat().st_mode & 0o077 == 0

    engine = toy()
    engine.start("only", 8)
    flip(engine)
    with pytest.raises(KVCorruptionError) as caught:
        engine.decode()
    assert caught.value.report.dump is None
    assert "  dump  " not in str(caught.value)


def test_a_folder_that_cannot_be_written_hides_no_finding(tmp_path: Path):
    """Where no dump can be written the finding is raised all the same, and an event tells why there is no dump."""
    import structlog

    (tmp_path / "file").write_text("")
    engine = toy(dump_dir=str(tmp_path / "file"))
    engine.start("only", 8)
    flip(engine)
    with structlog.testing.capture_logs() as events, pytest.raises(KVCorruptionError) as caught:
        engine.decode()
    assert caught.value.report.dump is None
    assert [event["event"] for event in events if event["log_level"] == "error"] == ["kvcanary.dump_failed"]


def test_a_dump_that_is_gone_at_once_hides_no_finding(tmp_path: Path, monkeypatch):
    """Whoever tidies the folder away while a dump is told of stops no engine."""
    from kvcanary.dumps import writing

    write = writing.write_dump
    monkeypatch.setattr(writing, "write_dump", lambda source, path: (write(source, path), path.unlink()))
    engine = toy(dump_dir=str(tmp_path))
    engine.start("only", 8)
    flip(engine)
    with pytest.raises(KVCorruptionError) as caught:
        engine.decode()
    assert caught.value.report.dump is None


def test_a_flood_of_findings_writes_few_dumps(tmp_path: Path):
    """In mode log every finding may dump, but not more than sixteen do."""
    engine = toy(dump_dir=str(tmp_path), mode="log")
    engine.start("only", 100)
    for position in range(0, 96, 4):  # each on a page of its own
        flip(engine, position=position)
        engine.decode()
    assert len(list(tmp_path.iterdir())) == 16


def test_a_signal_asks_for_a_dump(tmp_path: Path):
    """SIGUSR1 makes the next check write one; after detach nobody listens."""
    engine = toy(dump_dir=str(tmp_path))
    engine.start("only", 8)
    os.kill(os.getpid(), signal.SIGUSR1)
    engine.decode()
    [path] = tmp_path.iterdir()
    assert read_dump(path).manifest["trigger"] == "signal"
    engine.canary.detach()
    os.kill(os.getpid(), signal.SIGUSR1)
    engine.decode()
    assert len(list(tmp_path.iterdir())) == 1
