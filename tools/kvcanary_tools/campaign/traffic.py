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

from kvcanary import CanaryConfig, Finding, KVCanaryError, faults
from kvcanary.codes import CODES
from kvcanary.dumper import SUFFIX
from kvcanary.faults.fault import Armed, Fault, Strike
from kvcanary.faults.target import Setup, Target
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
    step: in which the first of them was found, or in which all ended.
    ended: requests that the canary has ended (mode abort).
    left: step that sampled the tokens, request, tokens; accepted_len: tokens a verify, the bonus included.
    strike: what the fault did; None where it never could.
    """

    error: Exception | None = None
    findings: Sequence[Finding] = ()
    step: int = 0
    ended: set[str] = field(default_factory=set)
    left: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    accepted_len: float = 0.0
    strike: Strike | None = None

    @property
    def tokens(self) -> dict[str, list[int]]:
        """All that left, by request."""
        found: dict[str, list[int]] = {}
        for _, request, tokens in self.left:
            found.setdefault(request, []).extend(tokens)
        return found


def play(run: Run, fault: Fault | None, unheeded: bool = False) -> Played:
    """The run, from its seed. unheeded: no check of the canary says anything, as if it were not there."""
    rng = random.Random(f"{run.twin}:{run.seed}")  # the traffic, shared with the clean twin
    with ExitStack() as stack:
        disable = frozenset(CODES) if unheeded else frozenset()
        if run.kind == DISABLED and fault is not None:
            checks = {fault.expected, *fault.also}
            disable = frozenset(checks & CODES.keys())
            for error in checks - disable:
                stack.enter_context(switched_off(error))
        armed = stack.enter_context(faults.arm(fault.name)) if fault is not None and fault.is_seam else None
        canary = CanaryConfig(mode=run.mode, content=run.setup.content, seed=run.seed, disable=disable)
        try:
            bench = build(run.setup, canary)
        except KVCanaryError as error:  # a wrong size may be refused at once
            return Played(error, strike=_of_build(armed))
        own = random.Random(f"{run.fault}:{run.config}:{run.seed}")
        target = EngineTarget(bench.engine, run.setup, own, run.turn)
        played = _drive(bench, target, _striker(fault, run.kind), armed, rng)
        if run.dumps is not None and run.kind == FAULTY and played.error is not None and played.findings:
            bench.engine.canary.dump(Path(run.dumps) / f"{run.fault}-{run.config}-{run.seed}{SUFFIX}")
        return played


def _of_build(armed: Armed | None) -> Strike | None:
    """A value that was changed while the engine was built: its step is not one."""
    return Strike(None, armed.place) if armed is not None and armed.num_strikes else None


def _striker(fault: Fault | None, kind: str) -> Callable[[Target], bool] | None:
    if fault is None or kind == CLEAN:
        return None
    return fault.quiet if kind == QUIET else fault.strike


def _drive(
    bench: Bench,
    target: EngineTarget,
    striker: Callable[[Target], bool] | None,
    armed: Armed | None,
    rng: random.Random,
) -> Played:
    """Submit, step and strike."""
    engine, setup, played = bench.engine, target.setup, Played()
    params = SamplingParams(max_new_tokens=setup.new_tokens, ignore_eos=True)
    warm = rng.randint(*WARM_STEPS)
    second = rng.randint(2, warm)
    late = range(second, second + (MORE_REQUESTS if setup.shared else 1))  # steps in which one more request comes
    try:
        for number in range(setup.batch):
            engine.submit(bench.prompt(rng, setup), params, salt=_salt(setup, number))
        while engine.has_work and target.step < MOST_STEPS:
            if not played.findings:
                played.step = target.step
            if target.step in late:
                number = setup.batch + target.step - second
                engine.submit(bench.prompt(rng, setup), params, salt=_salt(setup, number))
            if striker is not None and target.step > warm and target.is_decoding and striker(target):
                striker = None
            try:
                _step(target, armed, played)
            finally:
                _note(played, target)
    except Exception as error:  # a fault may end in anything; what comes behind a finding is of the same fault
        played.error = None if played.findings else error
        played.findings = played.findings or getattr(error, "findings", ())
    played.strike = target.strike or _of_build(armed)
    played.accepted_len = engine.metrics.accepted_length
    return played


def _note(played: Played, target: EngineTarget) -> None:
    """The step that ran, which is the one of the finding where there is one: traffic may go on behind it."""
    if not played.findings:
        played.step = target.engine.metrics.num_steps  # an error may be held back until clean tokens have left
        if target.canary.config.mode == "abort":
            played.findings = target.canary.findings


def _salt(setup: Setup, number: int) -> str:
    tenant = number % setup.salts
    return f"tenant {tenant}" if tenant else ""


def _step(target: EngineTarget, armed: Armed | None, played: Played) -> None:
    engine, strikes = target.engine, 0 if armed is None else armed.num_strikes
    with _stepping(target):
        try:
            events = engine.step()
        finally:
            if armed is not None and armed.num_strikes > strikes == 0:
                target.record(late=armed.fault.late, **armed.place)
    sampled = engine.metrics.num_steps - engine.lag
    played.left += [(sampled, event.request_id, event.token_ids) for event in events]
    played.ended |= {event.request_id for event in events if event.finish_reason == KV_CORRUPTION}


@contextmanager
def _stepping(target: EngineTarget) -> Iterator[None]:
    target.is_stepping = True
    try:
        yield
    finally:
        target.is_stepping = False
