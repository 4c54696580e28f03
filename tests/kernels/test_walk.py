"""Walk and advance: rows of block tables against a plain oracle, kernel and reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.record.layout import CHAIN, MASK_32, REQUEST_GENERATION, chain_host, signed, unsigned
from kvcanary_kernels.watch import advance as writes_of
from kvcanary_kernels.watch import fetch as lines_of
from kvcanary_kernels.watch import walk as rows_of
from kvcanary_kernels.watch.walk import (
    EVERYBODYS,
    GIVEN_BACK,
    NO_VIOLATION,
    NOBODYS,
    NOT_FOLLOWED,
    SHARED_WRITER,
    UNJUDGED,
    Rows,
)
from tests.support.watched_rows import BLOCK_SIZE, BLOCKS, LAYERS, RING, ROOTS, WIDTH, Rig


@pytest.fixture(params=["", "_torch"], ids=["triton", "torch"])
def rig(request: pytest.FixtureRequest, device: str) -> Rig:
    return Rig(device, request.param)


CLEAN = ([None, None], [None, None], [None, None])


def test_rows_are_followed(rig: Rig) -> None:
    """Prefill of several blocks, decode, a rejected tail: no violation, and chains are those of plain integers."""
    long = [(7 * i) % 51 for i in range(40)]
    assert rig.forward({0: long[:33], 2: long[:6]}) == CLEAN
    assert rig.forward({2: [3], 0: [4, 5, 6]}) == CLEAN
    assert rig.forward({0: [9], 2: [1]}, accepted={0: 34}) == CLEAN  # two of the three were rejected
    assert int(rig.total) == 0
    for row in (0, 2):
        tokens = rig.tokens[row]
        wanted = chain_host(tokens, 0, ROOTS[row], rig.keys)
        held = [unsigned(int(rig.records[rig.slot(row, p), CHAIN])) for p in range(len(tokens))]
        assert held == wanted
        assert unsigned(int(rig.truth.tails[row, 0])) == wanted[-1]
        assert int(rig.truth.ends[row]) == len(tokens)


def test_a_row_reads_what_another_writes_in_the_same_forward(rig: Rig) -> None:
    """A prefix that is computed in this very forward, and shared already: written, and the right one."""
    rig.table[2, :2] = rig.table[0, :2]
    rig.truth.ends[2], rig.truth.tails[2, 0] = 8, signed(chain_host(list(range(8)), 0, ROOTS[0], rig.keys)[-1])
    rig.tokens[2] = list(range(8))
    assert rig.forward({0: list(range(9)), 2: [7, 7]}) == CLEAN
    assert rig.counted.tolist() == [8, 0]  # bytes of before are nobody's
    assert rig.forward({0: [1], 2: [1]}) == CLEAN
    assert rig.counted.tolist() == [8 + 9 + 10, 9 + 10]


@pytest.mark.parametrize("length", [1, 4, 127, 128, 129, 200])
def test_every_length_is_followed(rig: Rig, length: int) -> None:
    """Tiles and their last entries: a row of any length, then one token more."""
    rig.table[0, :] = torch.arange(1, WIDTH + 1, dtype=torch.int32)
    assert rig.forward({0: [i % 31 for i in range(length)]})[0] == [None]
    assert rig.forward({0: [7]})[0] == [None]
    assert int(rig.total) == 0
    assert int(rig.truth.ends[0]) == length + 1


def test_owners_are_judged_where_an_engine_tells_of_grants(rig: Rig) -> None:
    """A freed slot that is read is R7, another row's R8, written W2; a shared one may be read, and written is W3.

    One that was given back and not granted since is R7 as well, and written W7.
    """
    rig.owners = torch.zeros(BLOCKS * BLOCK_SIZE, dtype=torch.int64, device=rig.device)
    for row in (0, 2):
        rig.owners[[rig.slot(row, position) for position in range(40)]] = rig.truth.uids[row]
    assert rig.forward({0: list(range(18)), 2: list(range(9))}) == CLEAN
    rig.owners[rig.slot(0, 3)] = EVERYBODYS.value
    assert rig.forward({0: [1], 2: [2]}) == CLEAN
    rig.owners[rig.slot(0, 5)], rig.owners[rig.slot(2, 4)] = NOBODYS.value, rig.truth.uids[0]
    walked, _, written = rig.forward({0: [1], 2: [2]})
    assert (walked, written) == ([("R7", 5), ("R8", 4)], [None, None])
    assert int(rig.total) == 2
    rig.owners[rig.slot(0, 5)], rig.owners[rig.slot(2, 4)] = rig.truth.uids[0], rig.truth.uids[2]
    rig.owners[rig.slot(0, 20)], rig.owners[rig.slot(2, 11)] = EVERYBODYS.value, rig.truth.uids[0]
    walked, _, written = rig.forward({0: [1], 2: [2]})
    assert (walked, written) == ([None, None], [("W3", 20), ("W2", 11)])
    rig.owners[rig.slot(0, 21)] = NOBODYS.value
    assert rig.forward({0: [1]})[2] == [("W2", 21)]
    rig.owners[rig.slot(0, 21)] = rig.truth.uids[0]
    rig.owners[rig.slot(0, 22)], rig.owners[rig.slot(2, 5)] = GIVEN_BACK.value, GIVEN_BACK.value
    rig.owners[rig.slot(2, 11)], rig.owners[rig.slot(0, 20)] = rig.truth.uids[2], rig.truth.uids[0]
    walked, _, written = rig.forward({0: [1], 2: [2]})
    assert (walked, written) == ([None, ("R7", 5)], [("W7", 22), None])


def test_a_slot_that_all_may_read_may_have_one_writer(rig: Rig) -> None:
    """SHARED_WRITER - uid: every row reads it, that one writes it, whoever else is W3; of unjudged slots, silence."""
    rig.owners = torch.full((BLOCKS * BLOCK_SIZE,), UNJUDGED.value, device=rig.device)
    assert rig.forward({0: list(range(18)), 2: list(range(9))}) == CLEAN
    uid = int(rig.truth.uids[0])
    rig.owners[[rig.slot(0, 17), rig.slot(0, 18), rig.slot(2, 8)]] = SHARED_WRITER.value - uid
    assert rig.forward({0: [1], 2: [2]}) == CLEAN
    rig.owners[[rig.slot(0, 19), rig.slot(2, 10)]] = SHARED_WRITER.value - uid
    walked, _, written = rig.forward({0: [1], 2: [2]})
    assert (walked, written) == ([None, None], [None, ("W3", 10)])


def test_a_swapped_table_is_found(rig: Rig) -> None:
    """Two blocks of a row exchanged: R4 at the first position of the first."""
    rig.forward({0: list(range(18)), 1: list(range(9))})
    rig.table[0, [1, 2]] = rig.table[0, [2, 1]]
    walked, _, _ = rig.forward({0: [1], 1: [2]})
    assert walked == [("R4", 4), None]
    assert int(rig.total) >= 8


def test_a_row_of_somebody_else_is_found(rig: Rig) -> None:
    """The same root, whole and consistent, other tokens: R6 at its last entry. Another root: R5 at the first."""
    rig.forward({0: [1, 2, 3, 4], 2: [1, 2, 9, 4], 1: [1, 2, 3, 4]})
    rig.table[0, 0] = rig.table[2, 0]
    assert rig.forward({0: [5]})[0] == [("R6", 3)]
    rig.table[2, 0] = rig.table[1, 0]
    assert rig.forward({2: [5]})[0] == [("R5", 0)]


def test_what_nobody_wrote_and_what_lies_outside(rig: Rig) -> None:
    """R12 at an unwritten slot, R2 in the null block, R1 behind the pool, R3 where the record was damaged."""
    for row in range(4):
        rig.forward({row: list(range(10))})
    rig.table[0, 1], rig.table[1, 1], rig.table[2, 1] = 89, 0, BLOCKS
    rig.records[rig.slot(3, 5), CHAIN] ^= 4
    walked, _, _ = rig.forward({row: [1] for row in range(4)})
    assert walked == [("R12", 4), ("R2", 4), ("R1", 4), ("R3", 5)]


def test_a_length_that_cannot_be_is_found(rig: Rig) -> None:
    """More entries than were written, or fewer than could have been rejected: R10."""
    rig.forward({0: list(range(9)), 1: list(range(9))})
    assert rig.forward({0: [1]}, accepted={0: 12})[0] == [("R12", 9)]  # what was never written comes first
    rig.tokens[1] += [3, 4]
    assert rig.forward({1: [1]}, accepted={1: 2})[0] == [("R10", 2)]


def test_a_second_pool_is_recorded_along_the_same_rows(rig: Rig) -> None:
    """Layers with slots of their own get the same records, and the rows are followed once."""
    rig.forward({0: list(range(6)), 2: [1, 2]})
    twin = {name: getattr(rig, name).clone() for name in ("records", "slots", "chains")}
    rows = rig.rows({2: [5, 6, 7], 0: [9]}, {})
    fed, truth = rig.fed({2: [5, 6, 7], 0: [9]}, rows), rig.truth.lines.clone()
    rig.forward({2: [5, 6, 7], 0: [9]})
    after = rig.truth.lines.clone()
    assert not torch.equal(truth, after)
    rig.call(writes_of, "advance", rig.watched(twin["records"], 2, 4), rows, fed, rig.truth, seeds=rig.seeds,
             slots=twin["slots"], chains=twin["chains"], violations=rig.cells(4), is_first=False)  # fmt: skip
    for name, tensor in twin.items():
        assert torch.equal(tensor, getattr(rig, name)), name
    assert torch.equal(after, rig.truth.lines)
    assert int(rig.total) == 0


def test_rows_that_nobody_follows_are_left_alone(rig: Rig) -> None:
    """Without tokens there is nothing to judge and nothing to record."""
    rig.truth.ends[1] = NOT_FOLLOWED
    assert rig.forward({1: list(range(9)), 0: [1, 2]}) == CLEAN
    assert not rig.records[rig.slot(1, 0)].any()
    assert rig.slots[rig.step % RING, :11].tolist() == [-1] * 9 + [rig.slot(0, 0), rig.slot(0, 1)]
    assert rig.forward({1: [1], 0: [1]}) == CLEAN


def test_a_window_hides_what_lies_before_it(rig: Rig) -> None:
    """Blocks that left the window may be anybody's; the first visible entry still has its position."""
    rig.forward({0: list(range(20))})
    rig.table[0, :2] = 0
    rig.kv[0].view(torch.int32)[rig.table[0, 2], 0, 1, 0] ^= 2
    assert rig.forward({0: [1]}, window=8)[:2] == ([None], [None])
    rig.table[0, 4] = rig.table[0, 3]
    assert rig.forward({0: [1]}, window=8)[0] == [("R4", 16)]


def test_chunks_hide_what_lies_before_them(rig: Rig) -> None:
    """Blocks of earlier chunks may be anybody's; behind a whole one nothing is seen."""
    rig.forward({0: list(range(20))})
    before = rig.table[0, 3].clone()
    rig.table[0, :3] = 0
    rig.kv[0].view(torch.int32)[before, 0, 1, 0] ^= 2
    assert rig.forward({0: [1]}, window=-8)[:2] == ([None], [None])
    own, rig.table[0, 4] = rig.table[0, 4].clone(), before
    assert rig.forward({0: [1]}, window=-8)[0] == [("R4", 16)]
    rig.table[0, 4] = own
    assert rig.forward({0: [1, 2]}, window=-8)[:2] == ([None], [None])
    rig.table[0, :6] = 0
    assert rig.forward({0: [3]}, window=-8)[:2] == ([None], [None])
    rig.table[0, 6] = before
    assert rig.forward({0: [3]}, window=-8)[0] == [("R4", 24)]


def test_wrong_writes_are_found(rig: Rig) -> None:
    """W5 one slot further, W1 outside or into the null block, W6 a token that is not the request's."""
    known = [[5, 6, 7, 8, 9, 1], [5, 6, 7], [1] * 6, [1] * 6]
    width = max(map(len, known))
    known = [row + [0] * (width - len(row)) for row in known]
    batch = {0: [5, 6, 7], 1: [5, 6, 7]}
    assert rig.forward(batch, slots={1: rig.slot(0, 2)})[2] == [("W5", 1), None]
    before = int(rig.total)
    assert rig.forward({2: [1, 1], 3: [1, 1]}, slots={0: BLOCKS * BLOCK_SIZE, 3: 2})[2] == [("W1", 0), ("W1", 1)]
    assert int(rig.total) == before + 2
    assert rig.forward({0: [8, 3]}, known=known)[2] == [("W6", 4)]


def test_tokens_that_nobody_has_yet_are_found(rig: Rig) -> None:
    """W6 behind those that the engine knows, and so many drafts."""
    known = [[5, 6, 7, 8]] * 4
    assert rig.forward({0: [5, 6, 7, 8, 1, 2], 1: [5]}, known=known, ahead=2)[2] == [None, None]
    assert rig.forward({0: [3], 1: [6, 7]}, known=known, ahead=2)[2] == [("W6", 6), None]
    assert rig.forward({1: [8, 1]}, known=known)[2] == [("W6", 4)]
    assert int(rig.total) == 2


def test_kernel_and_reference_agree_bit_for_bit(device: str) -> None:
    """Memory after the same forwards, damage among them, is equal."""
    rigs, violations = [Rig(device, suffix) for suffix in ("", "_torch")], []
    for rig in rigs:
        rig.forward({0: list(range(37)), 1: [4, 5]})
        rig.table[0, 3] = 0
        rig.table[1, 0] = rig.table[0, 0]
        rig.kv[0].view(torch.int32)[rig.table[0, 5], 0, 1, 0] ^= 2
        rig.forward({1: [6, 7, 8], 0: [5], 3: [signed(9)]}, slots={0: 1})
        violations.append(rig.violations)
        rig.forward({1: [1]}, accepted={1: 3})
        violations.append(rig.violations)
        for window in 8, -8, -32:
            rig.forward({0: [1]}, window=window)
            violations.append(rig.violations)
    half = len(violations) // 2
    assert all(torch.equal(*pair) for pair in zip(violations[:half], violations[half:], strict=True))
    assert [int((own != NO_VIOLATION).sum()) for own in violations[2:half]] == [
        0,
        0,
        0,
    ]  # what is wrong lies before them
    # walk of rows 0 and 1, advance of row 1, reread of row 0: layer and slot
    assert (violations[0] != NO_VIOLATION).sum() == 5
    first, second = rigs
    for name in ("records", "fingerprints", "stamps", "total", "counted", "seeds"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert torch.equal(first.truth.lines, second.truth.lines)


def test_what_lies_before_a_window_is_not_asked(rig: Rig) -> None:
    """The first entry that attention sees continues one that it does not see; the next ones continue what it sees."""
    rig.forward({0: list(range(20))})
    rig.records[rig.slot(0, 12), CHAIN] += 1
    assert rig.forward({0: [7]}, window=8)[0] == [None]
    rig.records[rig.slot(0, 12), CHAIN] -= 1
    assert rig.forward({0: [8]}, window=0)[0] == [None]


def test_a_block_below_all_blocks_is_outside(rig: Rig) -> None:
    """A number that no block has, however far from all, is R1 and no stray address."""
    rig.forward({0: list(range(9))})
    rig.table[0, 1] = -1000
    assert rig.forward({0: [1]})[0] == [("R1", 4)]


def test_entries_behind_a_refused_one_are_their_own(rig: Rig) -> None:
    """The null block in the middle of a row: its entries count, and not the next one, which continues nothing known."""
    rig.forward({0: list(range(13))})
    rig.table[0, 1] = 0
    assert rig.forward({0: [1]})[0] == [("R2", BLOCK_SIZE)]
    assert int(rig.total) == BLOCK_SIZE


@pytest.mark.parametrize(("length", "window"), [(13, 0), (13, 3), (13, -4), (2**31 - 1, 0), (2**40, 0), (2**40, 3)])
def test_a_length_that_no_table_has_is_outside(rig: Rig, length: int, window: int) -> None:
    """A row that is said to have more entries than its line of the table: R1, and no line of another is read for it.
    It is judged up to one entry behind the table, whatever is said.
    """
    rig.forward({0: list(range(8)), 1: list(range(8))})
    rig.seeds = torch.stack((rig.truth.tails[:, 0], torch.ones_like(rig.truth.ends)), 1)
    numbers, lengths, starts = torch.tensor([[0, 1, 9], [length, 8, 9], [0, 0, 0]], device=rig.device)
    rows, walked, read = Rows(numbers, rig.table[:, :2].contiguous(), lengths, starts), rig.cells(4), rig.cells(2, 4)
    watched = rig.watched(rig.records, 2, 0, window)
    rig.call(rows_of, "walk", watched, rows, rig.truth, seeds=rig.seeds, violations=walked, counted=rig.counted[:1])
    rig.reread(watched, rows, stride=1, whole=False, violations=read)
    assert rig.codes(walked[rig.step % RING, :2], "R") == [("R1", 8), None]
    assert int(rig.total) == 1
    if not window:
        assert rig.counted.tolist() == [9 + 8, 8 + 8]


def test_a_table_ends_behind_its_last_block() -> None:
    """A position that no block of the row has is no slot."""
    positions = torch.tensor([[0, 3, 4]])
    assert rows_of.table_slots(torch.tensor([[3]]), positions, BLOCK_SIZE).tolist() == [[12, 15, -1]]


def test_what_is_kept_of_an_entry(rig: Rig) -> None:
    """Who wrote it, and both fingerprints of every layer as the fingerprint has them."""
    rig.forward({0: [5, 6, 7], 1: [8]})
    slots = torch.tensor([rig.slot(0, 2), rig.slot(1, 0)], device=rig.device)
    assert (rig.records[slots, REQUEST_GENERATION] & MASK_32).tolist() == rig.truth.uids[:2].tolist()
    fingerprint_a, fingerprint_b = torch.empty(LAYERS, 2, dtype=torch.int64, device=rig.device), torch.empty_like(slots)
    fingerprint_torch(rig.pool, slots, rig.keys, fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b)
    assert torch.equal(rig.fingerprints[0][:, slots], fingerprint_a)
    assert torch.equal(rig.fingerprints[1][:, slots].sum(0) + signed(rig.keys.start_b), fingerprint_b)


def test_null_slots_are_those_that_the_engine_says(rig: Rig) -> None:
    """None, one, or more than a block: R2 and W1 begin below them, and what lies at them or behind is an entry."""
    rig.table[0, 0] = 0
    rig.null_slots = 0
    assert rig.forward({0: list(range(3))}) == ([None], [None], [None])
    assert rig.forward({0: [1]}) == ([None], [None], [None])
    rig.null_slots = 1
    assert rig.forward({0: [2]}) == ([("R2", 0)], [None], [None])
    rig.table[2, 0], rig.null_slots = 1, 2 * BLOCK_SIZE
    assert rig.forward({2: [5, 6]})[2] == [("W1", 0)]
    assert rig.slots[rig.step % RING, :2].tolist() == [-1, -1]


def test_a_table_is_read_in_place_through_row_numbers(rig: Rig) -> None:
    """The lines of an engine's own table, by row number, say what their copies in batch order say; keep keeps them."""
    twin = Rig(rig.device, rig.suffix, in_place=True)
    for own in (rig, twin):
        assert own.forward({2: list(range(18)), 0: list(range(9))}) == CLEAN
        assert own.forward({0: [3], 2: [4, 5]}) == CLEAN
        own.table[2, [1, 2]] = own.table[2, [2, 1]]
        own.kv[1].view(torch.int32)[int(own.table[0, 1]), 1, 2, 5] ^= 1
    batch = {2: [1], 0: [2]}
    assert rig.forward(batch) == twin.forward(batch) == ([("R4", 4), None], [None, (1, 6)], [None, None])
    for name in ("records", "slots", "chains", "seeds", "total", "counted"):
        assert torch.equal(getattr(rig, name), getattr(twin, name)), name
    kept = torch.zeros_like(twin.table)
    rows, watched = twin.rows(batch, {}), twin.watched(twin.records, 2, 2)
    twin.call(lines_of, "keep", rows, now=watched.now, kept=kept, block_size=BLOCK_SIZE)
    wanted = torch.zeros_like(kept)
    for row, blocks in (0, -(-12 // BLOCK_SIZE)), (2, -(-22 // BLOCK_SIZE)):
        wanted[row, :blocks] = twin.table[row, :blocks]
    assert torch.equal(kept, wanted)
    batch, wrong = {2: [1], 3: [2, 3]}, {1: twin.slot(1, 9)}  # row 3 of the engine is the second of the batch
    assert rig.forward(batch, slots=wrong)[2] == twin.forward(batch, slots=wrong)[2] == [None, ("W5", 0)]
