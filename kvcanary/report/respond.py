"""Response: what fired becomes findings, and the mode decides what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation import FOLLOWING, Violation
from kvcanary.calls.violation_log import ViolationGroup, ViolationLog
from kvcanary.config import CanaryConfig
from kvcanary.errors import KVCorruptionError
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.report.announce import announce
from kvcanary.report.describe import Describer
from kvcanary.report.finding import Finding, FindingLog
from kvcanary.report.healing import DAMAGE, Healing, LoadHealing
from kvcanary.report.render import Report

REMEMBERED_INCIDENTS = 65536
ENDING = ("abort", "heal")  # modes in which requests end, or begin anew
#: Whichever requests they name: an engine whose ranks differ has no right answer for any of them.
OF_ALL_RANKS = frozenset({"X1", "X2"})


class Response:
    """`log` tells, `raise` stops the engine, `abort` names the requests that must end, `heal` those that begin anew.

    announce: what a report is given to where the engine goes on
    healing:  mode heal: what is being made good; else None
    """

    def __init__(
        self,
        config: CanaryConfig,
        describer: Describer,
        ledger: Ledger | None = None,
        dump: Callable[[Sequence[Finding]], str | None] = lambda findings: None,
    ) -> None:
        """`dump`: writes what was recorded, and says where; None where nothing is written.

        Without a ledger nobody can be ended: CanaryConfigs of such pools have neither mode `abort` nor `heal`.
        """
        self._dump = dump
        self.announce: Callable[[Report], None] = announce
        self._config, self._describer, self._ledger = config, describer, ledger
        self._requests: dict[str, Request] = {} if ledger is None else ledger.requests
        self._incidents: dict[tuple[object, ...], int] = {}
        self._num_repeats = 0  # numbers that have no place of their own
        self._unhooked: dict[tuple[int, int], int] = {}  # by pool and request: the incident of a forward without hooks
        self.damaged_pages: set[int] = set()  # that a prefix cache has
        self.log = FindingLog()
        self.healing: Healing | LoadHealing | None = None

    def act(self, groups: Sequence[ViolationGroup], step: int, coverage: Coverage) -> frozenset[str]:
        """Join what a violation log took into findings and tell them; the requests that end by them or begin anew."""
        if not groups:
            return frozenset()
        coverage.count_violations(groups)
        aborted = self._marked(groups)
        stops, action = self._decide(groups, aborted, step)
        with torch.inference_mode():
            described = self._describer.describe(groups, self._number, action)
        coverage.untold_incidents += described.undescribed
        findings = described.findings
        if self.healing is not None and not stops:
            stops, action, findings = self.healing.treat(groups, findings, aborted, self.damaged_pages, step)
        reported = [finding for finding in findings if self.log.add(finding)]
        if stops or reported:
            told = tuple(findings if stops else reported)
            report = Report(told, action, coverage.counters(), self._dump(told))
            if stops:
                raise KVCorruptionError(told, report)
            self.announce(report)
        if self.healing is not None:
            self.healing.close(step)
        return aborted

    def answer(self, violations: Iterable[Violation], step: int, coverage: Coverage) -> None:
        """`act`, for violations of one step that no intake has taken."""
        intake = ViolationLog(self._config.disable)
        intake += violations
        self.act(intake.take(), step, coverage)

    def _marked(self, groups: Sequence[ViolationGroup]) -> frozenset[str]:
        """Those that end, of all that are damaged from now on: they read or wrote wrongly, or hold a damaged page."""
        kept = [own for group in groups for own in group.kept if own.code in DAMAGE and own.state is None]
        pages = {violation.page for violation in kept if 0 <= violation.slot < violation.pool.view.num_slots}
        touched = {name for group in groups for name in group.request_ids if name in self._requests}
        touched |= {name for name, request in self._requests.items() if not pages.isdisjoint(request.pages)}
        for name in touched:
            self._requests[name].is_damaged = True
        if self._ledger is not None:
            self.damaged_pages |= {page for page in pages if page >= 0 and self._ledger.pages.published[page]}
        return frozenset(touched) if self._config.mode in ENDING else frozenset()

    def _decide(self, groups: Sequence[ViolationGroup], aborted: frozenset[str], step: int) -> tuple[bool, str]:
        """Whether the engine stops, and what is done, in words."""
        mode, codes = self._config.mode, {violation.code for group in groups for violation in group.kept}
        if aborted and not codes & OF_ALL_RANKS:
            return False, f"ended {', '.join(sorted(aborted))}; the others go on"
        if mode == "raise" or (mode in ENDING and codes & OF_ALL_RANKS.union({"H1"})):  # blind, it protects nobody
            return True, f"raised KVCorruptionError; no token of step {step} leaves the engine"
        return False, "logged; the engine goes on"

    def _number(self, incident: Sequence[Violation]) -> int:
        """The number of an incident; a slot, or forward without hooks, that was seen before keeps its number.

        What follows from such a forward in rows of its requests has its number, but for another such forward.
        """
        places = [place for violation in incident for place in violation.places]
        known = [self._incidents[place] for place in places if place in self._incidents]
        if self.healing is not None:
            known = self._still_open(known, places, incident[0].step)
        if self._unhooked and not (incident[0].is_unhooked and incident[0].position is None):
            rows = [row for violation in incident if violation.code in FOLLOWING for row in self._rows(violation)]
            known += [self._unhooked[row] for row in rows if row in self._unhooked]
        new = len(self._incidents) + self._num_repeats + 1
        if incident[0].code == "L1":  # what an engine does twice are two events
            self._num_repeats += 1
            return new
        number = known[0] if known else new
        for place in places:
            if len(self._incidents) < REMEMBERED_INCIDENTS:
                self._incidents.setdefault(place, number)
        for violation in incident:
            if violation.is_unhooked and len(self._unhooked) < REMEMBERED_INCIDENTS:
                self._unhooked |= dict.fromkeys(self._rows(violation), number)
        return number

    def _still_open(self, known: list[int], places: Sequence[tuple[object, ...]], step: int) -> list[int]:
        """Those of these numbers that were not made good; the places of the others have none any more."""
        over = {number for number in known if self.healing is not None and self.healing.is_over(number, step)}
        for place in places if over else ():
            if self._incidents.get(place) in over:
                del self._incidents[place]
                self._num_repeats += 1
        return [number for number in known if number not in over]

    def _rows(self, violation: Violation) -> list[tuple[int, int]]:
        """Pool and request of those of its rows whose requests live."""
        requests = self._requests
        return [(pool_id, requests[name].uid) for pool_id, name in violation.rows if name in requests]
