"""Graphs: the manager's static substeps, and what their harvest means as findings."""

from __future__ import annotations

from kvcanary.bank import SubstepBank
from kvcanary.certificate import Coverage
from kvcanary.harvest import CoverageGap, StaticHit
from kvcanary.hits import Hit
from kvcanary.ledger import Ledger
from kvcanary.state import CanaryState


class StaticChecks:
    """Substeps that are captured or replayed: they judge on the device, and the host reads what fired once a step."""

    def __init__(self, state: CanaryState, ledger: Ledger, coverage: Coverage) -> None:
        self._state, self._ledger, self._coverage = state, ledger, coverage
        self.bank = SubstepBank(state)

    def harvest(self) -> list[Hit]:
        """Hits and gaps since the last harvest; after the step has been synchronised."""
        harvest = self.bank.harvest()
        rows, entries, reads = harvest.runs
        self._coverage.slots_checked += reads
        self._coverage.slots_sealed += entries
        self._coverage.forwards += rows > 0
        self._coverage.unproved_stores += entries > 0
        return [self._hit(hit) for hit in harvest.hits] + [self._gap(gap) for gap in harvest.gaps]

    def _hit(self, hit: StaticHit) -> Hit:
        pool = self._state.by_name[hit.pool]
        position = hit.place if hit.place >= 0 else None
        name = self._ledger.name(hit.uid) if hit.uid >= 0 else None
        return Hit(hit.code, pool, hit.slot, position, name, hit.site, hit.step)

    def _gap(self, gap: CoverageGap) -> Hit:
        expected = {"rows": gap.planned_rows, "entries": gap.planned_entries, "reads": gap.planned_reads}
        found = {"rows": gap.run_rows, "entries": gap.run_entries, "reads": gap.run_reads}
        pool, step = self._state.by_name[gap.pool], int(self.bank.step)
        return Hit("H1", pool, -1, None, None, gap.site, step, expected=expected, found=found)
