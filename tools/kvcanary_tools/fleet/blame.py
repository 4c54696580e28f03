"""Blame: which GPU, code path, version or connector has more incidents than its exposure explains.

Each suspect is compared with the rest of the fleet by a Poisson test. Whoever is least likely by chance is named, what
it explains is put aside, and the rest is judged again: so a bad GPU does not make the code that runs on it suspect.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvcanary_tools.fleet.members import Member
from kvcanary_tools.fleet.merging import family_of, path_of

GPU, SITE, PATH, VERSION, CONNECTOR = "GPU", "code", "code path", "version", "connector"
DIMENSIONS = (GPU, PATH, SITE, VERSION, CONNECTOR)
CERTAIN = 0.01  # of a suspect's p-value times the number of suspects
FEWEST = 25  # codes with a site, and layers, that a fleet has at least: most have never had an incident
MOST_OF = 0.8  # of a suspect's incidents that a second value must share to be named with it
HEAL, RESTART, DRAIN, FILE = "heal", "restart", "drain and probe", "file with the engine"


@dataclass(frozen=True)
class Watched:
    """One GPU for the time that it was watched. `exposure`: bytes compared, of one unit in the whole fleet."""

    gpu: str
    exposure: float
    version: str
    connector: str = "none"

    def value(self, dimension: str) -> str:
        return {GPU: self.gpu, VERSION: self.version, CONNECTOR: self.connector}[dimension]


@dataclass(frozen=True)
class Incident:
    """One fault on a GPU. `site`: code, family and site. `is_bit`: one word changed that nobody wrote."""

    watched: Watched
    site: str
    layer: int | None
    is_bit: bool

    @property
    def path(self) -> str:
        return self.site if self.layer is None else f"{self.site}, layer {self.layer}"

    def value(self, dimension: str) -> str:
        own = self.watched
        by_code = {SITE: self.site, PATH: self.path}
        return by_code[dimension] if dimension in by_code else own.value(dimension)


@dataclass(frozen=True)
class Suspect:
    """A value of one dimension and what speaks against it.

    count:    incidents of a GPU; of the others GPUs that have at least one, so that no single GPU makes them suspect
    expected: of that many by the rate of the rest;  p: of at least as many by chance
    with_it:  values of other dimensions that its incidents share, beyond chance
    """

    dimension: str
    value: str
    count: int
    expected: float
    p: float
    advice: str = ""
    with_it: dict[str, str] = field(default_factory=dict)

    def names(self, dimension: str, value: str) -> bool:
        return (self.dimension, self.value) == (dimension, value) or self.with_it.get(dimension) == value


@dataclass(frozen=True)
class Verdict:
    """Suspects, the surest first, and how many incidents nobody is suspected of: those are healed one by one."""

    suspects: list[Suspect]
    isolated: int


def poisson_tail(count: int, mean: float) -> float:
    """P(X >= count) of a Poisson variable with that mean, summed from the first term on."""
    if count <= 0 or mean <= 0:
        return float(count <= 0)
    term, total, n = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)), 0.0, count
    while term > total * 1e-17:
        total += term
        n += 1
        term *= mean / n
    return min(total, 1.0)


def binomial_tail(count: int, total: int, share: float) -> float:
    """P(X >= count) of that many tries."""
    return sum(math.comb(total, n) * share**n * (1 - share) ** (total - n) for n in range(count, total + 1))


def blame(fleet: Sequence[Watched], incidents: Sequence[Incident]) -> Verdict:
    """Name suspects one after the other, until chance explains the rest."""
    fleet, left, named = list(fleet), list(incidents), []
    while left:
        suspects = [one for dimension in DIMENSIONS for one in _suspects(fleet, left, dimension)]
        worst = min(suspects, key=lambda one: (one.p, DIMENSIONS.index(one.dimension)), default=None)
        if worst is None or worst.p * len(suspects) > CERTAIN:
            break
        own = [one for one in left if one.value(worst.dimension) == worst.value]
        named.append(replace(worst, advice=_advice(worst, own), with_it=_with_it(fleet, own, worst.dimension)))
        left = [one for one in left if one.value(worst.dimension) != worst.value]
        if worst.dimension not in (SITE, PATH):  # what it was exposed to goes with its incidents
            fleet = [one for one in fleet if one.value(worst.dimension) != worst.value]
    return Verdict(named, len(left))


def of_members(members: Sequence[Member]) -> tuple[list[Watched], list[Incident]]:
    """The arguments of `blame`, of those members that are watched."""
    fleet, incidents = [], []
    for member in members:
        if member.certificate is None:
            continue
        own = Watched(member.gpu, member.exposure, member.version, member.connector)
        fleet.append(own)
        for finding in member.incidents:
            (site, layer), is_bit = path_of(finding), finding["undeclared"] and finding["part"] is not None
            incidents.append(Incident(own, f"{finding['code']} ({family_of(finding)}) at {site}", layer, bool(is_bit)))
    return fleet, incidents


def lines(verdict: Verdict) -> Iterator[str]:
    """For people, a suspect a line."""
    for number, one in enumerate(verdict.suspects, 1):
        what = "incidents" if one.dimension == GPU else "GPUs"
        shared = "".join(f", {dimension} {value}" for dimension, value in one.with_it.items())
        yield f"{number}. {one.dimension} {one.value}{shared}"
        yield f"   {one.count} {what}, {one.expected:.2g} expected, p {one.p:.1e}: {one.advice}"
    if not verdict.suspects:
        yield "nobody stands out"
    if verdict.isolated:
        yield f"{verdict.isolated} isolated: {HEAL}"


def _suspects(fleet: Sequence[Watched], left: Sequence[Incident], dimension: str) -> Iterator[Suspect]:
    """Every value of a dimension that has incidents, by the rate of the values beside it and one incident more.

    A changed word is found where it is read next: that says nothing of a code, only of a layer if that stays the same.
    """
    counted = [one for one in left if not one.is_bit] if dimension == SITE else left
    counts = _counts(counted, dimension)
    beside = _beside(counted, dimension, counts)
    for value, count in counts.items():
        own = _share_of(fleet, left, dimension, value)
        if own < 1:  # else there is nothing to compare with
            expected = (beside[value] - count + 1) * own / (1 - own)
            yield Suspect(dimension, value, count, expected, poisson_tail(count, expected))


def _beside(incidents: Sequence[Incident], dimension: str, counts: Counter[str]) -> dict[str, int]:
    """By value the sum over those that it is compared with, its own included: all, of a code path all of its code."""
    if dimension != PATH:
        return dict.fromkeys(counts, sum(counts.values()))
    site_of = {one.path: one.site for one in incidents}
    sums: Counter[str] = Counter()
    for path, count in counts.items():
        sums[site_of[path]] += count
    return {path: sums[site_of[path]] for path in counts}


def _counts(incidents: Sequence[Incident], dimension: str) -> Counter[str]:
    """By value its incidents if it is a GPU, else the GPUs that have one."""
    if dimension == GPU:
        return Counter(one.watched.gpu for one in incidents)
    gpus: dict[str, set[str]] = defaultdict(set)
    for one in incidents:
        gpus[one.value(dimension)].add(one.watched.gpu)
    return Counter({value: len(own) for value, own in gpus.items()})


def _share_of(fleet: Sequence[Watched], incidents: Sequence[Incident], dimension: str, value: str) -> float:
    """Of the fleet's exposure, the part of a value. Codes with their sites have equal parts, and layers of one do."""
    if dimension == SITE:
        return 1 / max(FEWEST, len({one.site for one in incidents}) + 1)
    if dimension == PATH:
        return 1 / max(FEWEST, len({one.layer for one in incidents}) + 1)
    total = sum(one.exposure for one in fleet)
    own = sum(one.exposure for one in fleet if one.value(dimension) == value)
    return own / total if total else 1.0


def _with_it(fleet: Sequence[Watched], own: Sequence[Incident], dimension: str) -> dict[str, str]:
    """By other dimension the value that most of these incidents share, where chance does not explain that."""
    shared: dict[str, str] = {}
    others = {GPU: (), SITE: (PATH, VERSION, CONNECTOR), PATH: (VERSION, CONNECTOR)}
    for other in others.get(dimension, (SITE, PATH)):
        counts = _counts(own, other)
        value, count = counts.most_common(1)[0]
        total = sum(counts.values())
        by_chance = binomial_tail(count, total, _share_of(fleet, own, other, value))
        if count >= MOST_OF * total and by_chance < CERTAIN:
            shared[other] = value
    return shared


def _advice(suspect: Suspect, own: Sequence[Incident]) -> str:
    """A GPU whose words change is drained; one with other incidents is restarted; all else is the engine's."""
    if suspect.dimension != GPU:
        return FILE
    return DRAIN if 2 * sum(one.is_bit for one in own) >= len(own) else RESTART
