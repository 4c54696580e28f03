"""The canary's certificate for people: one line, or the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcanary_tools.console import numbered, size


def certificate_line(certificate: dict[str, Any]) -> str:
    """`canary (raise, rolling): 41 forwards, 20,431 slots and 10.4 MB checked: nothing found`."""
    found = num_findings(certificate)
    return (
        f"canary ({certificate['mode']}, {certificate['content']}): {numbered(certificate['forwards'], 'forward')}, "
        f"{numbered(certificate['slots_checked'], 'slot')} and {size(certificate['bytes_checked'])} checked: "
        f"{numbered(found, 'finding') if found else 'nothing found'}"
    )


def certificate_lines(certificate: dict[str, Any]) -> Iterator[str]:
    """Every counter in words, and what was not checked, with the reason."""
    forwards, slots = numbered(certificate["forwards"], "forward"), numbered(certificate["slots_checked"], "slot")
    yield f"mode {certificate['mode']}, content {certificate['content']}"
    yield f"{forwards} watched, {slots} checked, {size(certificate['bytes_checked'])} of K and V read again"
    yield f"{size(certificate['finite_bytes_checked'])} that nobody has written looked through for NaN and Inf"
    yield f"longest time that a live byte went unread: {numbered(certificate['max_unread_steps'], 'step')}"
    yield f"bytes live at the end: {certificate['live_bytes']:,}; freed unread: {certificate['freed_unread_bytes']:,}"
    yield f"checks: {' '.join(certificate['classes'])}"
    if certificate["disabled"]:
        yield f"switched off: {' '.join(certificate['disabled'])}"
    for reason, count in certificate["unchecked"].items():
        yield f"not checked: {reason}: {count:,}"
    yield f"findings: {num_findings(certificate)}"


def num_findings(certificate: dict[str, Any]) -> int:
    """All of them; the certificate lists one a code and place of reading, with its count."""
    return sum(finding["count"] for finding in certificate["findings"])
