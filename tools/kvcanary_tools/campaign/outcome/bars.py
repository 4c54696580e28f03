"""What a campaign must show: of each fault, and of all together where it is the one that the pages tell of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcanary_tools.campaign.configurations import EMBEDDED, Plan
from kvcanary_tools.campaign.outcome.matrix import BEST, Row

FIRST, AMONG_BEST = 0.90, 0.99  # of the verdicts whose right cause is first, and among the first BEST


def missed(rows: Sequence[Row], totals: Sequence[Row], plan: Plan | None = None) -> Iterator[str]:
    """One line a fault and bar that it misses. plan: of the runs that there must be, None: as many as there are."""
    for row in totals:
        for reported, is_held in row.bars():
            if not is_held:
                yield f"{row.fault}: {reported}"
    if plan is not None:
        yield from _too_few(rows, totals, plan)
        yield from _verdicts(totals)


def _too_few(rows: Sequence[Row], totals: Sequence[Row], plan: Plan) -> Iterator[str]:
    for row in totals:
        if row.runs < plan.runs:
            yield f"{row.fault}: it struck in {row.runs} runs, {plan.runs} are due"
        for kind, count, due in (("quiet twins", row.quiet, plan.quiet), ("runs without", row.disabled, plan.disabled)):
            if 0 < count < due:
                yield f"{row.fault}: {count} {kind}, {due} are due"
    for row in rows:
        if row.config == EMBEDDED and row.model == EMBEDDED and row.runs < plan.embedded:
            yield f"{row.fault}: it struck in {row.runs} runs of the embedded model, {plan.embedded} are due"


def _verdicts(totals: Sequence[Row]) -> Iterator[str]:
    """Of all faults together; a fault whose own causes fall behind is told of, if the sum does."""
    for name, share, reported in (
        ("verdict_first", FIRST, "first"),
        ("verdict_top3", AMONG_BEST, f"among the first {BEST}"),
    ):
        verdicts = sum(row.verdicts for row in totals)
        right = sum(getattr(row, name) for row in totals)
        if right < share * verdicts:
            yield f"the right cause is {reported} in {right} of {verdicts} reports, {share:.0%} are due"
            for row in totals:
                if getattr(row, name) < share * row.verdicts:
                    yield f"{row.fault}: it is {reported} in {getattr(row, name)} of {row.verdicts}"
