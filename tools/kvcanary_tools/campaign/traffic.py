"""The traffic of one run on a fresh engine, with a fault struck in its midst, until it is done or something stops it.

Kinds of a run:
faulty    the fault is made; it must be found as it says
quiet     it is made where nothing can read it; only what is due may be found
disabled  the check that should find it is switched off; others may find it, this one must not
clean     the same traffic without it
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvcanary import CanaryConfig, Finding, KVCanaryError, faults
from kvcanary.codes import CODES
from kvcanary.faults.fault import Armed, Fault
from kvcanary.faults.strike import Strike
from kvcanary.faults.target import Setup, Target
from kvcanary.manager.dump_trigger import SUFFIX
from kvcanary_tools.campaign.engines import Bench, build
from kvcanary_tools.campaign.harness import EngineTarget
from kvcanary_tools.campaign.switches import switched_off
from spec_engine import SamplingParams
from spec_engine.engine import KV_CORRUPTION

FAULTY, CLEAN, QUIET, DISABLED = "faulty", "clean", "quiet", "disabled"
KINDS = (FAULTY, CLEAN, QUIET, DISABLED)
WARM_STEPS = (3, 6)  # before a fault may strike, drawn; one more request comes before that
MORE_REQUESTS = 3  # where prompts share their heads
MOST_STEPS = 500


@dataclass(frozen=True)
class Run:
    """What to do: a fault (by name; "" in a clean run), a configuration, a seed, a kind.

    mode: of the canary, "raise" or "abort": of the latter traffic goes on without those whom a finding touches
    turn: number of the run, for what a fault tries one by one
    dumps: folder into which a faulty run writes what was recorded, if a check stops it; None: nothing is written
    """

    fault: str
    config: str
    setup: Setup
    seed: int
    kind: str = FAULTY
    mode: str = "raise"
    turn: int = 0
    dumps: str | None = None

    @property
    def twin(self) -> str:
        """Runs of one twin and seed have one clean twin: the same setup, whatever fault asked for it."""
        return repr(self.setup)


@dataclass
class Played:
    """How the traffic went.

    error: what stopped it; findings: those that stopped it, or the first ones that it went on behind.
    step: in which the first of them was found, or in which all ended; num_steps: of the whole run.
    is_cut: whether it had not ended after MOST_STEPS, so that it says nothing of how it would.
    ended: requests that the canary has ended (mode abort), and in which step.
    prefills: steps in which prompts were computed.
    left: step that sampled the tokens, request, tokens; accepted_len: tokens a verify, the bonus included.
    num_retractions: times that a request gave up its pages.
    strike: what the fault did; None where it never could.
    """

    error: Exception | None = None
    findings: Sequence[Finding] = ()
    step: int = 0
    num_steps: int = 0
    is_cut: bool = False
    ended: dict[str, int] = field(default_factory=dict)
    prefills: set[int] = field(default_factory=set)
    left: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    accepted_len: float = 0.0
    num_retractions: int = 0
    strike: Strike | None = None

    @property
    def tokens(self) -> dict[str, list[int]]:
        """All that left, by request."""
        found: dict[str, list[int]] = {}
        for _, request, tokens in self.left:
            found.setdefault(request, []).extend(tokens)
        return found


class Traffic(Protocol):
    """Requests as they come. warm: step behind which a fault may strike; from then on nobody is cancelled."""

    warm: int

    def come(self, target: EngineTarget) -> None:
        """Submit, and cancel, what is due before the next step."""
        ...


class Burst:
    """A batch at once, and a little later one more request, or a few where prompts share their heads."""

    def __init__(self, bench: Bench, setup: Setup, rng: random.Random) -> None:
        self.bench, self.setup, self.rng = bench, setup, rng
        self.warm = rng.randint(*WARM_STEPS)
        self.second = rng.randint(2, self.warm)

    def come(self, target: EngineTarget) -> None:
        more = MORE_REQUESTS if self.setup.shared else 1
        if target.step == 1:
            for number in range(self.setup.batch):
                submit(self.bench, self.setup, self.rng, number)
        elif self.second <= target.step < self.second + more and target.engine.has_work:
            submit(self.bench, self.setup, self.rng, self.setup.batch + target.step - self.second)


def submit(bench: Bench, setup: Setup, rng: random.Random, number: int, new_tokens: int | None = None) -> str:
    """One request of the setup's traffic, of the tenant whose turn it is; its id."""
    params = SamplingParams(max_new_tokens=new_tokens or setup.new_tokens, ignore_eos=True)
    tenant = number % setup.salts
    return bench.engine.submit(bench.prompt(rng, setup), params, salt=f"tenant {tenant}" if tenant else "")


def play(
    run: Run,
    fault: Fault | None,
    unheeded: bool = False,
    traffic: Callable[[Bench, Setup, random.Random], Traffic] = Burst,
) -> Played:
    """The run, from its seed. unheeded: no check of the canary says anything, as if it were not there."""
    rng = random.Random(f"{run.twin}:{run.seed}")  # the traffic, shared with the clean twin
    with ExitStack() as stack:
        disable = frozenset(CODES) if unheeded else frozenset()
        if run.kind == DISABLED and fault is not None:
            checks = {fault.expected, *fault.also}
            disable = frozenset(checks & CODES.keys())
            for error in checks - disable:
                stack.enter_context(switched_off(error))
        is_armed = fault is not None and fault.is_seam and (run.kind != QUIET or fault.quiet is None)
        armed = stack.enter_context(faults.arm(run.fault)) if is_armed else None
        settings = {"content": run.setup.content, "quarantine": 0 if unheeded else run.setup.quarantine}
        canary = CanaryConfig(mode=run.mode, seed=run.seed, disable=disable, **settings)
        try:
            bench = build(run.setup, canary)
        except (KVCanaryError, ValueError) as error:  # a wrong size may be refused at once
            return Played(error, strike=_of_build(armed))
        own = random.Random(f"{run.fault}:{run.config}:{run.seed}")
        target = EngineTarget(bench.engine, run.setup, own, run.turn)
        played = _drive(target, traffic(bench, run.setup, rng), _striker(fault, run.kind), armed)
        if run.kind == QUIET:
            played.strike = played.strike or _of_a_formula(armed)
        is_dumped = run.dumps is not None and run.kind == FAULTY and played.error is not None
        if is_dumped and bench.engine.canary.findings:  # a fault with a pool of its own leaves none here
            bench.engine.canary.dump(Path(run.dumps) / f"{run.fault}-{run.config}-{run.seed}{SUFFIX}")
        return played


def _of_build(armed: Armed | None) -> Strike | None:
    """A value that was changed while the engine was built: its step is not one."""
    return Strike(None, armed.place) if armed is not None and armed.num_strikes else None


def _of_a_formula(armed: Armed | None) -> Strike | None:
    """A quiet twin's: it came by, and did no harm."""
    return Strike(None, code="") if armed is not None and armed.num_asked else None


def _striker(fault: Fault | None, kind: str) -> Callable[[Target], bool] | None:
    if fault is None or kind == CLEAN:
        return None
    return fault.quiet if kind == QUIET else fault.strike


def _drive(
    target: EngineTarget, traffic: Traffic, striker: Callable[[Target], bool] | None, armed: Armed | None
) -> Played:
    """Submit, step and strike."""
    engine, played = target.engine, Played()
    try:
        while _goes_on(played, target, traffic):
            if striker is not None and target.step > traffic.warm and target.is_decoding and striker(target):
                striker = None
            try:
                _step(target, armed, played)
            finally:
                _note(played, target)
        played.is_cut = engine.has_work
    except Exception as error:  # a fault may end in anything; what comes behind a finding is of the same fault
        played.error = None if played.findings else error
        played.findings = played.findings or getattr(error, "findings", ())
    played.strike = target.strike or _of_build(armed)
    played.accepted_len, played.num_steps = engine.metrics.accepted_length, engine.metrics.num_steps
    played.num_retractions = engine.metrics.num_retractions
    return played


def _goes_on(played: Played, target: EngineTarget, traffic: Traffic) -> bool:
    """Whether there is a next step, with the requests that come before it."""
    if not played.findings:
        played.step = target.step
    traffic.come(target)
    return target.engine.has_work and target.step < MOST_STEPS


def _note(played: Played, target: EngineTarget) -> None:
    """The step that ran, which is the one of the finding where there is one: traffic may go on behind it."""
    if not played.findings:
        played.step = target.engine.metrics.num_steps  # an error may be held back until clean tokens have left
        if target.canary.config.mode == "abort":
            played.findings = target.canary.findings


def _step(target: EngineTarget, armed: Armed | None, played: Played) -> None:
    engine, strikes = target.engine, 0 if armed is None else armed.num_strikes
    prefilled = engine.metrics.prefill_tokens
    with _stepping(target):
        try:
            events = engine.step()
        finally:
            if armed is not None and armed.num_strikes > strikes == 0:
                target.record(late=armed.fault.late, **armed.place)
            if engine.metrics.prefill_tokens > prefilled:
                played.prefills.add(engine.metrics.num_steps)
    sampled = engine.metrics.num_steps - engine.lag
    played.left += [(sampled, event.request_id, event.token_ids) for event in events]
    corrupted = [event.request_id for event in events if event.finish_reason == KV_CORRUPTION]
    played.ended |= dict.fromkeys(corrupted, engine.metrics.num_steps)


@contextmanager
def _stepping(target: EngineTarget) -> Iterator[None]:
    target.is_stepping = True
    try:
        yield
    finally:
        target.is_stepping = False
