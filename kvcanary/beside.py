"""Beside: a stream on which operations run while a forward goes on, in a captured step a branch of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FIRST = -1  # a stream's priority


class Beside:
    """On a GPU a second stream, in whose order all runs that is launched `behind`; on a CPU all runs at once.

    It goes first where both want to start: its kernels are short, and would wait for the whole of a long one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=FIRST) if device.type == "cuda" else None
        self._is_ahead = False

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is launched within follows everything that was launched so far, there and here, and nobody waits."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._is_ahead = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from now on follows all that runs beside."""
        if self._is_ahead and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._is_ahead = False
