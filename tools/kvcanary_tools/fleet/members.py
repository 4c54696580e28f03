"""Members of a fleet: certificate and incidents of each, from running servers, or from files of their reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from kvcanary_tools.console import UsageFailure
from kvcanary_tools.remote import DEBUG_PREFIX, server_at

AT_A_TIME = 32
TIMEOUT_SECONDS = 20
TARGETS = "kvcanary_info"  # a metric that every watched server has


@dataclass(frozen=True)
class Member:
    """One canary: a server, or one worker of an engine.

    certificate: None where there is none, `reason` says why
    incidents:   the first finding of each, as its event has it
    """

    place: str
    certificate: Mapping[str, Any] | None = None
    incidents: Sequence[Mapping[str, Any]] = field(default=())
    reason: str = ""
    is_reached: bool = True

    @property
    def gpu(self) -> str:
        """UUID of its GPU; its host and process where it has none."""
        told = (self.certificate or {}).get("hardware", {})
        here = f"{told.get('hostname', self.place)}/{told.get('pid', 0)}"
        return str(told.get("gpu_uuid") or here)

    @property
    def version(self) -> str:
        own = self.certificate or {}
        return f"{own.get('engine', 'spec_engine')} {own.get('host_version', own.get('version', 'not known'))}"

    @property
    def connector(self) -> str:
        return str((self.certificate or {}).get("connector") or "none")

    @property
    def exposure(self) -> float:
        """Bytes that were compared; where none were, entries whose identity was judged."""
        own = self.certificate or {}
        return float(own.get("bytes_checked") or own.get("slots_checked") or 0)


def ask_all(places: Sequence[str], api_key: str | None) -> list[Member]:
    """Every member of these URLs and files, in their order; who does not answer is a member too, with the reason."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        asked = pool.map(lambda place: list(_members_at(place, api_key)), places)
        return [member for members in asked for member in members]


def found_by_prometheus(url: str) -> list[str]:
    """URLs of the servers that a Prometheus scrapes and that have a canary. UsageFailure where it cannot say."""
    address = f"{url.rstrip('/')}/api/v1/query?query={quote(TARGETS)}"
    try:
        found = _json_at(address, None)["data"]["result"]
        return sorted({f"http://{sample['metric']['instance']}" for sample in found})
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise UsageFailure(
            f"{url} does not say who has a canary: {error}", "--prometheus takes the root URL of a Prometheus"
        ) from error


def members_in(place: str, told: Any) -> Iterator[Member]:
    """Of what a file holds: a report of an adapter, one by role, what `merged` gave, or a list of any of these."""
    if isinstance(told, list):
        for number, own in enumerate(told):
            yield from members_in(f"{place}[{number}]", own)
    elif isinstance(told, dict) and "certificate" in told:
        yield _member(place, told["certificate"], told.get("incidents", ()))
    elif isinstance(told, dict) and "workers" in told:
        yield from _members_of_merged(place, told)
    elif isinstance(told, dict) and ("armed" in told or "mode" in told):
        yield _member(place, told, told.get("incidents", ()))
    elif isinstance(told, dict) and told and all(isinstance(own, dict) for own in told.values()):
        for role, own in told.items():
            yield from members_in(f"{place} {role}", own)
    else:
        raise ValueError("it has no certificate: give what collective_rpc('kvcanary_report') or handle.report() said")


def _members_of_merged(place: str, told: dict[str, Any]) -> Iterator[Member]:
    for own in told["workers"]:
        incidents = [finding for finding in told["findings"] if own.get("rank") in finding["ranks"][:1]]
        yield _member(f"{place} rank {own.get('rank')}", own, incidents)


def _member(place: str, certificate: Mapping[str, Any] | None, incidents: Sequence[Mapping[str, Any]]) -> Member:
    if certificate is None:
        return Member(place, reason="its canary is off")
    if certificate.get("mode", "off") == "off" or certificate.get("armed") is False:
        turn = certificate.get("turn", {})
        is_waiting = turn.get("share", 1) < 1
        reason = f"no turn in {turn['week']}, share {turn['share']}" if is_waiting else "it is not armed"
        return Member(place, None, reason=reason)
    return Member(place, certificate, incidents)


def _members_at(place: str, api_key: str | None) -> Iterator[Member]:
    if not place.startswith(("http://", "https://")):
        yield from _members_in_file(place)
        return
    root = f"{server_at(place)}{DEBUG_PREFIX}"
    try:
        yield _member(place, _json_at(f"{root}/certificate", api_key), _json_at(f"{root}/incidents", api_key))
    except HTTPError as error:
        hint = {401: "it wants another API key", 404: "it was started without --debug"}.get(error.code, error.reason)
        yield Member(place, reason=f"{error.code}: {hint}", is_reached=False)
    except (OSError, HTTPException, ValueError) as error:
        yield Member(place, reason=str(getattr(error, "reason", error)), is_reached=False)


def _members_in_file(place: str) -> list[Member]:
    try:
        return list(members_in(place, json.loads(Path(place).read_text(encoding="utf-8"))))
    except (OSError, ValueError, LookupError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "members are http:// URLs, or JSON files of their reports"
        raise UsageFailure(f"{place} says of no member: {reason}", hint) from error


def _json_at(url: str, api_key: str | None) -> Any:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as answer:
        return json.load(answer)
