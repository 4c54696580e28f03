"""The campaign, quick: every fault that is ready is found as it says, and its twins are silent."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import replace
from types import ModuleType
from xml.etree import ElementTree

import pytest

from kvcanary.dumps.reading import read_dump
from kvcanary.faults import catalogue
from kvcanary.faults.catalogue import faults
from kvcanary.faults.fault import Fault
from kvcanary.faults.strike import UNDECLARED, need
from kvcanary.faults.target import Setup
from kvcanary.replay.replayer import replay
from kvcanary_tools.campaign import runner, runs, traffic
from kvcanary_tools.campaign.configurations import FULL, PLANS, QUICK, Plan, setup_for
from kvcanary_tools.campaign.outcome.matrix import rows_of, totals_of
from kvcanary_tools.campaign.outcome.report import as_junit, failures, is_right, matrix_lines
from kvcanary_tools.campaign.runs import perform
from kvcanary_tools.campaign.switches import checks_of, switched_off
from kvcanary_tools.campaign.traffic import CLEAN, DISABLED, FAULTY, KINDS, QUIET, Run

NAME, SETUP = "p4-k2-t3", QUICK["p4-k2-t3"]
READY = [fault.name for fault in faults() if fault.state == "ready"]


@pytest.mark.parametrize("name", READY)
def test_every_fault_is_found_as_it_says(name):
    """In the quick configurations to which it applies: check, place, writer, in time, no leak, silent twins."""
    planned = runner.runs_of([catalogue.find(name)], PLANS["quick"], None, seed=1)
    results = list(runner.campaign(planned, workers=1))
    [total] = totals_of(results)
    assert total.is_right, "\n".join(failures(results))
    assert total.runs
    assert total.writer_right == total.writers


@pytest.mark.parametrize(
    ("name", "config", "seed"),
    [
        ("bits.two_sign_bits", "p4-k4-t5-paged", 1),  # struck where a move takes it along
        ("bits.flip", "p4-k4-t5-paged", 3),
        ("bits.flip", "p4-k2-t3-rolling", 3),  # found as one of several requests ends
        ("draft.compaction_lost", "p16-k2-t2-pressed", 3),
        ("draft.compaction_lost", "p1-k2-t2-batch64", 1),
        ("draft.position_off_by_one", "p1-k2-t2-batch64", 13),  # more entries than are told of
        ("draft.rewind_by_count", "p4-k2-t3-shared", 1),  # three prompts come between
        ("draft.state_not_restored", "p4-k2-t3-shared", 1),
        ("identity.plain_key", "p1-k1-t1", 35),
        ("lifetime.landed_in_a_free_page", "embedded", 1),  # pages of many layers wait for their poison
        ("uninitialised.nan_behind_the_row", "p4-k2-t3-rolling", 5),
        ("windows.untranslated", "p4-k2-t3-rolling", 3),
    ],
)
def test_what_a_full_campaign_has_to_get_right(name, config, seed):
    """Single runs of it that are unlike the others: found at the place, in time, and no token leaves."""
    plan = PLANS["full"]
    planned = runner.runs_of([catalogue.find(name)], plan, None, seed=1)
    [run] = [run for run in planned if (run.kind, run.config, run.seed) == (FAULTY, config, seed)]
    result = perform(run)
    assert is_right(result), (result.code, result.place_right, result.leaked, result.steps, result.text)
    assert result.struck or result.run.setup.content == "rolling"


def strike_with(monkeypatch, strike, kind: str = FAULTY, **more) -> runs.Result:
    """One run of a fault made up for the test."""
    fault = Fault("bits.made_up", "Made up.", more.pop("expected", "R9"), "everything", strike=strike, **more)
    monkeypatch.setattr(runs, "find", lambda name: fault)
    return perform(Run(fault.name, NAME, SETUP, 1, kind))


def flip(target, **reported) -> bool:
    """Flip a bit of the first entry of the first request, and say what `reported` says."""
    [reader, *_] = target.running()
    slot = int(reader.slots[0])
    target.pools["target"].k[0][slot].view(-1).mul_(-1)
    target.record(reported.pop("writer", UNDECLARED), **({"slot": slot, "layer": 0, "position": 0} | reported))
    return True


def test_a_fault_that_says_the_truth_is_right(monkeypatch):
    """Found by its check, at its place, in its step, before a token left."""
    result = strike_with(monkeypatch, flip)
    assert (result.struck, result.found, result.code, result.steps) == (True, True, "R9", 1)
    assert (result.place_right, result.writer_right) == (True, True)
    assert (result.leaked, result.exposed) == (0, 0)


@pytest.mark.parametrize("wrong", [{"slot": -5}, {"layer": 1}, {"position": frozenset({1, 2})}, {"reader": "nobody"}])
def test_a_wrong_place_is_seen(monkeypatch, wrong):
    """Each field that the fault states is compared."""
    result = strike_with(monkeypatch, lambda target: flip(target, **wrong))
    assert result.found
    assert result.place_right is False


def test_a_wrong_writer_is_seen(monkeypatch):
    """An undeclared write is nobody's."""
    assert strike_with(monkeypatch, lambda target: flip(target, writer="req-0")).writer_right is False


def test_a_fault_that_ends_otherwise_is_not_found(monkeypatch):
    """Another check than the expected one gets no credit."""
    result = strike_with(monkeypatch, flip, expected="R4")
    assert (result.found, result.code) == (False, "R9")


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_fault_that_strikes_nothing_is_untried(monkeypatch, is_raised):
    """It is asked again before each step, where it raises NotNow or gives False; it says nothing about the canary."""
    asked = []

    def not_now(target):
        asked.append(target.step)
        need(not is_raised)
        return False

    result = strike_with(monkeypatch, not_now)
    assert not result.struck
    assert len(asked) > 3
    assert asked == sorted(set(asked))
    [total] = totals_of([result])
    assert (total.runs, total.untried) == (0, 1)


def test_a_twin_that_alarms_is_not_quiet(monkeypatch):
    """A quiet fault that is found, or one whose due code is another, counts as a finding of the twin."""
    struck = {"strike": lambda target: True, "kind": QUIET}
    assert strike_with(monkeypatch, **struck, quiet=flip).found
    due = strike_with(monkeypatch, **struck, quiet=lambda target: flip(target, code="R9"))
    assert (due.found, due.expected) == (False, "R9")


def test_a_disabled_check_is_off(monkeypatch):
    """The check is in nobody's findings, whoever else finds the fault."""
    result = strike_with(monkeypatch, flip, kind=DISABLED)
    assert (result.struck, result.found) == (True, False)


def test_a_host_check_is_switched_off_where_it_is_called():
    """All functions that raise the error, wherever they were imported to, and back again."""
    from kvcanary import invariants
    from spec_engine.memory import request_table

    assert checks_of("RowOverflowError") == {"check_row_fits", "check_row_width"}
    before = request_table.check_row_fits
    with switched_off("RowOverflowError"):
        request_table.check_row_fits(1, 0, 99, 4, 4)
        invariants.check_row_fits(1, 0, 99, 4, 4)
    assert request_table.check_row_fits is before
    with pytest.raises(invariants.RowOverflowError):
        request_table.check_row_fits(1, 0, 99, 4, 4)


def test_what_is_imported_while_a_check_is_off_gets_it_back(monkeypatch):
    """A module that is imported meanwhile takes what does nothing: it must not keep it for the runs that follow."""
    from kvcanary import invariants

    name = "spec_engine.imported_meanwhile"
    with switched_off("RowOverflowError"):
        late = ModuleType(name)
        late.check_row_fits = invariants.check_row_fits
        monkeypatch.setitem(sys.modules, name, late)
        late.check_row_fits(1, 0, 99, 4, 4)
    with pytest.raises(invariants.RowOverflowError):
        late.check_row_fits(1, 0, 99, 4, 4)


def test_a_seed_is_a_run():
    """The same seed gives the same run, another one another."""
    run = Run("bits.flip", NAME, SETUP, 3)
    assert perform(run) == perform(run)
    assert perform(run).text != perform(replace(run, seed=5)).text


def test_workers_find_the_same(monkeypatch):
    """Two processes, the results of one."""
    monkeypatch.setattr(runner, "BATCH", 2)
    planned = runner.runs_of([catalogue.find("bits.zeroed_row")], PLANS["quick"], 1, seed=1)
    alone, together = list(runner.campaign(planned, 1)), list(runner.campaign(planned, 2))
    assert sorted(map(repr, together)) == sorted(map(repr, alone))


def test_what_a_campaign_runs():
    """Faulty runs go round the setups that apply, modes take turns, and a round has one seed, so that all faults share
    clean twins, one a setup and seed; needs are set; none pending.
    """
    wide = Fault("bits.wide", "s", "R9", "a", strike=flip, needs={"batch": 3}, applies=lambda setup: setup.topk > 1)
    pending = Fault("bits.later", "s", "R9", "a", reason="no beams")
    plan = Plan({"a": Setup(), "b": Setup(topk=1), "c": Setup(page_size=1)}, runs=4, quiet=1, disabled=2)
    planned = runner.runs_of([wide, pending], plan, None, seed=1)
    by_kind = {kind: [(run.config, run.seed) for run in planned if run.kind == kind] for kind in KINDS}
    assert by_kind == {
        FAULTY: [("a", 1), ("c", 1), ("a", 3), ("c", 3)],
        DISABLED: [("a", 1), ("c", 1)],
        QUIET: [],
        CLEAN: [("a", 1), ("c", 1), ("a", 3), ("c", 3)],
    }
    assert [run.mode for run in planned if run.kind == FAULTY] == ["raise", "abort", "abort", "raise"]
    assert [run.turn for run in planned if run.kind == FAULTY] == [0, 1, 2, 3]
    assert {run.setup.batch for run in planned} == {3}
    assert setup_for(wide, Setup(topk=1)) is None


def test_rows_are_by_configuration(monkeypatch):
    """The matrix of the JSON has a row a fault and configuration, with the twins of its own setup."""
    fault = catalogue.find("bits.flip")
    planned = runner.runs_of([fault], PLANS["quick"], 4, seed=1)
    rows = rows_of(runner.campaign(planned, 1))
    assert [(row.config, row.runs) for row in rows] == [
        ("p4-k2-t3", 2),
        ("p1-k4-t2-overlap", 1),
        ("p16-k1-t3-batch4", 1),
    ]
    assert all(row.is_right and row.twins for row in rows)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "0 ways"),
        ({"strike": flip, "perturb": flip}, "2 ways"),
        ({"strike": flip, "reason": "r"}, "pending and has 1 ways"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(more, message):
    """Ready with one way to be made, or pending with a reason."""
    with pytest.raises(ValueError, match=message):
        Fault("bits.made_up", "Made up.", "R9", "everything", **more)


def test_a_faulty_run_leaves_a_dump_that_reaches_its_finding(tmp_path):
    """With a folder for dumps one file, replayed to the same finding; a twin leaves none."""
    run = Run("addressing.pages_exchanged", NAME, SETUP, 1, dumps=str(tmp_path))
    assert perform(run).found
    perform(replace(run, kind=DISABLED))
    [path] = tmp_path.iterdir()
    assert path.name == f"addressing.pages_exchanged-{NAME}-1.kvdump"
    dump = read_dump(path)
    assert [finding["code"] for finding in dump.findings] == ["R4"]
    assert replay(dump).missing == []


@pytest.mark.parametrize("name", ["bits.flip", "addressing.keyed_by_position", "graphs.padding_on_a_live_slot"])
def test_traffic_goes_on_behind_a_finding(name):
    """Mode abort: the requests that a finding touches end without another token, the others go on to their end."""
    run = Run(name, NAME, SETUP, 1, mode="abort")
    played = traffic.play(run, catalogue.find(name))
    assert played.error is None
    assert played.findings
    assert played.num_steps > played.step
    assert 0 < len(played.ended) < len(played.tokens)
    result = perform(run)
    assert (result.found, result.place_right, result.leaked) == (True, True, 0)


def test_a_token_behind_the_end_is_a_leak():
    """Whoever a finding names must end in its step; of the others only what comes behind their own end counts."""
    run = Run("bits.flip", NAME, SETUP, 1, mode="abort")
    played = traffic.play(run, catalogue.find("bits.flip"))
    reader = played.findings[0].reader
    played.left.append((played.step, reader, (7, 8)))
    assert runs.judged(run, catalogue.find("bits.flip"), played).leaked == 2
    stopped = replace(run, mode="raise")
    assert runs.judged(stopped, catalogue.find("bits.flip"), played).leaked > 2


def test_tokens_may_be_exposed_where_bytes_are_read_in_turn():
    """Under rolling checks, and where the fault says so; else a single one is one too many."""
    fault, rolling = catalogue.find("bits.flip"), FULL["p4-k2-t3-rolling"]
    for setup, many in ((SETUP, True), (rolling, False)):
        run = Run("bits.flip", NAME, setup, 3)
        played = traffic.play(run, fault)
        played.strike = replace(played.strike, step=played.step - 1)
        result = runs.judged(run, fault, played)
        assert result.exposed > 0 or not played.findings[0].readers
        assert result.too_exposed == (many and result.exposed > 0)


def test_an_untried_run_in_which_something_fires_is_an_alarm(monkeypatch):
    """The fault never struck, and yet there is a finding: it counts like that of a clean twin."""
    run = Run("bits.flip", NAME, SETUP, 1)
    untried = runs.Result(run, struck=False, code="R9")
    assert not is_right(untried)
    assert totals_of([untried])[0].twin_findings == 1


def cut_short(monkeypatch, name: str, steps: int, **more) -> runs.Result:
    """One run of a fault that its cap ends after so many steps."""
    monkeypatch.setattr(traffic, "MOST_STEPS", steps)
    return perform(Run(name, NAME, setup_for(catalogue.find(name), SETUP), 1, **more))


@pytest.mark.parametrize(
    ("name", "steps", "more"),
    [
        ("lengths.worst_case_estimate", 90, {}),  # goes round for ever
        ("windows.window_on_a_global_layer", 4, {"mode": "abort"}),  # nothing is to be found
        ("bits.flip", 7, {"mode": "abort"}),  # found, and then the traffic goes on
    ],
)
def test_a_run_that_its_cap_ends_is_no_violation(monkeypatch, name, steps, more):
    """Whatever its entry says, and whatever spoke before: it has not ended, and matrix and report say so."""
    result = cut_short(monkeypatch, name, steps, **more)
    assert (result.not_ended, result.found, is_right(result)) == (True, False, False)
    assert result.text.startswith(f"not ended: cut after {steps - 1} steps, the last token left in step ")
    [total] = totals_of([result])
    assert total.not_ended == 1
    assert not total.is_right
    assert "1 runs and twins did not end" in [reported for reported, is_held in total.bars() if not is_held]
    assert "not ended" in next(failures([result]))
    [case] = ElementTree.fromstring(as_junit([total], [result])).iter("failure")
    assert (case.get("type"), "1 not ended" in case.get("message")) == ("not ended", True)
    head, line = matrix_lines([total])
    assert line[head.index("not ended") :].split()[0] == "1"


@pytest.mark.parametrize("kind", [CLEAN, QUIET])
def test_a_twin_that_its_cap_ends_is_not_clean(monkeypatch, kind):
    """It says nothing of what a longer run would find."""
    result = cut_short(monkeypatch, "bits.flip", 6, kind=kind)
    assert (result.not_ended, result.found, is_right(result)) == (True, False, False)


def test_without_its_check_a_run_may_go_on_for_ever(monkeypatch):
    """Nobody stops what only that check would: the switch works, and no bar is missed."""
    result = cut_short(monkeypatch, "lengths.worst_case_estimate", 300, kind=DISABLED)
    assert (result.struck, result.not_ended, result.found, is_right(result)) == (True, True, False, True)
    assert totals_of([result])[0].not_ended == 0


def test_every_worker_has_something_to_do(monkeypatch):
    """A few runs are shared out, in smaller parts than those of a whole campaign."""
    sizes = []

    class Pool:
        def __init__(self, workers, *settings):
            sizes.append(workers)

        def submit(self, perform_all, batch):
            sizes.append(len(batch))
            done = Future()
            done.set_result([])
            return done

        def shutdown(self, **settings): ...

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(runner, "perform", lambda run: run)
    list(runner.campaign([Run("", NAME, SETUP, seed) for seed in range(33)], workers=16))
    assert sizes == [16, *[2] * 16]


def test_an_interrupted_campaign_ends_its_workers():
    """Closing it drops what has not begun; every fault has come as far as the others."""
    planned = runner.runs_of(catalogue.faults()[:20], PLANS["full"], None, seed=1)
    own = [run.turn for run in planned if run.kind == FAULTY]
    assert own == sorted(own)
    coming = runner.campaign(planned[-40:], workers=2)
    next(coming)
    coming.close()
