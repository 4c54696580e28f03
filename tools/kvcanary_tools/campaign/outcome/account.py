"""What a campaign has come to so far: its results, and the JSON that says so, kept while it still runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvcanary_tools.campaign.outcome.matrix import Row, rows_of, totals_of
from kvcanary_tools.campaign.outcome.report import as_json
from kvcanary_tools.campaign.runner import cpu_seconds
from kvcanary_tools.campaign.runs import Result
from kvcanary_tools.files import JsonFile

KEEP_SECONDS = 30.0


@dataclass
class Account:
    """The results of one campaign as they come.

    file: where its JSON goes; meta: what it was asked for: config, seed, runs, workers.
    is_complete: whether every run has come to its end.
    """

    file: JsonFile
    meta: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    is_complete: bool = False
    began: float = field(default_factory=cpu_seconds)
    kept: float = field(default_factory=monotonic)

    def add(self, result: Result) -> None:
        """One more; now and then what there is now is kept, so that who is killed leaves that."""
        self.results.append(result)
        if not self.file.is_stdout and monotonic() - self.kept > KEEP_SECONDS:
            self.keep()
            self.kept = monotonic()

    def keep(self) -> None:
        """Write the JSON, where it has a place."""
        if self.file.path is not None:
            self.file.write(self.as_dict())

    def matrix(self) -> tuple[list[Row], list[Row]]:
        """Rows a fault and configuration, and a line a fault."""
        return rows_of(self.results), totals_of(self.results)

    def as_dict(self) -> dict[str, Any]:
        spent = {"cpu_seconds": round(cpu_seconds() - self.began), "complete": self.is_complete}
        return as_json(*self.matrix(), self.results, **self.meta, **spent)
