"""Does blame find the bad ones? ``python -m kvcanary_tools.bench.fleet``: a simulated fleet, many seeds.

500 GPUs, 10^9 GPU-seconds. What is sound has errors at published rates, some of which any fleet has; on top there are
one bad HBM, one bad release and one bad connector. Nothing of this ran on a GPU: it measures `kvcanary fleet blame`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.fleet.blame import CONNECTOR, GPU, VERSION, Incident, Verdict, Watched, blame

SEEDS = 200
GPUS, GPU_SECONDS = 500, 1e9
LAYERS = 32
SITES = ("prefill", "verify", "decode", "release", "load")
CODES = ("R4", "R5", "R6", "R9", "R10", "R12", "T1", "W4", "W5", "W6")
HOUR = 3600.0
#: One memory error of an H100 in so many hours (its memory errors as a fleet saw them, arXiv 2503.11901), all taken for
#: changed words in the KV cache, which is the most that they can be.
MEMORY_HOURS = 88_768
#: One noticed silent error of computing in so many hours: 6 in 54 days of 16,384 H100 (the paper of Llama 3).
SILENT_HOURS = 3.5e6
#: Software findings that are no bad release's, in the whole fleet: nobody has published such a rate, so it is assumed.
SPORADIC = 20
#: Share of the fleet that runs the bad release, and that uses the bad connector.
ON_RELEASE, ON_CONNECTOR = 0.2, 0.3
#: Incidents expected of each bad one: of the HBM, the release and the connector.
STRENGTHS = (4, 6, 8, 12, 16, 20)
SHOWN_STRENGTH = 16
BAD_GPU, BAD_RELEASE, BAD_CONNECTOR = "GPU-137", "1.3.1", "nixl"


@dataclass(frozen=True)
class Rates:
    """Incidents that are expected in the whole fleet and time."""

    memory: float = GPU_SECONDS / HOUR / MEMORY_HOURS
    silent: float = GPU_SECONDS / HOUR / SILENT_HOURS
    sporadic: float = SPORADIC
    strength: float = SHOWN_STRENGTH


def main() -> None:
    rows = []
    for strength in STRENGTHS:
        found = [hits(seed, Rates(strength=strength)) for seed in range(SEEDS)]
        row = {"strength": strength, "seeds": SEEDS, "all_three_first": sum(map(all, found))}
        row |= {name: sum(own[n] for own in found) for n, name in enumerate(("hbm", "release", "connector"))}
        rows.append(row | {"nobody_else": sum(is_alone(seed, Rates(strength=strength)) for seed in range(SEEDS))})
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    clean = sum(not blame(*fleet_of(seed, Rates(strength=0))).suspects for seed in range(SEEDS))
    print(f"sound fleets in which nobody is blamed: {clean} of {SEEDS}")
    record = {
        "gpus": GPUS,
        "gpu_seconds": GPU_SECONDS,
        "rates": vars(Rates()),
        "rows": rows,
        "sound_without_blame": clean,
    }
    save("fleet", {"machine": machine(), **record})


def hits(seed: int, rates: Rates) -> tuple[bool, bool, bool]:
    """Whether the bad HBM, release and connector are among the first three suspects, each in one of its own."""
    first = blame(*fleet_of(seed, rates)).suspects[:3]
    wanted = ((GPU, BAD_GPU), (VERSION, BAD_RELEASE), (CONNECTOR, BAD_CONNECTOR))
    return tuple(any(own.names(*one) for own in first) for one in wanted)  # type: ignore[return-value]


def is_alone(seed: int, rates: Rates) -> bool:
    """Whether nobody but these is blamed."""
    return len(verdict_of(seed, rates).suspects) <= 3


def verdict_of(seed: int, rates: Rates) -> Verdict:
    return blame(*fleet_of(seed, rates))


def fleet_of(seed: int, rates: Rates) -> tuple[list[Watched], list[Incident]]:
    """A fleet, and what was found in it: the arguments of `blame`."""
    rng = random.Random(seed)
    exposure = GPU_SECONDS / GPUS
    fleet = [
        Watched(
            f"GPU-{number}",
            exposure,
            BAD_RELEASE if rng.random() < ON_RELEASE else "1.3.0",
            BAD_CONNECTOR if rng.random() < ON_CONNECTOR else "none",
        )
        for number in range(GPUS)
    ]
    incidents = [_anywhere(rng, fleet, is_bit=True) for _ in range(_poisson(rng, rates.memory + rates.silent))]
    incidents += [_anywhere(rng, fleet, is_bit=False) for _ in range(_poisson(rng, rates.sporadic))]
    return fleet, incidents + _bad(rng, fleet, rates.strength)


def _bad(rng: random.Random, fleet: list[Watched], strength: float) -> list[Incident]:
    """Of the one HBM at any place; of the release in one code path; of the connector where it loads, in any layer."""
    [gpu] = [own for own in fleet if own.gpu == BAD_GPU]
    of_release = [own for own in fleet if own.version == BAD_RELEASE]
    of_connector = [own for own in fleet if own.connector == BAD_CONNECTOR]
    incidents = [_incident(rng, gpu, "R9", rng.choice(SITES), is_bit=True) for _ in range(_poisson(rng, strength))]
    layer = rng.randrange(LAYERS)
    incidents += [
        Incident(rng.choice(of_release), "R4 at verify", layer, False) for _ in range(_poisson(rng, strength))
    ]
    incidents += [
        _incident(rng, rng.choice(of_connector), "T1", "load", is_bit=False) for _ in range(_poisson(rng, strength))
    ]
    return incidents


def _anywhere(rng: random.Random, fleet: list[Watched], is_bit: bool) -> Incident:
    return _incident(rng, rng.choice(fleet), "R9" if is_bit else rng.choice(CODES), rng.choice(SITES), is_bit)


def _incident(rng: random.Random, watched: Watched, code: str, site: str, is_bit: bool) -> Incident:
    return Incident(watched, f"{code} at {site}", rng.randrange(LAYERS), is_bit)


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's way: how many uniform numbers until their product falls below e^-mean."""
    count, product, least = 0, rng.random(), math.exp(-mean)
    while product > least:
        count += 1
        product *= rng.random()
    return count


if __name__ == "__main__":
    main()
