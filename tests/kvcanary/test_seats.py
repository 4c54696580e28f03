"""Rows behind a captured step that the host has not collected: truth on the device, and the books when it is judged."""

from __future__ import annotations

import re
from array import array
from ctypes import c_int64
from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, HookOrderError, PlanError, PoolView, ReadPlan, WritePlan
from kvcanary.captured.buffers import Batch, StaticBuffers
from kvcanary.captured.launch_group import runs_of
from kvcanary.dumps.reading import read_dump
from kvcanary.ledger.row_truth import RowTruth
from kvcanary.native.layout import ROWS, RUN, UNKNOWN
from kvcanary.replay.replayer import replay
from kvcanary_kernels.record.layout import chain_host, signed

PROMPT, PLACES = [50, 51, 52], 3
ACCEPTED = [60, 61]


class Ahead:
    """One request with three final entries in a draft's pool; each step's extend writes what a step has accepted."""

    def __init__(self, rig, *others: PoolView, **settings: object) -> None:
        """`others`: of pools with the same pages, in which nobody writes any more."""
        self.rig = rig
        views = [replace(rig.pool.view, token_offset=1), *others]
        self.canary = CanaryManager(CanaryConfig(seed=7, mode="log", **settings), views)
        self.accepted_tokens = self.canary.registry.add_accepted_tokens(4, PLACES)
        self.acceptance = self.accepted_tokens.add_acceptance(2, self.canary.registry.step)
        self.prefill, self.extend = (
            self.canary.registry.add("target", kind, 0, StaticBuffers.allocate(2, 4, 24, has_truths=True))
            for kind in ("prefill", "extend")
        )
        self.drafts = [
            self.canary.registry.add("target", "draft", number, StaticBuffers.allocate(2, 4, 24)) for number in range(2)
        ]
        self.canary.arm()
        self.canary.admit("ann", [*PROMPT, 53])
        self.canary.on_alloc("ann", [1, 2, 3])
        (self.request,) = self.canary.session.ledger.known(["ann"])
        self.length, self.tokens, self.step = 0, [*PROMPT, 53], 0
        self.begin()
        self.canary.launch(self.prefill, ["ann"], [3], 3)
        self.run(self.prefill, self.tokens[1:])
        self.canary.collect(self.canary.end_step())
        self.request.row_lens = [3] * len(views)
        self.canary.commit("ann", 3)

    def begin(self) -> None:
        self.step += 1
        self.canary.begin_step(self.step)

    def run(self, substep, tokens: list[int], truth=None) -> None:
        """A forward that writes these tokens behind the row, whatever the host knows of it."""
        end = self.length + len(tokens)
        is_known = truth is not None and not truth.uncollected[0]
        arrays = {"indptr": [0, end], "indices": range(4, 4 + end), "bounds": [0, len(tokens)]}
        arrays |= {"slots": range(4 + self.length, 4 + end), "tokens": tokens, "positions": range(self.length, end)}
        arrays |= {"prefix_lens": truth.prefix_lens if is_known else [UNKNOWN], "uids": [self.request.uid]}
        arrays |= {"truths": truth.truths if is_known else [0]}
        substep.buffers.fill(Batch(**{name: torch.tensor(list(values)) for name, values in arrays.items()}))
        self.rig.body(substep)
        self.length = end

    def launch(self, accepted: list[int], reported: list[int] | None = None, written: int | None = None):
        """A step that accepts tokens, and the extend that writes their entries."""
        self.begin()
        truth = self.canary.launch_accepted(self.extend, ["ann"], self.collected, self.acceptance)
        self.run(self.extend, [*accepted, 99][: len(accepted) if written is None else written], truth)
        reported = accepted if reported is None else reported
        row = torch.tensor([reported + [0] * (PLACES - len(reported)), [0] * PLACES])
        self.acceptance.record(torch.tensor([3, 0]), torch.tensor([len(reported), 0]), row)
        self.tokens += accepted
        return truth

    @property
    def collected(self) -> int:
        """The committed length that the engine has declared last."""
        request = self.request
        return request.uncollected[0].before if request.uncollected else request.committed_len

    def collect(self, flight, tokens: list[int], length: int) -> list[tuple[str, int]]:
        """What fired, by code and step, when the engine has collected the step of a step and says so."""
        self.canary.collect(flight)
        self.canary.append("ann", tokens)
        self.canary.commit("ann", length)
        self.canary.drain()
        return [(finding.code, finding.step) for finding in self.canary.findings]


@pytest.fixture
def ahead(make_static):
    return lambda **settings: Ahead(make_static(), **settings)


def test_truth_is_a_checkpoint_behind_which_the_device_goes_on(ahead):
    """Exact where all was heard; then the last length whose tokens are known, and a word that more lies behind it."""
    one = ahead()
    keys, root = one.canary.session.state.keys, one.request.root(0)

    def truth_of(length: int, uncollected: int):
        return (
            [one.request.uid],
            [length],
            [signed(chain_host(one.tokens[1 : 1 + length], 0, root, keys)[-1])],
            uncollected,
        )

    first = one.launch(ACCEPTED)
    assert (*first.numbers[:3].tolist(), first.uncollected[0]) == truth_of(3, 0)
    flight = one.canary.end_step()
    second = one.launch([62])
    assert (*second.numbers[:3].tolist(), second.uncollected[0]) == truth_of(3, 1)
    assert one.collect(flight, ACCEPTED, 5) == []


def test_books_go_on_when_the_step_is_judged(ahead):
    """By the device's word, in the step's own number; the engine says the same when it has collected the step."""
    one = ahead()
    one.launch(ACCEPTED)
    flight = one.canary.end_step()
    assert (one.request.committed_len, one.request.pending_acceptances, one.request.tokens.tolist()) == (
        3,
        1,
        [*PROMPT, 53],
    )
    one.canary.drain()
    reported = (
        one.request.committed_len,
        one.collected,
        one.request.pending_acceptances,
        one.request.tokens.tolist(),
    )
    assert reported == (5, 3, 0, [*PROMPT, 53, *ACCEPTED])
    assert (one.request.commit_step, one.request.growth[-1]) == (2, (2, 6))
    assert one.collect(flight, ACCEPTED, 5) == []
    assert (one.request.committed_len, one.collected) == (5, 5)


def test_a_step_that_landed_early_leaves_the_next_one_exact_truth(ahead):
    """Somebody needed to know: reads are told by what the engine has heard, truth by what the canary has."""
    one = ahead()
    one.launch(ACCEPTED)
    first = one.canary.end_step()
    one.canary.drain()
    truth = one.launch([62, 63, 64])
    assert (truth.prefix_lens, truth.uncollected) == ([5], [0])
    second = one.canary.end_step()
    assert one.collect(first, ACCEPTED, 5) == []
    assert one.collect(second, [62, 63, 64], 8) == []
    assert one.canary.certificate()["unchecked"] == {}


@pytest.mark.parametrize(("tokens", "length", "codes"), [([60, 61], 6, ["H1"]), ([60, 99], 5, ["R6"])])
def test_an_engine_that_says_something_else(ahead, tokens, length, codes):
    """Another length is H1 at once; another token is what the device has to be fed with next."""
    one = ahead()
    one.launch(ACCEPTED)
    one.collect(one.canary.end_step(), tokens, length)
    one.launch([62])
    one.canary.collect(one.canary.end_step())
    assert [finding.code for finding in one.canary.findings] == codes


@pytest.mark.parametrize("written", [1, 3])
def test_an_extend_that_writes_another_number(ahead, written):
    """H1, whose numbers are those of what was accepted."""
    one = ahead()
    one.launch(ACCEPTED, written=written)
    one.canary.collect(one.canary.end_step())
    found = [(finding.expected, finding.found) for finding in one.canary.findings if finding.code == "H1"]
    assert found == [
        ({"rows": 1, "entries": 2, "reads": 5}, {"rows": 1, "entries": written, "reads": 3 + written}),
    ]


def test_what_a_step_accepts_and_nobody_wrote(make_static):
    """H1 when the host collects it, in that step's number; the engine's word adds none."""
    one = Ahead(make_static(), replace(make_static().pool.view, name="other"))
    one.launch(ACCEPTED)
    assert one.collect(one.canary.end_step(), ACCEPTED, 5) == [("H1", 2)]
    (last,) = one.canary.findings
    assert (last.pool, last.expected, last.found) == ("other", {"entries": 5}, {"entries": 3})


def test_a_forward_that_the_host_judges_hears_first(ahead):
    """What it must be fed with is known then."""
    one = ahead()
    one.launch(ACCEPTED)
    one.canary.end_step()
    assert one.request.pending_acceptances == 1
    ints = partial(torch.tensor, dtype=torch.int64)
    read = ReadPlan(ints([0, 6]), torch.arange(4, 10), ("ann",), 1, ints([5]), 1)
    one.canary.forward("decode", 0, "target").open(read, WritePlan(ints([9]), ints([99]), ints([5])))
    assert (one.request.pending_acceptances, one.request.committed_len) == (0, 5)


def test_pages_go_back_with_a_step_in_the_air(ahead):
    """It lands first; what the engine never told of it is nobody's."""
    one = ahead()
    one.launch(ACCEPTED)
    flight = one.canary.end_step()
    one.canary.release("ann", 3)
    one.canary.on_free("ann", [1, 2, 3])
    one.canary.collect(flight)
    assert "ann" not in one.canary.session.ledger.requests
    assert one.canary.findings == []


def test_a_recording_is_followed_through_steps_that_nobody_had_collected_of(ahead, tmp_path):
    """From its beginning, and from a segment that begins with one in flight."""
    one, flights = ahead(ring=2), []
    for number in range(5):
        one.launch([70 + number])
        flights.append(one.canary.end_step())
        if len(flights) > 1:
            assert one.collect(flights.pop(0), [69 + number], 3 + number) == []
    dump = read_dump(one.canary.dump(tmp_path / "ahead.kvdump"))
    assert dump.manifest["seats"] == [4, PLACES]
    assert any(request.get("unheard") for request in dump.now)
    outcome = replay(dump)
    assert (outcome.findings, outcome.missing, outcome.errors) == ([], [], [])


def test_hooks_come_in_their_order(ahead):
    """Seats before the canary is armed, truth only where there are some."""
    one = ahead()
    with pytest.raises(HookOrderError, match=r"add_accepted_tokens\(\) must come before arm\(\)"):
        one.canary.registry.add_accepted_tokens(2, 2)
    one.canary.registry.accepted_tokens = None
    with pytest.raises(HookOrderError, match=r"add_truth\(\) must follow add_accepted_tokens\(\)"):
        one.canary.registry.add_truth("target", torch.zeros(1, dtype=torch.int64))


def test_what_a_step_accepts_is_written_by_one_forward(ahead):
    """Two would each bring the books on by it; how it must be is said before anything is booked."""
    one = ahead()
    one.begin()
    with pytest.raises(PlanError, match="must be written by one forward, got 2"):
        one.canary.launch_all(one.drafts, ["ann"], None, [3, 3], one.acceptance)
    with pytest.raises(PlanError, match="one kind and pool, got extend of the target pool, prefill of the target pool"):
        one.canary.launch_all([one.extend, one.prefill], ["ann"], [1], [3, 3])
    with pytest.raises(PlanError, match="one kind and pool, got none"):
        one.canary.launch_all([], ["ann"], [1], [])
    one.canary.collect(one.canary.end_step())
    assert one.canary.findings == []


def test_parts_are_launched_as_if_each_were_by_itself(ahead, monkeypatch):
    """Drafts, a forward of another kind, and one over what is accepted: truth, books, runs, the recording, and under
    `full` what is asked to be read.
    """
    made = {}
    for is_together in (False, True):
        one, asked = ahead(content="full"), []
        one.launch(ACCEPTED)
        one.canary.end_step()
        one.begin()
        canary, registry = one.canary, one.canary.registry
        monkeypatch.setattr(
            canary.session.checks, "read_all", lambda substeps, *reported, own=asked: own.append([*substeps])
        )
        if is_together:
            launch_group = registry.launch_group(one.drafts, [one.prefill], [one.extend], acceptance=one.acceptance)
            spread = [array("q", bytes(8 * 6 * width)) for width in (1, 2, 1)]
            places = [
                array("q", (own.buffer_info()[0], own.buffer_info()[0] + 8, width, 5, width))
                for own, width in zip(spread, (1, 2, 1), strict=True)
            ]
            where = array("q", [place.buffer_info()[0] for place in places])
            rows = canary.launch_group(launch_group, ["ann"], [1, 2], [4, 5, 6, 3], where.buffer_info()[0])
            size = ROWS.size + 1
            truths = [RowTruth(rows[part * size : (part + 1) * size], registry.now) for part in range(3)]
            for own, truth, width in zip(spread, truths, (1, 2, 1), strict=True):
                numbers = [number for number in truth.numbers.ravel().tolist() for _ in range(width)]
                assert own[: 1 + 5 * width].tolist() == [registry.now, *numbers]
        else:
            truths = [
                canary.launch_all(one.drafts, ["ann"], [1], [4, 5]),
                canary.launch(one.prefill, ["ann"], [2], 6),
                canary.launch_accepted(one.extend, ["ann"], 3, one.acceptance),
            ]
        static = canary.session.checks.captured
        runs = [
            (run.substep.site, run.written and run.written.tolist(), run.committed, run.accepted is None, run.turn)
            for run in runs_of(static.launched)
        ]
        events = [event for event in canary.recorder.segments[-1].events if event[0] == "launch"]
        reported = [launched.launches[number] for _, launched, number in events[-4:]]
        recorded = [(launch.number, [*launch.written], launch.reads) for launch in reported]
        sent = static.send(one.step)
        structs = sent.pending.structs
        lines = [structs[field :: RUN.size].tolist() for field in (RUN.reads, RUN.places, RUN.keep, RUN.step, RUN.turn)]
        groups = [len(list(own)) for _, own in groupby(structs[RUN.rows :: RUN.size])]
        written = [at and c_int64.from_address(at).value for at in structs[RUN.written :: RUN.size]]
        sites = [[substep.site for substep in part] for part in asked]
        struct = (
            one.request.in_flight,
            one.request.pending_acceptances,
            one.request.row_lens.tolist(),
            static.num_pending_acceptances,
        )
        numbers = [truth.numbers.tolist() for truth in truths]
        made[is_together] = numbers, runs, recorded, lines, groups, written, struct, sites
    assert made[True] == made[False]
    assert made[True][4:6] == ([2, 1, 1], [1, 1, 2, 0])
    assert made[True][7] == [[("draft", 0), ("draft", 1)], [("prefill", 0)], [("extend", 0)]]
    one.canary.launch_group(launch_group, ["ann"], [1, 2, 3], [4, 5, 6, 3])
    (code, words), *others = what_was_found(one.canary)
    assert (code, others) == ("L1", [])
    assert re.search(r"of 4 forwards and of 1 requests in each of 2 parts, .* got 4 and 3: give", words)


def what_was_found(canary: CanaryManager) -> list[tuple[str, str]]:
    """Code and sentence of every finding, those of this step too."""
    canary.collect(canary.end_step())
    return [(finding.code, finding.sentence) for finding in canary.findings]


@pytest.mark.parametrize(
    ("written", "reads", "got"),
    [
        ([1], [3], "1 and 1"),
        ([1], [3] * 3, "3 and 1"),
        ([], [3, 3], "2 and 0"),
    ],
)
def test_what_is_launched_has_a_number_each(ahead, written, reads, got):
    """Of every forward and of every request; in mode log it is launched all the same, and one finding says so."""
    one = ahead()
    one.begin()
    one.canary.launch_all(one.drafts, ["ann"], written, reads)
    (code, words), *others = what_was_found(one.canary)
    assert (code, others) == ("L1", [])
    assert re.search(f"a number for each of 2 forwards and of 1 requests, .* got {got}: give", words)


def test_what_is_accepted_belongs_to_one_forward(ahead):
    """Numbers are left out where a step says what it accepts, and nowhere else; nothing is launched else."""
    one = ahead()
    one.begin()
    with pytest.raises(PlanError, match=r"a number for each of 2 forwards and of 1 requests, .* got 2 and None: give"):
        one.canary.launch_all(one.drafts, ["ann"], None, [3, 3])
    assert what_was_found(one.canary) == []


def test_a_host_that_is_two_steps_behind_hears_before_it_launches(ahead):
    """The device goes on by one step alone: what nobody has asked for lands, and the truth is exact."""
    one = ahead()
    one.launch(ACCEPTED)
    one.canary.end_step()
    one.launch([62])
    one.canary.end_step()
    assert one.canary.session.checks.captured.num_pending_acceptances == 2
    truth = one.launch([63])
    assert (truth.prefix_lens, truth.uncollected) == ([6], [0])
    assert one.canary.certificate()["unchecked"] == {}
    one.canary.collect(one.canary.end_step())
    assert one.canary.session.checks.captured.num_pending_acceptances == 0


def test_truth_that_nobody_knows_is_counted_for_each_forward(ahead):
    """Where the device cannot go on by what a step accepts, nor the host."""
    one = ahead()
    one.canary.registry.max_pending_acceptances = 0
    one.launch(ACCEPTED)
    truth = one.canary.launch_all(one.drafts, ["ann"], [1], [4, 5])
    assert truth.prefix_lens == [UNKNOWN]
    assert one.canary.certificate()["unchecked"] == {"truth not known to the host": 2}
