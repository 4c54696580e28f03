"""What is known of a forward's states: kernels and references give equal bits, over poisoned room."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary.pools.launch_site import pack_site
from kvcanary.pools.state_views import StateView
from kvcanary_kernels.engine.copies import copy_entries, copy_entries_torch
from kvcanary_kernels.record.layout import COLUMNS, make_keys
from kvcanary_kernels.watch.state_rows import (
    describe,
    describe_torch,
    follow,
    follow_torch,
    note_left,
    note_left_torch,
    rows_of,
)
from kvcanary_kernels.watch.states import States, taken_of

POISON, RING, LAYERS, ENTRIES, SLOTS = -77, 8, 3, 30, 40
VERIFY, MOVE = pack_site("verify", 0), pack_site("move", 0)


class Drawn:
    """Numbers of a forward, drawn by a seed."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def states(self, content: str) -> States:
        view = StateView("states", {"matrix": list(torch.randn(LAYERS, ENTRIES, 6, device=self.device))})
        keys, count = make_keys(5, LAYERS, view.slices.words_per_row, self.device), view.num_slices
        tables = self(-3, 9, 3, ENTRIES), self(0, 99, ENTRIES), self(0, count, ENTRIES)
        compared = {"write": 0, "rolling": 1, "full": count}[content]
        return States(view.slices, keys, *tables, self(0, 99, LAYERS, ENTRIES * count), count, compared, 4, MOVE)


def equal(kernels: list[Tensor], references: list[Tensor]) -> bool:
    return all(torch.equal(*both) for both in zip(kernels, references, strict=True))


@pytest.mark.parametrize("n", [1, 5, 130])
def test_rows_are_described(device: str, n: int) -> None:
    """Lengths that the canary does not know are the engine's, and their chains are not compared."""

    def run(operation) -> list[Tensor]:
        drawn, own = Drawn(n, device), rows_of(n, VERIFY, torch.device(device))
        own.truth.lines.fill_(POISON), own.seeds.fill_(POISON), own.rows.lengths.fill_(POISON)
        known, judged = drawn(-1, 4, n), drawn(0, 9, 1)
        told = {"step": drawn(0, 1 << 60, 1), "live": drawn(0, n + 1, 1), "entries": drawn(0, ENTRIES, n)}
        told |= {"lens": drawn(0, 9, n), "known": known, "chains": drawn(0, 99, n), "uids": drawn(1, 9, n)}
        operation(own, **told, judged=judged, ring=RING)
        wanted = torch.where(known >= 0, known, told["lens"])
        assert torch.equal(own.rows.lengths, wanted + 1)
        assert torch.equal(own.seeds[:, 1] != 0, (known > 0))
        return [own.now, own.rows.table, own.rows.lengths, own.truth.lines, own.seeds, judged]

    assert equal(run(describe), run(describe_torch))


@pytest.mark.parametrize(("rows", "new"), [(1, 1), (5, 1), (4, 7), (70, 3)])
def test_what_a_forward_leaves_is_noted(device: str, rows: int, new: int) -> None:
    """Chains are those of the records at the tokens' slots; a slot that no pool has is cut to one."""

    def run(operation) -> list[Tensor]:
        drawn, n = Drawn(rows + new, device), rows * new
        taken = taken_of(drawn.states("rolling"), 1, n)
        taken.left.fill_(POISON)
        told = {"live": drawn(0, rows + 1, 1), "entries": drawn(-1, ENTRIES, n), "slots": drawn(-1, SLOTS + 1, n)}
        told |= {"positions": drawn(0, 99, n), "uids": drawn(1, 9, rows), "records": drawn(0, 999, SLOTS, COLUMNS)}
        operation(taken, **told)
        return [taken.left]

    assert equal(run(note_left), run(note_left_torch))


@pytest.mark.parametrize("content", ["write", "rolling", "full"])
def test_what_is_known_follows_copies(device: str, content: str) -> None:
    """All that was known of the source is known of the entry, and when it was copied; -1 is no entry."""

    def run(operation) -> list[Tensor]:
        drawn = Drawn(3, device)
        states, places = drawn.states(content), torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(1))
        sources, entries = places[:6].to(device), places[6:12].to(device)
        entries[2] = -1
        operation(states, sources, entries, drawn(0, 1 << 40, 6), site=MOVE)
        return list(states[2:6])

    assert equal(run(follow), run(follow_torch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_entries_are_copied(device: str, size: int, dtype: torch.dtype) -> None:
    """Bit for bit, in all layers, from entries that lie apart; others stay."""

    def run(operation) -> list[Tensor]:
        states = torch.randn(LAYERS, 8, size + 3, dtype=dtype, generator=torch.Generator().manual_seed(2)).to(device)
        sources, entries = (torch.tensor(own, device=device) for own in ([1, 5, 2], [4, -1, 7]))
        before = states.clone()
        operation(states[:, :, :size], sources, entries)
        assert torch.equal(states[:, 4, :size], before[:, 1, :size])
        assert torch.equal(states[:, 5], before[:, 5])
        return [states]

    assert equal(run(copy_entries), run(copy_entries_torch))
