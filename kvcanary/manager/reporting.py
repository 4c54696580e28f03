"""Reporting: what was found, what follows from it, and what was checked at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from kvcanary.codes import FED
from kvcanary.errors import KVCorruptionError
from kvcanary.manager.dump_trigger import DumpTrigger
from kvcanary.manager.session import Session
from kvcanary.probe.forwards import PATHS
from kvcanary.probe.reader import Attend, misread_violation, probe_pool
from kvcanary.report.certificate import certificate
from kvcanary.report.describe import Describer
from kvcanary.report.finding import Finding
from kvcanary.report.healing import Healing
from kvcanary.report.ledger_evidence import LedgerEvidence
from kvcanary.report.respond import ENDING, Response
from kvcanary.report.stats import Stats


class Reporting:
    """The part of a manager that responds to what fired, and tells of it.

    aborted: modes abort and heal: running requests that must end, or be computed again (`heals`), by all that was
             judged; the release of another may name some
    healing: mode heal: what is being made good; else None
    drilled: requests whose damage is made to see whether it is found, and counts as no incident; add to it
    damaged_pages: modes abort and heal: pages of the prefix cache in which damage was found; it must give them up, and
                   those behind them. `on_evict` tells when it has.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._checks, self._ledger = session, session.checks, session.ledger
        self.recorder, config = session.recorder, session.config
        describer = Describer(LedgerEvidence(session.ledger).read, config.show_tokens)
        self.dumper = DumpTrigger(config, session.recorder, self._source)
        self._stats = Stats()
        self.response = Response(config, describer, session.ledger, self.dumper.on_finding)
        self.healing: Healing | None = None
        if config.mode == "heal":
            self.healing = Healing(session.ledger, self.response.log, session.coverage, config.content == "full")
        self.response.healing = self.healing
        self.drilled = self.response.log.drilled
        self.aborted: frozenset[str] = frozenset()
        self.damaged_pages: Set[int] = self.response.damaged_pages if config.mode in ENDING else frozenset()
        self.error: KVCorruptionError | None = None  # that was raised last

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self.response.log.findings

    def certificate(self) -> dict[str, Any]:
        """What was checked, what was not and why; plain JSON."""
        self._refresh()
        live_bytes, state = self._checks.scrubber.live_bytes(), self._session.state
        return certificate(
            self._session.config,
            self._session.coverage,
            live_bytes,
            state.keys.seed_id,
            self.response.log,
            self._fed(),
            state.records.device,
        )

    def page_map(self) -> dict[str, Any]:
        """What is true of every page now; plain JSON, see `kvcanary.ledger.page_map`."""
        from kvcanary.ledger.page_map import page_map

        return page_map(self._ledger, self._checks.cached.read_at, self._session.step)

    def dump(self, path: Path | str) -> Path:
        """Write what was recorded, and all findings so far, into this file. DumpError with `ring` 0 or before `arm()`.

        Nothing of prompts, bytes and keys leaves, unless `config.dump_content` asks for it.
        """
        return self.dumper.write(Path(path), self.findings, "command")

    def probe_reader(
        self,
        pool: str,
        attend: Attend,
        pages: Sequence[int],
        num_heads: int,
        paths: Collection[str] = PATHS,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> frozenset[str]:
        """Let the engine's own attention read known entries on pages that nobody owns, and judge what it gives (R8).

        Before `arm()`, and between steps where as many pages are free; their bytes are put back. The other arguments
        are those of `kvcanary.probe.reader.probe_pool`. The answer is that of `collect`.
        PlanError where the pool's values are no K and V that attention can be asked about.
        """
        self._session.expect_closed("probe_reader()")
        state = self._session.pool(pool)
        found = probe_pool(state.view, attend, pages, num_heads, paths, scale, dtype)
        self._session.coverage.reader_probes += 1
        if found is not None:
            self._checks.report([misread_violation(state, self._session.step, *found)])
        return self.act()

    # helpers

    def act(self) -> frozenset[str]:
        """Respond to what fired; the running requests that must end, also those named before."""
        if self._checks.violations.groups:
            groups = self._checks.with_what_spread(self._checks.violations.take())
            self.count_reads()
            self._checks.reread_soon(groups)
            try:
                self.aborted |= self.response.act(groups, self._session.step, self._session.coverage)
            except KVCorruptionError as error:
                self.error = error
                raise
        if self.aborted:
            requests = self._ledger.requests
            self.aborted = frozenset(name for name in self.aborted if name in requests and not requests[name].released)
        return self.aborted

    def conclude(self) -> frozenset[str]:
        """A step was judged; what `check` answers."""
        if self._session.step >= self._stats.due:
            self._refresh()
            self._stats.tick(self._session.step, self._session.coverage)
        aborted = self.aborted
        if aborted or self._checks.violations.groups:
            aborted = self.act()
        if self.healing is not None and self.healing.pending:
            self.healing.tick(self._session.step)
        if self.dumper.is_asked:
            self.dumper.tick()
        if self.recorder.is_due(self._session.step):
            if self.recorder.begins_segment(
                self._session.step
            ):  # what a checkpoint does not know, nobody could follow from it
                self._checks.collect()
                self.recorder.begin_segment(self._session.step)
            self.recorder.tick()
        return aborted

    def heals(self, request_id: str) -> bool:
        """Whether this request, which a finding touches, is to be computed again, not to end."""
        return self.healing is not None and self.healing.heals(request_id)

    def admitted(self, request_id: str, num_tokens: int) -> None:
        """What was said of an earlier request of this name is not said of this one."""
        if request_id in self.aborted:
            self.aborted -= {request_id}
        if self.healing is not None:
            self.healing.admitted(request_id, num_tokens)

    def are_damaged(self, pages: Sequence[int]) -> bool:
        """Whether something was found in what a request holds that has one of these pages."""
        if not self.response.log.findings:
            return False
        holders = map(self._ledger.holder, pages)
        return any(request is not None and request.is_damaged for request in holders)

    def _source(self, findings: Sequence[Finding], trigger: str) -> dict[str, Any]:
        """What a dump of now is written of: all that was launched is collected first."""
        self._checks.collect()
        return {
            "config": self._session.config,
            "manager_state": self.recorder.manager_state,
            "recorder": self.recorder,
            "findings": findings,
            "certificate": self.certificate(),
            "quarantine": self._session.quarantine,
            "step": self._session.step,
            "trigger": trigger,
        }

    def _fed(self) -> frozenset[str]:
        """The codes that this engine and these settings can make fire."""
        feeds = {
            "W7": self._session.quarantine > 0,
            "W9": self._session.has_registry or self._session.has_states,
            "P1": self._session.config.poison != "off",
            "T1": self._session.config.content != "write",
            "O1": self._session.async_tracker.is_used,
            "X1": self._session.has_ranks,
            "X2": self._session.has_ranks,
        }
        return (FED | {"W9", "X1", "X2"}) - {code for code, is_fed in feeds.items() if not is_fed}

    def _refresh(self) -> None:
        """Bring the coverage up to now."""
        self.count_reads()
        self._session.note_live_bytes()
        scrubbers = self._checks.scrubber, self._checks.cached
        waits = [
            steps for scrubber in scrubbers for steps in (scrubber.longest_wait, scrubber.waiting(self._session.step))
        ]
        self._session.coverage.max_unread_steps = max(self._session.coverage.max_unread_steps, *waits)

    def count_reads(self) -> None:
        """What was counted where it ran goes into the coverage."""
        if self._checks.captured is not None:
            self._checks.captured.count_quiet()
        for scrubber in (self._checks.scrubber, self._checks.cached):
            self._session.coverage.bytes_checked += scrubber.bytes_read
            scrubber.bytes_read = 0
