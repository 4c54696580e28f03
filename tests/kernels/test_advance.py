"""Rows behind steps that the host has not collected, from what these have accepted."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.judge.advance import BLOCK, advance, advance_torch
from kvcanary_kernels.record.layout import chain_host, make_keys, signed

KEYS = make_keys(3, 1, 4)
NUM_TABLE_ROWS, PLACES = 9, 3


@pytest.mark.parametrize("shift", [0, -1])
@pytest.mark.parametrize(("requests", "width"), [(0, 1), (1, 4), (5, 1), (BLOCK // 4 + 3, 4)])
@pytest.mark.parametrize("act", [advance, advance_torch], ids=["triton", "torch"])
def test_each_row_goes_on_by_what_its_seat_has_accepted(act, requests, width, shift, device) -> None:
    """By hand; rows that were heard stay, counts are cut to what there is, a row that there is not is row 0."""
    gen, rows = torch.Generator().manual_seed(requests), requests * width
    accepted = torch.randint(1, 1 << 31, (NUM_TABLE_ROWS, 1 + PLACES), generator=gen)
    accepted[:, 0] = torch.tensor([0, 1, 2, 3, 1, PLACES + 5, -2, 2, 3])
    table_rows = torch.randint(0, NUM_TABLE_ROWS, (requests,), generator=gen)
    table_rows[1:3] = torch.tensor([-1, NUM_TABLE_ROWS])[: len(table_rows[1:3])]
    uncollected = torch.randint(0, 2, (rows,), generator=gen)
    lens = torch.randint(-1, 500, (rows,), generator=gen)
    chains = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=gen)
    given = [tensor.to(device) for tensor in (accepted, table_rows, uncollected, lens, chains)]
    out = {name: torch.full((rows,), -77, device=device) for name in ("lens", "chains")}
    act(*given, width=width, shift=shift, keys=make_keys(3, 1, 4, device=device), **out)
    for row in range(rows):
        table_row = int(table_rows[row // width])
        count, *tokens = accepted[table_row if 0 <= table_row < NUM_TABLE_ROWS else 0].tolist()
        tokens = tokens[: max(count + shift, 0)] if uncollected[row] else []
        values = chain_host(tokens, int(lens[row]), int(chains[row]), KEYS)
        assert int(out["lens"][row]) == int(lens[row]) + len(tokens)
        assert int(out["chains"][row]) == signed(values[-1] if values else int(chains[row]))


@pytest.mark.parametrize("name", ["uncollected", "known_lens", "known_chains", "lens", "chains"])
@pytest.mark.parametrize("act", [advance, advance_torch], ids=["triton", "torch"])
def test_operands_of_other_shapes_are_refused(act, name: str) -> None:
    """With the shape that was given and the one that is due."""
    four, two = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rows = dict.fromkeys(("uncollected", "known_lens", "known_chains", "lens", "chains"), four)
    given = {
        "accepted": torch.zeros(3, 2, dtype=torch.int64),
        "table_rows": two,
        "width": 2,
        "shift": 0,
        "keys": KEYS,
    } | rows
    with pytest.raises(ValueError, match=rf"{name} must be contiguous \[4\] int64, got \[2\]"):
        act(**given | {name: two})
    with pytest.raises(
        ValueError, match=r"accepted must be contiguous \[num_table_rows, 1 \+ places\] int64, got \[4\]"
    ):
        act(**given | {"accepted": four})
