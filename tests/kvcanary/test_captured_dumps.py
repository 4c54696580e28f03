"""Recordings of captured forwards: what a check found in one is found again from its dump, at the same places."""

from __future__ import annotations

import pytest
import torch

from kvcanary.dumps.reading import read_dump
from kvcanary.records.mailbox import NUM_MESSAGES
from kvcanary.replay.replayer import Replayer, replay
from kvcanary_kernels.record import layout as record
from static_tree import TOKENS, StaticTree


def damage_a_record(tree: StaticTree) -> None:
    tree.verify.pool.records[5, record.CHAIN] ^= 1 << 40


def damage_a_fingerprint(tree: StaticTree) -> None:
    tree.verify.pool.content_a[0, 5] ^= 1


def clear_a_record(tree: StaticTree) -> None:
    tree.verify.pool.records[5].zero_()


STRUCK = {
    "R3": (damage_a_record, {}),
    "R3 cleared": (clear_a_record, {}),
    "W6": (None, {"tokens": [99, 98]}),
    "R13": (None, {"sees": [[1, 1], [1, 1]]}),
    "R4": (None, {"ids": [5, 4, 6, 7, 8]}),
    "R1": (None, {"ids": [4, 5, 1 << 40, 7, 8]}),
    "R2": (None, {"ids": [4, 5, 0, 7, 8]}),
    "R10": (None, {"ids": [4, 5, 7, 8]}),
    "R12": (None, {"skips": 1, "moves": None}),
    "W9": (None, {"padding": 6}),
    "T1": (None, {"moves": False}),
}


@pytest.mark.parametrize("name", STRUCK)
def test_a_replay_reaches_what_a_captured_forward_found(tree, tmp_path, name):
    """The same checks over the same buffers, from the recording alone; and nothing in a clean one."""
    assert tree.fired() == []
    tree.canary.commit("ann", 3)
    fault, given = STRUCK[name]
    if fault is not None:
        fault(tree)
    strike(tree, **given)
    found = tree.fired()
    dump = read_dump(tree.canary.dump(tmp_path / "launched.kvdump"))
    outcome = replay(dump)
    assert [finding.code for finding in outcome.findings] == [code for code, *_ in found]
    assert name.split()[0] in {code for code, *_ in found}
    assert outcome.missing == []


def test_right_captured_forwards_replay_clean(tree, tmp_path):
    """A prefill, a tree and its move: every record is what it was, and nothing is found."""
    assert tree.fired() == []
    tree.canary.commit("ann", 3)
    strike(tree)
    assert tree.fired() == []
    dump = read_dump(tree.canary.dump(tmp_path / "clean.kvdump"))
    assert [event["kind"] for event in dump.events if event["call"] == "launch"] == ["prefill", "verify"]
    replayer = Replayer(dump)
    outcome = replayer.run(None, None)
    assert (outcome.findings, outcome.missing, outcome.errors) == ([], [], [])
    ours, theirs = (
        pool.records[:, [record.STEP_SITE]] for pool in (tree.verify.pool, replayer.manager.session.state.pools[0])
    )
    assert torch.equal(ours, theirs)


def test_damage_behind_a_captured_move_is_not_moved(tree, tmp_path):
    """A slot that the move has read and written is damaged once it is over: the replay finds it there alone."""
    assert tree.fired() == []
    tree.canary.commit("ann", 3)
    strike(tree, moves=None)
    tree.canary.launch_move(tree.move)
    tree.rig.kv[:, [7, 9]] = tree.rig.kv[:, [8, 7]]
    tree.rig.kv[1, 7] += 1
    tree.move.record(torch.tensor([8, 7]), torch.tensor([7, 9]), torch.tensor([True, True]))
    tree.fired()
    found = [(finding.code, finding.slot) for finding in tree.canary.findings]
    assert found == [("T1", 7)]
    outcome = replay(read_dump(tree.canary.dump(tmp_path / "moved.kvdump")))
    assert ([(finding.code, finding.slot) for finding in outcome.findings], outcome.missing) == (found, [])


def strike(
    tree: StaticTree,
    ids: list[int] = (4, 5, 6, 7, 8),
    tokens: list[int] = TOKENS[3:5],
    sees: list[list[int]] = ((1, 0), (1, 1)),
    skips: int | None = None,
    padding: int | None = None,
    moves: bool | None = True,
) -> None:
    """A verify of two nodes and the move of its second; `skips`: a layer that does not store.

    padding: where an entry behind both is aimed;  moves: None: nothing moves, False: its bytes stay behind
    """
    tree.mask[0] = torch.tensor(sees).bool()
    substep = tree.verify
    tree.canary.begin_step(2)
    truth = tree.canary.launch(substep, ["ann"], [2], len(ids))
    row = tree.static_row(tree.uid, list(ids), list(tokens), [-1, 0])
    substep.buffers.fill(tree.rig.batch([row], prefix_lens=truth.prefix_lens))
    substep.buffers.slots[:2] = torch.tensor([7, 8])
    if padding is not None:
        substep.buffers.slots[2] = padding
    tree.rig.skipped_layers = set() if skips is None else {skips}
    tree.rig.body(substep)
    if moves is None:
        return
    tree.canary.launch_move(tree.move)
    if moves:
        tree.rig.kv[:, 7] = tree.rig.kv[:, 8]
    tree.move.record(torch.tensor([8, 0]), torch.tensor([7, 0]), torch.tensor([True, False]))


def test_a_dump_hears_first_of_what_was_launched(tree, tmp_path):
    """Also before anybody has checked the step."""
    dump = read_dump(tree.canary.dump(tmp_path / "early.kvdump"))
    assert [event["kind"] for event in dump.events if event["call"] == "launch"] == ["prefill"]
    assert replay(dump).findings == []


def test_a_step_that_did_not_run_says_nothing(tree, tmp_path):
    """H1, with counts of nothing: what an earlier run has left in memory of the host is no word of this one."""
    tree.fired()
    tree.canary.commit("ann", 3)
    for number in range(2, 2 + NUM_MESSAGES):
        tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
        tree.launch(number, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
        tree.canary.launch_move(tree.move)  # of nothing that has arrived
        tree.move.record(torch.tensor([8, 0]), torch.tensor([7, 0]), torch.tensor([number == 2, False]))
        tree.canary.collect(tree.canary.end_step())
    reported = [finding.code for finding in tree.canary.findings]
    assert reported == ["T1"]
    tree.canary.begin_step(2 + NUM_MESSAGES)
    tree.canary.launch(tree.verify, ["ann"], [2], 5)
    tree.canary.launch_move(tree.move)
    tree.canary.collect(tree.canary.end_step())
    (finding,) = tree.canary.findings[len(reported) :]
    planned = {"rows": 1, "entries": 2, "reads": 5}
    assert (finding.code, finding.expected, finding.found) == ("H1", planned, dict.fromkeys(planned, 0))
    certificate = tree.canary.certificate()
    assert (certificate["forwards"], certificate["slots_sealed"]) == (1 + NUM_MESSAGES, 3 + 2 * NUM_MESSAGES)
    tree.launch(3 + NUM_MESSAGES, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    tree.canary.collect(tree.canary.end_step())
    assert len(tree.canary.findings) == len(reported) + 1
    assert read_dump(tree.canary.dump(tmp_path / "idle.kvdump")).manifest["first_step"] <= 1


def test_a_segment_that_begins_in_the_air_hears_first(make_static, static_row, tmp_path):
    """Once in half a ring the host waits for what is in flight, so that the recording can be followed from there."""
    tree = StaticTree(make_static(), static_row, ring=2)
    tree.launch(1, tree.prefill, [4, 5, 6], TOKENS[:3])
    tree.fired()
    tree.canary.commit("ann", 3)
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    tree.launch(2, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    flights = [tree.canary.end_step()]
    for number in range(3, 7):
        tree.launch(number, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
        flights.append(tree.canary.end_step())
        tree.canary.collect(flights.pop(0))
    assert tree.canary.findings == []
    dump = read_dump(tree.canary.dump(tmp_path / "late.kvdump"))
    assert dump.manifest["first_step"] > 1
    outcome = replay(dump)
    assert (outcome.findings, outcome.missing, outcome.errors) == ([], [], [])


def test_places_of_the_last_run_are_exact(tree, monkeypatch):
    """Every one at which a check fired, and not the first alone; a later run of the forward would overwrite them."""
    tree.canary.commit("ann", 3)
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    tree.launch(2, tree.verify, [4, 9, 10, 7, 8], TOKENS[3:5], [-1, 0])
    reported, noticed = [], tree.canary.recorder.forwards.noticed
    monkeypatch.setattr(
        tree.canary.recorder.forwards, "noticed", lambda violation: (reported.append(violation), noticed(violation))
    )
    tree.canary.collect(tree.canary.end_step())
    assert sorted((violation.slot, violation.is_exact) for violation in reported if violation.code == "R12") == [
        (9, True),
        (10, True),
    ]


def test_places_of_an_earlier_run_are_its_first(tree, monkeypatch):
    """Two runs read a slot each that nobody has written: what the later one left is no place of the earlier one."""
    tree.canary.commit("ann", 3)
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    reported, noticed = [], tree.canary.recorder.forwards.noticed
    monkeypatch.setattr(
        tree.canary.recorder.forwards, "noticed", lambda violation: (reported.append(violation), noticed(violation))
    )
    flights = []
    for step, row in ((2, [4, 9, 6, 7, 8]), (3, [4, 5, 10, 7, 8])):
        tree.launch(step, tree.verify, row, TOKENS[3:5], [-1, 0])
        flights.append(tree.canary.end_step())
    for flight in flights:
        tree.canary.collect(flight)
    read = [(violation.step, violation.slot, violation.is_exact) for violation in reported if violation.code == "R12"]
    assert read == [(2, 9, True), (2, 10, False), (3, 10, True)]
