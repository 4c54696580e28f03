"""New rows: what is true of them is written, and the chain of what they have comes from the tokens of the engine."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.record.layout import chain_host, make_keys, signed
from kvcanary_kernels.watch.begin import NEW_WIDTH, Told, begin, begin_torch
from kvcanary_kernels.watch.walk import NO_VIOLATION, NOT_FOLLOWED, TAILS, Truth

POISON, ROWS, WIDTH = -77, 5, 300
ROOTS = [9, -5, 1 << 62]
LENGTHS = [0, 1, 128, 129, WIDTH]


def truth_of(device: str) -> Truth:
    return Truth(torch.full((ROWS, TAILS + 3), POISON, device=device))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("act", [begin, begin_torch], ids=["triton", "torch"])
def test_begin_follows_the_tokens_that_the_engine_knows(act, dtype: torch.dtype, device: str) -> None:
    """By an oracle that adds token after token; the chain of the host is not read, padding is written nowhere."""
    keys, truth = make_keys(11, 1, 1, device), truth_of(device)
    tokens = torch.randint(0, 32000, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = [(4 - i, length, 1, ROOTS[i % 3], 100 + i, 7 + i, POISON, 0, 0) for i, length in enumerate(LENGTHS[:4])]
    new = torch.tensor([*rows, (ROWS, 3, *[1] * 7), (-1, 3, *[1] * 7)], device=device)
    act(new, truth, keys, tokens.to(device))
    for number, end, _, root, uid, turn, *_ in rows:
        chain = [root, *chain_host(tokens[number, :end].tolist(), 0, root, keys)][-1]
        found = [int(values[number]) for values in (truth.ends, truth.known, truth.roots, truth.uids, truth.turns)]
        assert found == [end, 1, root, uid, turn]
        assert truth.tails[number].tolist() == [signed(chain), POISON, POISON]
    assert truth.lines[0].tolist() == [POISON] * (TAILS + 3)
    last = torch.tensor([[0, WIDTH, 1, -5, 7, 0, 1, 0, 0], [1, NOT_FOLLOWED, 1, 3, 8, 0, 2, 0, 0]], device=device)
    act(last, truth, keys, tokens.to(device))
    assert int(truth.tails[0, 0]) == signed(chain_host(tokens[0].tolist(), 0, -5, keys)[-1])
    assert (int(truth.ends[1]), int(truth.tails[1, 0])) == (NOT_FOLLOWED, 3)


@pytest.mark.parametrize("act", [begin, begin_torch], ids=["triton", "torch"])
def test_begin_takes_the_chain_that_it_is_given(act, device: str) -> None:
    """Where nobody has the tokens on the device."""
    truth = truth_of(device)
    new = torch.arange(2 * NEW_WIDTH, device=device).view(2, NEW_WIDTH)
    new[1, 0] = 3
    act(new, truth, make_keys(11, 1, 1, device))
    assert truth.tails[:, 0].tolist() == [6, POISON, POISON, 6 + NEW_WIDTH, POISON]
    assert truth.ends.tolist() == [1, POISON, POISON, 1 + NEW_WIDTH, POISON]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("act", [begin, begin_torch], ids=["triton", "torch"])
def test_begin_compares_what_the_engine_keeps(act, dtype: torch.dtype, device: str) -> None:
    """From each row's first token to its last, which the host may hold; a row of none, and padding, are not asked."""
    generator = torch.Generator().manual_seed(2)
    width, places = 2500, {0: None, 1: 0, 2: 1023, 3: 1024, 4: 2499}
    kept = torch.randint(0, 32000, (ROWS, width), generator=generator)
    told = torch.cat((torch.full((7,), POISON), kept.flatten()))  # rows begin at any place
    counts = [1, width, 1024, 1025, width]
    for row, place in places.items():
        if place is not None:
            told[row * width + place + 7 :][:1] += 1
    told[1 * width + 9 + 7] += 1  # only the first is told
    told[2 * width + 1024 + 7] += 1  # behind what is asked
    if device == "cuda":
        told = told.pin_memory()
    new = [(row, 0, 1, 5, 6, 7, 8, row * width + 7, counts[row]) for row in places]
    new += [(ROWS, 0, 1, 5, 6, 7, 8, 0, 9), (-1, 0, 1, 5, 6, 7, 8, 0, 9)]
    keys, truth, now = make_keys(11, 1, 1, device), truth_of(device), torch.tensor([0, 0, 0, 0, 2], device=device)
    cells = torch.full((4, 3, ROWS), NO_VIOLATION, device=device)
    asked = Told(told, now, cells[:, 1], torch.tensor([40], device=device))
    act(torch.tensor(new, device=device), truth, keys, kept.to(device, dtype), asked)
    wanted = torch.full((4, 3, ROWS), NO_VIOLATION)
    wanted[2, 1] = torch.tensor([NO_VIOLATION if place is None else place for place in places.values()])
    assert torch.equal(cells.cpu(), wanted)
    assert int(asked.total) == 44
    assert truth.tails[:, 0].tolist() == [5] * ROWS
    new = [(row, 0, 1, 5, 6, 7, 8, row * width + 7, 0) for row in places]
    act(torch.tensor(new, device=device), truth, keys, kept.to(device, dtype), asked)
    assert int(asked.total) == 44
