"""The published KV-cache bugs that the catalogue is measured by, and which of them a ready fault brings back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcanary.faults.fault import READY, Fault
from kvcanary.faults.threads import PUBLISHED

NO_RECURRENCE = "models with recurrent state run without a prefix cache: no state is ever cached"
READERS_SCALE = "a wrong scale of the reader changes no byte, and readers here have none: scales lie beside the rows"

#: Of those that no fault names, why.
UNREACHED: Mapping[str, str] = {
    "vllm-project/vllm#47861": NO_RECURRENCE,
    "vllm-project/vllm#55559": READERS_SCALE,
    "NVIDIA/TensorRT-LLM#16916": READERS_SCALE,
    "sgl-project/sglang#20705": READERS_SCALE,
}


def reached(faults: Sequence[Fault]) -> dict[str, list[str]]:
    """By published bug, the ready faults that bring it back."""
    ready = [fault for fault in faults if fault.state == READY]
    return {bug: names for bug in _all() if (names := [fault.name for fault in ready if bug in fault.bugs])}


def unreached(faults: Sequence[Fault]) -> dict[str, str]:
    """The others, and why: the reason of a pending fault, or of UNREACHED; KeyError for one that nobody explains."""
    known, waiting = reached(faults), {bug: fault.reason for fault in faults for bug in fault.bugs if fault.reason}
    return {bug: waiting[bug] if bug in waiting else UNREACHED[bug] for bug in _all() if bug not in known}


def summary(faults: Sequence[Fault]) -> str:
    """How much of what was published can be brought back, in a sentence."""
    total, known = sum(map(len, PUBLISHED.values())), len(reached(faults))
    ready = sum(fault.state == READY for fault in faults)
    return f"{ready} of {len(faults)} faults are ready; they bring back {known} of {total} published bugs"


def _all() -> list[str]:
    return [bug for bugs in PUBLISHED.values() for bug in bugs]
