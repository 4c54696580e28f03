"""Static substeps of a manager: what a replay finds on the device stops the engine like any other finding."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, HookOrderError, KVCorruptionError, PlanError
from kvcanary.buffers import StaticBuffers
from kvcanary.cards import RUN_CARD, RUN_READS
from kvcanary.dumps.reading import read_dump
from kvcanary.dumps.replaying import Replayer, replay
from kvcanary.learning import runs_of
from kvcanary.outbox import IN_THE_AIR, LINES
from kvcanary.pages import STATE_NAMES
from kvcanary.replay import StaticReplay
from kvcanary_kernels import record
from kvcanary_kernels.record import signed

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


@pytest.mark.parametrize("reads", [0, 1])
def test_a_forward_that_was_launched_and_did_not_run_as_told_is_h1(make_static, reads):
    """Its header comes with the step's own numbers: no row, no entry, or another number of entries that rows read."""
    rig = make_static()
    canary = CanaryManager(CanaryConfig(seed=7, mode="log"), [rig.pool.view])
    draft = canary.bank.add("target", "draft", 0, StaticBuffers.allocate(2, 4, 16))
    canary.arm()
    canary.admit("ann", TOKENS[:4])
    canary.on_alloc("ann", [1, 2])
    canary.begin_step(1)
    canary.launch(draft, ["ann"], [0], reads)
    canary.check()
    expected, found = {"rows": 1, "entries": 0, "reads": reads}, {"rows": 0, "entries": 0, "reads": 0}
    assert [(finding.code, finding.expected, finding.found) for finding in canary.findings] == [("H1", expected, found)]


def test_substeps_are_added_before_arm(run):
    """H2: what comes after arm() was never captured."""
    late = run()
    with pytest.raises(Exception, match="add\\(\\) must come before arm\\(\\): decode of the target pool is late"):
        late.canary.bank.add("target", "decode", 0, StaticBuffers.allocate(8, 8, 8))


def test_a_device_is_told_of_pages_before_what_runs_next(run, monkeypatch):
    """In one delta list, however often something has happened to pages; in none where nothing has."""
    told: list[int] = []
    one = run()
    state = one.canary._state
    publish = state.pools[0].loops.publish_pages
    monkeypatch.setattr(
        state.pools[0].loops, "publish_pages", lambda *args: (told.append(len(args[0])), publish(*args))
    )
    one.canary.on_alloc("ann", [3])
    one.canary.on_alloc("ann", [4])
    assert told == []
    one.step(2, 4, 1)
    assert len(told) == 1
    assert state.page_states[3:5].tolist() == [record.RESERVED] * 2
    one.step(3, 5, 1)
    assert len(told) == 1


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


class Tree:
    """One request whose prefill and verify are launched substeps: a chain of two nodes behind three entries."""

    def __init__(self, rig, static_row, **settings: object) -> None:
        self.rig, self.static_row = rig, static_row
        self.canary = CanaryManager(CanaryConfig(seed=7, mode="log", **settings), [rig.pool.view])
        self.mask = torch.zeros(2, 2, 2, dtype=torch.bool)
        self.prefill, self.verify = (
            self.canary.bank.add("target", kind, 0, StaticBuffers.allocate(2, 4, 16, **own), **settings)
            for kind, own, settings in (
                ("prefill", {}, {}),
                ("verify", {"is_tree": True}, {"max_depth": 2, "tree_mask": self.mask}),
            )
        )
        self.move = self.canary.bank.add_move("target", 2)
        self.canary.arm()
        self.canary.admit("ann", TOKENS[:4])
        self.canary.on_alloc("ann", [1, 2])
        self.uid = self.canary.requests_of(["ann"])[0].uid

    def launch(self, number: int, substep, ids: list[int], tokens: list[int], parents: list[int] | None = None):
        """A forward of these entries; what the host gave for its row."""
        self.canary.begin_step(number)
        truth = self.canary.launch(substep, ["ann"], [len(tokens)], len(ids))
        substep.buffers.fill(self.rig.batch([self.static_row(self.uid, ids, tokens, parents)]))
        self.rig.body(substep)
        return truth

    def fired(self) -> list[tuple[str, tuple[str, int], int]]:
        self.canary.check()
        return [(finding.code, finding.site, finding.slot) for finding in self.canary.findings]


@pytest.fixture
def tree(make_static, static_row) -> Tree:
    made = Tree(make_static(), static_row)
    truth = made.launch(1, made.prefill, [4, 5, 6], TOKENS[:3])
    assert (truth.uids, truth.prefix_lens, truth.truths) == ([made.uid], [0], [signed(made.verify.pool.root)])
    return made


def verify(tree: Tree, sees: list[list[int]], tokens: list[int] = TOKENS[3:5]) -> None:
    tree.mask[0] = torch.tensor(sees).bool()
    tree.launch(2, tree.verify, [4, 5, 6, 7, 8], tokens, [-1, 0])


def test_the_host_learns_what_launched_forwards_have_written(tree):
    """Rows may be committed, their pages are written, and forwards are counted as eager ones are."""
    assert tree.fired() == []
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]])
    assert tree.fired() == []
    request = tree.canary.requests_of(["ann"])[0]
    assert request.row_lens.tolist() == [5]
    assert [STATE_NAMES[state] for state in tree.canary._ledger.states[[1, 2]]] == ["WRITTEN", "WRITTEN"]
    certificate = tree.canary.certificate()
    assert [certificate[name] for name in ("forwards", "slots_checked", "slots_sealed")] == [2, 8, 5]


def test_a_commit_waits_for_no_forward(tree):
    """Between launch and check too; pages are final when the host has learned that they were written."""
    pages = tree.canary._ledger.states
    tree.canary.commit("ann", 3)
    assert (len(tree.canary._static.launched), STATE_NAMES[pages[1]]) == (1, "RESERVED")
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
        tree.canary.bank.add_move("target", 2)
    with pytest.raises(PlanError, match="pool must be one of target, got 'draft'"):
        make_static().bank.add_move("draft", 2)


def test_a_launch_needs_a_bank(make_engine):
    """H2: a manager whose bank nobody asked for has captured nothing."""
    with pytest.raises(HookOrderError, match="launch\\(\\) needs substeps of this manager's bank, got None"):
        make_engine().canary.launch(None, [], [], 0)
    with pytest.raises(HookOrderError, match="launch_move\\(\\) needs a move of this manager's bank"):
        make_engine().canary.launch_move(None)


def damage_a_record(tree: Tree) -> None:
    tree.verify.pool.records[5, record.CHAIN] ^= 1 << 40


def damage_a_fingerprint(tree: Tree) -> None:
    tree.verify.pool.content_a[0, 5] ^= 1


def clear_a_record(tree: Tree) -> None:
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
        pool.records[:, [record.STEP_SITE]] for pool in (tree.verify.pool, replayer.manager._state.pools[0])
    )
    assert torch.equal(ours, theirs)


def strike(
    tree: Tree,
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


# a host that hears later


def test_what_departed_is_judged_when_it_is_heard(tree):
    """From its own copies, whatever the buffers hold by then, and only that step."""
    tree.fired()
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], [99, 98])
    first = tree.canary.depart()
    tree.launch(3, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    second = tree.canary.depart()
    assert (tree.canary.findings, first.has_landed, second.has_landed) == ([], False, False)
    tree.canary.hear(first)
    assert [(finding.code, finding.step, finding.slot) for finding in tree.canary.findings] == [("W6", 2, 7)]
    assert (first.has_landed, second.has_landed) == (True, False)
    tree.canary.hear(second)
    assert len(tree.canary.findings) == 1


def test_forwards_behind_each_other_are_launched_with_one_truth(make_static):
    """The same as launched one by one: what each is expected to run, and who is in the air how often."""
    made = {}
    for is_one_by_one in (True, False):
        rig = make_static()
        canary = CanaryManager(CanaryConfig(seed=7), [rig.pool.view])
        drafts = [canary.bank.add("target", "draft", n, StaticBuffers.allocate(2, 4, 16)) for n in range(3)]
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
        (request,) = canary.requests_of(["ann"])
        launched = [(run.substep.site, run.committed) for run in runs_of(canary._static.launched)]
        reads = canary._static.send(1).snapshot.cards[RUN_READS::RUN_CARD].tolist()
        assert reads == [4, 5, 6]
        made[is_one_by_one] = truth, launched, request.in_the_air, request.row_lens.tolist()
    assert made[True] == made[False]
    assert made[True][2] == 3


def test_a_step_that_landed_early_still_stops_the_engine(run):
    """Somebody needed to know (a page was freed): the error came there, and comes again for the step's own tokens."""
    late = run()
    pool = late.canary._state.by_name["target"]
    late.canary.begin_step(2)
    row = late.static_row(late.uid, [4, 5, 6, 7], TOKENS[3:4])
    pool.records[5, 1] ^= 1 << 40
    late.canary.bank.load(late.substeps["decode"], late.rig.batch([row]))
    late.rig.body(late.substeps["decode"])
    flight = late.canary.depart()
    with pytest.raises(KVCorruptionError):
        late.canary.release("ann")
    assert flight.has_landed
    with pytest.raises(KVCorruptionError):
        late.canary.hear(flight)


def test_a_host_that_never_hears_overtakes_nothing(tree):
    """Where more steps are in the air than there are buffers, the oldest is learned of before its copy is lost."""
    tree.fired()
    tree.canary.commit("ann", 3)
    flights = []
    for number in range(2, 2 + IN_THE_AIR + 2):
        tokens = [99, 98] if number == 2 else TOKENS[3:5]
        tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
        tree.launch(number, tree.verify, [4, 5, 6, 7, 8], tokens, [-1, 0])
        flights.append(tree.canary.depart())
    assert [flight.has_landed for flight in flights] == [True, True] + [False] * IN_THE_AIR
    assert tree.fired() == [("W6", ("verify", 0), 7)]
    assert tree.canary.certificate()["forwards"] == 1 + len(flights)


def test_steps_without_forwards_overtake_nothing_either(tree):
    """The host has memory for so many steps that have begun, whatever was launched in them."""
    tree.fired()
    tree.canary.commit("ann", 3)
    verify(tree, [[1, 0], [1, 1]], [99, 98])
    flight, last = tree.canary.depart(), 2 + LINES
    for number in range(3, last):
        tree.canary.begin_step(number)
        assert not flight.has_landed
    tree.launch(last, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    tree.canary.hear(flight)
    assert [(finding.code, finding.step, finding.slot) for finding in tree.canary.findings] == [("W6", 2, 7)]


def test_without_r9_nobody_is_noted_for_a_look_that_never_comes(run):
    """What waits for the next slice would grow with the requests near which something was found."""
    damaged = run(mode="log", disable=frozenset({"R9"}))
    damaged.canary._state.by_name["target"].records[5, 1] ^= 1 << 40
    damaged.step(2, 4, 1)
    assert [finding.code for finding in damaged.canary.findings] == ["R3"]
    assert not damaged.canary._checks.sweeper.hurried


def test_a_step_that_did_not_run_says_nothing(tree, tmp_path):
    """H1, with counts of nothing: what an earlier run has left in memory of the host is no word of this one."""
    tree.fired()
    tree.canary.commit("ann", 3)
    for number in range(2, 2 + LINES):
        tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
        tree.launch(number, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
        tree.canary.launch_move(tree.move)  # of nothing that has arrived
        tree.move.record(torch.tensor([8, 0]), torch.tensor([7, 0]), torch.tensor([number == 2, False]))
        tree.canary.check()
    told = [finding.code for finding in tree.canary.findings]
    assert told == ["T1"]
    tree.canary.begin_step(2 + LINES)
    tree.canary.launch(tree.verify, ["ann"], [2], 5)
    tree.canary.launch_move(tree.move)
    tree.canary.check()
    (finding,) = tree.canary.findings[len(told) :]
    planned = {"rows": 1, "entries": 2, "reads": 5}
    assert (finding.code, finding.expected, finding.found) == ("H1", planned, dict.fromkeys(planned, 0))
    certificate = tree.canary.certificate()
    assert (certificate["forwards"], certificate["slots_sealed"]) == (1 + LINES, 3 + 2 * LINES)
    tree.launch(3 + LINES, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    tree.canary.check()
    assert len(tree.canary.findings) == len(told) + 1
    assert read_dump(tree.canary.dump(tmp_path / "idle.kvdump")).manifest["first_step"] <= 1


def test_a_segment_that_begins_in_the_air_hears_first(make_static, static_row, tmp_path):
    """Once in half a ring the host waits for what is in the air, so that the recording can be followed from there."""
    tree = Tree(make_static(), static_row, ring=2)
    tree.launch(1, tree.prefill, [4, 5, 6], TOKENS[:3])
    tree.fired()
    tree.canary.commit("ann", 3)
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    tree.launch(2, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
    flights = [tree.canary.depart()]
    for number in range(3, 7):
        tree.launch(number, tree.verify, [4, 5, 6, 7, 8], TOKENS[3:5], [-1, 0])
        flights.append(tree.canary.depart())
        tree.canary.hear(flights.pop(0))
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
    told, noticed = [], tree.canary.recorder.captured.noticed
    monkeypatch.setattr(tree.canary.recorder.captured, "noticed", lambda hit: (told.append(hit), noticed(hit)))
    tree.canary.check()
    assert sorted((hit.slot, hit.is_exact) for hit in told if hit.code == "R12") == [(9, True), (10, True)]


def test_places_of_an_earlier_run_are_its_first(tree, monkeypatch):
    """Two runs read a slot each that nobody has written: what the later one left is no place of the earlier one."""
    tree.canary.commit("ann", 3)
    tree.mask[0] = torch.tensor([[1, 0], [1, 1]]).bool()
    told, noticed = [], tree.canary.recorder.captured.noticed
    monkeypatch.setattr(tree.canary.recorder.captured, "noticed", lambda hit: (told.append(hit), noticed(hit)))
    flights = []
    for step, row in ((2, [4, 9, 6, 7, 8]), (3, [4, 5, 10, 7, 8])):
        tree.launch(step, tree.verify, row, TOKENS[3:5], [-1, 0])
        flights.append(tree.canary.depart())
    for flight in flights:
        tree.canary.hear(flight)
    read = [(hit.step, hit.slot, hit.is_exact) for hit in told if hit.code == "R12"]
    assert read == [(2, 9, True), (2, 10, False), (3, 10, True)]
