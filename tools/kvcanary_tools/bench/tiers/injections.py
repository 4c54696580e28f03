"""Faults in a tier of files, and clean loads: what of it is found, and as what.

python -m kvcanary_tools.bench.tiers.injections --injections 1000 --loads 100000
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from kvcanary import Tier
from kvcanary_tools.bench import common
from kvcanary_tools.bench.common import machine
from kvcanary_tools.bench.tiers.file_tier import FileTier

SEED = 0x5EA1
FINDINGS_A_TIER = 30
SHAPES = ((2, 4, 16, 2, 8), (4, 2, 3, 16), (3, 1000), (8192,), (2, 1, 40_000), (5, 7, 3))
DTYPES = (np.float32, np.float16, np.int8, np.float64)

Fault = Callable[[random.Random, FileTier, str, str], None]


def made(chance: random.Random) -> np.ndarray:
    """Numbers as a model would have them, of any shape and type."""
    random_ = np.random.default_rng(chance.getrandbits(32))
    return (40 * random_.standard_normal(chance.choice(SHAPES))).astype(chance.choice(DTYPES))


def truncated(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """The file ends anywhere."""
    path = tier.folder / f"{key}.kv"
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def half_written(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """It has its length, and zeros from somewhere on."""
    path = tier.folder / f"{key}.kv"
    data = path.read_bytes()
    end = chance.randrange(len(data.rstrip(b"\0")))
    path.write_bytes(data[:end] + bytes(len(data) - end))


def half_overwritten(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """A later object of the same key reached the file to its half."""
    path = tier.folder / f"{key}.kv"
    old = path.read_bytes()
    new = renewed(chance, tier, key)
    half = max(1, len(old) // 2)
    path.write_bytes(new.tobytes()[:half] + old[half:])


def stale(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """A later object of the same key did not reach its file, and its seal did."""
    old = (tier.folder / f"{key}.kv").read_bytes()
    renewed(chance, tier, key)
    (tier.folder / f"{key}.kv").write_bytes(old)


def stale_with_its_seal(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """Neither of both arrived."""
    old = [(tier.folder / f"{key}.{kind}").read_bytes() for kind in ("kv", "seal")]
    renewed(chance, tier, key)
    for kind, data in zip(("kv", "seal"), old, strict=True):
        (tier.folder / f"{key}.{kind}").write_bytes(data)


def swapped(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """The file of another key."""
    shutil.copy(tier.folder / f"{other}.kv", tier.folder / f"{key}.kv")


def swapped_with_its_seal(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """The file of another key, with what belongs to it."""
    for kind in ("kv", "seal"):
        shutil.copy(tier.folder / f"{other}.{kind}", tier.folder / f"{key}.{kind}")


def flipped(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """One bit."""
    path = tier.folder / f"{key}.kv"
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def seal_cut(chance: random.Random, tier: FileTier, key: str, other: str) -> None:
    """The seal's own file ends anywhere."""
    path = tier.folder / f"{key}.seal"
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def renewed(chance: random.Random, tier: FileTier, key: str) -> np.ndarray:
    """The key is put again, with other bytes of the same shape."""
    dtype, shape = CONTENTS[tier.folder, key]
    new = (40 * np.random.default_rng(chance.getrandbits(32)).standard_normal(shape)).astype(dtype)
    tier.save(key, new)
    return new


#: By fault, what a finding may call it: a half of few bytes may be one word.
FAULTS: dict[Fault, tuple[str, ...]] = {
    truncated: ("short",),
    half_written: ("short", "one word", "unknown"),
    half_overwritten: ("stale", "unknown", "one word"),
    stale: ("stale",),
    stale_with_its_seal: ("stale",),
    swapped: ("misrouted",),
    swapped_with_its_seal: ("misrouted",),
    flipped: ("one word",),
    seal_cut: ("short",),
}
CONTENTS: dict[tuple[Path, str], tuple[Any, tuple[int, ...]]] = {}


def save(tier: FileTier, key: str, kv: np.ndarray) -> None:
    CONTENTS[tier.folder, key] = kv.dtype, kv.shape
    tier.save(key, kv)


def inject(count: int, folder: Path, seed: int = 1) -> dict[str, Any]:
    """So many faults, one after the other, each with a clean load before it."""
    chance, tier = random.Random(seed), FileTier(folder, SEED)
    found, misses, alarms, others = Counter[str](), 0, 0, 0
    for number in range(count):
        key, other, fault = f"{number}-a", f"{number}-b", list(FAULTS)[number % len(FAULTS)]
        if number % FINDINGS_A_TIER == 0:  # which keeps the first of each check, and counts the others
            tier = FileTier(folder, SEED)
        for name in (key, other):
            save(tier, name, made(chance))
        alarms += sum(tier.load(name) is None for name in (key, other))
        told = len(tier.tier.findings)
        fault(chance, tier, key, other)
        if tier.load(key) is not None:
            misses += 1
            continue
        verdict = tier.tier.findings[-1].found["verdict"] if len(tier.tier.findings) > told else "not told"
        found[f"{fault.__name__}: {verdict}"] += 1
        others += verdict not in FAULTS[fault]
    return {"injections": count, "misses": misses, "alarms": alarms, "other_verdicts": others, "verdicts": dict(found)}


def load_clean(count: int, folder: Path, seed: int = 2) -> dict[str, Any]:
    """So many loads of objects that nobody touched, some put again, by tiers that were started anew in between."""
    chance, tier, alarms, findings = random.Random(seed), FileTier(folder, SEED), 0, 0
    keys = [f"clean-{number}" for number in range(200)]
    for key in keys:
        save(tier, key, made(chance))
    begin = time.perf_counter()
    for number in range(count):
        if number % 500 == 499:
            save(tier, chance.choice(keys), made(chance))
        if number % 5000 == 4999:
            findings += len(tier.tier.findings)
            tier = FileTier(folder, SEED)
        alarms += tier.load(chance.choice(keys)) is None
    seconds = time.perf_counter() - begin
    findings += len(tier.tier.findings)
    return {
        "clean_loads": count,
        "misses_of_clean_loads": alarms,
        "findings": findings,
        "us_a_load": round(1e6 * seconds / count),
    }


def speed(num_bytes: int = 1 << 28) -> dict[str, Any]:
    """GB a second of seals and checks of one large object, beside a copy of it into memory that is there."""
    data, target = np.random.default_rng(0).integers(0, 256, (2, num_bytes), np.uint8)
    tier = Tier(SEED)
    seal = tier.put("large", data)
    best: dict[str, float] = {}
    for _ in range(5):
        for name, run in (
            ("put", lambda: tier.put("large", data)),
            ("check", lambda: tier.check("large", data, seal)),
            ("copy", lambda: np.copyto(target, data)),
        ):
            begin = time.perf_counter()
            run()
            best[name] = max(best.get(name, 0.0), num_bytes / (time.perf_counter() - begin) / 1e9)
    rates = {f"gb_a_second_{name}": round(rate, 2) for name, rate in best.items()}
    return rates | {"seal_bytes_a_byte": round(len(seal.to_bytes()) / num_bytes, 6)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--injections", type=int, default=1000)
    parser.add_argument("--loads", type=int, default=100_000)
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # findings are counted here
    with tempfile.TemporaryDirectory() as folder:
        result = inject(options.injections, Path(folder)) | load_clean(options.loads, Path(folder))
    what = "faults in a tier of files, clean loads of it, and the speed of seals"
    result = {"what": what, "machine": machine(), "seed": SEED, **result, **speed()}
    common.save("tier_files", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
