"""Finding: one fault as users see it; FindingLog: all of them, grouped so that none floods the rest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvcanary.sites import site_name

KEPT_IN_GROUP = 64  # findings kept whole a group; later ones are counted


@dataclass(frozen=True)
class Cause:
    """A possible cause. `basis`: `derived` (follows from what was read) or `inferred` (fits it best)."""

    text: str
    basis: str


@dataclass(frozen=True)
class Finding:
    """One fault: what, where, whose, expected and found, since when, and why.

    sentence:   what the check's hit means
    offset:     slot within its page
    layers:     layers that differ or are missing; `layer` is the first
    part, head, dim, byte, bit: where exactly one word changed; byte and bit count within the element
    site, step: the forward that read (R) or wrote (W), or the canary's own look (`sweep`, `release`)
    reader:     request whose row it is; None for writes
    writer:     request named by the slot's record, or the one that writes; with its step and site
    last_good_step: step in which this was last known good
    history:    grants and frees of the page, oldest first
    readers:    requests that hold the page; `exposed_tokens` of theirs were sampled since it was last good
    evidence:   other checks that fired for the same fault
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
    expected: dict[str, Any]
    found: dict[str, Any]
    last_good_step: int | None
    history: tuple[str, ...]
    readers: tuple[str, ...]
    exposed_tokens: int
    causes: tuple[Cause, ...]
    evidence: tuple[str, ...]
    incident: int

    def to_dict(self) -> dict[str, Any]:
        """The same with stable keys, ready for JSON."""
        return asdict(self) | {
            "layers": list(self.layers),
            "site": list(self.site),
            "write_site": None if self.write_site is None else list(self.write_site),
            "history": list(self.history),
            "readers": list(self.readers),
            "causes": [asdict(cause) for cause in self.causes],
            "evidence": list(self.evidence),
        }


@dataclass
class FindingGroup:
    """Findings of one code at one site."""

    first: Finding
    last: Finding
    count: int = 0
    kept: list[Finding] = field(default_factory=list)
    incidents: set[int] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        return self.first.to_dict() | {"count": self.count, "last_step": self.last.step}


class FindingLog:
    """First, last and count of each (code, site)."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], FindingGroup] = {}
        self.total = 0

    def add(self, finding: Finding) -> bool:
        """Count a finding; whether it is one to tell: a new incident, and not one of very many."""
        key = finding.code, site_name(*finding.site)
        group = self.groups.setdefault(key, FindingGroup(finding, finding))
        group.last, group.count = finding, group.count + 1
        self.total += 1
        if finding.incident in group.incidents or len(group.kept) >= KEPT_IN_GROUP:
            return False
        group.incidents.add(finding.incident)
        group.kept.append(finding)
        return True

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident in each group, in the order in which they were found."""
        kept = [finding for group in self.groups.values() for finding in group.kept]
        return sorted(kept, key=lambda finding: (finding.step, finding.incident))
