"""Findings of several workers of one engine: told once, counted for Prometheus, and one report of all.

Workers of one host have one parent. Who is the first to make a file with the name of a finding tells of it; the others
find the file there. What only one of them can see (its bytes, its tables) has a name of its own all the same.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcanary.adapters.hosted import metrics
from kvcanary.report.announce import announce
from kvcanary.report.finding import Finding
from kvcanary.report.render import Report


class SharedReporter:
    """What tells of a worker's findings; `is_alone`: there is no other worker."""

    def __init__(self, rank: int, is_alone: bool, folder: Path | None = None) -> None:
        self.rank, self._is_alone = rank, is_alone
        self._folder = folder or Path(tempfile.gettempdir()) / f"kvcanary-{os.getuid()}-{os.getppid()}"

    def announce(self, report: Report, on_screen: bool = True) -> None:
        """Tell of what no other worker has told."""
        own = tuple(finding for finding in report.findings if self._is_alone or self._is_first(finding))
        announce(replace(report, findings=own, rank=self.rank), on_screen)
        for finding in own:
            metrics.found(finding, self.rank)

    def _is_first(self, finding: Finding) -> bool:
        name = hashlib.blake2b(repr(_place(finding.to_dict())).encode(), digest_size=16).hexdigest()
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # no place for it: better twice than never
            return True
        return True


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of what `collective_rpc("kvcanary_report")` gave: each incident once, with the ranks that had it."""
    findings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for report in reports:
        for finding in report.get("incidents", ()):
            findings.setdefault(_place(finding), {**finding, "ranks": []})["ranks"].append(report["rank"])
    workers = [{k: v for k, v in report.items() if k not in ("findings", "incidents")} for report in reports]
    armed = bool(reports) and all(report["armed"] for report in reports)
    return {"armed": armed, "findings": list(findings.values()), "workers": workers}


def _place(finding: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for what several workers find of one fault: they run the same steps over the same requests."""
    return tuple(finding[name] for name in ("code", "reader", "writer", "position", "slot", "layer", "first_bad_step"))
