"""A room of the museum: one fault on the embedded model, as its users saw it, and as the canary sees it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from kvcanary.faults.catalogue import find
from kvcanary.faults.fault import READY, Fault
from kvcanary.faults.target import Setup
from kvcanary_tools.campaign.configurations import setup_for
from kvcanary_tools.campaign.runs import Result, perform
from kvcanary_tools.campaign.traffic import CLEAN, FAULTY, Run, play

EMBEDDED = Setup(model="embedded", page_size=16, topk=4, num_steps=4, num_draft_tokens=8, prompt_len=64, new_tokens=32)
ROOMS = (EMBEDDED, replace(EMBEDDED, page_size=4), replace(EMBEDDED, topk=1, num_draft_tokens=None), Setup())
SEED = 1
MOST_TRIES = 8


@dataclass(frozen=True)
class Room:
    """What came of it. effect: what a user sees when no check speaks; verdict, report: what the canary says."""

    setup: str
    effect: str
    verdict: str
    report: str
    is_right: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def visit(fault: Fault) -> Room | None:
    """Make the fault in the first setup to which it applies; None where it is pending."""
    if fault.state != READY:
        return None
    for setup in (wanted for room in ROOMS if (wanted := setup_for(fault, room)) is not None):
        for seed in range(SEED, SEED + MOST_TRIES):
            result = perform(Run(fault.name, setup.model, setup, seed, FAULTY))
            if result.struck:
                return _room(fault, result)
    raise RuntimeError(f"no room of the museum suits {fault.name}: it applies to {fault.applies_to}")


def _room(fault: Fault, result: Result) -> Room:
    run = result.run
    verdict = (
        f"{result.code}, as expected" if result.found else f"{result.code or 'nothing'}, expected {result.expected}"
    )
    if not fault.is_seen:
        verdict = f"nothing: no check can see it, look for {fault.expected}" if result.found else result.code
    return Room(f"{run.setup.model} model", _effect(run), verdict, result.text, result.found)


def _effect(run: Run) -> str:
    """The same traffic with every finding ignored, compared with what it should have been."""
    clean = play(replace(run, fault="", kind=CLEAN), None, unheeded=True)
    faulty = play(run, find(run.fault), unheeded=True)
    if faulty.error is not None:
        return f"the run ends in {type(faulty.error).__name__}: {str(faulty.error).partition(chr(10))[0]}"
    if faulty.is_cut:
        return f"the run does not end, and no error: {faulty.num_retractions} retractions in {faulty.num_steps} steps"
    wrong = sum(tokens != faulty.tokens.get(request) for request, tokens in clean.tokens.items())
    lengths = f"accepted length {clean.accepted_len:.2f}, now {faulty.accepted_len:.2f}"
    retractions = f"; retractions {clean.num_retractions}, now {faulty.num_retractions}"
    more = retractions if clean.num_retractions or faulty.num_retractions else ""
    return f"{wrong} of {len(clean.tokens)} answers differ, and no error; {lengths}{more}"
