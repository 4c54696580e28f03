"""Captured substeps of a manager: what a replay finds on the device stops the engine like any other finding."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, HookOrderError, KVCorruptionError, PlanError
from kvcanary.captured.buffers import StaticBuffers
from kvcanary.captured.launch_group import runs_of
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary.native.layout import RUN
from kvcanary.records.mailbox import MAX_IN_FLIGHT, NUM_MESSAGES
from kvcanary_kernels.record import layout as record
from static_replay import StaticReplay
from static_tree import TOKENS, StaticTree


class Run:
    """One request of a manager whose every forward is a replay; K and V come from the rig's pool."""

    def __init__(self, rig, static_row, **settings: object) -> None:
        self.rig, self.static_row = rig, static_row
        self.canary = CanaryManager(CanaryConfig(seed=7, **settings), [rig.pool.view])
        self.replay = StaticReplay(self.canary.registry)
        self.substeps = {}
        for kind, entries in (("prefill", 4), ("decode", 2)):
            buffers = StaticBuffers.allocate(2, entries, 16)
            substep = self.canary.registry.add("target", kind, 0, buffers)
            self.substeps[kind] = substep
            self.replay.capture([substep], lambda substep=substep: rig.body(substep))
        self.canary.arm()
        self.canary.admit("ann", TOKENS)
        self.canary.on_alloc("ann", [1, 2])
        self.uid = self.canary.session.ledger.known(["ann"])[0].uid

    def step(self, number: int, length: int, count: int) -> None:
        """A forward that writes the last `count` of `length` entries."""
        row = self.static_row(self.uid, list(range(4, 4 + length)), TOKENS[length - count : length])
        self.canary.begin_step(number)
        kind = "prefill" if number == 1 else "decode"
        substep = self.substeps[kind]
        self.canary.registry.load(substep, self.rig.batch([row]))
        self.rig.body(substep)
        self.canary.collect(self.canary.end_step())


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
    damaged.canary.session.state.by_name["target"].records[5, 1] ^= 1 << 40
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
    idle.canary.registry.load(idle.substeps["decode"], idle.rig.batch([row]))
    idle.canary.collect(idle.canary.end_step())
    found = [(finding.code, finding.expected, finding.found) for finding in idle.canary.findings]
    expected = {"rows": 1, "entries": 1, "reads": 4}
    assert found == ([] if disable else [("H1", expected, dict.fromkeys(expected, 0))])


@pytest.mark.parametrize("reads", [0, 1])
def test_a_forward_that_was_launched_and_did_not_run_as_told_is_h1(make_static, reads):
    """Its header comes with the step's own numbers: no row, no entry, or another number of entries that rows read."""
    rig = make_static()
    canary = CanaryManager(CanaryConfig(seed=7, mode="log"), [rig.pool.view])
    draft = canary.registry.add("target", "draft", 0, StaticBuffers.allocate(2, 4, 16))
    canary.arm()
    canary.admit("ann", TOKENS[:4])
    canary.on_alloc("ann", [1, 2])
    canary.begin_step(1)
    canary.launch(draft, ["ann"], [0], reads)
    canary.collect(canary.end_step())
    expected, found = {"rows": 1, "entries": 0, "reads": reads}, {"rows": 0, "entries": 0, "reads": 0}
    assert [(finding.code, finding.expected, finding.found) for finding in canary.findings] == [("H1", expected, found)]


def test_substeps_are_added_before_arm(run):
    """H2: what comes after arm() was never captured."""
    late = run()
    with pytest.raises(Exception, match="add\\(\\) must come before arm\\(\\): decode of the target pool is late"):
        late.canary.registry.add("target", "decode", 0, StaticBuffers.allocate(8, 8, 8))


def test_a_device_is_told_of_pages_before_what_runs_next(run, monkeypatch):
    """In one delta list, however often something has happened to pages; in none where nothing has."""
    reported: list[int] = []
    one = run()
    state = one.canary.session.state
    publish = state.pools[0].loops.publish_pages
    monkeypatch.setattr(
        state.pools[0].loops, "publish_pages", lambda *args: (reported.append(len(args[0])), publish(*args))
    )
    one.canary.on_alloc("ann", [3])
    one.canary.on_alloc("ann", [4])
    assert reported == []
    one.step(2, 4, 1)
    assert len(reported) == 1
    assert state.page_states[3:5].tolist() == [record.RESERVED] * 2
    one.step(3, 5, 1)
    assert len(reported) == 1


def test_a_freed_page_is_stale_to_the_next_replay(run):
    """The device learns of a free at the head of the next step."""
    freed = run(mode="log")
    freed.canary.on_free("ann", [2])
    row = freed.static_row(freed.uid, [4, 5, 6, 8], TOKENS[3:4])
    freed.canary.begin_step(2)
    freed.canary.registry.load(freed.substeps["decode"], freed.rig.batch([row]))
    freed.rig.body(freed.substeps["decode"])
    freed.canary.collect(freed.canary.end_step())
    assert {finding.code for finding in freed.canary.findings} >= {"W2"}
    assert torch.equal(
        freed.canary.session.state.generations, torch.from_numpy(freed.canary.session.ledger.generations)
    )


def verify(tree: StaticTree, sees: list[list[int]], tokens: list[int] = TOKENS[3:5]) -> None:
    tree.mask[0] = torch.tensor(sees).bool()
    tree.launch(2, tree.verify, [4, 5, 6, 7, 8], tokens, [-1, 0])


def test_the_host_learns_what_launched_forwards_have_written(tree):
    """Rows may be committed, their pages are written, and forwards are counted as eager ones are."""
    assert tree.fired() == []
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]])
    assert tree.fired() == []
    request = tree.canary.session.ledger.known(["ann"])[0]
    assert request.row_lens.tolist() == [5]
    assert [STATE_NAMES[state] for state in tree.canary.session.ledger.states[[1, 2]]] == ["WRITTEN", "WRITTEN"]
    certificate = tree.canary.certificate()
    assert [certificate[name] for name in ("forwards", "slots_checked", "slots_sealed")] == [2, 8, 5]


def test_a_commit_waits_for_no_forward(tree):
    """Between launch and check too; pages are final when the host has learned that they were written."""
    pages = tree.canary.session.ledger.states
    tree.canary.commit("ann", 3)
    assert (len(tree.canary.session.checks.captured.launched), STATE_NAMES[pages[1]]) == (1, "RESERVED")
    assert tree.fired() == []
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    tree.launch(2, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    tree.canary.commit("ann", 5)
    assert STATE_NAMES[pages[1]] == "WRITTEN"
    assert tree.fired() == []
    assert [STATE_NAMES[state] for state in pages[[1, 2]]] == ["COMMITTED", "WRITTEN"]


def test_a_token_that_is_not_the_requests_is_w6(tree):
    """The root of a launched tree is the request's own token; nodes behind it are guesses."""
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], [99, 98])
    assert tree.fired() == [("W6", ("verify", 0), 7)]


def test_a_mask_that_shows_a_stranger_is_r13(tree):
    """A node sees itself and its ancestors, in a captured forward as in any."""
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 1], [1, 1]])
    assert tree.fired() == [("R13", ("verify", 0), 7)]


@pytest.mark.parametrize("moves_bytes", [True, False])
def test_a_captured_move_brings_the_records(tree, moves_bytes):
    """The host learns where entries lie now; bytes that did not come along are T1."""
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]])
    pool, source, destination = tree.verify.pool, torch.tensor([8, 0]), torch.tensor([7, 0])
    tree.canary.launch_move(tree.move)
    if moves_bytes:
        tree.rig.kv[:, 7] = tree.rig.kv[:, 8]
    tree.move.record(source, destination, torch.tensor([True, False]))
    assert tree.fired() == ([] if moves_bytes else [("T1", ("move", 0), 7)])
    assert torch.equal(pool.records, pool.expected)
    moved = record.read_record(pool.records, 7)
    assert (moved.token, moved.position, moved.step) == (TOKENS[4], 4, 2)
    assert (tree.move.src.tolist(), tree.move.dst.tolist()) == ([8, -1], [7, -1])


def test_moves_are_added_before_arm_to_pools_that_are_there(tree, make_static):
    """H2 and a sentence, as for substeps."""
    with pytest.raises(HookOrderError, match="add_move\\(\\) must come before arm\\(\\): the move in the target pool"):
        tree.canary.registry.add_move("target", 2)
    with pytest.raises(PlanError, match="pool must be one of target, got 'draft'"):
        make_static().registry.add_move("draft", 2)


def test_a_launch_needs_a_registry(make_engine):
    """H2: a manager whose registry nobody asked for has captured nothing."""
    with pytest.raises(HookOrderError, match="launch\\(\\) needs substeps of this manager's registry, got None"):
        make_engine().canary.launch(None, [], [], 0)
    with pytest.raises(HookOrderError, match="launch_move\\(\\) needs a move of this manager's registry"):
        make_engine().canary.launch_move(None)


# a host that hears later


def test_what_departed_is_judged_when_it_is_collected(tree):
    """From its own copies, whatever the buffers hold by then, and only that step."""
    tree.fired()
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], [99, 98])
    first = tree.canary.end_step()
    tree.launch(3, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    second = tree.canary.end_step()
    assert (tree.canary.findings, first.is_collected, second.is_collected) == ([], False, False)
    tree.canary.collect(first)
    assert [(finding.code, finding.step, finding.slot) for finding in tree.canary.findings] == [("W6", 2, 7)]
    assert (first.is_collected, second.is_collected) == (True, False)
    tree.canary.collect(second)
    assert len(tree.canary.findings) == 1


def test_forwards_behind_each_other_are_launched_with_one_truth(make_static):
    """The same as launched one by one: what each is expected to run, and who is in flight how often."""
    made = {}
    for is_one_by_one in (True, False):
        rig = make_static()
        canary = CanaryManager(CanaryConfig(seed=7), [rig.pool.view])
        drafts = [canary.registry.add("target", "draft", n, StaticBuffers.allocate(2, 4, 16)) for n in range(3)]
        canary.arm()
        canary.admit("ann", TOKENS[:4])
        canary.on_alloc("ann", [1, 2])
        canary.begin_step(1)
        if is_one_by_one:
            launches = zip(drafts, (4, 5, 6), strict=True)
            truths = [canary.launch(draft, ["ann"], [1], reads).numbers.tolist() for draft, reads in launches]
            assert truths[1:] == truths[:1] * 2
            truth = truths[0]
        else:
            truth = canary.launch_all(drafts, ["ann"], [1], [4, 5, 6]).numbers.tolist()
        (request,) = canary.session.ledger.known(["ann"])
        launched = [(run.substep.site, run.committed) for run in runs_of(canary.session.checks.captured.launched)]
        reads = canary.session.checks.captured.send(1).pending.structs[RUN.reads :: RUN.size].tolist()
        assert reads == [4, 5, 6]
        made[is_one_by_one] = truth, launched, request.in_flight, request.row_lens.tolist()
    assert made[True] == made[False]
    assert made[True][2] == 3


def test_a_step_that_landed_early_still_stops_the_engine(run):
    """Somebody needed to know (a page was freed): the error came there, and comes again for the step's own tokens."""
    late = run()
    pool = late.canary.session.state.by_name["target"]
    late.canary.begin_step(2)
    row = late.static_row(late.uid, [4, 5, 6, 7], TOKENS[3:4])
    pool.records[5, 1] ^= 1 << 40
    late.canary.registry.load(late.substeps["decode"], late.rig.batch([row]))
    late.rig.body(late.substeps["decode"])
    flight = late.canary.end_step()
    with pytest.raises(KVCorruptionError):
        late.canary.release("ann")
    assert flight.is_collected
    with pytest.raises(KVCorruptionError):
        late.canary.collect(flight)


def test_a_host_that_never_hears_overtakes_nothing(tree):
    """Where more steps are in flight than there are buffers, the oldest is learned of before its copy is lost."""
    tree.fired()
    tree.canary.commit("ann", 3)
    flights = []
    for number in range(2, 2 + MAX_IN_FLIGHT + 2):
        tokens = [99, 98] if number == 2 else TOKENS[3:5]
        tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
        tree.launch(number, tree.verify, [4, 5, 6, 7, 8], tokens, [-1, 0])
        flights.append(tree.canary.end_step())
    assert [flight.is_collected for flight in flights] == [True, True] + [False] * MAX_IN_FLIGHT
    assert tree.fired() == [("W6", ("verify", 0), 7)]
    assert tree.canary.certificate()["forwards"] == 1 + len(flights)


def test_steps_without_forwards_overtake_nothing_either(tree):
    """The host has memory for so many steps that have begun, whatever was launched in them."""
    tree.fired()
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], [99, 98])
    flight, last = tree.canary.end_step(), 2 + NUM_MESSAGES
    for number in range(3, last):
        tree.canary.begin_step(number)
        assert not flight.is_collected
    tree.launch(last, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    tree.canary.collect(flight)
    assert [(finding.code, finding.step, finding.slot) for finding in tree.canary.findings] == [("W6", 2, 7)]


def test_without_r9_nobody_is_noted_for_a_look_that_never_comes(run):
    """What waits for the next slice would grow with the requests near which something was found."""
    damaged = run(mode="log", disable=frozenset({"R9"}))
    damaged.canary.session.state.by_name["target"].records[5, 1] ^= 1 << 40
    damaged.step(2, 4, 1)
    assert [finding.code for finding in damaged.canary.findings] == ["R3"]
    assert not damaged.canary.session.checks.scrubber.hurried


def test_a_forward_that_is_only_expected_is_missed_beside_one_that_was_launched(tree):
    """Lines tell of launches; of what nobody has launched the headers must tell, that it has not run at all."""
    tree.fired()
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], TOKENS[3:5])
    tree.canary.registry.expect(tree.prefill, 1, 2, 5)
    assert tree.fired() == [("H1", ("prefill", 0), -1)]


def test_a_forward_of_which_nobody_was_told_is_h1(run):
    """A replay that neither a launch nor the registry has expected."""
    reported = run(mode="log")
    reported.canary.begin_step(2)
    reported.substeps["decode"].buffers.fill(
        reported.rig.batch([reported.static_row(reported.uid, [4, 5, 6, 7], TOKENS[3:4])])
    )
    reported.rig.body(reported.substeps["decode"])
    reported.canary.collect(reported.canary.end_step())
    expected, found = {"rows": 0, "entries": 0, "reads": 0}, {"rows": 1, "entries": 1, "reads": 4}
    assert [(one.code, one.expected, one.found) for one in reported.canary.findings] == [("H1", expected, found)]


@pytest.fixture
def sent(monkeypatch):
    """Of a registry, each time that all headers are sent."""

    def of(registry) -> list[None]:
        sent, send = [], registry._mailbox.send
        monkeypatch.setattr(registry._mailbox, "send", lambda: sent.append(None) or send())
        return sent

    return of


def test_a_registry_without_substeps_has_no_headers_to_send(make_static, sent):
    """Nobody copies them behind every step."""
    canary = CanaryManager(CanaryConfig(seed=7), [make_static().pool.view])
    copies = sent(canary.registry)
    canary.arm()
    for step in (1, 2):
        canary.begin_step(step)
        canary.end_step()
    assert not copies


def test_headers_are_sent_in_steps_that_need_them(tree, sent):
    """One whose forwards were launched is told of by their lines, whatever was expected before it."""
    tree.fired()
    tree.canary.commit("ann", 3)
    copies = sent(tree.canary.registry)
    tree.canary.begin_step(2)
    tree.canary.registry.expect(tree.prefill, 0, 0, 0)
    assert tree.fired() == []
    assert len(copies) == 1
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    tree.launch(3, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    assert tree.fired() == []
    assert len(copies) == 1


def test_what_departs_twice_in_a_step_lands_before_it_is_overtaken(tree):
    """With the step's other flight, be its own forwards none."""
    tree.fired()
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], TOKENS[3:5])
    flights = [tree.canary.end_step() for _ in range(2)]
    for number in range(3, 2 + NUM_MESSAGES):
        tree.canary.begin_step(number)
    assert [flight.is_collected for flight in flights] == [False, False]
    tree.canary.begin_step(2 + NUM_MESSAGES)
    assert [flight.is_collected for flight in flights] == [True, True]
