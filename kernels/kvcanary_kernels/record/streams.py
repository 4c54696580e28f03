"""Streams of a CUDA device by its number: torch looks many things up for a device that has none, at every call."""

from __future__ import annotations

from types import TracebackType

import torch

MOST_STREAMS = 256  # that are remembered; torch's own are fewer
_seen: dict[tuple[int, int], torch.cuda.Stream] = {}  # by number of the device and handle: a handle names one stream


def current(device: torch.device) -> torch.cuda.Stream:
    """Where this device is given what is launched now."""
    return _current(torch.cuda.current_device() if device.index is None else device.index)


class on:
    """What is launched within goes there, as with `torch.cuda.stream`."""

    __slots__ = ("_before", "_elsewhere", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        index = stream.device_index
        self._elsewhere = None if index == torch.cuda.current_device() else torch.cuda.stream(stream)
        if self._elsewhere is not None:
            self._elsewhere.__enter__()
            return
        self._before = _current(index)
        torch.cuda.set_stream(stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._elsewhere is None:
            torch.cuda.set_stream(self._before)
        else:
            self._elsewhere.__exit__(kind, error, trace)


def _current(index: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream`, which makes an object at every call; only its handle is asked for where that is
    known."""
    handle_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if handle_of is None or not torch.cuda.is_initialized():
        return torch.cuda.current_stream(index)
    key = index, handle_of(index)
    stream = _seen.get(key)
    if stream is None:
        if len(_seen) == MOST_STREAMS:
            _seen.clear()
        stream = _seen[key] = torch.cuda.current_stream(index)
    return stream
