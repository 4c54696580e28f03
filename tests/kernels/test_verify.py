"""Verify: every entry that attention reads is judged by the record of its slot and of the one before it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.judge.verify import NO_PREDECESSOR, ROOT, verify, verify_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import Keys, make_keys, signed

MASK = 2**64 - 1
M32 = 2**32 - 1
POISON = -77
PAGE_SIZE, NUM_SLOTS, LAYERS, POOL_ID = 4, 50, 3, 1  # 13 pages, the last one half
NULL_SLOTS = PAGE_SIZE
SEED = 0xDEADBEEFCAFEF00D
R1, R2, R3, R4, R5, R12 = 1, 2, 4, 8, 16, 2048
both = pytest.mark.parametrize("operation", [verify, verify_torch], ids=["triton", "torch"])


def mixed(token: int, position: int, keys: Keys) -> int:
    z = ((token << 32 | position) + keys.mix_key) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def seal_of(words: list[int], slot: int, keys: Keys) -> int:
    summands = zip(keys.seal_keys, [*words, slot, POOL_ID], strict=True)
    return (keys.seal_start + sum(key * word for key, word in summands)) & MASK


@dataclass
class Pool:
    """Records as 16 plain words a slot, the grants, and the rows that were written."""

    keys: Keys
    words: list[list[int]] = field(default_factory=lambda: [[0] * 16 for _ in range(NUM_SLOTS)])
    generations: list[int] = field(default_factory=lambda: [10 + page for page in range(-(-NUM_SLOTS // PAGE_SIZE))])

    def write(self, slots: list[int], first_position: int = 0, chain: int = SEED, salt: int = 0) -> None:
        for position, slot in enumerate(slots, first_position):
            token = (position * 2654435761 + salt) & M32
            chain = (self.keys.multiplier * chain + mixed(token, position, self.keys)) & MASK
            generation = self.generations[slot // PAGE_SIZE]
            identity = [token, position, chain & M32, chain >> 32, 7, generation & M32, 2**31 + 1, 2**24 + slot]
            seal = seal_of(identity, slot, self.keys)
            self.words[slot] = [*identity, 1, 2, 2**LAYERS - 1, 0, 0, 0, seal & M32, seal >> 32]

    def chain(self, slot: int) -> int:
        return self.words[slot][2] | self.words[slot][3] << 32

    def records(self, device: str) -> Tensor:
        columns = [[signed(w[i] | w[i + 1] << 32) for i in range(0, 16, 2)] for w in self.words]
        return torch.tensor(columns, device=device)


@dataclass(frozen=True)
class Segment:
    start: int
    length: int
    first_position: int = 0
    predecessor: int = ROOT
    seed: int = SEED


def oracle(pool: Pool, indices: list[int], segments: list[Segment]) -> list[int]:
    def readable(slot: int) -> bool:
        return NULL_SLOTS <= slot < NUM_SLOTS

    codes = [POISON] * len(indices)
    for segment in segments:
        before, root = segment.predecessor, segment.predecessor == ROOT
        for j in range(segment.length):
            slot = indices[segment.start + j]
            code = 0
            if not 0 <= slot < NUM_SLOTS:
                code = R1
            elif slot < NULL_SLOTS:
                code = R2
            else:
                words = pool.words[slot]
                token, position = words[0], words[1]
                code += R3 * (seal_of(words[:8], slot, pool.keys) != words[14] | words[15] << 32)
                code += R4 * (position != segment.first_position + j)
                if root or readable(before):
                    continued = segment.seed if root else pool.chain(before)
                    expected = (pool.keys.multiplier * continued + mixed(token, position, pool.keys)) & MASK
                    code += R5 * (pool.chain(slot) != expected)
                stale = words[5] != pool.generations[slot // PAGE_SIZE] & M32
                code += R12 * (stale or words[10] & 2**LAYERS - 1 != 2**LAYERS - 1)
            codes[segment.start + j] = code
            before, root = slot, False
    return codes


def run(
    operation,
    pool: Pool,
    indices: list[int],
    segments: list[Segment],
    device: str,
    live: int | None = None,
    group: int = 1,
):
    def tensor(values: list[int]) -> Tensor:
        return torch.tensor([signed(v) for v in values], dtype=torch.int64, device=device)

    codes = tensor([POISON] * len(indices))
    operation(
        pool.records(device),
        tensor(indices),
        starts=tensor([s.start for s in segments]),
        lengths=tensor([s.length for s in segments]),
        first_positions=tensor([s.first_position for s in segments]),
        predecessors=tensor([s.predecessor for s in segments]),
        seeds=tensor([s.seed for s in segments]),
        generations=tensor(pool.generations),
        layers=record.layers_bitmap(LAYERS, device),
        page_size=PAGE_SIZE,
        null_slots=NULL_SLOTS,
        pool_id=POOL_ID,
        keys=pool.keys,
        codes=codes,
        num_live=None if live is None else tensor([live]),
        group=group,
    )
    return codes.tolist()


FIRST, SECOND, TAIL = [8, 9, 10, 11, 48, 49, 20], [30, 31, 12, 13], [24, 25]
INDICES = [*FIRST, 99, *SECOND, *TAIL, 99]  # 99 lies between segments and is never judged
SEGMENTS = [
    Segment(0, 7),
    Segment(7, 0),  # a row without entries
    Segment(8, 4, seed=5),
    Segment(12, 2, first_position=7, predecessor=20),  # continues the first row
    Segment(14, 0),
]


@pytest.fixture
def written(device: str) -> Pool:
    """Two rows, the first over the last page's last slot, and a branch that continues the first."""
    pool = Pool(make_keys(21, LAYERS, 4, device))
    pool.write(FIRST)
    pool.write(SECOND, chain=5, salt=99)
    pool.write(TAIL, first_position=7, chain=pool.chain(20), salt=5)
    return pool


@both
def test_verify_finds_nothing_in_what_was_written(operation, written: Pool, device: str) -> None:
    """Clean rows and branches give zero; entries of no segment stay as they are."""
    codes = run(operation, written, INDICES, SEGMENTS, device)
    assert codes == [0] * 7 + [POISON] + [0] * 6 + [POISON]
    assert codes == oracle(written, INDICES, SEGMENTS)


FAULTS = {
    "beyond the pool": ({2: NUM_SLOTS}, {2: R1}),
    "negative": ({2: -1}, {2: R1}),
    "far away": ({0: 2**40}, {0: R1}),
    "null slot": ({3: 1}, {3: R2}),
    "bad last entry": ({6: -5}, {6: R1}),
    "two pages swapped": ({0: 48, 4: 8}, {0: R4 | R5, 1: R5, 4: R4 | R5, 5: R5}),
    "another row's slot at its position": ({2: 12}, {2: R5, 3: R5}),
    "an unwritten slot": ({2: 40}, {2: R3 | R4 | R5 | R12, 3: R5}),
    "the null page and nothing else": (dict.fromkeys(range(7), 0), dict.fromkeys(range(7), R2)),
}


@both
@pytest.mark.parametrize("name", FAULTS)
def test_verify_judges_the_indices(operation, name: str, written: Pool, device: str) -> None:
    """A wrong index is named where it stands; R5 is not judged behind a slot that cannot be read."""
    wrong, expected = FAULTS[name]
    indices = [wrong.get(i, slot) for i, slot in enumerate(INDICES)]
    codes = run(operation, written, indices, SEGMENTS, device)
    assert codes == oracle(written, indices, SEGMENTS)
    assert {i: c for i, c in enumerate(codes) if c not in (0, POISON)} == expected


@both
def test_verify_judges_every_word_of_a_record(operation, written: Pool, device: str) -> None:
    """One flipped bit in each of the 16 words of slot 10: what covers that word says so, nobody else."""
    expected = {0: R3 | R5, 1: R3 | R4 | R5, 2: R3 | R5, 3: R3 | R5, 4: R3, 5: R3 | R12, 6: R3, 7: R3}
    expected |= {8: 0, 9: 0, 10: R12, 11: 0, 12: 0, 13: 0, 14: R3, 15: R3}  # the seal excludes content and layers
    for word in range(16):
        flip = 1 << (2 if word == 10 else 31)
        written.words[10][word] ^= flip
        codes = run(operation, written, INDICES, SEGMENTS, device)
        assert codes == oracle(written, INDICES, SEGMENTS)
        assert codes[2] == expected[word]
        assert codes[3] == (R5 if word in (2, 3) else 0)  # the next entry continues a changed chain
        written.words[10][word] ^= flip


@both
def test_verify_compares_grants(operation, written: Pool, device: str) -> None:
    """A page granted again since the write is R12 for all its entries, and for no other."""
    written.generations[12] += 1
    written.generations[2] += 2**32  # the same 32 bits
    codes = run(operation, written, INDICES, SEGMENTS, device)
    assert [i for i, c in enumerate(codes) if c == R12] == [4, 5]
    assert codes == oracle(written, INDICES, SEGMENTS)


@both
def test_verify_judges_where_a_segment_continues(operation, written: Pool, device: str) -> None:
    """A wrong root, a wrong predecessor, an unreadable one and none at all."""
    tail = SEGMENTS[3]
    for change, first in (
        ({"predecessor": 49}, R5),
        ({"predecessor": -1}, R5),
        ({"predecessor": NO_PREDECESSOR}, 0),
        ({"predecessor": NUM_SLOTS}, 0),
        ({"predecessor": 2}, 0),
        ({"first_position": 8}, R4),
    ):
        segments = [Segment(0, 7, seed=SEED + 1), replace(tail, **change)]
        codes = run(operation, written, INDICES, segments, device)
        assert codes == oracle(written, INDICES, segments)
        assert (codes[0], codes[12]) == (R5, first)


@both
@pytest.mark.parametrize("live", [0, 1, 3, 4, 99])
def test_verify_leaves_padding_alone(operation, live: int, written: Pool, device: str) -> None:
    """Segments at and after the live count are not judged."""
    codes = run(operation, written, INDICES, SEGMENTS, device, live=live)
    assert codes == oracle(written, INDICES, SEGMENTS[:live])


@both
@pytest.mark.parametrize("segments", [[], [Segment(0, 0)], [Segment(3, 1, 3, 10)]], ids=["none", "empty", "one"])
def test_verify_takes_few_segments(operation, segments: list[Segment], written: Pool, device: str) -> None:
    """None, one without entries, one with one entry."""
    assert run(operation, written, INDICES, segments, device) == oracle(written, INDICES, segments)


@both
def test_verify_spans_programs(operation, device: str) -> None:
    """A row longer than one program's share; records may be read twice (the row repeats itself: R4 and R5)."""
    pool = Pool(make_keys(21, LAYERS, 4, device))
    pool.write(list(range(4, 50)))
    indices = list(range(4, 50)) * 30
    segments = [Segment(0, len(indices))]
    codes = run(operation, pool, indices, segments, device)
    assert codes == oracle(pool, indices, segments)
    assert codes[:46] == [0] * 46
    assert set(codes[46:]) == {R4, R4 | R5}


GROUPED = {
    "alike": ({}, {}),
    "one reads another slot": ({50 * 6 + 20: 12}, {}),
    "one reads nothing of the pool": ({50 * 5 + 45: NUM_SLOTS}, {}),
    "one reads what follows another slot": ({50 * 5 + 20: 12, 50 * 6 + 20: 13, 50 * 6 + 21: 25, 50 * 7 + 21: 25}, {}),
    "one begins elsewhere": ({}, {6: {"first_position": 1}}),
    "one has another root": ({}, {5: {"seed": 9}}),
    "one continues another": ({}, {6: {"predecessor": 20}}),
    "some are shorter": ({}, {4: {"length": 3}, 5: {"length": 40}, 6: {"length": 0}}),
    "one reads nothing of the pool where one ends": (
        {50 * 4 + 44: -1, 50 * 5 + 44: -1, 50 * 6 + 44: -1, 50 * 6 + 45: -1},
        {5: {"length": 45}},
    ),
}


@both
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("name", GROUPED)
def test_segments_of_a_group_are_judged_each(operation, name: str, group: int, device: str) -> None:
    """What is judged once for all of them is what all of them read, and as they read it; padding stays as it is."""
    pool = Pool(make_keys(21, LAYERS, 4, device))
    pool.write(list(range(4, 50)))
    pool.words[30][0] ^= 1  # R3 and R5 to every reader
    wrong, changes = GROUPED[name]
    indices = [*range(4, 50), 99, 99, 99, 99] * 8
    for place, slot in wrong.items():
        indices[place] = slot
    segments = [replace(Segment(50 * i, 46), **changes.get(i, {})) for i in range(8)]
    codes = run(operation, pool, indices, segments, device, live=7, group=group)
    assert codes == oracle(pool, indices, segments[:7])
    with pytest.raises(ValueError, match="group must divide 8 segments, got 3"):
        run(operation, pool, indices, segments, device, group=3)


@both
def test_zeroed_records_are_not_valid(operation, device: str) -> None:
    """A wiped canary does not vouch for anything, whatever the grants and the root."""
    pool = Pool(make_keys(21, LAYERS, 4, device), generations=[0] * 13)
    codes = run(operation, pool, [8, 9], [Segment(0, 2, seed=0)], device)
    assert codes == oracle(pool, [8, 9], [Segment(0, 2, seed=0)])
    assert all(code & R3 and code & R5 for code in codes)


@both
def test_verify_refuses_wrong_sizes(operation, written: Pool, device: str) -> None:
    """There is one grant a page."""
    short = replace(written, generations=[1] * 12)
    with pytest.raises(ValueError, match=r"generations must be contiguous \[13\] int64, got \[12\]"):
        run(operation, short, INDICES, SEGMENTS, device)
