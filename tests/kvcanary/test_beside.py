"""SideStream: what runs there follows what was launched before it, and is followed by what comes after a join."""

from __future__ import annotations

import pytest
import torch

from kvcanary.records.side_stream import LAST, SideStream

CYCLES = 20_000_000  # about 10 ms


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param)


def slow_add(total: torch.Tensor, value: int) -> None:
    if total.is_cuda:
        torch.cuda._sleep(CYCLES)
    total.add_(value)


def test_order(device):
    """There after here, and here after all of it behind a join; a join without anything ahead is nothing."""
    side_stream, total = SideStream(device), torch.zeros(1, device=device)
    seen, joined = torch.zeros_like(total), torch.zeros_like(total)
    slow_add(total, 1)
    with side_stream.behind():
        slow_add(total, 10)
    with side_stream.behind():
        seen.copy_(total)
        slow_add(total, 100)
    side_stream.join()
    joined.copy_(total)
    side_stream.join()
    assert (seen.item(), joined.item()) == (11, 111)


def test_what_was_postponed_comes_in_its_order_and_so_much_at_a_time(device):
    """As evenly as those that share it can; the last of them brings all that is left, and nothing comes twice."""
    side_stream, seen = SideStream(device), []
    one, *others = (lambda name=name: seen.append(name) for name in "abcdefg")
    side_stream.defer("draft", one)
    side_stream.defer("draft", *others)
    shares = []
    for left in (3, 2, 1, 0):
        shares.append(side_stream.catch_up(among=left))
        assert side_stream.owes("draft") == (left > 1)
    assert (shares, "".join(seen)) == ([3, 2, 2, 0], "abcdefg")
    side_stream.defer("draft", one)
    side_stream.finish()
    assert "".join(seen) == "abcdefga"


@pytest.mark.gpu
def test_a_branch_of_a_graph():
    """The order is the graph's; a join before anything was launched beside does not break a capture."""
    side_stream, total = SideStream(torch.device("cuda")), torch.zeros(1, device="cuda")
    seen, graph = torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side_stream.join()
        slow_add(total, 1)
        with side_stream.behind():
            slow_add(total, 10)
        with side_stream.behind():
            seen[0].copy_(total[0])
            slow_add(total, 100)
        side_stream.join()
        seen[1].copy_(total[0])
    graph.replay()
    assert seen.tolist() == [11, 111]


@pytest.mark.gpu
def test_one_that_was_captured_goes_on():
    """What it has to follow is marked anew every time, in a capture and outside of it."""
    side_stream, total = SideStream(torch.device("cuda")), torch.zeros(1, device="cuda")
    seen, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()

    def run(number: int) -> None:
        slow_add(total, 1)
        with side_stream.behind():
            seen[number].copy_(total[0])
        side_stream.join()

    run(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(1)
    graph.replay()
    run(2)
    assert seen.tolist() == [1, 2, 3]


@pytest.mark.gpu
def test_memory_that_is_written_there_is_nobodys_before():
    """It is free here while something there is still to write into it: who asks for memory now gets other."""
    side_stream, kept = SideStream(torch.device("cuda"), LAST), torch.zeros(1 << 20, device="cuda")
    side_stream.keep(kept)
    with side_stream.behind():
        slow_add(kept, 1)
    address = kept.data_ptr()
    del kept
    assert torch.zeros(1 << 20, device="cuda").data_ptr() != address
