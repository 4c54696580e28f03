"""Walk, advance, take and reread: rows of block tables against a plain oracle, kernel and reference bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.record import rows as rows_of_pools
from kvcanary_kernels.record.layout import (
    CHAIN,
    MASK_32,
    REQUEST_GENERATION,
    Keys,
    chain_host,
    make_keys,
    signed,
    unsigned,
)
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from kvcanary_kernels.watch import advance as writes_of
from kvcanary_kernels.watch import fetch as lines_of
from kvcanary_kernels.watch import reread as fingerprints_of
from kvcanary_kernels.watch import walk as rows_of
from kvcanary_kernels.watch.advance import Fed, Overwritten
from kvcanary_kernels.watch.reread import Before
from kvcanary_kernels.watch.walk import (
    EVERYBODYS,
    GIVEN_BACK,
    NO_VIOLATION,
    NOBODYS,
    NOT_FOLLOWED,
    SHARED_WRITER,
    UNJUDGED,
    Rows,
    Truth,
    Watched,
    code_of,
)

BLOCK_SIZE, BLOCKS, WIDTH, LAYERS, RING = 4, 90, 60, 2, 3
ROOTS = [77, -5, 77, 1 << 62]


@dataclass
class Rig:
    """Four rows of an engine's state, their tokens, and the canary's memory."""

    device: str
    suffix: str
    tokens: list[list[int]] = field(default_factory=lambda: [[], [], [], []])
    null_slots: int = BLOCK_SIZE
    in_place: bool = False
    owners: Tensor | None = None
    asks_finite: bool = True
    asks_stored: bool = False

    def __post_init__(self) -> None:
        device = self.device
        self.keys: Keys = make_keys(11, LAYERS, 12, device)
        shape = (BLOCKS, 2, BLOCK_SIZE, 6)  # K and V packed in the last axis, as 3 words each
        data = torch.randint(0, 2**31 - 1, (LAYERS, *shape), generator=torch.Generator().manual_seed(3))
        self.kv = [layer.float().to(device) for layer in data]
        k, v = [kv[..., :3] for kv in self.kv], [kv[..., 3:] for kv in self.kv]
        self.pool: PoolRows = pool_rows(k, v, layout="HND", page_size=BLOCK_SIZE)
        slots = BLOCKS * BLOCK_SIZE
        self.records = torch.zeros(slots, 8, dtype=torch.int64, device=device)
        self.fingerprints = torch.zeros(2, LAYERS, slots, dtype=torch.int64, device=device)
        self.stamps = torch.zeros(slots, dtype=torch.int64, device=device)
        stamps = torch.zeros_like(self.stamps), self.stamps  # of another pool of these slots, which nobody stores into
        self.overwritten = Overwritten.of(stamps, RING, 300)
        self.before = Before(self.overwritten.is_another, 1, torch.zeros(LAYERS, dtype=torch.int64, device=device))
        self.table = torch.zeros(4, WIDTH, dtype=torch.int32, device=device)
        blocks = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(5)) + 1
        for row in range(4):
            self.table[row, :20] = blocks[20 * row : 20 * row + 20].to(torch.int32)
        lines = [[0, 1, root, 1 + row, 0, root, *[0] * 4] for row, root in enumerate(ROOTS)]
        self.truth = Truth(torch.tensor(lines, device=device))
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)  # by walk, by reread
        self.seeds = torch.zeros(4, 2, dtype=torch.int64, device=device)
        self.slots, self.chains = (torch.full((RING, 300), -9, dtype=torch.int64, device=device) for _ in range(2))
        self.step = 0

    def call(self, module, name: str, *arguments, **keywords) -> None:
        getattr(module, name + self.suffix)(*arguments, **keywords)

    def rows(self, batch: dict[int, list[int]], accepted: dict[int, int]) -> Rows:
        starts, lengths = [0], []
        for row, new in batch.items():
            starts.append(starts[-1] + len(new))
            lengths.append(accepted.get(row, len(self.tokens[row])) + len(new))
        make = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)  # noqa: E731
        padding = 4 - len(batch)
        numbers, lengths, starts = [*batch, *[9] * padding], lengths + [9] * padding, starts + starts[-1:] * padding
        table = self.table if self.in_place else self.table[list(batch)].contiguous()
        return Rows(make(numbers), table, make(lengths), make(starts), self.in_place)

    def forward(self, batch: dict[int, list[int]], accepted: dict[int, int] | None = None, **changes) -> tuple:
        """Violations of walk, reread and advance of one forward; `accepted`: how much of a row is left of the last
        one.
        """
        self.step += 1
        for row, length in (accepted or {}).items():
            del self.tokens[row][length:]
        rows = self.rows(batch, accepted or {})
        window = changes.pop("window", 0)
        fed = self.fed(batch, rows, **changes)
        walked, written, read, self.firsts = self.cells(4), self.cells(4), self.cells(2, 4), self.cells(2)
        watched = self.watched(self.records, len(batch), len(fed.tokens), window)
        overwritten, before = (self.overwritten, self.before) if self.asks_stored else (None, None)
        self.call(writes_of, "advance", watched, rows, fed, self.truth, seeds=self.seeds,
                  slots=self.slots, chains=self.chains, violations=written, overwritten=overwritten)  # fmt: skip
        self.call(
            rows_of, "walk", watched, rows, self.truth, seeds=self.seeds, violations=walked, counted=self.counted[:1]
        )
        self.reread(watched, rows, stride=1, whole=False, violations=read)
        self.call(fingerprints_of, "take", watched, self.pool, self.slots, self.chains, self.keys,
                  fingerprints=self.fingerprints, stamps=self.stamps,
                  firsts=self.firsts, asks_finite=self.asks_finite, before=before)  # fmt: skip
        self.violations = torch.cat((walked, written, *read.unbind(1)))
        walked, written, (read, self.places) = (violations[self.step % RING] for violations in (walked, written, read))
        for row, new in batch.items():
            self.tokens[row] += new
        walked, read, written = (violations[: len(batch)] for violations in (walked, read, written))
        return self.codes(walked, "R"), self.named(read, 128), self.codes(written, "W")

    def watched(self, records: Tensor, num_rows: int, num_tokens: int, window: int = 0) -> Watched:
        now = torch.tensor([num_rows, num_tokens, self.step, 2, self.step % RING], device=self.device)
        return Watched(records, self.keys, BLOCK_SIZE, window, now, self.total, self.null_slots, self.owners)

    def reread(self, watched: Watched, rows: Rows, **keywords) -> None:
        self.call(fingerprints_of, "reread", watched, self.pool, rows, self.keys, fingerprints=self.fingerprints,
                  stamps=self.stamps,
                  truth=self.truth, counted=self.counted[1:], **keywords)  # fmt: skip

    def cells(self, *shape: int) -> Tensor:
        return torch.full((RING, *shape), NO_VIOLATION, device=self.device)

    def codes(self, violations: Tensor, kind: str) -> list:
        return [
            None if violation == NO_VIOLATION else code_of(violation, kind)[::-1] for violation in violations.tolist()
        ]

    def named(self, violations: Tensor, unit: int) -> list:
        return [
            None if violation == NO_VIOLATION else (violation % unit, violation // unit)
            for violation in violations.tolist()
        ]

    def slot(self, row: int, position: int) -> int:
        return int(self.table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

    def fed(self, batch: dict[int, list[int]], rows: Rows, slots: dict[int, int] | None = None, **changes) -> Fed:
        places, positions = [], []
        for row, length in zip(batch, rows.lengths.tolist(), strict=False):
            positions += range(length - len(batch[row]), length)
            places += [self.slot(row, p) for p in range(length - len(batch[row]), length)]
        for index, slot in (slots or {}).items():
            places[index] = slot
        tokens = [token for new in batch.values() for token in new]
        make = lambda values, kind=torch.int64: torch.tensor(values, dtype=kind, device=self.device)  # noqa: E731
        known = changes.get("known")
        extra = () if known is None else (make(known, torch.int32), make([len(row) for row in known], torch.int32))
        fed = Fed(make(tokens, torch.int32), make(positions), make(places), *extra)
        return fed._replace(ahead=changes.get("ahead", 0))


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


def test_a_length_that_no_table_has_is_outside(rig: Rig) -> None:
    """A row that is said to have more entries than its line of the table: R1, and no line of another is read for it."""
    rig.forward({0: list(range(8)), 1: list(range(8))})
    rig.seeds = torch.stack((rig.truth.tails[:, 0], torch.ones_like(rig.truth.ends)), 1)
    numbers, lengths, starts = torch.tensor([[0, 1, 9], [13, 8, 9], [0, 0, 0]], device=rig.device)
    rows, walked, read = Rows(numbers, rig.table[:, :2].contiguous(), lengths, starts), rig.cells(4), rig.cells(2, 4)
    watched = rig.watched(rig.records, 2, 0)
    rig.call(rows_of, "walk", watched, rows, rig.truth, seeds=rig.seeds, violations=walked, counted=rig.counted[:1])
    rig.reread(watched, rows, stride=1, whole=False, violations=read)
    assert rig.codes(walked[rig.step % RING, :2], "R") == [("R1", 8), None]
    assert (int(rig.total), rig.counted.tolist()) == (5, [13 + 8, 8 + 8])


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
