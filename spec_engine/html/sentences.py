"""A certificate in sentences: what was checked, what was found, and what was not looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

UNITS = ("B", "kB", "MB", "GB", "TB")
INACTIVE = {  # by the reason that a certificate gives
    "not fed": "inactive, this engine gives no data for it",
    "content is not compared": "inactive, bytes are not compared with content=write",
    "an error at once, in every mode": "an error at once instead of a finding",
    "an error at once, in mode raise": "an error at once instead of a finding",
}


class Sentence(NamedTuple):
    """`tone`: good, bad, limit (something was not checked), or plain."""

    tone: str
    text: str


def sentences(certificate: Mapping[str, Any], num_findings: int) -> list[Sentence]:
    """The whole certificate, the verdict first; num_findings: all, with those that were only counted."""
    found = f"{_many(num_findings, 'finding')}." if num_findings else "No findings."
    return [
        Sentence("bad" if num_findings else "good", found),
        *_checked(certificate),
        *_limits(certificate),
    ]


def _checked(certificate: Mapping[str, Any]) -> Iterator[Sentence]:
    forwards, slots = _many(certificate["forwards"], "forward"), _many(certificate["slots_checked"], "slot")
    yield Sentence("plain", f"{forwards} watched, {slots} checked when they were read.")
    read, unread = certificate["bytes_checked"], certificate["max_unread_steps"]
    if not read:
        yield Sentence("limit", "No stored byte was read again.")
    elif unread:
        yield Sentence("plain", f"Every live byte was read again within {_many(unread, 'step')} ({size(read)} in all).")
    else:
        yield Sentence("plain", f"Every live byte was read again in every step ({size(read)} in all).")
    if certificate.get("finite_bytes_checked"):
        yield Sentence("plain", f"{size(certificate['finite_bytes_checked'])} of unwritten memory scanned for NaN.")
    unread_bytes = certificate["freed_unread_bytes"]
    if unread_bytes:
        yield Sentence("limit", f"{size(unread_bytes)} were freed before a last check.")
    elif read:
        yield Sentence("plain", "No page was freed before its last check.")


def _limits(certificate: Mapping[str, Any]) -> Iterator[Sentence]:
    inactive: dict[str, list[str]] = {}
    for code, reason in certificate.get("inactive_classes", {}).items():
        inactive.setdefault(INACTIVE.get(reason, f"inactive, {reason}"), []).append(code)
    if certificate["classes"]:
        yield Sentence("plain", f"{_many(len(certificate['classes']), 'check')} active.")
    yield from (Sentence("limit", f"{', '.join(codes)}: {why}.") for why, codes in inactive.items())
    for reason, count in certificate["unchecked"].items():
        yield Sentence("limit", f"Not checked, {count:,} times: {reason}.")


def size(count: float) -> str:
    """`23.6 MB`."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:,.0f} {UNITS[unit]}" if count >= 100 or not unit else f"{count:.3g} {UNITS[unit]}"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
