"""Index arrays that the device builds: bit for bit the reference's, and what each row was meant to read."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary_kernels.engine.index import index_rows, index_rows_torch

POISON = -77
NUM_SLOTS = 1 << 20
both = pytest.mark.parametrize("operation", [index_rows, index_rows_torch], ids=["triton", "torch"])
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def build(operation, device, table, rows, prefixes, tails, tail_lens=None) -> tuple[list[int], list[int]]:
    """(kv_indptr, kv_indices) by this operation, from lists."""
    width = len(table[0]) + len(tails[0])
    indptr = torch.full((len(tails) + 1,), POISON, device=device)
    indices = torch.full((len(tails) * width + 3,), POISON, device=device)

    def ints(values):
        return None if values is None else torch.tensor(values, dtype=torch.int64, device=device)

    operation(
        ints(table),
        ints(rows),
        ints(prefixes),
        ints(tails),
        tail_lens=ints(tail_lens),
        num_slots=NUM_SLOTS,
        kv_indptr=indptr,
        kv_indices=indices,
    )
    return indptr.tolist(), indices.tolist()


def by_hand(table, rows, prefixes, tails, tail_lens) -> list[list[int]]:
    """What each row reads, by lists."""
    width = len(tails) // len(rows)
    own = [len(tails[0])] * len(tails) if tail_lens is None else tail_lens
    return [table[rows[r // width]][: prefixes[r // width]] + tails[r][: own[r]] for r in range(len(tails))]


@both
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("requests", "width", "columns", "max_tail"), [(1, 1, 5, 1), (3, 2, 300, 4), (130, 1, 7, 3)])
def test_rows_are_prefix_and_tail(operation, device, requests, width, columns, max_tail, is_ragged):
    """Kernel and reference agree with lists; what lies behind the last row keeps its poison."""
    chance = random.Random(requests)
    table = [[0] * columns, *([chance.randrange(1, NUM_SLOTS) for _ in range(columns)] for _ in range(requests))]
    rows = [chance.randrange(requests + 1) for _ in range(requests)]
    prefixes = [chance.choice([0, 1, columns, chance.randrange(columns)]) for _ in rows]
    tails = [[chance.randrange(NUM_SLOTS) for _ in range(max_tail)] for _ in range(requests * width)]
    tail_lens = [chance.randrange(max_tail + 1) for _ in tails] if is_ragged else None
    expected = by_hand(table, rows, prefixes, tails, tail_lens)
    flat = [slot for row in expected for slot in row]
    indptr, indices = build(operation, device, table, rows, prefixes, tails, tail_lens)
    assert indptr == [sum(map(len, expected[:r])) for r in range(len(tails) + 1)]
    assert indices == flat + [POISON] * (len(indices) - len(flat))


@both
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_out_of_range_is_cut(operation, device):
    """Lengths and slots that a damaged device holds cost a finding, and no address outside the arrays."""
    table = [[0, 0, 0], [7, NUM_SLOTS, -5]]
    indptr, indices = build(operation, device, table, [1, 9, 1], [2**40, 2, -3], [[8], [9], [2**50]], [1, 2**40, 1])
    assert indptr == [0, 4, 5, 6]
    assert indices[:6] == [7, 0, 0, 8, 9, 0]


def test_arguments_are_checked():
    """Arrays of other shapes are refused before anything is launched."""
    good = {"table": [[0, 0]], "rows": [0], "prefixes": [1], "tails": [[0]]}
    one, pair = torch.ones(1, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    short = {"num_slots": 4, "kv_indptr": pair, "kv_indices": pair}
    for operation in (index_rows, index_rows_torch):
        with pytest.raises(ValueError, match="tails must have as many rows for each of 2 requests, got 3"):
            build(operation, "cpu", **good | {"rows": [0, 0], "prefixes": [1, 1], "tails": [[0]] * 3})
        with pytest.raises(ValueError, match="prefix_lens must be contiguous \\[1\\] int64"):
            build(operation, "cpu", **good | {"prefixes": [1, 1]})
        with pytest.raises(ValueError, match="kv_indices must hold 3 entries, every row whole, got 2"):
            operation(pair[None], one[0], one[0], one, **short)
