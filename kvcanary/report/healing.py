"""Healing (mode `heal`): what is made good, how, and from when on that is no answer any more.

Damage of bytes and records is made good: requests that hold it give up their pages, and the engine computes them again
from their tokens; a prefix cache gives up the pages that it has, or keeps them where the one changed word was put back.
What an engine did wrong it would do again: such findings end their requests as mode `abort` does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import structlog

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationGroup
from kvcanary.errors import RepairRefusedError
from kvcanary.ledger.ledger import Ledger
from kvcanary.report.finding import Finding, FindingLog
from kvcanary.scrub.repair import repair_slot

#: Findings about what lies in a page, whoever reads it: what can be made good.
DAMAGE = frozenset({"R3", "R9", "R12", "T1"})
MOST_HEALS = 2  # of one page or one cause; the third finding ends its requests, the next one stops the engine
FORGOTTEN_AFTER = 1_000_000  # steps
SETTLED_AFTER = 2  # steps; what was launched before a finding has been judged by then

_events = structlog.get_logger("kvcanary")


class Treatment(NamedTuple):
    """stops: the engine does; action: what is done, in words; findings: the same, which say it."""

    stops: bool
    action: str
    findings: list[Finding]


@dataclass(eq=False)
class Heal:
    """What is made good together.

    findings: the first of each incident
    names:    requests that are still to be computed again; pages: that a prefix cache has still to give up
    how:      what was done so far
    """

    findings: list[Finding]
    step: int
    names: set[str]
    pages: set[int]
    how: list[str]
    began: float = field(default_factory=time.perf_counter)


class Healing:
    """What is being made good.

    pending: by request, with how many tokens it was admitted anew; 0: it was not yet
    """

    def __init__(self, ledger: Ledger, log: FindingLog, coverage: Coverage, is_full: bool) -> None:
        """`is_full`: every byte that a forward reads is compared before its tokens leave."""
        self._ledger, self._log, self._coverage, self._is_full = ledger, log, coverage, is_full
        self.pending: dict[str, int] = {}
        self._ended: set[str] = set()  # until another request has the name
        self._open: list[Heal] = []
        self._heals: dict[int, Heal] = {}  # by incident
        self._found = _Found()

    def heals(self, request_id: str) -> bool:
        """Whether the request is to give up its pages and be computed again; until it is admitted anew."""
        return self.pending.get(request_id) == 0

    def is_over(self, incident: int, step: int) -> bool:
        """Whether what fires now at the places of this incident is new damage."""
        heal = self._heals.get(incident)
        return heal is not None and step >= heal.step + SETTLED_AFTER and not any(map(self.heals, heal.names))

    def treat(
        self,
        groups: Sequence[ViolationGroup],
        findings: Sequence[Finding],
        touched: frozenset[str],
        cached: set[int],
        step: int,
    ) -> Treatment:
        """Begin to make good what was found, and say so.

        touched: requests that read, wrote or hold it; cached: damaged pages of the prefix cache; what is put back
                 leaves this set
        """
        damage = [own for group in groups for own in group.kept if own.code in DAMAGE]
        wrong, why = (_wrong(groups, findings) | self._ended) & touched, _no_damage(findings)
        count, what = self._count(findings, step) if self._is_new(damage, touched) else (0, "")
        if count > MOST_HEALS:
            wrong, why = touched, f"finding {count} of {what}, healing does not last"
        if count > MOST_HEALS + 1:
            return _told(True, f"raised KVCorruptionError; no token of step {step} leaves; {why}", findings)
        self._give_up(wrong)
        how = self._put_back(groups, damage, touched, cached)
        heal = Heal([], step, set(touched - wrong), cached & {own.page for own in damage}, how)
        plan = _plan(heal)
        words = [f"ended {', '.join(sorted(wrong))}; the others go on; {why}"] if wrong else []
        words += [f"heals: {'; '.join(plan)}"] if plan else []
        treatment = _told(False, "; ".join(words) or "logged; the engine goes on", findings)
        if plan:
            self._begin(heal, [own for own in treatment.findings if own.code in DAMAGE])
        return treatment

    def admitted(self, request_id: str, num_tokens: int) -> None:
        """A request is there again."""
        self._ended.discard(request_id)
        if request_id in self.pending:
            self.pending[request_id] = num_tokens

    def evicted(self, pages: Iterable[int], step: int) -> None:
        """The prefix cache has given up these pages."""
        for heal in self._open:
            if gone := heal.pages.intersection(pages):
                heal.pages -= gone
                heal.how.append(f"evicted {_pages(gone)} from the prefix cache")
        self.close(step)

    def tick(self, step: int) -> None:
        """A step was judged: some requests may be as far again as they were."""
        for name, length in list(self.pending.items()):
            request = self._ledger.requests.get(name)
            if length and request is None:  # it was ended meanwhile
                self._give_up({name})
            elif length and request is not None and request.committed_len >= length:
                del self.pending[name]
                for heal in self._open:
                    if name in heal.names:
                        heal.names.discard(name)
                        heal.how.append(f"computed {name} again from its {length} tokens")
        self.close(step)

    def close(self, step: int) -> None:
        """Tell of what has been made good."""
        for heal in [heal for heal in self._open if not heal.names and not heal.pages]:
            self._open.remove(heal)
            for finding in heal.findings:
                self._coverage.healed += 1
                _tell(self._log.heal(finding, "; ".join(heal.how)), heal, step)

    # helpers

    def _is_new(self, damage: Sequence[Violation], touched: Collection[str]) -> bool:
        """Not only what is being made good already."""
        if touched:
            return bool(damage) and not all(self.heals(name) or name in self._ended for name in touched)
        underway = {page for heal in self._open for page in heal.pages}
        return any(own.page not in underway for own in damage)

    def _count(self, findings: Sequence[Finding], step: int) -> tuple[int, str]:
        """How often their pages and causes were found of late, and the one that was found most."""
        own = [finding for finding in findings if finding.code in DAMAGE]
        names = {f"page {one.page} of pool {one.pool!r}" for one in own if one.page >= 0 and one.entry is None}
        names |= {f"cause {one.causes[0].family!r}" for one in own if one.causes}
        return self._found.count(names, step)

    def _put_back(
        self, groups: Sequence[ViolationGroup], damage: Sequence[Violation], touched: Collection[str], cached: set[int]
    ) -> list[str]:
        """Put words back on damaged pages that a prefix cache keeps; what was done.

        Not where somebody may have read them since, and the cache have what was computed from that.
        """
        if (touched and not self._is_full) or any(group.count > len(group.kept) for group in groups):
            return []
        done: list[str] = []
        for page in sorted(cached & {own.page for own in damage}):
            words = _repaired([own for own in damage if own.page == page])
            done += words
            if words:
                cached.discard(page)
        return done

    def _begin(self, heal: Heal, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.incident not in self._heals:
                self._heals[finding.incident] = heal
                heal.findings.append(finding)
        self.pending |= dict.fromkeys(heal.names, 0)
        self._open.append(heal)

    def _give_up(self, names: Collection[str]) -> None:
        """These requests end, and are not computed again."""
        self._ended.update(names)
        for name in names:
            self.pending.pop(name, None)
        self._open = [heal for heal in self._open if heal.names.isdisjoint(names)]


class LoadHealing:
    """Where an engine computes loads again that failed, and can do nothing else: other findings stop it."""

    def __init__(self, engine: str, log: FindingLog) -> None:
        """`engine`: what it is called in a finding"""
        self._engine, self._log = engine, log
        self._open: dict[str, Heal] = {}  # by request, of whose load blocks were reported as failed
        self._over: dict[int, int] = {}  # by incident, the step in which it was made good
        self._found = _Found()

    def failed(self, request_id: str, step: int) -> None:
        """Blocks of a load were wrong, and the engine was told that they failed."""
        self._open[request_id] = Heal([], step, {request_id}, set(), [])

    def treat(
        self,
        groups: Sequence[ViolationGroup],
        findings: Sequence[Finding],
        touched: frozenset[str],
        cached: set[int],
        step: int,
    ) -> Treatment:
        """As `Healing.treat`; without a ledger nobody is touched, and nothing is cached."""
        loads = [own for own in findings if (own.code, own.site[0]) == ("T1", "load") and own.reader in self._open]
        others = {own.code for own in findings if own not in loads} | {_code(group) for group in groups} - {"T1"}
        names = {own.reader for own in loads if own.reader is not None}
        count, what = self._found.count({f"cause {own.causes[0].family!r}" for own in loads if own.causes}, step)
        why = f"finding {count} of {what}, healing does not last" if count > MOST_HEALS else ""
        if others:
            why = f"{', '.join(sorted(others))} is no load that {self._engine} could compute again"
        if why:
            return _told(True, f"raised KVCorruptionError; no token of step {step} leaves; {why}", findings)
        treatment = _told(False, f"heals: {self._engine} computes {', '.join(sorted(names))} again", findings)
        for own in treatment.findings:
            self._open[own.reader or ""].findings.append(own)
        return treatment

    def went_back(self, request_id: str, position: int, step: int) -> int:
        """The engine computes this row again from here on; how many findings are made good by that."""
        heal = self._open.pop(request_id, None)
        if heal is None:
            return 0
        for finding in heal.findings:
            self._over[finding.incident] = step
            how = f"{self._engine} computes {request_id} again from position {position}"
            _tell(self._log.heal(finding, how), heal, step)
        return len(heal.findings)

    def is_over(self, incident: int, step: int) -> bool:
        """As of `Healing`."""
        return step > self._over.get(incident, step)

    def close(self, step: int) -> None:
        """Nothing is left to tell."""


class _Found:
    """By page or cause, in words, the steps of late in which a heal began."""

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {}

    def count(self, names: Collection[str], step: int) -> tuple[int, str]:
        """How often each of these was found, this step included: the one that was found most."""
        for name in names:
            known = [before for before in self._steps.get(name, ()) if before > step - FORGOTTEN_AFTER]
            self._steps[name] = [*known, step][-MOST_HEALS - 2 :]
        return max(((len(self._steps[name]), name) for name in names), default=(0, ""))


def _tell(finding: Finding, heal: Heal, step: int) -> None:
    _events.info(
        "kvcanary.healed",
        code=finding.code,
        incident=finding.incident,
        pool=finding.pool,
        page=finding.page,
        healed=finding.healed,
        step=step,
        steps=step - heal.step,
        ms=round(1e3 * (time.perf_counter() - heal.began), 3),
    )


def _told(stops: bool, action: str, findings: Sequence[Finding]) -> Treatment:
    return Treatment(stops, action, [replace(finding, action=action) for finding in findings])


def _wrong(groups: Sequence[ViolationGroup], findings: Sequence[Finding]) -> frozenset[str]:
    """Requests in which something else than damage was found; it makes other checks fire too, NaN that spreads N1."""
    damaged = _names(finding for finding in findings if finding.code in DAMAGE)
    others = {name for group in groups for name in group.request_ids if _code(group) not in DAMAGE}
    return _names(finding for finding in findings if finding.code not in DAMAGE | {"N1"}) | (others - damaged)


def _names(findings: Iterable[Finding]) -> frozenset[str]:
    named = ((*own.readers, own.reader, own.writer if own.code[0] in "WN" else None) for own in findings)
    return frozenset(name for own in named for name in own if name is not None)


def _no_damage(findings: Sequence[Finding]) -> str:
    codes = sorted({finding.code for finding in findings} - DAMAGE)
    return f"{', '.join(codes) or 'what fired'} is no damage: computed again it would come again"


def _code(group: ViolationGroup) -> str:
    return "" if group.last is None else group.last.code


def _plan(heal: Heal) -> list[str]:
    """What has been done and what is to come."""
    words = list(heal.how)
    words += [f"computes {', '.join(sorted(heal.names))} again"] if heal.names else []
    return words + ([f"the prefix cache is to give up {_pages(heal.pages)}"] if heal.pages else [])


def _pages(pages: Collection[int]) -> str:
    return f"page{'s' if len(pages) > 1 else ''} {', '.join(map(str, sorted(pages)))}"


def _repaired(damage: Sequence[Violation]) -> list[str]:
    """Put one word of each of these slots back, where that explains all that fired on their page; what was done."""
    if any(own.code != "R9" or own.is_unwritten or own.state is not None for own in damage):
        return []
    words = []
    for pool, slot in {(own.pool.pool_id, own.slot): (own.pool, own.slot) for own in damage}.values():
        try:
            word = repair_slot(pool, slot).word
        except RepairRefusedError:
            return []
        words.append(f"put back one word of slot {slot} of pool {pool.name!r}, layer {word.layer}, and verified it")
    return words
