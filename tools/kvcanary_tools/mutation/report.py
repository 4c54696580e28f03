"""The report of a run: counts, what became of each mutant, and every survivor with the sentence that explains it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from kvcanary_tools.mutation.areas import AREAS, area_of
from kvcanary_tools.mutation.running import Outcome

EXPLANATIONS = Path("tools", "kvcanary_tools", "mutation", "results", "explanations.json")
PACKAGES = ("kvcanary", "mutmut", "numpy", "pytest", "torch")


def explanations(root: Path) -> dict[str, str]:
    """Why a mutant may live, by what it changes: a change keeps its sentence when its number in mutmut changes."""
    return json.loads((root / EXPLANATIONS).read_text(encoding="utf-8"))


def change_of(outcome: Outcome) -> str:
    """`function: old -> new`, one line."""
    old, new = (" ".join(text.split()) for text in (outcome.removed, outcome.added))
    return f"{outcome.function}: {old} -> {new}"


def killed_before(reported: Mapping[str, Any]) -> list[Outcome]:
    """The killed mutants of an earlier report: where only tests were added, they stay killed."""
    outcomes = (Outcome(name, status, "", "") for name, status in reported["mutants"].items())
    return [outcome for outcome in outcomes if outcome.killed]


def versions() -> dict[str, str]:
    """What the mutants and the tests are of."""
    return {"python": python_version()} | {name: version(name) for name in PACKAGES}


def as_dict(
    outcomes: Sequence[Outcome], mutants: Mapping[str, int], explained: Mapping[str, str], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """`mutants`: how many each area has; `meta`: what the run was, besides its counts."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.name)
    by_area = {area: [o for o in outcomes if area_of(o.name) == area] for area in mutants}
    survivors = [outcome for outcome in outcomes if not outcome.killed]
    return {
        "meta": {
            **meta,
            "sample": len(outcomes),
            "killed": len(outcomes) - len(survivors),
            "statuses": dict(sorted(Counter(outcome.status for outcome in outcomes).items())),
        },
        "areas": [
            {
                "area": area,
                "files": list(AREAS[area]),
                "mutants": mutants[area],
                "sample": len(some),
                "killed": sum(outcome.killed for outcome in some),
            }
            for area, some in by_area.items()
        ],
        "survivors": [{"name": o.name, "change": change_of(o), "why": explained.get(change_of(o))} for o in survivors],
        "mutants": {outcome.name: outcome.status for outcome in outcomes},
    }
