"""What workers of one model sampled is compared before it leaves, now or in a thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from structlog.testing import capture_logs

from kvcanary.adapters.hosted.output_gate import hold_back
from kvcanary.adapters.hosted.sampled import LEFT, SampledByRanks, levels_of
from kvcanary.ranks import Agreement, RanksDisagreeError


def given(*rows: list[int]) -> SimpleNamespace:
    return SimpleNamespace(req_ids=[f"r{n}" for n in range(len(rows))], sampled_token_ids=list(rows))


class OnItsWay:
    """The output of a step that is asked for later."""

    def __init__(self, result: SimpleNamespace) -> None:
        self.result, self.thread = result, ""

    def get_output(self) -> SimpleNamespace:
        self.thread = threading.current_thread().name
        return self.result


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def wrong(monkeypatch) -> None:
    """Another rank has other tokens in step 3."""

    class Other(Agreement):
        def _greatest(self, numbers, step):
            greatest = super()._greatest(numbers, step)
            return [number + (step == 3 and place == 2) for place, number in enumerate(greatest)]

    monkeypatch.setattr("kvcanary.adapters.hosted.sampled.Agreement", Other)


def test_a_difference_is_told_once(group, wrong) -> None:
    """In its step, and what comes behind it is compared no more."""
    told: list[RanksDisagreeError] = []
    sampled = SampledByRanks(group, told.append)
    for step in range(1, 6):
        sampled.compare(step, given([step], [7, 8]))
    assert [(error.step, error.level) for error in told] == [(3, "tokens")]


def test_who_tells_may_stop_the_step(group, wrong) -> None:
    """What is raised passes, so that the tokens do not leave."""

    def stop(error: RanksDisagreeError) -> None:
        raise RuntimeError(str(error))

    sampled = SampledByRanks(group, stop)
    output = OnItsWay(given([1]))
    hold_back(output, lambda result: sampled.compare(3, result))
    with pytest.raises(RuntimeError, match="ranks must have the same tokens in step 3"):
        output.get_output()


def test_an_output_that_nobody_takes_is_asked_for_in_a_thread(group, wrong) -> None:
    """In the order of the steps, and the step behind does not wait for it."""
    told, outputs, is_told = [], [OnItsWay(given([step])) for step in range(4)], threading.Event()
    sampled = SampledByRanks(group, lambda error: (told.append(error), is_told.set()))
    for step, output in enumerate(outputs):
        sampled.compare_later(step, output)
    assert is_told.wait(30)
    assert [error.step for error in told] == [3]
    assert {output.thread for output in outputs} == {"kvcanary ranks"}


def test_a_rank_that_stops_watching_is_no_difference(group, monkeypatch) -> None:
    """The others hear of it with their next step, tell it as an event, and compare no more."""

    class Left(Agreement):
        def check(self, step, levels, phase=0, number=None):
            if number == 2:
                raise RanksDisagreeError("ranks must have the same step", step=2, level="step", values=(2, LEFT))
            super().check(step, levels, phase, number)

    monkeypatch.setattr("kvcanary.adapters.hosted.sampled.Agreement", Left)
    told = []
    sampled = SampledByRanks(group, told.append)
    with capture_logs() as events:
        for step in (5, 6, 7):
            sampled.compare(step, given([step]))
    assert told == []
    assert [(event["event"], event["step"]) for event in events] == [("kvcanary.ranks_not_compared", 6)]


def test_a_token_of_that_number_is_a_difference(group, monkeypatch) -> None:
    """A rank whose token is -1 has not left."""

    class Marked(Agreement):
        def check(self, step, levels, phase=0, number=None):
            raise RanksDisagreeError("ranks must have the same tokens", step=1, level="tokens", values=(5, LEFT))

    monkeypatch.setattr("kvcanary.adapters.hosted.sampled.Agreement", Marked)
    told = []
    SampledByRanks(group, told.append).compare(1, given([5]))
    assert [error.level for error in told] == ["tokens"]


def test_who_leaves_compares_no_more(group) -> None:
    """It takes part once more, in a thread, and then nothing is compared."""
    told = []
    sampled = SampledByRanks(group, told.append)
    sampled.leave()
    sampled.leave()
    sampled.compare(1, given([1]))
    assert told == []
    assert sampled._number == 0


def test_rows_of_any_kind_are_compared_by_request() -> None:
    """Lists and arrays, steps without tokens, and a stage that samples nothing."""
    rows = levels_of(given([3], [4, 5]))["tokens"]
    assert rows.rows() == {"r0": [3], "r1": [4, 5]}
    assert rows.is_private
    arrays = SimpleNamespace(req_ids=["r0", "r1"], sampled_token_ids=[np.array([3]), np.array([4, 5])])
    assert levels_of(arrays)["tokens"].digest == rows.digest
    empty = SimpleNamespace(req_ids=["r0"], sampled_token_ids=[])
    assert levels_of(empty)["tokens"].digest == levels_of(None)["tokens"].digest != rows.digest
