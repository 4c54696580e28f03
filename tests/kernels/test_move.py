"""Move: records follow bytes; windows may overlap; damage is carried along, never sealed over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.judge.move import move, move_torch
from kvcanary_kernels.record.layout import Keys, make_keys, read_record, seal_host, signed

POISON = -77
NUM_SLOTS, LAYERS, POOL_ID = 24, 3, 1
both = pytest.mark.parametrize("operation", [move, move_torch], ids=["triton", "torch"])


def sealed_pool(keys: Keys, device: str) -> tuple[Tensor, Tensor]:
    """Records of random identity and content whose seals hold, and random fingerprints."""
    generator = torch.Generator().manual_seed(3)
    records = torch.randint(-(2**62), 2**62, (NUM_SLOTS, 8), generator=generator)
    for slot in range(NUM_SLOTS):
        records[slot, 7] = signed(seal_host(read_record(records, slot), slot, POOL_ID, keys))
    fingerprints = torch.randint(-(2**62), 2**62, (LAYERS, NUM_SLOTS), generator=generator)
    return records.to(device), fingerprints.to(device)


def oracle(records: Tensor, content_a: Tensor, src: list[int], dst: list[int], news: list[dict[str, int]], keys: Keys):
    """Expected records and fingerprints, every source read first; seals computed anew from the words."""
    rows, fingerprints = records.tolist(), content_a.T.tolist()
    new_rows, new_fingerprints = [list(r) for r in rows], [list(x) for x in fingerprints]
    for s, d, new in zip(src, dst, news, strict=True):
        row = list(rows[s])
        request = new.get("request", row[2] & 0xFFFFFFFF)
        row[2] = signed(request | new["generation"] << 32)
        row[3] = signed(new["step"] | new["site"] << 32)
        words = [w & 0xFFFFFFFF for column in row[:4] for w in (column, column >> 32)] + [d, POOL_ID]
        row[7] = signed(keys.seal_start + sum(k * w for k, w in zip(keys.seal_keys, words, strict=True)))
        new_rows[d], new_fingerprints[d] = row, fingerprints[s]
    return new_rows, new_fingerprints


def run(operation, records: Tensor, content_a: Tensor, src: Tensor, dst: Tensor, keys: Keys, **given) -> None:
    """The writer stays, and every source was written since its page was granted, unless `given` says more."""
    scratch = torch.full((src.numel(), 8 + LAYERS), POISON, device=src.device)
    given.setdefault("requests", records[src.clamp(0, NUM_SLOTS - 1), 2])
    truth = {"page_generations": records[:, 2] >> 32, "page_size": 1, "arrived": torch.full_like(src, POISON)} | given
    operation(records, content_a, src, dst, **truth, pool_id=POOL_ID, keys=keys, scratch=scratch)


WINDOWS = {
    "none": ([], []),
    "one": ([23], [0]),
    "apart": ([20, 21, 23], [3, 2, 1]),
    "down": ([5, 6, 7, 8, 9], [3, 4, 5, 6, 7]),
    "up": ([3, 4, 5, 6, 7], [5, 6, 7, 8, 9]),
    "cycle": ([1, 2, 3], [2, 3, 1]),
    "itself": ([4, 9], [4, 2]),
}


@both
@pytest.mark.parametrize("new_owner", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_move_reads_every_source_first(operation, window: str, new_owner: bool, device: str, tensor) -> None:
    """Token, position, chain and content follow; generation, step, site and, if given, the owner are new."""
    keys = make_keys(2, LAYERS, 4, device)
    records, content_a = sealed_pool(keys, device)
    src, dst = WINDOWS[window]
    n = len(src)
    given = {
        "generations": [2**32 - 1 - i for i in range(n)],
        "step": [2**31 + 5],
        "sites": [i << 16 | 9 for i in range(n)],
    }
    if new_owner:
        given["requests"] = [100 + i for i in range(n)]
    news = [
        {"generation": 2**32 - 1 - i, "step": 2**31 + 5, "site": i << 16 | 9}
        | ({"request": 100 + i} if new_owner else {})
        for i in range(n)
    ]
    expected = oracle(records, content_a, src, dst, news, keys)
    run(operation, records, content_a, tensor(src), tensor(dst), keys, **{k: tensor(v) for k, v in given.items()})
    assert (records.tolist(), content_a.T.tolist()) == expected


@both
@pytest.mark.parametrize("column", [0, 1, 2, 3, 7])
def test_a_damaged_source_stays_damaged(operation, column: int, device: str, tensor) -> None:
    """One flipped bit anywhere in identity or seal: the moved record's seal does not hold either."""
    keys = make_keys(2, LAYERS, 4, device)
    records, content_a = sealed_pool(keys, device)
    records[6, column] ^= 1 << 37
    one = tensor([1])
    run(operation, records, content_a, tensor([6, 7]), tensor([2, 3]), keys, generations=one, step=one, sites=one)
    damaged, sound = read_record(records, 2), read_record(records, 3)
    assert damaged.seal != seal_host(damaged, 2, POOL_ID, keys)
    assert sound.seal == seal_host(sound, 3, POOL_ID, keys)


@both
def test_move_writes_nothing_for_bad_slots(operation, device: str, tensor) -> None:
    """An entry whose source or destination is outside the pool is refused whole."""
    keys = make_keys(2, LAYERS, 4, device)
    records, content_a = sealed_pool(keys, device)
    src, dst, new = [4, -1, 5, 6, 24], [1, 2, 24, 3, 8], {"generation": 1, "step": 2, "site": 3}
    expected = oracle(records, content_a, [4, 6], [1, 3], [new | {"request": 100}, new | {"request": 103}], keys)
    given = {"generations": tensor([1] * 5), "step": tensor([2]), "sites": tensor([3])}
    given["requests"] = tensor([100, 101, 102, 103, 104])
    run(operation, records, content_a, tensor(src), tensor(dst), keys, **given)
    assert (records.tolist(), content_a.T.tolist()) == expected


@both
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_was_not_written_since_its_grant_arrives_blank(operation, is_damaged: bool, device: str, tensor) -> None:
    """All but damage is zero there, under a seal that holds; the others follow, and are told."""
    keys = make_keys(2, LAYERS, 4, device)
    records, content_a = sealed_pool(keys, device)
    src, dst, new = [4, 9, 12, -1, 7], [20, 21, 1, 2, 3], {"generation": 1, "step": 2, "site": 3}
    grants = [read_record(records, slot).generation for slot in src if slot >= 0]
    pages = [2**33] * 12  # of two slots
    for slot, grant in zip((4, 12, 7), (grants[0], grants[2], grants[3] + 1), strict=True):
        pages[slot // 2] = grant + 2**34
    pages[9 // 2] = grants[1] - 1
    expected, fingerprints = oracle(records, content_a, [4, 12], [20, 1], [new, new], keys)
    for slot in (21, 3):
        expected[slot], fingerprints[slot] = [0] * 8, [0] * LAYERS
        expected[slot][7] = signed(seal_host(read_record(torch.tensor([expected[slot]]), 0), slot, POOL_ID, keys))
    if is_damaged:
        records[9, 7] += 5
        expected[9][7] = int(records[9, 7])
        expected[21][7] = signed(expected[21][7] + 5)
    one, arrived = tensor([1]), tensor([POISON] * 5)
    given = {"generations": one, "step": tensor([2]), "sites": tensor([3]), "arrived": arrived}
    given |= {"page_generations": tensor(pages), "page_size": 2}
    run(operation, records, content_a, tensor(src), tensor(dst), keys, **given)
    assert arrived.tolist() == [20, -1, 1, -1, -1]
    assert (records.tolist(), content_a.T.tolist()) == (expected, fingerprints)


def test_move_needs_scratch(device: str, tensor) -> None:
    """The kernel allocates nothing, so the buffer must be given."""
    keys = make_keys(2, LAYERS, 4, device)
    records, content_a = sealed_pool(keys, device)
    one = tensor([1])
    given = {"generations": one, "step": one, "sites": one, "requests": one, "pool_id": 0, "keys": keys}
    given |= {"page_generations": one, "page_size": NUM_SLOTS, "arrived": one}
    with pytest.raises(ValueError, match=r"scratch must be contiguous \[>= 1, 11\] int64, got \[1, 8\]"):
        move(records, content_a, one, one, **given, scratch=torch.zeros(1, 8, dtype=torch.int64, device=device))
