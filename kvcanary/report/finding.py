"""Finding: one fault as users see it; FindingLog: all of them, grouped so that none floods the rest."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Set
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import structlog

from kvcanary.pools.launch_site import site_name

if TYPE_CHECKING:
    from kvcanary.provenance.bytes_of import Provenance

MOST_IN_EVENT = 2  # of a list, where a dump has all of it
KEPT_IN_GROUP = 64  # findings kept whole a group; later ones are counted
#: What a cause can be: the families of published KV cache bugs, and the canary's own hooks. The list is closed.
FAMILIES = (
    "bounds",
    "addressing",
    "lengths",
    "draft",
    "windows",
    "graphs",
    "lifetime",
    "order",
    "identity",
    "transfer",
    "scales",
    "uninitialised",
    "numerics",
    "ranks",
    "bits",
    "hooks",
)
UNKNOWN = "unknown"  # family of an incident that no rule explains
_events = structlog.get_logger("kvcanary")


@dataclass(frozen=True)
class Cause:
    """A possible cause. `basis`: `derived` (follows from what was read) or `inferred` (fits it best).

    family:   one of FAMILIES
    evidence: what was read that speaks for it
    """

    family: str
    text: str
    basis: str
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")


@dataclass(frozen=True)
class Finding:
    """One fault: what, where, whose, expected and found, since when, and why.

    sentence:   what the check's violation means
    offset:     slot within its page
    layers:     layers that differ or are missing; `layer` is the first
    part, head, dim, byte, bit: where exactly one word changed; byte and bit count within the element
    site, step: the forward that read (R) or wrote (W), or the canary's own re-read (`sweep`, `release`)
    reader:     request whose row it is; None for writes
    writer:     request named by the slot's record, or the one that writes; with its step and site
    undeclared: the record is not to blame: somebody wrote here and declared nothing
    owner:      request that the page is granted to
    bytes_of:   whose bytes lie there now, where that could be told
    last_good_step, first_bad_step: step in which this was last known good, and the one in which it was found
    history:    grants and frees of the page, oldest first
    readers:    requests whose rows are touched; `exposed_tokens` of theirs were sampled since it was last good
    evidence:   other checks that fired for the same fault
    action:     what was done about it
    entry:      where the slot is an entry of a StateView, its number
    healed:     mode heal: how it was made good; "" until it is
    hardware:   machine, process and GPU, what NVML said of it at that moment, and the address (`kvcanary.hardware`)
    """

    code: str
    name: str
    sentence: str
    pool: str
    page: int
    slot: int
    offset: int
    position: int | None
    layer: int | None
    layers: tuple[int, ...]
    part: str | None
    head: int | None
    dim: int | None
    byte: int | None
    bit: int | None
    site: tuple[str, int]
    step: int
    reader: str | None
    writer: str | None
    write_step: int | None
    write_site: tuple[str, int] | None
    undeclared: bool
    owner: str | None
    expected: dict[str, Any]
    found: dict[str, Any]
    bytes_of: tuple[Provenance, ...]
    last_good_step: int | None
    first_bad_step: int
    history: tuple[str, ...]
    readers: tuple[str, ...]
    exposed_tokens: int
    causes: tuple[Cause, ...]
    evidence: tuple[str, ...]
    incident: int
    action: str = ""
    entry: int | None = None
    healed: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bit_error(self) -> bool:
        """Whether one word changed of bytes that nobody is known to have written: what failing memory looks like."""
        return self.undeclared and self.part is not None

    def touches(self, names: Set[str]) -> bool:
        """Whether one of these requests reads, wrote or owns what it is about."""
        return not names.isdisjoint((self.reader, self.owner, self.writer, *self.readers))

    def to_dict(self) -> dict[str, Any]:
        """The same with stable keys, ready for JSON."""
        return {name: _listed(value) for name, value in asdict(self).items()}


def _listed(value: Any) -> Any:
    """With lists in the place of tuples, as JSON has them."""
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def log_finding(finding: Finding, rank: int | None = None, dump: str | None = None) -> None:
    """One structlog event, `kvcanary.finding`, whose keys are the fields of the finding and where there is more.

    rank: of the worker that has it.  dump: the file that has its lists whole; without one the event has
    """
    whole = finding.to_dict()
    fields = whole if dump is None else _cut(whole)
    cut = [name for name in whole if fields[name] != whole[name]]
    _events.error("kvcanary.finding", **fields, rank=rank, dump=dump, next=next_command(finding, dump), cut=cut)


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(inner) for name, inner in value.items()}
    return [_cut(inner) for inner in value[:MOST_IN_EVENT]] if isinstance(value, list) else value


def next_command(finding: Finding, dump: str | None) -> str:
    """What to type to know more: of this finding, where a dump has it, else of its code."""
    return f"kvcanary explain {shlex.quote(dump)}" if dump else f"kvcanary codes {finding.code}"


@dataclass
class FindingGroup:
    """Findings of one code at one site."""

    first: Finding
    last: Finding
    count: int = 0
    kept: list[Finding] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return self.first.to_dict() | {"count": self.count, "last_step": self.last.step}


class FindingLog:
    """First, last and count of each (code, site)."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], FindingGroup] = {}
        self.total = 0
        self.incidents: Counter[str] = Counter()  # by family of the cause ranked first, `unknown` where there is none
        self.bit_errors = 0
        self.drilled: set[str] = set()  # requests whose damage is a drill's: it counts as no incident
        self._counted: set[int] = set()  # incidents
        self._reported: set[tuple[str, int]] = set()  # codes and incidents

    def add(self, finding: Finding) -> bool:
        """Count a finding; whether it is one to tell: a new incident, and not one of very many.

        What several sites see of one incident, such as a damaged bit that a forward and the last re-read find, is told
        once; entries that a forward without hooks (H1) has left unwritten, and lengths that it left behind, are not.
        """
        key = finding.code, site_name(*finding.site)
        group = self.groups.setdefault(key, FindingGroup(finding, finding))
        group.last, group.count = finding, group.count + 1
        self.total += 1
        self._count(finding)
        codes = (finding.code, "H1") if finding.code in ("R10", "R12") else (finding.code,)
        is_reported = any((code, finding.incident) in self._reported for code in codes)
        if is_reported or len(group.kept) >= KEPT_IN_GROUP:
            return False
        self._reported.add((finding.code, finding.incident))
        group.kept.append(finding)
        return True

    def _count(self, finding: Finding) -> None:
        """Each incident once, also those of which nothing is kept."""
        if finding.incident not in self._counted and not finding.touches(self.drilled):
            self._counted.add(finding.incident)
            self.incidents[finding.causes[0].family if finding.causes else UNKNOWN] += 1
            self.bit_errors += finding.is_bit_error

    def heal(self, finding: Finding, how: str) -> Finding:
        """All that was found of its incident was made good: what is kept says so from now on; the finding that does."""
        for group in self.groups.values():
            group.first, group.last = _healed(group.first, finding, how), _healed(group.last, finding, how)
            group.kept = [_healed(own, finding, how) for own in group.kept]
        return replace(finding, healed=how)

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident, in the order in which they were found."""
        kept = [finding for group in self.groups.values() for finding in group.kept]
        return sorted(kept, key=lambda finding: (finding.step, finding.incident))


def _healed(own: Finding, finding: Finding, how: str) -> Finding:
    return replace(own, healed=how) if own.incident == finding.incident else own
