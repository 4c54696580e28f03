"""A replay reaches the finding that the engine reached, from the events alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import Dump, read_dump
from kvcanary.errors import DumpError
from kvcanary.replay import stage
from kvcanary.replay.replayer import Replayer, replay
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.traffic import Traffic


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def struck(tmp_path: Path, fault: Callable[[ToyEngine], object], **settings: object) -> Dump:
    """The dump of a toy engine that a fault has stopped."""
    engine = ToyEngine(CanaryConfig(**{"content": "full", "ring": 6, "dump_dir": str(tmp_path), **settings}))
    engine.start("one", 21)
    engine.start("two", 13)
    for _ in range(9):
        engine.draft()
    fault(engine)
    with pytest.raises(KVCorruptionError) as caught:
        draft_on(engine)
    return read_dump(caught.value.report.dump)


def draft_on(engine: ToyEngine) -> None:
    for _ in range(30):
        engine.draft()


def step_on(engine) -> None:
    for _ in range(30):
        engine.step()


def flip_a_bit(engine: ToyEngine) -> None:
    slot = int(engine.rows["one"].slots[7])
    engine.pools["target"].kv.view(torch.int32)[1, slot, 1, 0, 2] ^= 1 << 9


def clear_a_row(engine: ToyEngine) -> None:
    engine.pools["target"].kv[:, int(engine.rows["two"].slots[4])] = 0


def swap_two_entries(engine: ToyEngine) -> None:
    slots = engine.rows["one"].slots
    slots[[3, 11]] = slots[[11, 3]]


def read_another_s_page(engine: ToyEngine) -> None:
    engine.rows["one"].slots[5] = engine.rows["two"].slots[5]


def read_out_of_bounds(engine: ToyEngine) -> None:
    engine.rows["one"].slots[5] = 1 << 40


def damage_a_record(engine: ToyEngine) -> None:
    pool = engine.canary.recorder.manager_state.state.by_name["target"]
    pool.records[int(engine.rows["two"].slots[2]), 3] ^= 5


def damage_a_fingerprint(engine: ToyEngine) -> None:
    pool = engine.canary.recorder.manager_state.state.by_name["target"]
    pool.content_a[1, int(engine.rows["two"].slots[2])] ^= 5


def leave_nan_in_the_null_page(engine: ToyEngine) -> None:
    engine.pools["target"].kv[1, : engine.shape.page_size] = float("nan")


def leave_nan_in_new_pages(engine: ToyEngine) -> None:
    size = engine.shape.page_size
    for page in (engine.canary.session.ledger.generations == 0).nonzero()[0].tolist()[1:]:
        engine.pools["draft"].kv[0, page * size + size - 1] = float("nan")


FAULTS = [
    (leave_nan_in_the_null_page, "R9"),
    (flip_a_bit, "R9"),
    (clear_a_row, "R9"),
    (swap_two_entries, "R4"),
    (read_another_s_page, "R8"),
    (read_out_of_bounds, "R1"),
    (damage_a_record, "R3"),
    (damage_a_fingerprint, "R3"),
]


@pytest.mark.parametrize(("fault", "code"), [*FAULTS, (leave_nan_in_new_pages, "R9")])
@pytest.mark.parametrize("content", ["full", "rolling"])
def test_the_same_finding_is_reached(tmp_path, fault, code, content):
    """From a checkpoint in mid-run: the same check at the same place, step, site and word."""
    dump = struck(tmp_path, fault, content=content, budget=1 << 20)
    assert dump.manifest["first_step"] > 0
    outcome = replay(dump)
    assert dump.findings[0]["code"] == code
    assert outcome.missing == []
    assert outcome.findings[0].code == code


@pytest.mark.parametrize("seed", range(6))
def test_right_traffic_replays_clean(tmp_path, seed):
    """Forks, copies, caches, preemption and drafts: nothing is found again, whatever the ring still has."""
    engine = ToyEngine(CanaryConfig(content="full", ring=[5, 512][seed % 2]), seed=seed)
    Traffic(engine, seed=seed).run(70)
    outcome = replay(read_dump(engine.canary.dump(tmp_path / "clean.kvdump")))
    assert (outcome.findings, outcome.missing, outcome.errors) == ([], [], [])
    assert outcome.step == engine.canary.step


def regrant(engine: ToyEngine, is_damaged: bool) -> list[int]:
    """Pages of a request that ended go to two others in one call, poisoned as they are; one poison is damaged."""
    engine.start("one", 21)
    engine.start("two", 13)
    pages = list(engine.rows["one"].pages)
    engine.finish("one")
    engine.canary.session.poisoner.fill(list(engine.canary.session.poisoner.waiting))
    for name in ("three", "four"):
        engine.canary.admit(name, [1, 2, 3])
    if is_damaged:
        engine.pools["target"].kv.view(torch.int32)[1, pages[1] * engine.shape.page_size, 1, 0, 2] ^= 1 << 9
    engine.canary.on_alloc_all(["three", "four"], [pages[:1], pages[1:]])
    engine.begin()
    engine.canary.collect(engine.canary.end_step())
    return pages


@pytest.mark.parametrize("is_damaged", [False, True])
def test_pages_of_many_are_granted_again(tmp_path, is_damaged):
    """In one call, as the engine did: rows, states and generations are the same, and so is what was found in a page."""
    engine = ToyEngine(CanaryConfig(content="full", mode="log", quarantine=0))
    pages = regrant(engine, is_damaged)
    dump = read_dump(engine.canary.dump(tmp_path / "granted.kvdump"))
    assert [event["counts"].tolist() for event in dump.events if event["call"] == "on_alloc_all"] == [
        [1, len(pages) - 1]
    ]
    assert [finding["code"] for finding in dump.findings] == ["P1"] * is_damaged
    replayer = Replayer(dump)
    outcome = replayer.run(None, None)
    assert (outcome.errors, outcome.missing, len(outcome.findings)) == ([], [], int(is_damaged))
    for name in ("states", "generations", "owners"):
        assert (
            getattr(replayer.manager.session.ledger, name).tolist()
            == getattr(engine.canary.session.ledger, name).tolist()
        )
    rows = [ledger.request("four").pages for ledger in (replayer.manager.session.ledger, engine.canary.session.ledger)]
    assert rows == [pages[1:]] * 2


def test_until_stops_before_the_fault(tmp_path):
    """Nothing is found up to the step before; one step more and it is."""
    dump = struck(tmp_path, flip_a_bit)
    step = dump.findings[0]["step"]
    assert replay(dump, until=step - 1).findings == []
    assert replay(dump, until=step).first_bad_step == step


def test_check_compares_one_code_alone(tmp_path):
    """With a code that the dump does not have there is nothing to reach."""
    dump = struck(tmp_path, flip_a_bit)
    outcome = replay(dump, code="W4")
    assert (outcome.findings, outcome.missing) == ([], [])


def test_events_that_do_not_lead_there_are_told(tmp_path):
    """Without the damage that it saw, the recording does not explain the finding, and says so."""
    dump = struck(tmp_path, flip_a_bit)
    for event in dump.events:
        event.pop("damage", None)
    assert [missing["code"] for missing in replay(dump).missing] == ["R9"]


def test_large_pools_have_short_stand_ins(tmp_path, monkeypatch):
    """Where rows as long as the engine's would take too much memory, the place is the same, the word not asked."""
    dump = struck(tmp_path, flip_a_bit)
    monkeypatch.setattr(stage, "MOST_POOL_BYTES", 0)
    outcome = replay(dump)
    assert outcome.missing == []
    assert outcome.findings[0].slot == dump.findings[0]["slot"]


def test_what_cannot_be_held_is_refused(tmp_path, monkeypatch):
    """A dump whose replay would take too much memory is refused in a sentence."""
    dump = struck(tmp_path, flip_a_bit)
    monkeypatch.setattr(stage, "MOST_STATE_BYTES", 1000)
    with pytest.raises(DumpError, match="GiB to replay"):
        replay(dump)


def test_a_recording_without_records_is_not_replayed(tmp_path):
    """Where the records of the beginning were too many to keep, the dump says that it can only be read."""
    engine = ToyEngine(CanaryConfig(content="full"))
    engine.canary.recorder.segments.clear()
    engine.canary.recorder.most_bytes = 100
    engine.canary.recorder.start(0)
    engine.start("one", 6)
    dump = read_dump(engine.canary.dump(tmp_path / "bare.kvdump"))
    with pytest.raises(DumpError, match="it can be read, not replayed"):
        replay(dump)


@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS])
def test_checks_fire_as_often_as_they_did(tmp_path, fault):
    """In mode log a fault is seen again and again, by both rows of a fork: the replay counts the same."""
    engine = ToyEngine(CanaryConfig(content="full", mode="log"))
    engine.start("one", 21)
    engine.start("two", 13)
    engine.fork_by_reference("two", "three")
    engine.draft("one", "two")
    fault(engine)
    for _ in range(3):
        engine.decode("one", "two", "three")
    dump = read_dump(engine.canary.dump(tmp_path / "often.kvdump"))
    replayer = Replayer(dump)
    assert replayer.run(None, None).missing == []
    assert dump.manifest["certificate"]["fired"]
    assert replayer.manager.certificate()["fired"] == dump.manifest["certificate"]["fired"]


def test_abort_goes_on_as_the_engine_did(make_engine, tmp_path):
    """In mode abort and log the recording goes on behind a finding, and so does the replay."""
    engine = make_engine(mode="log", content="full", dump_dir=str(tmp_path), ring=64)
    engine.start("only", 16)
    engine.step()
    engine.pools["target"].kv[1, engine.slot("only", 3), 1, 0, 2] += 1.0
    for _ in range(3):
        engine.step()
    assert len(engine.canary.findings) == 1
    dump = read_dump(engine.canary.dump(tmp_path / "later.kvdump"))
    outcome = replay(dump)
    assert outcome.missing == []
    assert outcome.step == engine.step_number


def test_damage_older_than_the_recording_is_remembered(make_engine, tmp_path):
    """Pages of a request that was found damaged before it begins are filled when they are freed, in the replay too."""
    engine = make_engine(mode="log", content="full", dump_dir=str(tmp_path), ring=8)
    engine.start("only", 16)
    engine.start("other", 16)
    element = engine.pools["target"].bits(1, engine.slot("only", 3), "V")[2:3]
    for _ in range(2):  # and back: nothing is found of it as the request ends
        element ^= 1 << 9
        engine.step()
    for _ in range(30):
        engine.step()
    dump = read_dump(engine.canary.dump(tmp_path / "before.kvdump"))
    assert {line["request_id"]: line["is_damaged"] for line in dump.start} == {"only": True, "other": False}
    for name in ("only", "other"):
        engine.finish(name)
    replayer = Replayer(read_dump(engine.canary.dump(tmp_path / "later.kvdump")))
    replayer.run(None, None)
    poisoner, again = engine.canary.session.poisoner, replayer.manager.session.poisoner
    assert (again.poisoned, again.waiting) == (poisoner.poisoned, poisoner.waiting)


def test_damage_that_a_move_has_taken_along_is_there_before_it(make_engine, tmp_path):
    """An accepted node is damaged where the forward wrote it: found as it arrives at the end of its row."""
    engine = make_engine(content="rolling", dump_dir=str(tmp_path), ring=64)
    pool = engine.pools["target"]
    move = pool.move

    def damage_and_move(src: torch.Tensor, dst: torch.Tensor) -> None:
        leaving = [slot for slot in src.tolist() if slot not in dst]
        pool.kv[1, leaving[:1], 1, 0, 2] += 1.0
        move(src, dst)

    pool.move = damage_and_move
    engine.start("only", 16)
    with pytest.raises(KVCorruptionError) as caught:
        step_on(engine)
    [finding] = caught.value.findings
    assert (finding.code, finding.site) == ("R9", ("move", 0))
    assert replay(read_dump(caught.value.report.dump)).missing == []


def test_damage_behind_a_move_is_not_moved(make_engine, tmp_path):
    """A slot that a move has read and written is damaged once it is over: found there, not where its bytes went."""
    engine = make_engine(content="rolling", dump_dir=str(tmp_path), ring=64)
    pool = engine.pools["target"]
    move = pool.move

    def move_and_damage(src: torch.Tensor, dst: torch.Tensor) -> None:
        move(src, dst)
        moved = src != dst
        both = [slot for slot in dst[moved].tolist() if slot in src[moved]]
        pool.kv[1, both[:1], 1, 0, 2] += 1.0

    pool.move = move_and_damage
    engine.start("only", 16)
    with pytest.raises(KVCorruptionError) as caught:
        step_on(engine)
    [finding] = caught.value.findings
    assert (finding.code, finding.site) == ("T1", ("move", 0))
    found_again = replay(read_dump(caught.value.report.dump))
    assert found_again.missing == []
    assert [(found.code, found.slot) for found in found_again.findings] == [("T1", finding.slot)]


@pytest.mark.parametrize("how", ["on_load_end", "on_restore"])
def test_damage_of_what_came_back_is_behind_its_arrival(make_engine, tmp_path, how):
    """Bytes are damaged on their way into other pages: the replay brings them back first, and then damages them."""
    engine = make_engine(dump_dir=str(tmp_path), ring=64)
    engine.start("only", 16)
    engine.step()
    canary, row, pool = engine.canary, engine.rows["only"], engine.pools["target"]
    snapshot, old = canary.on_offload(row.pages), [engine.slot("only", position) for position in range(row.committed)]
    kept = {name: own.kv[:, old].clone() for name, own in engine.pools.items()}
    left, row.pages = row.pages, [engine.free_pages.pop() for _ in row.pages]
    canary.on_free("only", left)
    engine._begin()
    canary.on_alloc("only", row.pages, for_load=True)
    for name, own in engine.pools.items():
        own.kv[:, [engine.slot("only", position) for position in range(row.committed)]] = kept[name]
    pool.kv[1, engine.slot("only", 5), 1, 0, 2] += 1.0
    if how == "on_load_end":
        canary.on_load_begin("only", row.pages)
    getattr(canary, how)("only", row.pages, row.committed, snapshot)
    with pytest.raises(KVCorruptionError) as caught:
        canary.check()
    [finding] = caught.value.findings
    assert (finding.code, finding.slot) == ("T1", engine.slot("only", 5))
    assert replay(read_dump(caught.value.report.dump)).missing == []
