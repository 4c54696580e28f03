"""Launches that are the same every time: captured into CUDA graphs, so that each costs the host one replay."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import cache

import torch

from kvcanary_kernels.record.capture import garbage_kept

MOST_GRAPHS = 96  # an engine whose buffers move all the time is launched one by one


class Replays:
    """Graphs by key; the first time a key comes its launches run as they are, and compile what they need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._graphs: dict[Hashable, Callable[[], None] | None] = {}
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None

    def run(self, key: Hashable, launch: Callable[[], None]) -> Callable[[], None] | None:
        """`launch()`, whose launches and addresses the key determines; gives what does the same again, if captured."""
        replay = self._graphs.get(key)
        if replay is None and key in self._graphs:
            replay = self._graphs[key] = replay_of(self._captured(launch), self._device)
        if replay is not None:
            replay()
            return replay
        if self._is_cuda and len(self._graphs) < MOST_GRAPHS:
            self._graphs[key] = None
        launch()
        return None

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), garbage_kept():
            graph.capture_begin(capture_error_mode="thread_local")  # other threads wait for events meanwhile
            try:
                launch()
            finally:
                graph.capture_end()
        return graph


def replay_of(graph: torch.cuda.CUDAGraph, device: torch.device) -> Callable[[], None]:
    """What launches a graph on the current stream: by the driver itself where that can be had, else as torch does.

    torch's own gives up the interpreter's lock and sets guards, which costs the host more than the launch; a graph of
    ours holds no random numbers, for which torch would have to do something. RuntimeError where the driver refuses.
    """
    launch, handle_of = _launch_graph(), getattr(graph, "raw_cuda_graph_exec", None)
    stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if launch is None or handle_of is None or stream_of is None:
        return graph.replay
    handle, index = handle_of(), torch.cuda.current_device() if device.index is None else device.index

    def replay(graph: torch.cuda.CUDAGraph = graph) -> None:  # which lives as long as this
        result = launch(handle, stream_of(index))
        if result:
            raise RuntimeError(f"cuGraphLaunch must give 0, got {result}: the driver refuses a graph of the canary")

    return replay


@cache
def _launch_graph() -> Callable[[int, int], int] | None:
    """`cuGraphLaunch(graph, stream)`, called without giving up the interpreter's lock; None without a driver."""
    try:
        launch = ctypes.PyDLL("libcuda.so.1").cuGraphLaunch
    except (OSError, AttributeError):
        return None
    launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return launch
