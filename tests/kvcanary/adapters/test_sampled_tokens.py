"""A row goes on with the token that was sampled of it, whatever books an engine keeps of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary.adapters.observed.inputs import UNKNOWN, SampledTokens
from kvcanary.adapters.observed.state import RING
from kvcanary.report.causes.watched import FIRST_ENTRY

from .row_engine import RowEngine
from .test_inputs import told

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Sampling(RowEngine):
    """Looks at what its rows are fed, where an engine would between `read` and the forward."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device, prepares=False)
        self.own = SampledTokens(self.canary, 3)
        self.prepare()
        self.own.prepare(self.forward_of([], 0, [0]))
        self.own._next.fill_(77)  # of launches while nobody ran, nothing counts
        self.spoil = self._compare
        self.batch: list[int] = []

    def start(self, *numbers: int) -> None:
        """Rows of one to so many entries."""
        for number in numbers:
            self.begin(number, [])
        self.own.begun(numbers)
        self.go({number: [5] * (1 + place) for place, number in enumerate(numbers)})

    def go(self, batch: dict[int, list[int]]) -> None:
        self.batch = list(batch)
        self.step(batch)

    def sample(self, *tokens: int | Sequence[int], **how: Any) -> None:
        rows = [[token] if isinstance(token, int) else list(token) for token in tokens]
        self.own.sampled(torch.tensor(rows, dtype=torch.int32, device=self.device), **how)

    def _compare(self) -> None:
        self.own.compare(self.forward_of(self.batch, 0, [0]))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_go_on_with_what_was_sampled_are_silent(device: str) -> None:
    """Whatever their order in the batch; a row that waits a step, one that begins, and the last of several tokens."""
    engine = Sampling(device)
    engine.start(3, 0, 7)
    for turn in range(2 * RING):
        engine.sample(turn, turn + 40, turn + 80)
        engine.go({7: [turn + 80], 3: [turn]})
        engine.sample([1, turn + 20, UNKNOWN], [turn + 9, UNKNOWN, UNKNOWN])
        engine.go({3: [turn + 9], 0: [turn + 40, 1, 1], 7: [turn + 20]})
        if turn == 3:
            engine.end(0)
            engine.begin(0, [])
            engine.own.begun([0])
            engine.go({0: [9]})
            engine.sample(4)
            engine.go({3: [8], 0: [4], 7: [8]})
            break
    assert told(engine) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turns", [0, 4, RING])
def test_a_row_that_goes_on_with_another_token_is_told(device: str, turns: int) -> None:
    """W6 of that row alone, with both tokens, its place in the row, and whose token it is."""
    engine = Sampling(device)
    engine.start(3, 0, 7)
    for turn in range(turns):  # the third one from the launches of before, when they are captured
        engine.sample(turn, turn, turn)
        engine.go({3: [turn], 0: [turn], 7: [turn]})
    engine.sample(11, 12, 13)
    engine.go({7: [13, 1], 0: [13, 5], 3: [11]})
    [finding] = told(engine)
    assert (finding.code, finding.writer, finding.position) == ("W6", "r0", 2 + turns)
    assert (finding.expected, finding.found) == ({"token": 12}, {"token": 13})
    assert finding.slot == int(engine.table[0, (2 + turns) // 4]) * 4 + (2 + turns) % 4
    assert {FIRST_ENTRY, "that token was sampled of 'r7'"} <= set(finding.evidence)
    assert finding.causes[0].family == "order"
    assert engine.canary.coverage.fired == {"W6": 1}
    assert int(engine.canary.memory.total) == 1
    engine.go({7: [1], 0: [1], 3: [1]})  # nothing was sampled in between
    assert len(told(engine)) == 1


def test_a_step_that_is_not_compared_tells_nothing() -> None:
    """Its place among the last steps still holds what was told of an older one."""
    engine = Sampling()
    engine.start(3)
    engine.sample(11)
    engine.go({3: [12]})
    assert len(told(engine)) == 1
    engine.spoil = lambda: None
    for _ in range(RING):
        engine.go({3: [1]})
    told(engine)
    assert engine.canary.coverage.fired == {"W6": 1}


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_thrown_away_is_not_expected(device: str) -> None:
    """A prompt goes on, and what was sampled at the end of its chunk does not count; a row of no entry waits."""
    engine = Sampling(device)
    engine.start(3, 0)
    engine.sample(11, 12, are_kept=np.array([False, True]))
    engine.go({3: [6, 7], 0: []})
    assert told(engine) == []
    engine.sample(30, UNKNOWN)
    engine.go({3: [30]})
    assert told(engine) == []


def test_a_row_without_an_entry_still_waits_for_its_token() -> None:
    """It was in a forward that fed it nothing."""
    engine = Sampling()
    engine.start(3, 0)
    engine.sample(11, 12)
    engine.go({3: [11], 0: []})
    engine.go({0: [13]})
    [finding] = told(engine)
    assert (finding.writer, finding.expected) == ("r0", {"token": 12})


def test_only_words_are_uploaded() -> None:
    """Other values would be words on a GPU, and what they were on a CPU."""
    with pytest.raises(TypeError, match=r"must be of torch\.int64, got torch\.bool"):
        Sampling().canary.memory.upload(torch.tensor([True]))


def test_memory_is_counted() -> None:
    engine = Sampling()
    assert engine.canary.num_bytes - engine.canary.memory.num_bytes == engine.own.num_bytes > 0
