"""For tests of any paged engine: `kv_canary` attaches a canary, `kv_fault` makes a fault that must be found.

Installing kvcanary is enough: pytest finds the plugin, and loading it imports no torch.

def test_prefill_is_clean(kv_canary):
    canary = kv_canary([PoolView("target", k, v, page_size=16)])
    ...  # run the engine with this canary: a finding fails the test, when it fires or at its end

@pytest.mark.kvfault("bits.flip", layer=3)
def test_a_flipped_bit_is_found(kv_canary, kv_fault):
    ...
    kv_fault(run=engine.step)  # made in the attached canary's pools; found by its check, at its place

def test_a_stray_write_is_found(kv_canary, kv_fault):
    ...
    finding = kv_fault(arm=stray_write, run=engine.step, code="R9", slot=33)

def test_an_undone_fix_is_found(kv_fault):
    error = kv_fault(arm="bounds.row_width", run=lambda: engine().generate(prompts))

`pytest --kvcanary=log` gives canaries another mode, where a test does not say one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvcanary.config import MODES
from kvcanary.errors import KVCanaryError

if TYPE_CHECKING:
    from kvcanary.faults.fault import Fault
    from kvcanary.faults.target import Target
    from kvcanary.manager.manager import CanaryManager
    from kvcanary.pools.views import PoolView
    from kvcanary.report.finding import Finding


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcanary", "KV-cache integrity canary")
    group.addoption(
        "--kvcanary", choices=MODES[1:], default="raise", help="mode of canaries whose test does not say one"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kvfault(name, **choices): the fault of kvcanary.faults that kv_fault makes in this test"
    )


@pytest.fixture
def kv_attached() -> list[CanaryManager]:
    """The canaries that `kv_canary` has attached in this test, in order."""
    return []


@pytest.fixture
def kv_canary(
    request: pytest.FixtureRequest, kv_attached: list[CanaryManager]
) -> Iterator[Callable[..., CanaryManager]]:
    """Attach an armed canary: `kv_canary(pools, **settings of CanaryConfig)`; the mode is that of `--kvcanary`.

    At the end of the test what is pending is judged; a canary with findings fails the test with its report, unless
    they were raised while it ran (mode `raise`).
    """
    from kvcanary import CanaryConfig, CanaryManager

    def attach(pools: Sequence[PoolView], **settings: Any) -> CanaryManager:
        settings.setdefault("mode", request.config.getoption("kvcanary", "raise"))
        canary = CanaryManager(CanaryConfig(**settings), pools)
        canary.arm()
        kv_attached.append(canary)
        return canary

    yield attach
    for canary in kv_attached:
        raised = canary.config.mode == "raise" and canary.findings
        if not raised:
            canary.drain()
        canary.detach()
        if canary.findings and not raised:
            reported = "; ".join(f"{one.name} ({one.code}) at slot {one.slot}" for one in canary.findings)
            pytest.fail(f"kvcanary found {len(canary.findings)}: {reported}", pytrace=False)


@pytest.fixture
def kv_fault(
    request: pytest.FixtureRequest, kv_attached: list[CanaryManager]
) -> Iterator[Callable[..., Finding | KVCanaryError]]:
    """Make a fault, run, and expect what finds it: `kv_fault(arm, run, code, target=..., **fields of what is found)`.

    arm: what to call, or the name of a fault; by default that of the marker `kvfault`. One that undoes a fix stays
    armed to the end of the test, another strikes now, in `target`, by default the pools of the last attached canary.
    `run` must raise: KVCorruptionError, whose first finding must have this code, or a typed error of that name; by
    default what the fault expects. Finding or error is returned; it must have the fields that are given, and those that
    the fault has recorded.
    """
    marker = request.node.get_closest_marker("kvfault")
    with ExitStack() as armed:

        def strike(
            arm: Callable[[], object] | str | None = None,
            run: Callable[[], object] | None = None,
            code: str | None = None,
            *,
            target: Target | None = None,
            **fields: Any,
        ) -> Finding | KVCanaryError:
            choices: Mapping[str, Any] = {}
            if arm is None:
                if marker is None or not marker.args:
                    raise TypeError('kv_fault needs arm=, or the marker @pytest.mark.kvfault("family.name")')
                arm, choices = marker.args[0], marker.kwargs
            if run is None:
                raise TypeError("kv_fault needs run=, what must end in the finding")
            if isinstance(arm, str):
                fault, place = _made(arm, choices, target, kv_attached, armed)
                code, fields = code or fault.expected, {**place, **fields}
            else:
                arm()
            if code is None:
                raise TypeError("kv_fault needs code=, what must find a fault that is no fault of the catalogue")
            try:
                run()
            except KVCanaryError as error:
                return _expected(error, code, fields)
            pytest.fail(f"no check fired, {code} was expected", pytrace=False)

        yield strike


def _made(
    name: str, choices: Mapping[str, Any], target: Target | None, attached: Sequence[CanaryManager], armed: ExitStack
) -> tuple[Fault, Mapping[str, Any]]:
    """The fault, armed or struck, and what it has recorded of its place."""
    from kvcanary import faults
    from kvcanary.faults.attached import AttachedTarget
    from kvcanary.faults.catalogue import find

    fault = find(name)
    if fault.strike is None:
        armed.enter_context(faults.arm(name))
        return fault, {}
    if target is None:
        if not attached:
            raise TypeError(f"{name} strikes a running engine: attach a canary first, or pass target=")
        target = AttachedTarget(attached[-1], chosen=choices)
    if not fault.strike(target):
        pytest.fail(f"{name} could not strike, it applies to {fault.applies_to}", pytrace=False)
    return fault, {} if target.strike is None else target.strike.place


def _expected(error: KVCanaryError, code: str, fields: Mapping[str, Any]) -> Finding | KVCanaryError:
    """The first finding, or the error itself where it has none; another than the expected one fails the test."""
    findings = getattr(error, "findings", None)
    cause, name, text = error, type(error).__name__, str(error)
    if findings:
        cause, name, text = findings[0], findings[0].code, error_text(findings[0])
    found = {"code": name} | {field: getattr(cause, field) for field in fields}
    expected = {"code": code, **fields}
    for field, value in fields.items():
        if isinstance(value, frozenset) and found[field] in value:
            expected[field] = found[field]
    if found != expected:
        if any(line.startswith(f"{code} ") for line in getattr(cause, "evidence", ())):
            text += f"\n{code} is in its evidence: faults of a write speak first, then the first entry of a row"
        pytest.fail(f"expected {expected}, found {found}:\n{text}", pytrace=False)
    return cause


def error_text(finding: Finding) -> str:
    """The finding as one line."""
    return f"{finding.name} ({finding.code}): {finding.pool} pool, slot {finding.slot}, position {finding.position}"
