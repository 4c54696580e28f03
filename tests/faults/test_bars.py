"""What a campaign must show, what it makes up for, and what its dumps are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from kvcanary.faults.target import Setup
from kvcanary_tools.campaign import dumps
from kvcanary_tools.campaign.configurations import EMBEDDED, QUICK, Plan, setup_for
from kvcanary_tools.campaign.outcome import report
from kvcanary_tools.campaign.outcome.bars import missed
from kvcanary_tools.campaign.outcome.matrix import Row, rows_of, totals_of
from kvcanary_tools.campaign.runner import runs_instead
from kvcanary_tools.campaign.runs import Result, find, perform
from kvcanary_tools.campaign.traffic import CLEAN, FAULTY, QUIET, Run
from kvcanary_tools.commands.dumps.replay import command as replay_command

PLAN = Plan({}, runs=4, quiet=1, disabled=0, embedded=2, is_measured=True)
CONFIGS = {"a": Setup(), EMBEDDED: Setup(model=EMBEDDED)}


def faulty(config: str, seed: int, **more) -> Result:
    run = Run("bits.flip", config, CONFIGS[config], seed, more.pop("kind", FAULTY))
    given = {"struck": True, "found": True, "code": "R9", "expected": "R9", "place_right": True, "rank": 1}
    return Result(run, **(given | more))


def right() -> list[Result]:
    quiet = faulty("a", 1, kind=QUIET, found=False, code="")
    return [faulty(config, seed) for config in CONFIGS for seed in (1, 3)] + [quiet]


def missed_by(results: list[Result], plan: Plan | None = PLAN) -> list[str]:
    return list(missed(rows_of(results), totals_of(results), plan))


def test_what_is_right_misses_nothing():
    assert missed_by(right()) == []


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"found": False}, "3 of 4 runs were found"),
        ({"place_right": False}, "the place is right in 3 of 4"),
        ({"writer_right": False}, "the writer is right in 0 of 1"),
        ({"leaked": 2}, "2 tokens leaked"),
        ({"late": True}, "1 were found too late"),
        ({"too_exposed": True}, "tokens were exposed in 1 runs"),
        ({"rank": 2}, "it is first in 3 of 4"),
        ({"rank": 0}, "it is among the first 3 in 3 of 4"),
    ],
)
def test_each_bar_is_told_with_its_fault(wrong, reported):
    """One line a fault and bar, with both numbers."""
    first, *others = right()
    assert any(line.startswith(f"bits.flip: {reported}") for line in missed_by([replace(first, **wrong), *others]))


def test_verdicts_and_counts_are_of_the_campaign_that_is_measured():
    """A few runs of one fault are not judged by how many there are."""
    first, *others = right()
    some = [replace(first, rank=2), *others[1:]]
    assert missed_by(some, None) == []
    assert {line.split(",")[0] for line in missed_by(some)} >= {"bits.flip: it struck in 3 runs"}


def test_too_few_runs_of_the_embedded_model():
    results = [*right()[:3], faulty("a", 5), faulty("a", 1, kind=QUIET, found=False, code="")]
    assert missed_by(results) == ["bits.flip: it struck in 1 runs of the embedded model, 2 are due"]


def test_an_idle_run_is_made_up_for_where_the_fault_could_be_made():
    """With a seed that nobody has had, and a clean twin of its own."""
    results = [faulty("a", 1), faulty("a", 3), faulty(EMBEDDED, 1, struck=False), faulty(EMBEDDED, 3, struck=False)]
    more = runs_instead(results, PLAN, None)
    assert [(run.fault, run.config, run.seed, run.kind) for run in more] == [
        ("", "a", 5, CLEAN),
        ("", "a", 7, CLEAN),
        ("bits.flip", "a", 5, FAULTY),
        ("bits.flip", "a", 7, FAULTY),
    ]
    assert runs_instead(right(), PLAN, None) == []


def test_the_embedded_model_has_its_own_due():
    """What it lacks is made up for there, where the whole campaign is wanted and the fault could be made there."""
    lacking = [*right()[:3], faulty(EMBEDDED, 3, struck=False), faulty("a", 5)]
    more = runs_instead(lacking, PLAN, None)
    assert [(run.config, run.seed) for run in more if run.kind == FAULTY] == [(EMBEDDED, 7)]
    assert runs_instead(lacking, PLAN, 4) == []
    never = [faulty("a", seed) for seed in (1, 3, 5, 7)] + [faulty(EMBEDDED, 1, struck=False)]
    assert runs_instead(never, PLAN, None) == []


def test_a_row_says_how_many_quiet_twins_were_made():
    [total] = totals_of(right())
    assert isinstance(total, Row)
    assert (total.quiet, total.twins) == (1, 1)


def test_dumps_are_explained_and_replayed(tmp_path):
    """The right cause first, and the same finding again; one that cannot be is told of."""
    name = "p4-k2-t3"
    for fault in ("bits.flip", "lifetime.freed_and_granted_while_read"):
        perform(Run(fault, name, setup_for(find(fault), QUICK[name]), 1, FAULTY, dumps=str(tmp_path)))
    scores = [dumps.score(path) for path in sorted(tmp_path.iterdir())]
    reported = dumps.as_json(scores)
    assert [row["fault"] for row in reported["rows"]] == ["bits.flip", "lifetime.freed_and_granted_while_read"]
    sums = {"faults": 2, "dumps": 2, "cause_first": 2, "cause_named": 2, "recorded": 2, "replayed": 2}
    assert reported["meta"] == sums | report.versions()
    assert list(dumps.missed(reported)) == []
    worse = dumps.as_json([replace(scores[0], rank=2, missing=("R9 at slot 1",)), *scores[1:]])
    assert len(list(dumps.missed(worse))) == 2
    assert [one["dump"] for one in worse["wrong"]] == [scores[0].dump]


def test_a_finding_in_a_state_is_not_replayed(tmp_path):
    """Recordings have no recurrent states: its dump is explained, counts apart, and `replay` says why."""
    fault, name = find("states.copy_left_out"), "p4-k2-t3"
    perform(Run(fault.name, name, setup_for(fault, QUICK[name]), 1, FAULTY, dumps=str(tmp_path)))
    [path] = tmp_path.iterdir()
    score = dumps.score(path)
    assert (score.rank, score.is_recorded, score.is_same) == (1, False, False)
    reported = dumps.as_json([score])
    assert (reported["meta"]["recorded"], reported["wrong"], list(dumps.missed(reported))) == (0, [], [])
    told = CliRunner().invoke(replay_command, [str(path)])
    assert told.exit_code == 3
    assert "NOT reached" in told.output
    assert "it comes from recurrent states, which are not recorded" in told.output


def test_a_fault_with_a_pool_of_its_own_leaves_no_dump(tmp_path):
    """What it breaks is not in the engine's recording."""
    fault = find("scales.reset")
    assert perform(Run(fault.name, "a", setup_for(fault, Setup()), 1, FAULTY, dumps=str(tmp_path))).found
    assert not list(tmp_path.iterdir())
