"""Response: what fired becomes findings, and the mode decides what they do."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from kvcanary.config import CanaryConfig
from kvcanary.describe import Describer
from kvcanary.errors import KVCorruptionError
from kvcanary.findings import FindingLog
from kvcanary.hits import Hit, join_hits
from kvcanary.ledger import Ledger
from kvcanary.report import Report

REMEMBERED_INCIDENTS = 65536
_events = structlog.get_logger("kvcanary")


class Response:
    """`log` tells, `raise` stops the engine, `abort` names the requests that must end."""

    def __init__(self, config: CanaryConfig, ledger: Ledger, describer: Describer) -> None:
        self._config, self._ledger, self._describer = config, ledger, describer
        self._incidents: dict[tuple[int, int], int] = {}
        self.log = FindingLog()

    def act(self, hits: Sequence[Hit], step: int, counters: dict[str, int]) -> frozenset[str]:
        """Join hits of the active checks into findings and tell them; the running requests that they end."""
        hits = [hit for hit in hits if hit.code not in self._config.disable]
        if not hits:
            return frozenset()
        incidents = join_hits(hits)
        with torch.inference_mode():
            findings = [self._describer.finding(incident, self._number(incident)) for incident in incidents]
        told = [finding for finding in findings if self.log.add(finding)]
        doomed = self._touched(hits) if self._config.mode == "abort" else frozenset()
        nobody_to_end = self._config.mode == "abort" and not doomed and any(hit.code != "P1" for hit in hits)
        if self._config.mode == "raise" or nobody_to_end:
            action = f"raised KVCorruptionError; no token of step {step} leaves the engine"
            raise KVCorruptionError(findings, Report(tuple(findings), action, counters))
        action = f"ended {', '.join(sorted(doomed))}; the others go on" if doomed else "logged; the engine goes on"
        for finding in told:
            report = Report((finding,), action, counters)
            _events.error("kv_corruption", report=report.text(), **finding.to_dict())
        return doomed

    def _touched(self, hits: Sequence[Hit]) -> frozenset[str]:
        """Requests that read or wrote wrongly, and those that hold a page whose bytes or records are damaged."""
        touched: set[str] = set()
        for hit in hits:
            names = {hit.request_id} if hit.code.startswith("W") else {hit.request_id, *self._holders(hit)}
            touched |= {name for name in names if name in self._ledger.requests}
        return frozenset(touched)

    def _holders(self, hit: Hit) -> list[str]:
        if hit.code not in DAMAGE or not 0 <= hit.slot < hit.pool.view.num_slots:
            return []
        return [name for name, request in self._ledger.requests.items() if hit.page in request.pages]

    def _number(self, incident: Sequence[Hit]) -> int:
        """The number of an incident; a slot that was seen before keeps its number."""
        known = [self._incidents[hit.place] for hit in incident if hit.place in self._incidents]
        number = known[0] if known else len(self._incidents) + 1
        for hit in incident:
            if len(self._incidents) < REMEMBERED_INCIDENTS:
                self._incidents.setdefault(hit.place, number)
        return number


#: Findings about what lies in a page, whoever reads it.
DAMAGE = frozenset({"R3", "R9", "R12", "T1"})
