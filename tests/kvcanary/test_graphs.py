"""Static substeps of a manager: what a replay finds on the device stops the engine like any other finding."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError
from kvcanary.buffers import StaticBuffers
from kvcanary.replay import StaticReplay

TOKENS = [50, 51, 52, 53, 54, 55]


class Run:
    """One request of a manager whose every forward is a replay; K and V come from the rig's pool."""

    def __init__(self, rig, static_row, **settings: object) -> None:
        self.rig, self.static_row = rig, static_row
        self.canary = CanaryManager(CanaryConfig(seed=7, **settings), [rig.pool.view])
        self.replay = StaticReplay(self.canary.bank)
        self.substeps = {}
        for kind, entries in (("prefill", 4), ("decode", 2)):
            buffers = StaticBuffers.allocate(2, entries, 16)
            substep = self.canary.bank.add("target", kind, 0, buffers)
            self.substeps[kind] = substep
            self.replay.capture([substep], lambda substep=substep: rig.body(substep))
        self.canary.arm()
        self.canary.admit("ann", TOKENS)
        self.canary.on_alloc("ann", [1, 2])
        self.uid = self.canary.requests_of(["ann"])[0].uid

    def step(self, number: int, length: int, count: int) -> None:
        """A forward that writes the last `count` of `length` entries."""
        row = self.static_row(self.uid, list(range(4, 4 + length)), TOKENS[length - count : length])
        self.canary.begin_step(number)
        kind = "prefill" if number == 1 else "decode"
        substep = self.substeps[kind]
        self.canary.bank.load(substep, self.rig.batch([row]))
        self.rig.body(substep)
        self.canary.check()


@pytest.fixture
def run(make_static, static_row):
    """A run after its prefill."""

    def start(**settings: object) -> Run:
        made = Run(make_static(), static_row, **settings)
        made.step(1, 3, 3)
        return made

    return start


def test_clean_replays_find_nothing_and_are_counted(run):
    """Rows that replays read and entries that they write are in the certificate."""
    clean = run()
    clean.step(2, 4, 1)
    clean.step(3, 5, 1)
    certificate = clean.canary.certificate()
    assert certificate["findings"] == []
    assert (certificate["slots_checked"], certificate["slots_sealed"]) == (3 + 4 + 5, 3 + 1 + 1)


@pytest.mark.parametrize("disable", [frozenset(), frozenset({"R3"})])
def test_damage_between_replays_stops_the_engine(run, disable):
    """The report names the reader and the place, as for an eager forward; switched off, it does not."""
    damaged = run(disable=disable)
    damaged.canary._state.by_name["target"].records[5, 1] ^= 1 << 40
    with pytest.raises(KVCorruptionError) as caught:
        damaged.step(2, 4, 1)
    finding = caught.value.findings[0]
    found = (finding.code, finding.slot, finding.position, finding.reader, finding.site, finding.step)
    if disable:
        assert finding.code == "R5"  # the chain is broken there too
    else:
        assert found == ("R3", 5, 1, "ann", ("decode", 0), 2)


@pytest.mark.parametrize("disable", [frozenset(), frozenset({"H1"})])
def test_a_forward_that_was_planned_and_did_not_run_is_h1(run, disable):
    """A captured body without hooks, or a graph that was not launched: counters stand still."""
    idle = run(mode="log", disable=disable)
    idle.canary.begin_step(2)
    row = idle.static_row(idle.uid, [4, 5, 6, 7], TOKENS[3:4])
    idle.canary.bank.load(idle.substeps["decode"], idle.rig.batch([row]))
    idle.canary.check()
    found = [(finding.code, finding.expected, finding.found) for finding in idle.canary.findings]
    expected = {"rows": 1, "entries": 1, "reads": 4}
    assert found == ([] if disable else [("H1", expected, dict.fromkeys(expected, 0))])


def test_substeps_are_added_before_arm(run):
    """H2: what comes after arm() was never captured."""
    late = run()
    with pytest.raises(Exception, match="add\\(\\) must come before arm\\(\\): decode of the target pool is late"):
        late.canary.bank.add("target", "decode", 0, StaticBuffers.allocate(8, 8, 8))


def test_a_freed_page_is_stale_to_the_next_replay(run):
    """The device learns of a free at the head of the next step."""
    freed = run(mode="log")
    freed.canary.on_free("ann", [2])
    row = freed.static_row(freed.uid, [4, 5, 6, 8], TOKENS[3:4])
    freed.canary.begin_step(2)
    freed.canary.bank.load(freed.substeps["decode"], freed.rig.batch([row]))
    freed.rig.body(freed.substeps["decode"])
    freed.canary.check()
    assert {finding.code for finding in freed.canary.findings} >= {"W2"}
    assert torch.equal(freed.canary._state.generations, torch.from_numpy(freed.canary._ledger.generations))
