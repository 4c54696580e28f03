"""Take and reread: bytes along the rows of block tables, kernel and reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.record import rows as rows_of_pools
from kvcanary_kernels.record.layout import CHAIN
from kvcanary_kernels.watch import reread as fingerprints_of
from kvcanary_kernels.watch.walk import NO_VIOLATION, Rows, Truth
from tests.support.watched_rows import BLOCK_SIZE, BLOCKS, LAYERS, RING, WIDTH, Rig


@pytest.fixture(params=["", "_torch"], ids=["triton", "torch"])
def rig(request: pytest.FixtureRequest, device: str) -> Rig:
    return Rig(device, request.param)


def test_one_slot_written_twice_is_counted(rig: Rig) -> None:
    """Two rows write one slot: the record can only be one's, and the fingerprints know (W4)."""
    rig.forward({0: [5, 6, 7], 1: [8, 6, 7]})
    before = int(rig.total)
    rig.forward({0: [1], 1: [2]}, slots={1: rig.slot(0, 3)})
    assert int(rig.total) == before + 2  # W5 of the row that went astray, and W4


def test_changed_bytes_are_found(rig: Rig) -> None:
    """One bit of one layer: the layer and the position, and nothing of other rows."""
    rig.forward({0: list(range(18)), 1: list(range(9))})
    block, offset = divmod(rig.slot(1, 6), BLOCK_SIZE)
    rig.kv[1].view(torch.int32)[block, 1, offset, 5] ^= 1
    assert rig.forward({0: [1], 1: [2]})[1] == [None, (1, 6)]
    assert divmod(int(rig.places[1]), fingerprints_of.SLOTS_PER_ENTRY) == (6, rig.slot(1, 6))
    assert int(rig.total) == 1


def test_the_first_layer_that_is_not_finite_is_kept(rig: Rig) -> None:
    """Of all that a step stores the least, layer before entry; one count each, and no other slot."""
    rig.forward({0: list(range(18)), 1: list(range(9))})
    assert rig.firsts.tolist() == [[NO_VIOLATION] * 2] * RING
    for layer, row, position, value in (1, 0, 18, torch.inf), (1, 1, 10, torch.nan), (0, 1, 11, -torch.inf):
        block, offset = divmod(rig.slot(row, position), BLOCK_SIZE)
        rig.kv[layer][block, 1, offset, 4] = value
    rig.kv[0][0] = torch.nan  # nobody's
    rig.kv[0][divmod(rig.slot(0, 25), BLOCK_SIZE)[0]] = torch.nan  # behind the row
    rig.forward({0: [1], 1: [1, 2, 3, 4]})
    wanted = [[NO_VIOLATION] * 2 for _ in range(RING)]
    wanted[rig.step % RING][fingerprints_of.NOT_FINITE] = 0 * fingerprints_of.ENTRIES_PER_LAYER + 3  # the fourth
    assert rig.firsts.tolist() == wanted
    assert int(rig.total) == 3
    rig.asks_finite = False
    for position in (19, 20):
        block, offset = divmod(rig.slot(0, position), BLOCK_SIZE)
        rig.kv[1][block, 0, offset, 0] = torch.nan
    rig.forward({0: [1, 2]})
    assert int(rig.total) == 3


def test_a_last_look_reads_whole_rows_along_their_own_lines(rig: Rig) -> None:
    """What this forward wrote too; their numbers name the lines, and rows behind the live ones are padding."""
    rig.forward({0: list(range(18)), 1: list(range(9))})
    block, offset = divmod(rig.slot(1, 8), BLOCK_SIZE)
    rig.kv[1].view(torch.int32)[block, 1, offset, 5] ^= 1
    numbers = torch.tensor([1, 0, 9], device=rig.device)
    violations = torch.full((RING, 2, 3), NO_VIOLATION, dtype=torch.int64, device=rig.device)
    rows = Rows(numbers, rig.table, numbers, numbers)
    rig.reread(rig.watched(rig.records, 2, 0), rows, stride=1, whole=True, violations=violations)
    assert rig.named(violations[1, 0], 128) == [(1, 8), None, None]
    assert rig.named(violations[1, 1], fingerprints_of.SLOTS_PER_ENTRY) == [(rig.slot(1, 8), 8), None, None]
    assert int((violations != NO_VIOLATION).sum()) == 2
    assert rig.counted.tolist() == [0, 27]
    assert int(rig.total) == 1


def test_the_first_slot_is_read_as_any_other(rig: Rig) -> None:
    """Whose fingerprints were taken there: an engine may keep entries in slot 0."""
    rig.forward({0: list(range(6))})
    rig.table[0, 0] = 0
    rig.stamps[0] = rig.records[0, CHAIN] = 5
    counted = int(rig.counted[1])
    assert rig.forward({0: [1]})[1] == [(0, 0)]
    assert int(rig.counted[1]) == counted + 1 + 6 - BLOCK_SIZE


def test_bytes_under_another_record_are_not_judged(rig: Rig) -> None:
    """A record that is newer than the fingerprints: its bytes were never taken, so nobody knows them."""
    rig.forward({0: list(range(6))})
    rig.stamps[rig.slot(0, 2)] = 1
    block, offset = divmod(rig.slot(0, 2), BLOCK_SIZE)
    rig.kv[0].view(torch.int32)[block, 0, offset, 0] ^= 2
    assert rig.forward({0: [1]})[1] == [None]


@pytest.mark.parametrize(("window", "first", "told"), [(0, 0, [60, 17]), (45, 28, [60, 71]), (-32, 64, [71])])
def test_few_programs_go_on_until_a_row_ends(
    rig: Rig, window: int, first: int, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch knows no lengths: one program reads all rows to their ends, from the first entry that is seen."""
    monkeypatch.setattr(fingerprints_of, "PER_UNIT", 1)
    monkeypatch.setattr(fingerprints_of, "num_units", lambda device: 1)
    monkeypatch.setattr(rows_of_pools, "TILE_WORDS", 32)
    length = 72
    assert 2 * rig.pool.tile < length // 2  # positions that a program reads at a time, where every second is due
    rig.forward({0: list(range(length)), 1: [5]})
    for position in (17, 60, 71):
        block, offset = divmod(rig.slot(0, position), BLOCK_SIZE)
        rig.kv[1].view(torch.int32)[block, 0, offset, 0] ^= 2
    rows, before = rig.rows({0: [1], 1: [2]}, {}), rig.counted[1:].clone()
    seen = []
    for turn in range(2):
        rig.truth.turns[:] = turn
        violations = torch.full((RING, 2, 2), NO_VIOLATION, dtype=torch.int64, device=rig.device)
        rig.reread(rig.watched(rig.records, 2, 2, window), rows, stride=2, whole=False, violations=violations)
        seen += [pair[1] for pair in rig.named(violations[rig.step % RING, 0], 128) if pair]
    assert seen == told  # the first that is due in each of two forwards
    assert int(rig.counted[1:] - before) == length - first + 1
    assert int(rig.total) == sum(position >= first for position in (17, 60, 71))


@pytest.mark.parametrize(
    ("rows", "stride", "whole", "window"),
    [(1, 1, False, 0), (2, 5, False, 0), (67, 8, False, 0), (67, 3, False, 40), (64, 2, False, -32), (33, 1, True, 0)],
)
def test_rows_of_any_length_share_programs(device: str, rows: int, stride: int, whole: bool, window: int) -> None:
    """Empty rows, rows that nobody follows, long ones and padding, in any order: each entry is read for its own row."""
    draw, told = torch.Generator().manual_seed(rows + stride), []
    lengths = torch.randint(0, 200, (rows + 3,), generator=draw) * torch.randint(0, 2, (rows + 3,), generator=draw)
    lengths[rows // 2] = 231
    numbers, is_known = torch.randperm(rows + 3, generator=draw), torch.rand(rows + 3, generator=draw) > 0.1
    is_known[numbers[rows // 2]] = True
    table = torch.randint(0, BLOCKS + 1, (rows + 3, WIDTH), generator=draw)  # one block is not in the pool
    chains = torch.randint(0, 9, (BLOCKS * BLOCK_SIZE,), generator=draw)
    wrong = torch.rand(LAYERS, BLOCKS * BLOCK_SIZE, generator=draw) < 0.1
    for suffix in "", "_torch":
        rig = Rig(device, suffix)
        slots = torch.arange(len(chains), device=device)
        rig.fingerprints[:] = fingerprints_of.both_fingerprints(rig.pool, slots, rig.keys)
        rig.fingerprints[0] ^= wrong.to(device).long() << 40
        rig.records[:, CHAIN] = chains
        rig.stamps[:] = torch.where(chains % 4 == 1, 2, chains)
        lines = torch.zeros(rows + 3, 10, dtype=torch.int64)
        lines[numbers, 0], lines[:, 4] = torch.where(is_known[numbers], lengths, -1), torch.arange(rows + 3) * 7
        rig.truth = Truth(lines.to(device))
        given = numbers, table.int(), (lengths + 2).int(), 2 * torch.arange(rows + 4)
        read = torch.full((RING, 2, rows + 3), NO_VIOLATION, device=device)
        watched = rig.watched(rig.records, rows, 2 * rows, window)
        own = Rows(*[tensor.to(device) for tensor in given], in_place=whole)
        rig.reread(watched, own, stride=stride, whole=whole, violations=read)
        told.append((read, rig.counted, rig.total))
    assert all(torch.equal(*pair) for pair in zip(*told, strict=True))
    assert int(rig.total) > 0
    assert (read[rig.step % RING, :, rows:] == NO_VIOLATION).all()


@pytest.mark.parametrize("length", [2**31 - 1, 2**40, -(2**31)])
def test_a_length_that_no_row_has_hides_no_other_row(rig: Rig, length: int) -> None:
    """An engine may say anything: rows are read as far as their tables go."""
    rig.forward({0: list(range(9)), 1: list(range(30)), 2: list(range(9))})
    block, offset = divmod(rig.slot(2, 6), BLOCK_SIZE)
    rig.kv[1].view(torch.int32)[block, 0, offset, 0] ^= 2
    rows, before = rig.rows({0: [1], 1: [1], 2: [1]}, {}), rig.counted[1:].clone()
    lengths = rows.lengths.long()
    lengths[1] = length
    violations = torch.full((RING, 2, 4), NO_VIOLATION, dtype=torch.int64, device=rig.device)
    watched = rig.watched(rig.records, 3, 3)
    rig.reread(watched, rows._replace(lengths=lengths), stride=1, whole=False, violations=violations)
    assert rig.named(violations[rig.step % RING, 0], 128) == [None, None, (1, 6), None]
    assert int(rig.counted[1:] - before) == 9 + 9 + (30 if length > 0 else 0)


def test_rolling_reads_every_position_once(rig: Rig) -> None:
    """Phases 0 to stride - 1 together see each position; a violation shows in its own phase alone."""
    rig.forward({0: list(range(30))})
    block, offset = divmod(rig.slot(0, 17), BLOCK_SIZE)
    rig.kv[0].view(torch.int32)[block, 0, offset, 0] ^= 2
    rows = rig.rows({0: [1]}, {})
    seen = []
    counted = rig.counted[1:].clone()
    for turn in range(8):
        rig.truth.turns[0] = turn
        violations = torch.full((RING, 2, 1), NO_VIOLATION, dtype=torch.int64, device=rig.device)
        rig.reread(rig.watched(rig.records, 1, 1), rows, stride=8, whole=False, violations=violations)
        seen += [turn] if int(violations[rig.step % RING, 0]) != NO_VIOLATION else []
    assert seen == [17 % 8]
    assert int(rig.counted[1:] - counted) == 30


def test_a_row_counts_its_own_forwards(rig: Rig) -> None:
    """Not those of others: here two rows take turns."""
    for row in (0, 1) * 4:
        rig.forward({row: [7] * 5})
        assert int(rig.truth.turns[row]) == rig.step - rig.step // 2
