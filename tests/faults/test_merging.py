"""A record that takes in a later campaign of some faults."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvcanary.faults.target import Setup
from kvcanary_tools.campaign.outcome.matrix import rows_of, totals_of
from kvcanary_tools.campaign.outcome.merging import expect_whole, merged, rows_and_totals
from kvcanary_tools.campaign.outcome.report import as_json
from kvcanary_tools.campaign.runs import Result
from kvcanary_tools.campaign.traffic import CLEAN, FAULTY, Run


def campaign(*faults: str, seed: int = 1, configs: tuple[str, ...] = ("a", "b"), **meta) -> dict:
    runs = [Run(fault, config, Setup(), seed, FAULTY) for fault in faults for config in configs]
    results = [Result(run, struck=True, found=True, code="R9", expected="R9") for run in runs]
    results.append(Result(Run("", "a", Setup(), seed, CLEAN)))
    reported = {"config": "full", "complete": True, "cpu_seconds": 60, "seed": seed} | meta
    return as_json(rows_of(results), totals_of(results), results, **reported)


def test_rows_of_the_named_faults_are_replaced():
    """In their place, all of them, also those of a configuration in which nobody runs any more."""
    whole = merged(campaign("x", "y", "z"), campaign("y", "w", configs=("b", "c")))
    assert [(row["fault"], row["config"]) for row in whole["rows"]] == [
        *[("x", "a"), ("x", "b")],
        *[("y", "b"), ("y", "c")],
        *[("z", "a"), ("z", "b")],
        *[("w", "b"), ("w", "c")],
    ]
    assert [row["fault"] for row in whole["totals"]] == ["x", "y", "z", "w"]
    rows, totals = rows_and_totals(json.loads(json.dumps(whole)))
    assert [row.as_dict() for row in rows] == whole["rows"]
    assert [row.runs for row in totals] == [2, 2, 2, 2]


def test_an_older_record_takes_in_runs_that_did_not_end():
    """Its own rows did not count them; those that come in do, and the bars see it."""
    record, later = campaign("x"), campaign("y")
    for row in (*record["rows"], *record["totals"]):
        del row["not_ended"]
    for row in later["totals"]:
        row["not_ended"] = 3
    _, totals = rows_and_totals(json.loads(json.dumps(merged(record, later))))
    assert [row.not_ended for row in totals] == [0, 3]
    assert [row.is_right for row in totals] == [True, False]


def test_the_record_says_what_was_run_again():
    """With version, seed, runs and seconds; time and findings in twins are those of all that was run."""
    record, later = campaign("x", "y"), campaign("y", cpu_seconds=7, seed=3)
    later["meta"]["clean_findings"] = 1
    whole = merged(merged(record, later), campaign("x", cpu_seconds=1))
    assert [(one["faults"], one["cpu_seconds"], one["seed"]) for one in whole["meta"]["rerun"]] == [
        (["y"], 7, 3),
        (["x"], 1, 1),
    ]
    assert all(one["kvcanary"] == record["meta"]["kvcanary"] for one in whole["meta"]["rerun"])
    assert whole["meta"]["cpu_seconds"] == 68
    assert whole["meta"]["clean_findings"] == 1
    assert whole["meta"]["num_runs"] == {"faulty": 8, "clean": 3}
    assert "rerun" not in record["meta"]


@pytest.mark.parametrize("wrong", [{"complete": False}, {"config": "quick"}])
def test_only_a_whole_record_of_the_same_configurations_takes_others_in(wrong: dict):
    expect_whole(campaign("x"), "full")
    with pytest.raises(ValueError, match="a record must be complete and of config full"):
        expect_whole(campaign("x", **wrong), "full")


@pytest.mark.parametrize("other", [[], {"a": 1}, {"meta": {"complete": True}}, "text"], ids=str)
def test_what_is_no_record_is_refused_as_such(other):
    """Any other JSON: with a sentence, not by the first key that is missing."""
    with pytest.raises(ValueError, match="a record must be what kvcanary inject --json writes"):
        expect_whole(other, "full")


def test_results_are_not_shared_with_the_record():
    """A later run that is wrong makes the whole wrong."""
    bad = campaign("y")
    bad["totals"] = [row | {"found": 1} for row in bad["totals"]]
    _, totals = rows_and_totals(merged(campaign("x", "y"), bad))
    assert [row.is_right for row in totals] == [True, False]
    assert replace(totals[1], found=2).is_right
