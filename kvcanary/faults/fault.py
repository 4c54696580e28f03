"""What an entry of the catalogue is, and what is known of one while it is armed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary.faults.strike import NotNow
from kvcanary.faults.threads import injection_of

if TYPE_CHECKING:
    from kvcanary.faults.target import Setup, Target

READY, PENDING = "ready", "pending"


def everywhere(setup: Setup) -> bool:
    """`applies` of a fault that matters under all settings."""
    return True


@dataclass(frozen=True)
class Fault:
    """One published bug, or one kind of damage, and the finding in which it must end.

    name: "family.what"; the family is the module that holds it.
    k: number of its injection in the catalogue of published KV-cache bugs, or "" where it has none; that of its bugs,
        where one of them is listed there.
    bugs: "owner/repository#number" of the threads that it re-enacts.
    story: what went wrong there, in a sentence or two.
    expected: the code of the finding, or the name of the typed error, that must come first; or else its effect, in
        words, where no check can see it: the canary must say nothing then.
    also: codes that may come first in its place, where that depends on what the wrong slot happens to hold.
    applies_to: settings under which it matters, in words; `applies` says the same of a Setup.
    needs: fields of a Setup without which it cannot be made; a campaign sets them.

    One of two ways to make it, none where it is pending:
    perturb: ``perturb(value, **where of the seam)`` is the value that the bug computed; an engine has the seam.
    late: the seam is behind the point where its step's tokens are sampled.
    place: ``place(value, changed, **where)``: what the finding must name of it, as in `Strike.place`.
    strike: ``strike(target)`` makes it in a running engine and tells the target what it did (`Target.record`), at once
        or from a hook; False, or `NotNow`, where it cannot be made now: it is asked again before the next step. Of an
        entry it gives True or False.

    Its quiet twin, in which nothing may be found that is not due, is one of three; none where no check can see it:
    quiet: as `strike`, but nothing can read what it does; what it records has the code that is due, or none.
    quiet_needs: fields of a Setup, beside `needs`, with which the armed formula does no harm.
    alone: why there can be none.

    otherwise: what it comes to, in words, in settings or traffic in which it need not be found; no soak makes it then.
    spares_tokens: whether every token is the right one even so: then none is exposed to it.
    exposes: whether tokens leave before any check can see it, also where all bytes are read in each forward.
    within: engine steps from the strike to the finding, the strike's own included; one may be the prefill of others,
        and where more of them prefill others these are not counted.
    cause: family of the right cause in a report, where it is another than the fault's own: what the canary can know.
    reason: why an engine cannot be made to do this yet; its `state` is "pending" then, and else "ready".
    """

    name: str
    story: str
    expected: str
    applies_to: str = "everything"
    bugs: tuple[str, ...] = ()
    k: str = ""
    also: tuple[str, ...] = ()
    perturb: Callable[..., Any] | None = None
    place: Callable[..., Mapping[str, Any]] | None = None
    strike: Callable[[Target], bool | None] | None = None
    quiet: Callable[[Target], bool | None] | None = None
    quiet_needs: Mapping[str, Any] = field(default_factory=dict)
    alone: str = ""
    applies: Callable[[Setup], bool] = everywhere
    needs: Mapping[str, Any] = field(default_factory=dict)
    late: bool = False
    otherwise: str = ""
    spares_tokens: bool = False
    exposes: bool = False
    within: int = 2
    cause: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        ways = [way for way in (self.perturb, self.strike) if way is not None]
        if len(ways) != (self.state == READY):
            raise ValueError(f"{self.name} is {self.state} and has {len(ways)} ways to be made: perturb or strike")
        object.__setattr__(self, "k", self.k or injection_of(self.bugs))
        for way in ("strike", "quiet"):
            if make := getattr(self, way):
                object.__setattr__(self, way, partial(_attempt, make))

    @property
    def state(self) -> str:
        return PENDING if self.reason else READY

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_seam(self) -> bool:
        """Whether an engine's formula is perturbed, not its state."""
        return self.perturb is not None

    @property
    def has_twin(self) -> bool:
        """Whether a quiet twin is there."""
        return self.quiet is not None or bool(self.quiet_needs)

    @property
    def is_seen(self) -> bool:
        """Whether a check must find it."""
        return " " not in self.expected

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
            "otherwise": self.otherwise,
            "alone": self.alone,
            "story": self.story,
        }


def _attempt(make: Callable[[Target], bool | None], target: Target) -> bool:
    """Whether it was made."""
    try:
        return make(target) is not False
    except NotNow:
        return False


@dataclass
class Armed:
    """A fault while it is armed; ``num_strikes`` counts the values that it changed: 0 means that nothing was tried.

    num_asked: values that came by;  place: of the first that it changed, where the fault tells.
    """

    fault: Fault
    num_asked: int = 0
    num_strikes: int = 0
    place: Mapping[str, Any] = field(default_factory=dict)

    def strike(self, value: Any, where: Mapping[str, Any]) -> Any:
        if self.fault.perturb is None:
            return value
        self.num_asked += 1
        changed = self.fault.perturb(value, **where)
        if _differ(changed, value):
            if not self.num_strikes and self.fault.place is not None:
                self.place = self.fault.place(value, changed, **where)
            self.num_strikes += 1
        return changed


def _differ(changed: Any, value: Any) -> bool:
    """Of numbers, lists and tensors. What a graph is captured with nobody may look at: it counts as changed."""
    if getattr(changed, "shape", None) != getattr(value, "shape", None) or _is_captured(changed):
        return True
    differs = changed != value
    return bool(differs.any() if hasattr(differs, "any") else differs)


def _is_captured(value: Any) -> bool:
    if not getattr(value, "is_cuda", False):
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()
