"""What a run shows: whether the expected check spoke first, where and about whom, reached by the public exception."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf
from typing import Any

from kvcanary import Finding, KVCanaryError
from kvcanary.codes import CONTENT_CODES
from kvcanary.config import ROTATION_STEPS
from kvcanary.faults.catalogue import find
from kvcanary.faults.fault import Fault
from kvcanary.faults.strike import UNDECLARED, Strike
from kvcanary_tools.campaign.switches import can_switch_off
from kvcanary_tools.campaign.traffic import CLEAN, DISABLED, QUIET, Played, Run, play


@dataclass(frozen=True)
class Result:
    """What came of a run.

    struck: whether the fault was made; found: whether its check spoke first, or nobody where no check can see it (a
        clean or quiet run: whether anything spoke that was not due; disabled: whether the disabled check spoke).
    not_ended: whether the cap on its steps ended it: then nothing is found, whatever spoke before.
    code: of the first finding, or name of the error; "" for none.
    place_right, writer_right: None where the fault states none, or nothing was found.
    steps: engine steps from the strike to the finding, the strike's own included; late: more than it may take, where
        more than one of them was the prefill of others, without these.
    leaked: tokens that left in or after the step whose check fired, in mode abort of requests that it ends.
    exposed: tokens of its readers since the strike; too_exposed: there may be none, and there are.
    rank: of the right cause, 1 is the first, 0: not named; None for typed errors.
    text: of the error.
    """

    run: Run
    struck: bool = False
    found: bool = False
    not_ended: bool = False
    code: str = ""
    expected: str = ""
    place_right: bool | None = None
    writer_right: bool | None = None
    steps: int | None = None
    late: bool = False
    leaked: int = 0
    exposed: int = 0
    too_exposed: bool = False
    rank: int | None = None
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def perform(run: Run) -> Result:
    """The run, from its seed, and what it shows."""
    if run.kind == CLEAN:
        return replace(_clean(replace(run, config="", turn=0)), run=run)
    fault = find(run.fault)
    return judged(run, fault, play(run, fault))


@cache
def _clean(run: Run) -> Result:
    """Clean twins are shared by all faults of one setup and seed."""
    return judged(run, None, play(run, None))


def judged(run: Run, fault: Fault | None, ended: Played) -> Result:
    """What the traffic of a run shows, compared with what the fault says of itself."""
    strike, code, text = ended.strike, _code(ended), _text(ended)
    expected = _expected(run.kind, fault, strike)
    result = Result(run, strike is not None, not_ended=ended.is_cut, code=code, expected=expected, text=text)
    if run.kind in (CLEAN, QUIET):
        return replace(result, found=code not in ("", expected))
    if run.kind == DISABLED:
        off = {code for code in (expected, *(fault.also if fault else ())) if can_switch_off(code)}
        return replace(result, found=not _codes(ended).isdisjoint(off))
    if strike is None or fault is None or ended.is_cut:
        return result
    if not fault.is_seen:
        return replace(result, found=not code)
    if not ended.findings and not isinstance(ended.error, KVCanaryError):
        return result
    return _compared(replace(result, found=code == expected or code in fault.also), fault, strike, ended)


def _compared(result: Result, fault: Fault, strike: Strike, ended: Played) -> Result:
    found_step, rank = ended.step, None  # a check that fires stops its step
    readers: frozenset[str] | None = None  # whose tokens may be wrong; None: anybody's
    ends: dict[str, int] | None = None  # by request that ends the step from which on no token may leave; None: all
    place_right = all(str(value) in result.text for name, value in strike.place.items() if name == "request")
    writer_right, is_drafts, is_content = None, False, False
    if ended.findings:
        finding = ended.findings[0]
        readers = frozenset(finding.readers) or None
        if result.run.mode == "abort" and ended.error is None:
            touched = finding.writer if finding.code.startswith("W") else finding.reader
            ends = ended.ended | ({} if touched is None else {touched: found_step})
        place_right, writer_right = _is_there(finding, strike), _is_writer(finding, strike)
        rank, is_drafts = _rank(finding, fault), finding.pool != "target"
        is_content = finding.code in CONTENT_CODES or finding.layer is not None
    since = found_step if strike.step is None else strike.step
    steps = None if strike.step is None else found_step - strike.step + 1
    is_spared = is_drafts or fault.spares_tokens  # a draft's bytes reach no token
    exposed = 0 if is_spared else _num_tokens(ended, since, found_step, readers)
    others = 0 if steps is None else max(0, len(ended.prefills & set(range(since, found_step))) - 1)
    is_rolled = is_content and result.run.setup.content == "rolling"  # bytes are not read whole in each forward
    return replace(
        result,
        place_right=place_right if strike.place else None,
        writer_right=writer_right,
        steps=steps,
        late=steps is not None and steps - others > (ROTATION_STEPS if is_rolled else fault.within),
        leaked=_num_leaked(ended, found_step, ends),
        exposed=exposed,
        too_exposed=exposed > 0 and readers is not None and not (is_rolled or fault.exposes),
        rank=rank,
    )


def _num_leaked(ended: Played, found_step: int, ends: dict[str, int] | None) -> int:
    if ends is None:
        return _num_tokens(ended, found_step, inf, None)
    return sum(_num_tokens(ended, step, inf, {name}) for name, step in ends.items())


def _num_tokens(ended: Played, first: int, end: float, requests: Set[str] | None) -> int:
    """Tokens of these requests, None: of all, that the steps [first, end) have sampled."""
    return sum(
        len(tokens)
        for step, request, tokens in ended.left
        if first <= step < end and (requests is None or request in requests)
    )


def _expected(kind: str, fault: Fault | None, strike: Strike | None) -> str:
    if fault is None or not fault.is_seen:
        return ""
    stated = None if strike is None else strike.code
    if kind == QUIET:
        return stated or ""
    return fault.expected if stated is None else stated


def _code(ended: Played) -> str:
    """What spoke first: the code of a finding, or the name of an error, which mode abort may tell as a finding."""
    if ended.findings:
        first = ended.findings[0]
        return first.found["error"] if first.code == "L1" else first.code
    return "" if ended.error is None else type(ended.error).__name__


def _codes(ended: Played) -> set[str]:
    return {finding.code for finding in ended.findings} or {_code(ended)}


def _text(ended: Played) -> str:
    """Of the error; where traffic went on, of the first finding; where it went on for ever, of that."""
    if ended.is_cut:
        last = max((step for step, _, _ in ended.left), default=0)
        retractions = f"{ended.num_retractions} retractions"
        return f"not ended: cut after {ended.num_steps} steps, the last token left in step {last}, {retractions}"
    if ended.error is not None:
        return f"{type(ended.error).__name__}: {ended.error}"
    return next((f"{finding.code}, {finding.sentence}; {finding.action}" for finding in ended.findings), "")


def _is_there(finding: Finding, strike: Strike) -> bool:
    place = dict(strike.place)
    request = place.pop("request", None)
    is_named = request is None or str(request) in finding.sentence or request in finding.readers
    return is_named and all(_fits(getattr(finding, name), value) for name, value in place.items())


def _fits(found: Any, stated: Any) -> bool:
    return found in stated if isinstance(stated, frozenset) else found == stated


def _is_writer(finding: Finding, strike: Strike) -> bool | None:
    if strike.writer is None:
        return None
    if strike.writer == UNDECLARED:
        return finding.undeclared
    return not finding.undeclared and _fits(finding.writer, strike.writer)


def _rank(finding: Finding, fault: Fault) -> int:
    ranks = [rank for rank, cause in enumerate(finding.causes, 1) if cause.family == (fault.cause or fault.family)]
    return min(ranks, default=0)
