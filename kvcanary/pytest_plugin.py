"""Fixtures for tests of any paged engine: `kv_canary` attaches a canary, `kv_fault` expects a fault to be found.

pytest_plugins = ["kvcanary.pytest_plugin"]

def test_prefill_is_clean(kv_canary):
    canary = kv_canary([PoolView("target", k, v, page_size=16)])
    ...  # run the engine with this canary: a finding fails the test, when it fires or at its end

def test_a_flipped_bit_is_found(kv_canary, kv_fault):
    ...
    finding = kv_fault(arm=flip_a_bit, run=engine.step, code="R9", slot=33)

def test_an_undone_fix_is_found(kv_fault):
    error = kv_fault(arm="bounds.row_width", run=lambda: engine().generate(prompts), code="RowOverflowError")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcanary.errors import KVCanaryError
    from kvcanary.findings import Finding
    from kvcanary.manager import CanaryManager
    from kvcanary.views import PoolView


@pytest.fixture
def kv_canary() -> Iterator[Callable[..., CanaryManager]]:
    """Attach an armed canary: `kv_canary(pools, **settings of CanaryConfig)`.

    At the end of the test what is pending is judged; a canary with findings fails the test with its report, unless
    they were raised while it ran (mode `raise`, the default).
    """
    from kvcanary import CanaryConfig, CanaryManager

    attached: list[CanaryManager] = []

    def attach(pools: Sequence[PoolView], **settings: Any) -> CanaryManager:
        canary = CanaryManager(CanaryConfig(**settings), pools)
        canary.arm()
        attached.append(canary)
        return canary

    yield attach
    for canary in attached:
        raised = canary.config.mode == "raise" and canary.findings
        if not raised:
            canary.drain()
        canary.detach()
        if canary.findings and not raised:
            told = "; ".join(f"{finding.name} ({finding.code}) at slot {finding.slot}" for finding in canary.findings)
            pytest.fail(f"kvcanary found {len(canary.findings)}: {told}", pytrace=False)


@pytest.fixture
def kv_fault() -> Iterator[Callable[..., Finding | KVCanaryError]]:
    """Arm a fault, run, and expect what finds it: `kv_fault(arm, run, code, **fields of what is found)`.

    arm: what to call, or the name of a fault of `kvcanary.faults`, which stays armed to the end of the test.
    `run` must raise: KVCorruptionError, whose first finding must have this code, or a typed error of that name.
    Finding or error is returned; it must have these fields too (slot=33, layer=3).
    """
    from kvcanary import KVCanaryError, faults

    with ExitStack() as armed:

        def strike(
            arm: Callable[[], object] | str, run: Callable[[], object], code: str, **fields: Any
        ) -> Finding | KVCanaryError:
            if isinstance(arm, str):
                armed.enter_context(faults.arm(arm))
            else:
                arm()
            try:
                run()
            except KVCanaryError as error:
                return _expected(error, code, fields)
            pytest.fail(f"no check fired, {code} was expected", pytrace=False)

        yield strike


def _expected(error: KVCanaryError, code: str, fields: dict[str, Any]) -> Finding | KVCanaryError:
    """The first finding, or the error itself where it has none; another than the expected one fails the test."""
    findings = getattr(error, "findings", None)
    cause, name, text = error, type(error).__name__, str(error)
    if findings:
        cause, name, text = findings[0], findings[0].code, error_text(findings[0])
    found = {"code": name} | {field: getattr(cause, field) for field in fields}
    expected = {"code": code} | fields
    if found != expected:
        pytest.fail(f"expected {expected}, found {found}:\n{text}", pytrace=False)
    return cause


def error_text(finding: Finding) -> str:
    """The finding as one line."""
    return f"{finding.name} ({finding.code}): {finding.pool} pool, slot {finding.slot}, position {finding.position}"
