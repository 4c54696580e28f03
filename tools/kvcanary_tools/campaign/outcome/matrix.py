"""The detection matrix: results of many runs as one row a fault and configuration, and as one line a fault."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kvcanary_tools.campaign.runs import Result
from kvcanary_tools.campaign.traffic import CLEAN, DISABLED, FAULTY, QUIET

ALL = "all"
BEST = 3  # causes that a report names
WRITERS = 0.99  # of the named writers that must be right


@dataclass(frozen=True)
class Row:
    """A fault in one configuration, or in all; counts are of runs unless they say otherwise.

    runs: in which the fault struck; untried: in which it never could.
    not_ended: runs and twins that the cap on their steps ended, which none may; those without the check do not count.
    model: on which they ran.
    first_code: what spoke first most often; found: runs in which that was the expected check.
    place_right, writer_right: of the found runs that state one (`places`, `writers`).
    steps_to_detection: of found runs, the strike's step included; None where no run states a step.
    tokens_leaked, tokens_exposed: tokens; too_exposed: runs in which some are exposed where none may be.
    quiet: quiet twins that were made, of the twins.
    twin_findings: clean and quiet twins, and untried runs, in which something spoke that was not due.
    disabled_found: runs in which the check spoke although it was switched off.
    verdict_rank: the right cause's median rank in the reports, 0 where it is not named; None for typed errors.
    """

    fault: str
    config: str
    model: str
    runs: int
    untried: int
    found: int
    first_code: str
    expected_code: str
    places: int
    place_right: int
    writers: int
    writer_right: int
    steps_to_detection: dict[str, float] | None
    late: int
    tokens_leaked: int
    tokens_exposed: int
    too_exposed: int
    twins: int
    quiet: int
    twin_findings: int
    disabled: int
    disabled_found: int
    verdict_rank: float | None
    verdict_first: int
    verdict_top3: int
    verdicts: int
    not_ended: int = 0

    @property
    def is_right(self) -> bool:
        """Everything found as it says, and nothing else."""
        return all(is_held for _, is_held in self.bars())

    def bars(self) -> Iterator[tuple[str, bool]]:
        """What is said of the fault, and whether that is enough."""
        yield f"{self.found} of {self.runs} runs were found as they should be", self.found == self.runs
        yield f"{self.not_ended} runs and twins did not end", not self.not_ended
        yield f"the place is right in {self.place_right} of {self.places}", self.place_right == self.places
        writers_due = WRITERS * self.writers
        yield f"the writer is right in {self.writer_right} of {self.writers}", self.writer_right >= writers_due
        yield f"{self.late} were found too late", not self.late
        yield f"{self.tokens_leaked} tokens leaked", not self.tokens_leaked
        yield f"tokens were exposed in {self.too_exposed} runs where none may be", not self.too_exposed
        yield f"{self.twin_findings} of {self.twins} twins alarmed", not self.twin_findings
        yield f"a check spoke in {self.disabled_found} of {self.disabled} runs without it", not self.disabled_found

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(results: Iterable[Result]) -> list[Row]:
    """One row a fault and configuration."""
    clean: dict[str, list[Result]] = defaultdict(list)
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.run.kind == CLEAN:
            clean[result.run.twin].append(result)
        else:
            groups[result.run.fault, result.run.config].append(result)
    return [_row(key, group, clean[group[0].run.twin]) for key, group in groups.items()]


def totals_of(results: Sequence[Result]) -> list[Row]:
    """One line a fault, over all its configurations."""
    clean: dict[str, list[Result]] = defaultdict(list)
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        (clean[result.run.twin] if result.run.kind == CLEAN else groups[result.run.fault]).append(result)
    return [
        _row((fault, ALL), group, [r for twin in {one.run.twin for one in group} for r in clean[twin]])
        for fault, group in groups.items()
    ]


def _row(key: tuple[str, str], group: Sequence[Result], clean: Sequence[Result]) -> Row:
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in group:
        kinds[result.run.kind].append(result)
    faulty = [result for result in kinds[FAULTY] if result.struck]
    found = [result for result in faulty if result.found]
    steps = [result.steps for result in found if result.steps is not None]
    ranks = [result.rank for result in found if result.rank is not None]
    quiet = [result for result in kinds[QUIET] if result.struck]
    twins = [*clean, *quiet]
    disabled = [result for result in kinds[DISABLED] if result.struck]
    return Row(
        *key,
        model=_most([result.run.setup.model for result in group]),
        runs=len(faulty),
        untried=len(kinds[FAULTY]) - len(faulty),
        found=len(found),
        first_code=_most([result.code for result in faulty]),
        expected_code=_most([result.expected for result in faulty]),
        places=sum(result.place_right is not None for result in found),
        place_right=sum(bool(result.place_right) for result in found),
        writers=sum(result.writer_right is not None for result in found),
        writer_right=sum(bool(result.writer_right) for result in found),
        steps_to_detection={"median": median(steps), "max": max(steps)} if steps else None,
        late=sum(result.late for result in found),
        tokens_leaked=sum(result.leaked for result in found),
        tokens_exposed=sum(result.exposed for result in found),
        too_exposed=sum(result.too_exposed for result in found),
        twins=len(twins),
        quiet=len(quiet),
        twin_findings=sum(result.found for result in twins)
        + sum(bool(result.code) for result in kinds[FAULTY] if not result.struck),
        disabled=len(disabled),
        disabled_found=sum(result.found for result in disabled),
        verdict_rank=median(ranks) if ranks else None,
        verdict_first=sum(rank == 1 for rank in ranks),
        verdict_top3=sum(1 <= rank <= BEST for rank in ranks),
        verdicts=len(ranks),
        not_ended=sum(result.not_ended for result in (*kinds[FAULTY], *clean, *kinds[QUIET])),
    )


def _most(codes: Sequence[str]) -> str:
    return Counter(codes).most_common(1)[0][0] if codes else ""
