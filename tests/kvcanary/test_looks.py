"""Looks that travel with a step: each has its answer there, and nobody waits for one before."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvcanary.beside import LAST, Beside
from kvcanary.hits import Hit
from kvcanary.looks import MOST_LOOKS, Looks, Sent
from kvcanary.outbox import IN_THE_AIR, Outbox

CPU = torch.device("cpu")


def judge(number: int, judged: list[int]) -> list[Hit]:
    judged.append(number)
    return []


def test_as_many_looks_as_a_batch_has_requests_go_with_one_step():
    """Each answer lies in its own place, and those alone are judged that differ, once the step is heard."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    num_looks, differing = 300, {0, 17, 299}
    for number in range(num_looks):
        mismatch = torch.tensor([[0, 0], [0, int(number in differing)]])
        assert looks.ask(mismatch, partial(judge, number, judged)) == []
    assert (looks.waits, judged) == (True, [])
    sent = looks.send()
    assert sent is not None
    sent.hits()
    assert (looks.waits, set(judged)) == (False, differing)


def test_a_step_that_finds_nothing_forgets_what_the_last_one_found():
    """Places are taken again from the first on, whatever lay there."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    for number, mismatch in enumerate((torch.ones(1, 2), torch.zeros(1, 2))):
        looks.ask(mismatch.long(), partial(judge, number, judged))
        sent = looks.send()
        assert sent is not None
        sent.hits()
    assert judged == [0]


def test_looks_behind_the_last_place_are_judged_at_once():
    """Nothing is skipped where a step has more of them than places."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    for number in range(MOST_LOOKS + 1):
        looks.ask(torch.ones(1, 2, dtype=torch.int64), partial(judge, number, judged))
    assert judged == [MOST_LOOKS]


def asked(looks: Looks, differs: bool, number: int, judged: list[int], device: torch.device = CPU) -> None:
    looks.ask(torch.full((1, 2), int(differs), device=device), partial(judge, number, judged))


def sent_of(looks: Looks) -> Sent:
    sent = looks.send()
    assert sent is not None
    return sent


@pytest.mark.parametrize("differing", range(IN_THE_AIR + 1))
def test_answers_stay_until_the_step_is_heard(monkeypatch, differing):
    """Copies go beside later steps: what is asked for meanwhile lies elsewhere."""
    looks, judged, copies = Looks(CPU, at_once=False), list[int](), []

    def late(outbox: Outbox):
        buffer, numbers = outbox._buffers[0]
        copies.append(partial(buffer.copy_, outbox.device))
        return numbers

    monkeypatch.setattr(Outbox, "send", late)
    flights = []
    for number in range(IN_THE_AIR):
        asked(looks, number == differing, number, judged)
        flights.append(sent_of(looks))
    asked(looks, differing == IN_THE_AIR, IN_THE_AIR, judged)
    flights.append(sent_of(looks))
    for copy in copies:
        copy()
    for sent in flights:
        sent.hits()
    assert judged == [differing]


@pytest.mark.gpu
@pytest.mark.parametrize("differing", [0, 1])
def test_the_next_step_asks_before_the_last_one_is_answered(differing):
    """A page is granted, and its poison looked at, while bytes of the step before are still being read beside it."""
    device, judged = torch.device("cuda"), list[int]()
    looks, beside = Looks(device, at_once=False), Beside(device, LAST)
    with beside.behind():
        torch.cuda._sleep(20_000_000)
        asked(looks, differing == 0, 0, judged, device)
        first = sent_of(looks)
    asked(looks, differing == 1, 1, judged, device)
    with beside.behind():
        second = sent_of(looks)
    torch.cuda.synchronize()
    for sent in (first, second):
        sent.hits()
    assert judged == [differing]
