"""One certificate of a fleet: it is as good as its weakest member, and that is what it says first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcanary import site_name
from kvcanary.config import CONTENTS
from kvcanary.report.finding import UNKNOWN
from kvcanary_tools.console import numbered, size
from kvcanary_tools.fleet.members import Member

#: Modes from the one that does least about a finding to the one that lets nothing leave.
WEAKNESS = ("log", "heal", "abort", "raise")
SUMMED = (
    *("forwards", "slots_checked", "slots_sealed", "states_checked", "bytes_checked", "finite_bytes_checked"),
    *("freed_unread_bytes", "only_counted", "untold_incidents", "healed", "bit_errors"),
)
SHOWN_PLACES = 3


def fleet_certificate(members: Sequence[Member]) -> dict[str, Any]:
    """Sums, the weakest of each setting with its place, what is inactive anywhere, and incidents joined.

    Plain JSON with stable keys. `is_whole`: everybody was reached and is watched.
    """
    watched = [member for member in members if member.certificate is not None]
    own = [(member.place, member.certificate or {}) for member in watched]
    return {
        "members": len(members),
        "watched": len(watched),
        "is_whole": bool(members) and len(watched) == len(members),
        "unreachable": {member.place: member.reason for member in members if not member.is_reached},
        "not_watched": {m.place: m.reason for m in members if m.is_reached and m.certificate is None},
        "weakest": _weakest(own) if own else {},
        "sums": {name: sum(one.get(name, 0) for _, one in own) for name in SUMMED},
        "unchecked": dict(sum((Counter(one.get("unchecked", {})) for _, one in own), Counter())),
        "inactive_classes": _inactive(own),
        "versions": dict(Counter(member.version for member in watched)),
        "incidents": joined(watched),
    }


def joined(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Incidents that share code, family, site, layer and version, those of most GPUs first."""
    groups: dict[tuple[Any, ...], list[tuple[Member, Mapping[str, Any]]]] = defaultdict(list)
    for member in members:
        for finding in member.incidents:
            groups[finding["code"], family_of(finding), *path_of(finding), member.version].append((member, finding))
    shared = [
        {
            "code": code, "family": family, "site": site, "layer": layer, "version": version, "count": len(of_all),
            "gpus": sorted({member.gpu for member, _ in of_all}),
            "places": sorted({member.place for member, _ in of_all}),
            "sentence": of_all[0][1]["sentence"],
        }
        for (code, family, site, layer, version), of_all in groups.items()
    ]  # fmt: skip
    return sorted(shared, key=lambda one: (-len(one["gpus"]), -one["count"], one["code"]))


def family_of(finding: Mapping[str, Any]) -> str:
    causes = finding["causes"]
    return str(causes[0]["family"]) if causes else UNKNOWN


def path_of(finding: Mapping[str, Any]) -> tuple[str, int | None]:
    """Site and layer: with its code the code path of a finding."""
    return site_name(*finding["site"]), finding["layer"]


def lines(certificate: Mapping[str, Any]) -> Iterator[str]:
    """For people: the weakest first, then sums, then incidents."""
    yield f"{certificate['watched']} of {numbered(certificate['members'], 'member')} watched"
    for name, reason in certificate["unreachable"].items():
        yield f"  unreachable  {name}: {reason}"
    for name, reason in certificate["not_watched"].items():
        yield f"  not watched  {name}: {reason}"
    for name, (value, place) in certificate["weakest"].items():
        yield f"weakest {name.replace('_', ' ')}: {value}, at {place}"
    for code, reasons in certificate["inactive_classes"].items():
        for reason, places in reasons.items():
            yield f"inactive: {code}, {reason}, {_few(places)}"
    sums = certificate["sums"]
    yield f"{sums['slots_checked']:,} slots and {size(sums['bytes_checked'])} checked in {sums['forwards']:,} forwards"
    for reason, count in certificate["unchecked"].items():
        yield f"not judged: {count:,}, {reason}"
    if not certificate["incidents"]:
        yield "nothing found"
    for one in certificate["incidents"]:
        layer = "" if one["layer"] is None else f", layer {one['layer']}"
        gpus = numbered(len(one["gpus"]), "GPU")
        yield (
            f"{one['code']} ({one['family']}) at {one['site']}{layer}, {one['version']}: {one['count']} on {gpus}, "
            + (_few(one["places"]))
        )


def _weakest(own: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, tuple[Any, str]]:
    mode = min(own, key=lambda one: WEAKNESS.index(one[1]["mode"]))
    content = min(own, key=lambda one: CONTENTS.index(one[1]["content"]))
    unread = max(own, key=lambda one: one[1]["max_unread_steps"])
    return {
        "mode": (mode[1]["mode"], mode[0]),
        "content": (content[1]["content"], content[0]),
        "max_unread_steps": (unread[1]["max_unread_steps"], unread[0]),
    }


def _inactive(own: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[str]]]:
    """By code and reason the places where it cannot fire."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for place, certificate in own:
        for code, reason in certificate["inactive_classes"].items():
            found[code][reason].append(place)
    return {code: dict(reasons) for code, reasons in sorted(found.items())}


def _few(places: Sequence[str]) -> str:
    more = f" and {len(places) - SHOWN_PLACES} more" if len(places) > SHOWN_PLACES else ""
    return f"{', '.join(places[:SHOWN_PLACES])}{more}"
