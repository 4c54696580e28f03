"""The coverage certificate in a dump, checked before it is read to anybody."""

from __future__ import annotations

from typing import Any

from kvcanary.dumps.reading import Dump
from kvcanary.dumps.watched_reading import WatchedDump
from kvcanary.errors import DumpError

_NUMBERS = ("forwards", "slots_checked", "bytes_checked", "max_unread_steps", "live_bytes", "freed_unread_bytes")


def certificate_of(dump: Dump | WatchedDump) -> dict[str, Any]:
    """As `CanaryManager.certificate`, with the findings that the dump has; DumpError where it is none."""
    reported = dump.manifest["certificate"]
    is_whole = all(isinstance(reported.get(key), int) for key in _NUMBERS)
    is_whole &= all(isinstance(reported.get(key), str) for key in ("mode", "content"))
    is_whole &= all(isinstance(reported.get(key), list) for key in ("classes", "disabled"))
    unchecked = reported.get("unchecked")
    is_whole &= isinstance(unchecked, dict) and all(isinstance(count, int) for count in unchecked.values())
    if not is_whole:
        raise DumpError(f"{dump.path} is damaged: its certificate is not whole")
    return reported | {"findings": [finding | {"count": 1} for finding in dump.findings]}
