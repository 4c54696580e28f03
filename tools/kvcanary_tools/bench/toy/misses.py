"""What the fingerprints miss: ``python -m kvcanary_tools.bench.toy.misses``.

Every word of a row times 64 changes, by both lanes; random and structured corruptions of rows, by lane a; and
corruptions of a live pool, through the manager. A corruption that changes no byte is drawn again, never counted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_kernels.content.check import check_content_torch, mismatched_layers
from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.record.layout import make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from kvcanary_tools.bench.common import events_to_stderr, machine, progress, save
from kvcanary_tools.bench.toy.corruptions import FROM_OTHER_ROWS, KINDS, as_elements
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyShape
from kvcanary_tools.bench.toy.traffic import Load, Traffic

CORRUPTIONS, POOL_CORRUPTIONS, DELTAS = 10**6, 10**4, 64
LAYERS = 2
BATCH_BYTES = 1 << 20  # of one layer's rows
STRIKES_AN_ACTION = 10  # of a live pool, between two engine steps
FIRST_ACTIONS = 40  # before the first strike, for rows that are long enough
EVERYTHING = 1 << 40  # budget that has all live bytes read in every step
LIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class RowShape:
    """K and V of one slot and layer."""

    dtype: torch.dtype
    heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.heads} x {self.head_dim}"

    @property
    def words(self) -> int:
        """32-bit words of K and V."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize // 4


SHAPES = (
    RowShape(torch.float32, 2, 8),
    RowShape(torch.float32, 4, 32),
    RowShape(torch.bfloat16, 2, 64),
    RowShape(torch.bfloat16, 8, 128),
    RowShape(torch.float8_e4m3fn, 2, 32),
    RowShape(torch.float8_e4m3fn, 4, 128),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="corrupt rows, and count what is not found")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corruptions", type=int, default=CORRUPTIONS, help="of rows")
    parser.add_argument("--pool-corruptions", type=int, default=POOL_CORRUPTIONS, help="of a live pool")
    parser.add_argument("--json", type=Path, help="where to write the result; results/misses.json by default")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.corruptions, options.pool_corruptions, options.seed)
    save("misses", result, options.json)
    for title in ("words", "rows", "pool"):
        print(f"{title:32} {'tried':>10} {'found':>10} {'missed':>7}")
        for name, row in result[title].items():
            print(f"  {name:30} {row['tried']:10,} {row['found']:10,} {row['missed']:7,}")
    if any(row["missed"] for title in ("words", "rows", "pool") for row in result[title].values()):
        sys.exit(1)


@torch.inference_mode()
def measure(corruptions: int, pool_corruptions: int, seed: int = 0) -> dict:
    """All three measurements: by shape or kind, how many were tried, found and missed."""
    started = time.perf_counter()
    words = {str(shape): every_word(shape, seed) for shape in SHAPES}
    progress(f"every word times {DELTAS} changes: {sum(row['tried'] for row in words.values()):,}")
    rows: Counter[tuple[str, str]] = Counter()
    for shape in SHAPES:
        rows += corrupt_rows(shape, -(-corruptions // len(SHAPES)), seed)
        progress(f"rows of {shape} done")
    pool: Counter[tuple[str, str]] = Counter()
    for dtype in LIVE_DTYPES:
        pool += corrupt_pool(dtype, -(-pool_corruptions // len(LIVE_DTYPES)), seed)
        progress(f"live pool of {dtype} done")
    return {
        "what": "corruptions that were tried, found and missed; words: by both lanes, pool: at the right slot",
        "machine": machine(),
        "seed": seed,
        "deltas": DELTAS,
        "shapes": [str(shape) for shape in SHAPES],
        "seconds": round(time.perf_counter() - started, 1),
        "words": words,
        "rows": _table(rows),
        "pool": _table(pool),
    }


# every word


def every_word(shape: RowShape, seed: int) -> dict:
    """Each word of a row, in each layer, XORed with 64 deltas: every bit alone, and 32 random ones."""
    generator = torch.Generator().manual_seed(seed)
    clean = _content(shape, 1, generator)
    noise = torch.randint(1, 1 << 32, (DELTAS - 32,), generator=generator)
    deltas = torch.cat([1 << torch.arange(32), noise]).to(torch.int32)
    keys = make_keys(seed, LAYERS, shape.words)
    expected_a, expected_b = _fingerprints(_rows(clean), keys)
    tried = found_a = found = 0
    for layer in range(LAYERS):
        for word in range(shape.words):
            struck = clean.expand(-1, DELTAS, -1, -1, -1).clone()
            struck[layer].flatten(1).view(torch.int32)[:, word] ^= deltas
            fingerprint_a, fingerprint_b = _fingerprints(_rows(struck), keys)
            by_a = fingerprint_a[layer] != expected_a[layer]
            tried += DELTAS
            found_a += int(by_a.sum())
            found += int((by_a & (fingerprint_b != expected_b)).sum())
    return {"tried": tried, "found": found, "missed": tried - found, "found_by_lane_a": found_a}


def _fingerprints(rows: PoolRows, keys) -> tuple[Tensor, Tensor]:
    slots = torch.arange(rows.num_slots)
    fingerprint_a, fingerprint_b = torch.empty(LAYERS, rows.num_slots, dtype=torch.int64), torch.empty_like(slots)
    fingerprint_torch(rows, slots, keys, fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b)
    return fingerprint_a, fingerprint_b


# rows


def corrupt_rows(shape: RowShape, count: int, seed: int) -> Counter[tuple[str, str]]:
    """At least `count` corruptions, as many of each kind, of one layer each; (kind, tried or found) -> how many."""
    generator = torch.Generator().manual_seed(seed)
    counts: Counter[tuple[str, str]] = Counter()
    keys, wanted = make_keys(seed, LAYERS, shape.words), -(-count // len(KINDS))
    num_slots = max(2, min(wanted, BATCH_BYTES // (4 * shape.words)))
    slots = torch.arange(num_slots)
    mismatch = torch.zeros(num_slots, 2, dtype=torch.int64)
    while any(counts[kind, "tried"] < wanted for kind in KINDS):
        pool = _content(shape, num_slots, generator)
        rows = _rows(pool)
        content_a, _ = _fingerprints(rows, keys)
        layer = int(torch.randint(0, LAYERS, (), generator=generator))
        elements = as_elements(pool[layer])
        clean = elements.clone()
        for kind, corrupt in KINDS.items():
            if counts[kind, "tried"] >= wanted:
                continue
            elements.copy_(corrupt(clean, generator))
            changed = (elements != clean).flatten(1).any(1)
            check_content_torch(rows, slots, keys, content_a, mismatch=mismatch)
            differs = mismatched_layers(mismatch, LAYERS)
            right = differs[layer] & ~differs[1 - layer]
            counts[kind, "tried"] += int(changed.sum())
            counts[kind, "found"] += int((changed & right).sum())
            elements.copy_(clean)
    return counts


def _content(shape: RowShape, num_slots: int, generator: torch.Generator) -> Tensor:
    """[layers, num_slots, 2, heads, head_dim]: values as a model makes them, zeros of both signs among them."""
    size = (LAYERS, num_slots, 2, shape.heads, shape.head_dim)
    values = torch.randn(size, generator=generator)
    values *= (torch.rand(size, generator=generator) > 0.1).float()  # a negative value times 0 is -0
    return values.to(shape.dtype)


def _rows(pool: Tensor) -> PoolRows:
    return pool_rows(list(pool[:, :, 0]), list(pool[:, :, 1]))


# a live pool


def corrupt_pool(dtype: torch.dtype, count: int, seed: int) -> Counter[tuple[str, str]]:
    """Corrupt committed slots between the steps of a toy engine, have the canary check, restore the bytes.

    Found: every corrupted slot has a finding R9 that names its pool and layer, and no other slot has one.
    """
    config = CanaryConfig(mode="raise", budget=EVERYTHING, seed=seed)
    engine = ToyEngine(config, ToyShape(heads=2, head_dim=8, dtype=dtype, num_pages=200), seed)
    traffic = Traffic(engine, Load(max_rows=4), seed)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts: Counter[tuple[str, str]] = Counter()
    kinds, tried = cycle(KINDS), 0
    traffic.run(FIRST_ACTIONS)
    while tried < count:
        traffic.act()
        for kind in islice(kinds, STRIKES_AN_ACTION):
            found = _strike(engine, kind, rng, generator)
            if found is not None:
                tried += 1
                counts[kind, "tried"] += 1
                counts[kind, "found"] += found
    traffic.end()
    return counts


def _strike(engine: ToyEngine, kind: str, rng: random.Random, generator: torch.Generator) -> bool | None:
    """Whether this corruption of one slot, or of two, was found at its place; None: no byte changed."""
    slots = _committed_slots(engine, rng, 2 if kind in FROM_OTHER_ROWS else 1)
    if slots is None:
        return None
    pool = rng.choice(list(engine.pools.values()))
    layer = rng.randrange(pool.view.num_layers)
    elements, where = as_elements(pool.kv[layer]), torch.tensor(slots)
    clean = elements[where]
    struck = KINDS[kind](clean, generator)
    changed = (struck != clean).flatten(1).any(1)
    if not changed.any():
        return None
    elements[where] = struck
    expected = {(pool.view.name, slot, layer) for slot in where[changed].tolist()}
    found = _findings(engine)
    elements[where] = clean
    return found == expected


def _findings(engine: ToyEngine) -> set[tuple[str, int, int | None]]:
    """(pool, slot, layer) of every finding R9 of a check of all live bytes."""
    engine.begin()
    try:
        engine.canary.collect(engine.canary.end_step())
    except KVCorruptionError as error:
        return {(finding.pool, finding.slot, finding.layer) for finding in error.findings if finding.code == "R9"}
    return set()


def _committed_slots(engine: ToyEngine, rng: random.Random, count: int) -> list[int] | None:
    """Slots of one row, two pages or more apart, so that each is a finding of its own; None: no row is long enough."""
    apart = 2 * engine.shape.page_size
    rows = [row for row in engine.rows.values() if row.is_ready and row.committed >= count * apart]
    if not rows:
        return None
    row = rng.choice(rows)
    first = rng.randrange(row.committed - (count - 1) * apart)
    return [int(row.slots[first + number * apart]) for number in range(count)]


def _table(counts: Counter[tuple[str, str]]) -> dict:
    table = {}
    for kind in KINDS:
        tried, found = counts[kind, "tried"], counts[kind, "found"]
        table[kind] = {"tried": tried, "found": found, "missed": tried - found}
    table["all"] = {key: sum(row[key] for row in table.values()) for key in ("tried", "found", "missed")}
    return table


if __name__ == "__main__":
    events_to_stderr()
    main()
