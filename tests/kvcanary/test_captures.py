"""Captures, and what Python does meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from kvcanary.records.graph_cache import Replays
from kvcanary_kernels.record.capture import garbage_kept
from spec_engine.graphs.program import Recorder

CUDA = torch.device("cuda")


class Gone:
    """An engine that nobody has any more, with its graph: only the collector of garbage ends it."""

    def __init__(self) -> None:
        self.own, self.graph = self, torch.cuda.CUDAGraph()
        number = torch.zeros(1, device=CUDA)
        with torch.cuda.graph(self.graph):
            number += 1


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_kept_for_a_while(collects: bool) -> None:
    """And collected again behind it, also where that has failed, if it was before."""

    def fail() -> None:
        with garbage_kept():
            seen.append(gc.isenabled())
            raise ValueError

    before, seen = gc.isenabled(), list[bool]()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ValueError):
            fail()
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()


def replayed(launch: Callable[[], None]) -> None:
    """A look of a step: run, captured and replayed."""
    replays = Replays(CUDA)
    for _ in range(3):
        replays.run("own", launch)


def programmed(launch: Callable[[], None]) -> None:
    """A program of an engine: run, captured, and replayed twice."""
    run = Recorder(CUDA).record(launch)
    run()
    run()


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [replayed, programmed])
def test_the_end_of_an_older_graph_is_not_the_end_of_a_capture(capture: Callable[[Callable[[], None]], None]) -> None:
    """An engine that goes in the middle of one waits until the capture is over."""
    number, engines = torch.zeros(1, device=CUDA), [Gone() for _ in range(4)]

    def launch() -> None:
        if torch.cuda.is_current_stream_capturing():
            engines.clear()
            if gc.isenabled():  # then any object that is made may be the occasion
                gc.collect()
        number.add_(1)

    capture(launch)
    assert number.item() == 3
    assert not engines
