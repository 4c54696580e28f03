"""Launches that are the same every time: captured into CUDA graphs, so that each costs the host one replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from kvcanary_kernels.record.capture import garbage_kept

MOST_GRAPHS = 96  # an engine whose buffers move all the time is launched one by one


class Replays:
    """Graphs by key; the first time a key comes its launches run as they are, and compile what they need."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """`launch()`, whose launches and addresses the key determines."""
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs:
            graph = self._graphs[key] = self._captured(launch)
        if graph is not None:
            graph.replay()
            return
        if self._is_cuda and len(self._graphs) < MOST_GRAPHS:
            self._graphs[key] = None
        launch()

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), garbage_kept():
            graph.capture_begin(capture_error_mode="thread_local")  # other threads wait for events meanwhile
            try:
                launch()
            finally:
                graph.capture_end()
        return graph
