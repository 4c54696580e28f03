"""Streams: the one that a device is given work on, known by its handle."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcanary_kernels.record import streams
from kvcanary_kernels.record.streams import current, on


class Device:
    """Two devices whose current streams are numbers, and how often torch has made an object of one."""

    def __init__(self) -> None:
        self.index, self.handles, self.made = 0, [0, 0], 0

    def stream(self, index: int, handle: int) -> SimpleNamespace:
        return SimpleNamespace(device_index=index, cuda_stream=handle)

    def current_stream(self, index: int) -> SimpleNamespace:
        self.made += 1
        return self.stream(index, self.handles[index])

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.handles[stream.device_index] = stream.cuda_stream


@pytest.fixture
def device(monkeypatch) -> Device:
    one = Device()
    monkeypatch.setattr(streams, "_seen", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: one.index)
    monkeypatch.setattr(torch.cuda, "current_stream", one.current_stream)
    monkeypatch.setattr(torch.cuda, "set_stream", one.set_stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: one.handles[index], raising=False)
    return one


def test_a_stream_that_is_current_again_is_the_same_object(device: Device):
    """An object is made once a stream, whichever was current in between."""
    first = current(torch.device("cuda", 0))
    device.handles[0] = 7
    second = current(torch.device("cuda"))
    device.handles[0] = 0
    assert (first.cuda_stream, second.cuda_stream) == (0, 7)
    assert current(torch.device("cuda", 0)) is first
    assert device.made == 2


def test_equal_handles_of_two_devices_are_two_streams(device: Device):
    """Every device has a stream 0."""
    assert current(torch.device("cuda", 0)).device_index == 0
    assert current(torch.device("cuda", 1)).device_index == 1


def test_no_more_streams_are_kept_than_so_many(device: Device):
    """Handles that an engine makes anew all the time do not add up."""
    for handle in range(3 * streams.MOST_STREAMS):
        device.handles[0] = handle
        assert current(torch.device("cuda", 0)).cuda_stream == handle
    assert len(streams._seen) <= streams.MOST_STREAMS


def test_what_was_current_is_current_again(device: Device):
    """Also behind an error."""
    with on(device.stream(0, 5)):
        assert device.handles == [5, 0]
        with pytest.raises(KeyError), on(device.stream(0, 6)):
            raise KeyError(device.handles[0])
        assert device.handles == [5, 0]
    assert device.handles == [0, 0]


def test_another_device_is_left_to_torch(device: Device, monkeypatch):
    """Then the device changes too."""
    reported = []

    class Elsewhere:
        def __init__(self, stream: SimpleNamespace) -> None:
            reported.append(stream.cuda_stream)

        def __enter__(self) -> None:
            reported.append("in")

        def __exit__(self, *error: object) -> None:
            reported.append(error[0])

    monkeypatch.setattr(torch.cuda, "stream", Elsewhere)
    with on(device.stream(1, 5)):
        pass
    assert reported == [5, "in", None]


@pytest.mark.parametrize("is_there", [True, False])
def test_before_torch_knows_the_device_it_is_asked(device: Device, monkeypatch, is_there: bool):
    """So it is where a build has no handles."""
    if is_there:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    for _ in range(2):
        assert current(torch.device("cuda", 0)).cuda_stream == 0
    assert device.made == 2
