"""Streams of a CUDA device by its number: torch looks many things up for a device that has none, at every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def current(device: torch.device) -> torch.cuda.Stream:
    """Where this device is given what is launched now."""
    return torch.cuda.current_stream(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched within goes there, as with `torch.cuda.stream`."""
    index = stream.device_index
    if index != torch.cuda.current_device():
        with torch.cuda.stream(stream):
            yield
        return
    before = torch.cuda.current_stream(index)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)
