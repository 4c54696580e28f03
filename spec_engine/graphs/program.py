"""Programs: a body that runs over static buffers, again and again: captured on a GPU, called on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcanary_kernels.record.capture import garbage_kept

Body = Callable[[], None]
PRIORITY = -1  # of what is captured: before all that a host launches behind a step, which reads beside the next one


class Recorder:
    """Makes programs of bodies; all graphs share one memory pool, so only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._stream = torch.cuda.Stream(device, priority=PRIORITY) if self._is_cuda else None

    def record(self, body: Body) -> Body:
        """What runs the body from now on. It runs here too, over buffers without a live row."""
        if not self._is_cuda:
            body()
            return body
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body()  # compiles every kernel before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with garbage_kept(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            body()
        return graph.replay
