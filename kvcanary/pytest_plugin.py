"""Fixtures for tests of any paged engine: `kv_canary` attaches a canary, `kv_fault` expects it to find something.

pytest_plugins = ["kvcanary.pytest_plugin"]

def test_prefill_is_clean(kv_canary):
    canary = kv_canary([PoolView("target", k, v, page_size=16)])
    ...  # run the engine with this canary: a finding fails the test, when it fires or at its end

def test_a_flipped_bit_is_found(kv_canary, kv_fault):
    ...
    finding = kv_fault(arm=flip_a_bit, run=engine.step, code="R9", slot=33)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
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
def kv_fault() -> Callable[..., Finding]:
    """Arm a fault, run, and expect the finding: `kv_fault(arm, run, code, **fields of the finding)`.

    `run` must raise KVCorruptionError; its first finding must have this code and these fields (slot=33, layer=3).
    """
    from kvcanary import KVCorruptionError

    def strike(arm: Callable[[], object], run: Callable[[], object], code: str, **fields: Any) -> Finding:
        arm()
        try:
            run()
        except KVCorruptionError as error:
            finding = error.findings[0]
        else:
            pytest.fail(f"no check fired, {code} was expected", pytrace=False)
        found = {"code": finding.code} | {name: getattr(finding, name) for name in fields}
        expected = {"code": code} | fields
        if found != expected:
            pytest.fail(f"expected {expected}, found {found}:\n{error_text(finding)}", pytrace=False)
        return finding

    return strike


def error_text(finding: Finding) -> str:
    """The finding as one line."""
    return f"{finding.name} ({finding.code}): {finding.pool} pool, slot {finding.slot}, position {finding.position}"
