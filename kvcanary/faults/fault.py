"""What an entry of the catalogue is, and what is known of one while it is armed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One published bug as a perturbation of one formula.

    name: "family.what"; the family is the module of this package that holds it.
    k: number of its injection in the catalogue of published KV-cache bugs, or "" where it has none.
    bugs: "owner/repository#number" of the threads that it re-enacts.
    story: what went wrong there, in a sentence or two.
    expected: the typed error, the code of the finding, or else the effect in which it must end.
    applies_to: settings under which the formula matters; under others it changes nothing.
    perturb: ``perturb(value, **where of the seam)`` is the value that the bug computed.
    state, reason: "ready", or why an engine cannot be made to do this yet.
    """

    name: str
    bugs: tuple[str, ...]
    story: str
    expected: str
    applies_to: str
    perturb: Callable[..., Any]
    k: str = ""
    state: str = "ready"
    reason: str = ""

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    def as_dict(self) -> dict[str, Any]:
        """The entry as `kvcanary faults --json` prints it."""
        return {
            "name": self.name,
            "k": self.k,
            "family": self.family,
            "state": self.state,
            "reason": self.reason,
            "bugs": list(self.bugs),
            "expected_code": self.expected,
            "applies_to": self.applies_to,
            "story": self.story,
        }


@dataclass
class Armed:
    """A fault while it is armed; ``num_strikes`` counts the values that it changed: 0 means that nothing was tried."""

    fault: Fault
    num_strikes: int = 0

    def strike(self, value: Any, where: Mapping[str, Any]) -> Any:
        changed = self.fault.perturb(value, **where)
        self.num_strikes += changed != value
        return changed
