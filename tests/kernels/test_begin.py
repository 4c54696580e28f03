"""New rows: what is true of them is written, and the chain of what they have comes from the tokens of the engine."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.record.layout import chain_host, make_keys, signed
from kvcanary_kernels.watch.begin import NEW_WIDTH, begin, begin_torch
from kvcanary_kernels.watch.walk import NOT_FOLLOWED, TAILS, Truth

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
    rows = [(4 - i, length, 1, ROOTS[i % 3], 100 + i, 7 + i, POISON) for i, length in enumerate(LENGTHS[:4])]
    new = torch.tensor([*rows, (ROWS, 3, 1, 1, 1, 1, 1), (-1, 3, 1, 1, 1, 1, 1)], device=device)
    act(new, truth, keys, tokens.to(device))
    for number, end, _, root, uid, turn, _ in rows:
        chain = [root, *chain_host(tokens[number, :end].tolist(), 0, root, keys)][-1]
        found = [int(values[number]) for values in (truth.ends, truth.known, truth.roots, truth.uids, truth.turns)]
        assert found == [end, 1, root, uid, turn]
        assert truth.tails[number].tolist() == [signed(chain), POISON, POISON]
    assert truth.lines[0].tolist() == [POISON] * (TAILS + 3)
    last = torch.tensor([[0, WIDTH, 1, -5, 7, 0, 1], [1, NOT_FOLLOWED, 1, 3, 8, 0, 2]], device=device)
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
    assert truth.tails[:, 0].tolist() == [6, POISON, POISON, 13, POISON]
    assert truth.ends.tolist() == [1, POISON, POISON, 8, POISON]
