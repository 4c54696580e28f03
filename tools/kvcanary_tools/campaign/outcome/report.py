"""What a campaign says: the matrix as lines, as JSON and as JUnit XML, and one line for each run that was not right."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

import kvcanary
from kvcanary_tools.campaign.outcome.matrix import Row
from kvcanary_tools.campaign.runs import Result
from kvcanary_tools.campaign.traffic import CLEAN, DISABLED, FAULTY, QUIET

MOST_FAILURES = 20
COLUMNS = (
    *("fault", "runs", "found", "not ended", "by", "place", "writer", "steps", "leaked", "exposed"),
    *("twins", "off", "cause 1st"),
)


def matrix_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A table with one line a fault."""
    table = [COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    steps = row.steps_to_detection
    return (
        row.fault,
        str(row.runs),
        str(row.found),
        str(row.not_ended),
        row.first_code or "-",
        _share(row.place_right, row.places),
        _share(row.writer_right, row.writers),
        "-" if steps is None else f"{steps['median']:g}/{steps['max']:g}",
        str(row.tokens_leaked),
        str(row.tokens_exposed),
        f"{row.twin_findings} of {row.twins}",
        f"{row.disabled_found} of {row.disabled}",
        _share(row.verdict_first, row.verdicts),
    )


def _share(count: int, total: int) -> str:
    return f"{count / total:.0%}" if total else "-"


def failures(results: Sequence[Result]) -> Iterator[str]:
    """The first runs that did not end as they should, with how to repeat them."""
    wrong = [result for result in results if not is_right(result)]
    for result in wrong[:MOST_FAILURES]:
        run, said = result.run, result.text.partition("\n")[0] or "nothing fired"
        yield f"{run.fault or 'no fault'}, {run.kind}, {run.config}, seed {run.seed}: {said}"
    if len(wrong) > MOST_FAILURES:
        yield f"and {len(wrong) - MOST_FAILURES} more"


def is_right(result: Result) -> bool:
    """Whether a run ended as its kind says; one in which the fault never struck is a clean one.

    One that its cap ended has not ended at all; without the check that would stop it, it need not.
    """
    if result.not_ended and result.run.kind != DISABLED:
        return False
    if not result.struck and result.run.kind == FAULTY:
        return not result.code
    if result.run.kind == FAULTY:
        wrong = result.late or result.leaked or result.too_exposed or result.place_right is False
        return result.found and not wrong
    return not result.found


def as_json(rows: Sequence[Row], totals: Sequence[Row], results: Sequence[Result], **meta: Any) -> dict[str, Any]:
    """The object that `kvcanary inject --json` writes: a row a fault and configuration, a total a fault.

    num_runs: of each kind;  clean_findings, quiet_findings: twins in which something fired that is not due
    """
    alarms = Counter(result.run.kind for result in results if result.found)
    counts = {
        "num_runs": dict(Counter(result.run.kind for result in results)),
        "num_configs": len({result.run.config for result in results}),
        "clean_findings": alarms[CLEAN],
        "quiet_findings": alarms[QUIET],
    }
    return {
        "meta": meta | counts | versions(),
        "rows": [row.as_dict() for row in rows],
        "totals": [row.as_dict() for row in totals],
    }


def versions() -> dict[str, str]:
    """Of what has measured."""
    return {"kvcanary": kvcanary.__version__, "python": platform.python_version(), "machine": platform.machine()}


def as_junit(rows: Sequence[Row], results: Sequence[Result]) -> str:
    """One test case a fault."""
    suite = ElementTree.Element("testsuite", name="kvcanary inject", tests=str(len(rows)))
    suite.set("failures", str(sum(not row.is_right for row in rows)))
    for row in rows:
        family, _, what = row.fault.partition(".")
        case = ElementTree.SubElement(suite, "testcase", classname=f"kvcanary.faults.{family}", name=what)
        if not row.is_right:
            reported = [result for result in results if result.run.fault == row.fault and not is_right(result)]
            kind = "not ended" if row.not_ended else "not as it says"
            message = f"{row.found} of {row.runs} found as it says, {row.not_ended} not ended"
            failure = ElementTree.SubElement(case, "failure", type=kind, message=message)
            failure.text = "\n".join(f"{r.run.kind} {r.run.config} seed {r.run.seed}: {r.text}" for r in reported[:3])
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
