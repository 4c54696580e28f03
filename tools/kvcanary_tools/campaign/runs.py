"""One run: traffic on a fresh engine, a fault struck in its midst, and what the public exception says of it.

Kinds of a run:
faulty    the fault is made; it must be found as it says
quiet     it is made where nothing can read it; only what is due may be found
disabled  the check that should find it is switched off; others may find it, this one must not
clean     the same traffic without it
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcanary import CanaryConfig, Finding, KVCanaryError, KVCorruptionError, faults
from kvcanary.codes import CODES
from kvcanary.dumper import SUFFIX
from kvcanary.faults.fault import UNDECLARED, Armed, Fault, Strike
from kvcanary.faults.target import Setup
from kvcanary_tools.campaign.engines import Bench, build
from kvcanary_tools.campaign.harness import EngineTarget
from kvcanary_tools.campaign.switches import switched_off
from spec_engine import SamplingParams

FAULTY, CLEAN, QUIET, DISABLED = "faulty", "clean", "quiet", "disabled"
KINDS = (FAULTY, CLEAN, QUIET, DISABLED)
WARM_STEPS = (3, 6)  # before a fault may strike, drawn
SECOND_WAVE = (2, 5)  # step before which one more request comes, drawn
MOST_STEPS = 500


@dataclass(frozen=True)
class Run:
    """What to do: a fault (by name; "" in a clean run), a configuration, a seed, a kind.

    dumps: folder into which a faulty run writes what was recorded, if a check fires; None: nothing is written
    """

    fault: str
    config: str
    setup: Setup
    seed: int
    kind: str = FAULTY
    dumps: str | None = None

    @property
    def twin(self) -> str:
        """Runs of one twin and seed have one clean twin: the same setup, whatever fault asked for it."""
        return repr(self.setup)


@dataclass(frozen=True)
class Result:
    """What came of a run.

    struck: whether the fault was made; found: whether its check spoke first, or nobody where no check can see it (a
        clean or quiet run: whether anything spoke that was not due; disabled: whether the disabled check spoke).
    code: of the first finding, or name of the error; "" for none.
    place_right, writer_right: None where the fault states none, or nothing was found.
    steps: engine steps from the strike to the finding, the strike's own included.
    leaked: tokens that left in or after the step whose check fired; exposed: those of its readers since the strike.
    rank: of the right cause, 1 is the first, 0: not named; None for typed errors.
    text: of the error.
    """

    run: Run
    struck: bool = False
    found: bool = False
    code: str = ""
    expected: str = ""
    place_right: bool | None = None
    writer_right: bool | None = None
    steps: int | None = None
    leaked: int = 0
    exposed: int = 0
    rank: int | None = None
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Ended:
    """How the traffic ended: the error that stopped it, in which step, and which tokens had left by then."""

    error: Exception | None = None
    step: int = 0
    left: list[tuple[int, str, int]] = field(default_factory=list)  # step that sampled them, request, how many


def perform(run: Run) -> Result:
    """The run, from its seed."""
    fault = _named(run.fault)
    rng = random.Random(f"{run.twin}:{run.seed}")  # the traffic, shared with the clean twin
    with ExitStack() as stack:
        expected = "" if fault is None else fault.expected
        disable = frozenset({expected}) if run.kind == DISABLED and expected in CODES else frozenset()
        if run.kind == DISABLED and not disable:
            stack.enter_context(switched_off(expected))
        armed = stack.enter_context(faults.arm(fault.name)) if fault is not None and fault.is_seam else None
        canary = CanaryConfig(mode="raise", content=run.setup.content, seed=run.seed, disable=disable)
        try:
            bench = build(run.setup, canary)
        except KVCanaryError as error:  # a wrong size may be refused at once
            return _judged(run, fault, None, armed, Ended(error))
        own = random.Random(f"{run.fault}:{run.config}:{run.seed}")
        target = EngineTarget(bench.engine, run.setup, own, run.seed // 2)
        ended = _drive(bench, target, _striker(fault, run.kind), armed, rng)
        if run.dumps is not None and run.kind == FAULTY and isinstance(ended.error, KVCorruptionError):
            bench.engine.canary.dump(Path(run.dumps) / f"{run.fault}-{run.config}-{run.seed}{SUFFIX}")
    return _judged(run, fault, target.strike, armed, ended)


def _named(name: str) -> Fault | None:
    from kvcanary.faults.catalogue import find

    return find(name) if name else None


def _striker(fault: Fault | None, kind: str) -> Any:
    if fault is None or kind == CLEAN:
        return None
    return fault.quiet if kind == QUIET else fault.strike


def _drive(bench: Bench, target: EngineTarget, striker: Any, armed: Armed | None, rng: random.Random) -> Ended:
    """Submit, step and strike, until the work is done or something stops it."""
    engine, setup, ended = bench.engine, target.setup, Ended()
    params = SamplingParams(max_new_tokens=setup.new_tokens, ignore_eos=True)
    warm, second = rng.randint(*WARM_STEPS), rng.randint(*SECOND_WAVE)
    try:
        for _ in range(setup.batch):
            engine.submit(bench.prompt(rng, setup), params)
        while engine.has_work and engine.metrics.num_steps < MOST_STEPS:
            if target.step == second:
                engine.submit(bench.prompt(rng, setup), params)
            if striker is not None and target.step > warm and striker(target):
                striker = None
            ended.left += _step(target, armed)
    except Exception as error:  # a fault may end in anything
        ended.error = error
    ended.step = engine.metrics.num_steps
    return ended


def _step(target: EngineTarget, armed: Armed | None) -> list[tuple[int, str, int]]:
    engine, strikes = target.engine, 0 if armed is None else armed.num_strikes
    with _stepping(target):
        try:
            events = engine.step()
        finally:
            if armed is not None and armed.num_strikes > strikes == 0:
                target.record(**armed.place)
    sampled = engine.metrics.num_steps - engine.lag
    return [(sampled, event.request_id, len(event.token_ids)) for event in events]


@contextmanager
def _stepping(target: EngineTarget) -> Iterator[None]:
    target.is_stepping = True
    try:
        yield
    finally:
        target.is_stepping = False


# judging


def _judged(run: Run, fault: Fault | None, strike: Strike | None, armed: Armed | None, ended: Ended) -> Result:
    if strike is None and armed is not None and armed.num_strikes:  # while the engine was built
        strike = Strike(None, armed.place)
    code = _code(ended.error)
    text = "" if ended.error is None else f"{type(ended.error).__name__}: {ended.error}"
    expected = _expected(run.kind, fault, strike)
    result = Result(run, struck=strike is not None, code=code, expected=expected, text=text)
    if run.kind in (CLEAN, QUIET):
        return replace(result, found=code not in ("", expected))
    if run.kind == DISABLED:
        return replace(result, found=expected in _codes(ended.error))
    if strike is None or fault is None:
        return result
    if not fault.is_seen:
        return replace(result, found=not code)
    if not isinstance(ended.error, KVCanaryError):
        return result
    return _compared(replace(result, found=code == expected), fault, strike, ended, ended.error)


def _compared(result: Result, fault: Fault, strike: Strike, ended: Ended, error: KVCanaryError) -> Result:
    found_step, rank = ended.step, None  # a check that fires stops its step
    readers: frozenset[str] = frozenset()
    place_right = all(str(value) in str(error) for name, value in strike.place.items() if name == "request")
    writer_right, is_drafts = None, False
    if isinstance(error, KVCorruptionError):
        finding = error.findings[0]
        readers = frozenset(finding.readers)
        place_right, writer_right = _is_there(finding, strike), _is_writer(finding, strike)
        rank, is_drafts = _rank(finding, fault), finding.pool != "target"
    since = found_step if strike.step is None else strike.step
    exposed = [(step, request, count) for step, request, count in ended.left if since <= step < found_step]
    return replace(
        result,
        place_right=place_right if strike.place else None,
        writer_right=writer_right,
        steps=None if strike.step is None else found_step - strike.step + 1,
        leaked=sum(count for step, _, count in ended.left if step >= found_step),
        # a draft's bytes reach no token
        exposed=0 if is_drafts else sum(n for _, request, n in exposed if not readers or request in readers),
        rank=rank,
    )


def _expected(kind: str, fault: Fault | None, strike: Strike | None) -> str:
    if fault is None or not fault.is_seen:
        return ""
    stated = None if strike is None else strike.code
    if kind == QUIET:
        return stated or ""
    return fault.expected if stated is None else stated


def _code(error: Exception | None) -> str:
    """What spoke first: the code of a finding, or the name of an error."""
    if error is None:
        return ""
    return error.findings[0].code if isinstance(error, KVCorruptionError) else type(error).__name__


def _codes(error: Exception | None) -> set[str]:
    if isinstance(error, KVCorruptionError):
        return {finding.code for finding in error.findings}
    return {_code(error)}


def _is_there(finding: Finding, strike: Strike) -> bool:
    return all(_fits(getattr(finding, name), value) for name, value in strike.place.items())


def _fits(found: Any, stated: Any) -> bool:
    return found in stated if isinstance(stated, frozenset) else found == stated


def _is_writer(finding: Finding, strike: Strike) -> bool | None:
    if strike.writer is None:
        return None
    if strike.writer == UNDECLARED:
        return finding.undeclared
    return not finding.undeclared and finding.writer == strike.writer


def _rank(finding: Finding, fault: Fault) -> int:
    families = [cause.family for cause in finding.causes]
    right = fault.cause or fault.family
    return families.index(right) + 1 if right in families else 0
