"""SGLang's recurrent states, without SGLang: what each has absorbed, whose it is, and its bytes, where it is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary.adapters.hosted.states import WatchedStates
from kvcanary.adapters.sglang.states import entries_of, views_of
from tests.support.watching_canary import found_in, watching_canary

ENTRIES, LAYERS = 8, 2


class MambaPool:
    """As SGLang's: a window and a matrix an entry, [layers, entries, ...]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = (LAYERS, ENTRIES, 16, 4), (LAYERS, ENTRIES, 2, 8, 8)
        conv, temporal = (torch.randn(shape, generator=generator) for shape in shapes)
        self.mamba_cache = SimpleNamespace(conv=[conv], temporal=temporal)

    def copy_from(self, sources: torch.Tensor, entries: torch.Tensor, layers: slice = slice(None)) -> None:
        for tensor in (*self.mamba_cache.conv, self.mamba_cache.temporal):
            tensor[layers, entries] = tensor[layers, sources]


class Rows:
    """Two requests in rows 0 and 1, whose states lie in entries 1 and 2."""

    def __init__(self) -> None:
        self.mamba_pool, self.index = MambaPool(), torch.tensor([1, 2])

    def get_mamba_indices(self, rows: torch.Tensor) -> torch.Tensor:
        return self.index[rows]

    def translate_mamba_indices(self, entries: torch.Tensor) -> torch.Tensor:
        return entries


class Host:
    """States and what stands for a canary; `forward` runs one over both rows, to so many tokens each."""

    def __init__(self, content: str = "full") -> None:
        self.canary = watching_canary(content)
        self.rows = Rows()
        self.states = WatchedStates(self.canary, *views_of(self.rows.mamba_pool, drafts=False))
        self.states.granted(torch.tensor([1, 2]))

    def forward(self, *ends: int, chains: tuple[int, int] = (100, 200)) -> list[tuple[str, str | None, int]]:
        """Each row's chain grows by its length; gives code, request and entry of what was found."""
        canary, truth = self.canary, self.canary.memory.truth
        canary.step += 1
        site = "decode", 0
        canary.steps.append(SimpleNamespace(events=canary.events, number=canary.step, requests=["a", "b"], site=site))
        canary.events, past = [], truth.ends.clone()
        canary.launches.read(site, 2)
        canary.launches.seeds[:, 0], canary.launches.seeds[:, 1] = torch.tensor(chains) + past, 1
        truth.ends[:] = torch.tensor(ends)
        truth.tails[:, 0] = torch.tensor(chains) + truth.ends
        lengths = truth.ends.clone()
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), (lengths - past).cumsum(0)))
        made: Any = SimpleNamespace(lengths=lengths, starts=starts, num_tokens=2, numbers=np.array([0, 1]))
        self.states.begin(made)
        self.states.taken_from(entries_of(self.rows, self.states.rows))
        for tensor in (*self.rows.mamba_pool.mamba_cache.conv, self.rows.mamba_pool.mamba_cache.temporal):
            tensor[:, self.rows.index] += 1
        self.states.left()
        return [(own.code, own.request_id, own.slot) for own in found_in(canary)]


@pytest.fixture(params=["full", "rolling"])
def host(request: pytest.FixtureRequest) -> Host:
    """Both rows have absorbed five and six tokens."""
    host = Host(request.param)
    assert host.forward(5, 6) == []
    return host


def test_states_that_go_on_are_silent(host: Host) -> None:
    """Whatever the forwards leave; every state that is taken is counted."""
    for more in range(1, 6):
        assert host.forward(5 + more, 6 + more) == []
    assert host.canary.coverage.states_checked == 12
    assert int(host.canary.memory.total) == 0


def test_changed_bytes_name_the_layers(host: Host) -> None:
    """R9 of every slice under `full`; under `rolling` of the one that was taken."""
    phase = int(host.states._states.phases[1])
    host.rows.mamba_pool.mamba_cache.conv[0][1, 1].view(-1)[phase] += 1
    assert host.forward(6, 7) == [("R9", "a", 1)]
    [found] = found_in(host.canary)
    assert found.layers == (1,)
    assert host.forward(7, 8) == []


def test_another_requests_state_is_told_by_its_owner(host: Host) -> None:
    """R8 of both, though they may have absorbed as many tokens."""
    host.rows.index = torch.tensor([2, 1])
    assert host.forward(6, 7) == [("R8", "a", 2), ("R8", "b", 1)]


def test_a_state_that_was_not_left_or_was_freed_is_told(host: Host) -> None:
    """R12 of one that was granted anew, R7 of one that nobody has; what was granted since is silent from length 0."""
    host.states.granted(torch.tensor([5]))
    host.states.freed(torch.tensor([2]))
    host.rows.index = torch.tensor([5, 2])
    assert host.forward(6, 7) == [("R12", "a", 5), ("R7", "b", 2)]
    host.canary.memory.truth.ends[:] = 0
    host.states.granted(torch.tensor([2]))
    host.states.cleared(torch.tensor([5]))
    assert host.forward(4, 4) == []


def test_a_copy_brings_what_its_source_has_absorbed(host: Host) -> None:
    """As of a prefix: the request that goes on from it has the same tokens; R4 where it has other ones in number, R6
    where it has as many of another prompt.
    """
    copy = torch.tensor([1]), torch.tensor([6])
    host.rows.mamba_pool.copy_from(*copy)
    host.states.copied(*copy)
    host.rows.index = torch.tensor([1, 6])
    host.canary.memory.truth.ends[1] = 5
    assert host.forward(6, 6, chains=(100, 100)) == []
    host.states.copied(*copy)
    assert host.forward(7, 7, chains=(100, 50)) == [("R6", "b", 6)]
    host.states.copied(*copy)
    host.canary.memory.truth.ends[1] = 9
    assert host.forward(8, 10, chains=(100, 100)) == [("R4", "b", 6)]


def test_a_copy_of_one_layer_less_is_told(host: Host) -> None:
    """T1 with the layer, before anybody takes it; whoever takes it then reads what arrived."""
    copy = torch.tensor([1]), torch.tensor([6])
    host.rows.mamba_pool.copy_from(*copy, layers=slice(0, 1))
    host.states.copied(*copy)
    [event] = host.canary.events
    [found] = event.violations(2)
    assert (found.code, found.slot, found.layers, found.site) == ("T1", 6, (1,), ("move", 0))
    assert int(host.canary.memory.total) == 1


def test_what_was_forgotten_is_trusted_as_it_lies(host: Host) -> None:
    """After a flush nothing is known of any entry, until a forward has left something there."""
    host.states.forget()
    host.rows.index = torch.tensor([3, 4])
    assert host.forward(6, 7) == []
    assert host.forward(7, 8) == []
    host.rows.mamba_pool.mamba_cache.temporal += 1
    assert [code for code, *_ in host.forward(8, 9)] == ["R9", "R9"]


def test_under_write_no_bytes_are_read() -> None:
    """Who has absorbed what is judged all the same."""
    host = Host("write")
    assert host.forward(5, 6) == []
    host.rows.mamba_pool.mamba_cache.temporal += 1
    assert host.forward(6, 7) == []
    host.rows.index = torch.tensor([2, 1])
    assert [code for code, *_ in host.forward(7, 8)] == ["R8", "R8"]
