"""States that are judged on the device, told of forwards that no program runs."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, StateView

PROMPT = list(range(5, 25))
FIRST = 3  # entry of the request, which has one for each of two nodes behind it


class Rig:
    """One request over states of two layers."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(8, 2, 4) for _ in range(2)]
        config = CanaryConfig(mode="log", content="full", seed=3)
        self.manager = CanaryManager(config, [StateView("linear", {"state": self.layers})])
        self.captured = self.manager.capture_states("linear", rows=2, nodes=2)
        self.manager.arm()
        self.manager.admit("a", PROMPT)
        self.captured.on_alloc("a", range(FIRST, FIRST + 3))
        self.steps = count(1)

    def forward(self, before: int, after: int) -> list[str]:
        """Go on from so many tokens to so many more; codes of what was found."""
        self.manager.begin_step(next(self.steps))
        self.captured.take("prefill", ["a"], [FIRST], [before])
        for layer in self.layers:
            layer[FIRST] += 1
        self.captured.leave("prefill", ["a"], [FIRST], [after])
        return [own.code for own in self.captured.violations(self.manager.registry.turn)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_prompt_in_chunks_is_clean(rig: Rig) -> None:
    assert [rig.forward(0, 8), rig.forward(8, 12), rig.forward(12, 20)] == [[]] * 3
    assert rig.manager.certificate()["states_checked"] == 3


@pytest.mark.parametrize(("behind", "found"), [(19, ["R4"]), (18, ["R4"]), (20, [])])
def test_a_row_goes_on_by_what_its_state_has_absorbed(rig: Rig, behind: int, found: list[str]) -> None:
    rig.forward(0, 20)
    assert rig.forward(behind, 20) == found


def test_a_state_whose_tokens_nobody_could_say_is_not_judged(rig: Rig) -> None:
    """It went on behind the tokens that are known; once these are told, all is judged again."""
    rig.forward(0, 20)
    assert rig.forward(20, 23) == []  # of tokens 21 to 23 nobody has told
    assert rig.forward(22, 23) == []  # so that nobody knows what lies there
    rig.manager.append_all(["a"], [[30, 31, 32]])
    assert rig.forward(23, 23) == []
    assert rig.forward(22, 23) == ["R4"]


def test_what_is_kept_counts(rig: Rig) -> None:
    """Of an entry two records, five numbers, and a fingerprint of each slice of each layer; beside all else."""
    manager, view = rig.manager, rig.captured.view
    assert rig.captured.num_bytes == 8 * view.num_entries * (2 * 8 + 5 + view.num_layers * view.num_slices)
    others = manager.session.state.num_bytes + manager.states["linear"].num_bytes
    assert manager.num_bytes == others + rig.captured.num_bytes
